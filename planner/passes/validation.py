"""Validation: a program does everything once, in order, and ends.

Checked one after the other, so that each check may rely on those before it:

1. stages and ranks exist, and edges go from earlier to later stages;
2. every rank's row holds exactly what its stages and messages ask for, each action once;
3. whatever an action needs from its own rank comes earlier in the row, and the update of a stage is its last action;
4. no deadlock.  Sends do not wait; between two ranks messages arrive in the order they were sent, and a receive can
   only take the first.  Forward, backward and reduction of a stage on several ranks start when all of them have
   arrived (a normalisation inside may need all of them), so these must be in one order on all ranks.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator

from planner.ir.errors import IllegalProgramError
from planner.ir.program import Message, Program
from planner.ir.schedule import RECEIVE, SEND, Action, Op, format_grid

_WIDTH = 6  # actions shown on each side of the culprit
_TOGETHER = frozenset({Op.FORWARD, Op.BACKWARD, Op.BACKWARD_INPUT, Op.REDUCE_GRAD})

Key = tuple[int, int, int | None, bool]
"""What a message is: source stage, destination stage, micro-batch, forward."""


def validate(program: Program) -> None:
    """Raises :class:`IllegalProgramError`, with the culprit marked in the grid, unless ``program`` is legal."""
    _check_stages(program)
    _check_complete(program)
    _check_order(program)
    _check_ends(program)


def _illegal(program: Program, why: str, mark: tuple[int, Action] | None = None) -> IllegalProgramError:
    grid = format_grid(program.rows, mark, _WIDTH)
    return IllegalProgramError("the program is illegal", [why, grid], ["halopipe plan, to make the program anew"])


def _check_stages(program: Program) -> None:
    stages, num_ranks = program.stages, len(program.rows)
    if len(program.ranks) != stages.num_stages:
        raise _illegal(program, f"ranks are given for {len(program.ranks)} stages, there are {stages.num_stages}")
    for stage, ranks in enumerate(program.ranks):
        if not ranks or len(set(ranks)) < len(ranks):
            raise _illegal(program, f"stage {stage} is on ranks {list(ranks)}: at least one, each once")
        for rank in ranks:
            if not 0 <= rank < num_ranks:
                raise _illegal(program, f"stage {stage} is on rank {rank}, the program has ranks 0 to {num_ranks - 1}")
    for edge in stages.edges:
        if not 0 <= edge.src < edge.dst < stages.num_stages:
            text = f"an edge goes from stage {edge.src} to {edge.dst}: stages 0 to {stages.num_stages - 1} run in order"
            raise _illegal(program, text)
    for route, messages in program.messages.items():
        for message in messages:
            if message.src not in program.ranks[route[0]] or message.dst not in program.ranks[route[1]]:
                text = f"a message of edge {route[0]} to {route[1]} goes from rank {message.src} to {message.dst}"
                raise _illegal(program, f"{text}, which do not run these stages")


def _check_complete(program: Program) -> None:
    for rank, row in enumerate(program.rows):
        present = Counter(row)
        expected = dict.fromkeys(_expected(program, rank, present))
        for action, count in present.items():
            if action not in expected:
                text = f"rank {rank} has {action}, but {_why_not(program, rank, action)}"
                raise _illegal(program, text, (rank, action))
            if count > 1:
                raise _illegal(program, f"rank {rank} has {action} {count} times", (rank, action))
        missing = [action for action in expected if action not in present]
        if missing:
            related = [a for a in row if (a.stage, a.microbatch) == (missing[0].stage, missing[0].microbatch)]
            nearest = related[-1:] or list(row[-1:])
            mark = (rank, nearest[0]) if nearest else None
            lacks = ", ".join(map(str, missing[:3])) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
            raise _illegal(program, f"rank {rank} lacks {lacks}" + (" (near the mark)" if mark else ""), mark)


def _expected(program: Program, rank: int, present: Counter[Action]) -> Iterator[Action]:
    """Every action that ``rank`` must have; a backward is split where the row has a half of it and not the whole."""
    for stage, ranks in enumerate(program.ranks):
        if rank not in ranks:
            continue
        for m in range(program.stages.num_microbatches):
            backward = Action(stage, Op.BACKWARD, m)
            halves = Action(stage, Op.BACKWARD_INPUT, m), Action(stage, Op.BACKWARD_WEIGHT, m)
            split = not present[backward] and any(present[half] for half in halves)
            yield Action(stage, Op.FORWARD, m)
            yield from halves if split else (backward,)
            yield from (action for action in _messages(program, stage, m) if program.messages_of(rank, action))
        if len(ranks) > 1:
            yield Action(stage, Op.REDUCE_GRAD)
        yield Action(stage, Op.UPDATE)


def _messages(program: Program, stage: int, microbatch: int) -> Iterator[Action]:
    for edge in program.stages.into(stage):
        yield Action(stage, Op.RECV_FORWARD, microbatch, edge.src)
        yield Action(stage, Op.SEND_BACKWARD, microbatch, edge.src)
    for edge in program.stages.out_of(stage):
        yield Action(stage, Op.SEND_FORWARD, microbatch, edge.dst)
        yield Action(stage, Op.RECV_BACKWARD, microbatch, edge.dst)


def _why_not(program: Program, rank: int, action: Action) -> str:
    """Why ``action`` has no place on ``rank``."""
    stages = program.stages
    if not 0 <= action.stage < stages.num_stages:
        return f"stages are 0 to {stages.num_stages - 1}"
    if rank not in program.ranks[action.stage]:
        return f"stage {action.stage} is on ranks {list(program.ranks[action.stage])}"
    if action.microbatch is not None and not 0 <= action.microbatch < stages.num_microbatches:
        return f"micro-batches are 0 to {stages.num_microbatches - 1}"
    if action.op is Op.REDUCE_GRAD:
        return f"stage {action.stage} is on one rank: there is nothing to sum"
    if action.op in SEND | RECEIVE and action.peer is not None:
        downstream = action.op in (Op.SEND_FORWARD, Op.RECV_BACKWARD)
        src, dst = (action.stage, action.peer) if downstream else (action.peer, action.stage)
        return f"no message between ranks goes that way: edge {src} to {dst} has none for this rank and micro-batch"
    return "its backward is whole (B) and split (I, W) at once"


def _check_order(program: Program) -> None:
    for rank, row in enumerate(program.rows):
        place = {action: index for index, action in enumerate(row)}
        for index, action in enumerate(row):
            for alternatives in program.requirements(rank, action):
                for where, needed in alternatives:
                    if where == rank and place.get(needed, -1) > index:
                        text = f"rank {rank} runs {action} before {needed}, which it needs"
                        raise _illegal(program, text, (rank, action))
            if action.op is Op.UPDATE:
                late = next((later for later in row[index + 1 :] if later.stage == action.stage), None)
                if late is not None:
                    text = f"rank {rank} runs {late} after the update of stage {action.stage}"
                    raise _illegal(program, text, (rank, late))


def _check_ends(program: Program) -> None:
    """Runs the program without clocks, every rank as far as it gets."""
    channels: dict[tuple[int, int], deque[Key]] = {}
    at = [0] * len(program.rows)
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(program.rows):
            while at[rank] < len(row) and _can_start(program, channels, at, rank, row[at[rank]]):
                action = row[at[rank]]
                _pass_messages(program, channels, rank, action)
                for member in _members(program, rank, action):
                    at[member] += 1
                moved = True
    stuck = [(rank, row[at[rank]]) for rank, row in enumerate(program.rows) if at[rank] < len(row)]
    if stuck:
        why = "; ".join(f"rank {rank} waits in {_waits(program, channels, rank, action)}" for rank, action in stuck)
        raise _illegal(program, f"the program never ends: {why}", stuck[0])


def _members(program: Program, rank: int, action: Action) -> tuple[int, ...]:
    """The ranks that run ``action`` together."""
    return program.ranks[action.stage] if action.op in _TOGETHER else (rank,)


def _can_start(
    program: Program, channels: dict[tuple[int, int], deque[Key]], at: list[int], rank: int, action: Action
) -> bool:
    if action.op in RECEIVE:
        heads = (channels.get(_channel(m, action), ()) for m in program.messages_of(rank, action))
        return all(head and head[0] == _key(action) for head in heads)
    return all(
        at[member] < len(program.rows[member]) and program.rows[member][at[member]] == action
        for member in _members(program, rank, action)
    )


def _pass_messages(program: Program, channels: dict[tuple[int, int], deque[Key]], rank: int, action: Action) -> None:
    for message in program.messages_of(rank, action):
        queue = channels.setdefault(_channel(message, action), deque())
        if action.op in SEND:
            queue.append(_key(action))
        else:
            queue.popleft()


def _channel(message: Message, action: Action) -> tuple[int, int]:
    forward = action.op in (Op.SEND_FORWARD, Op.RECV_FORWARD)
    return (message.src, message.dst) if forward else (message.dst, message.src)


def _key(action: Action) -> Key:
    own, peer = action.stage, -1 if action.peer is None else action.peer
    at_source = action.op in (Op.SEND_FORWARD, Op.RECV_BACKWARD)
    src, dst = (own, peer) if at_source else (peer, own)
    return src, dst, action.microbatch, action.op in (Op.SEND_FORWARD, Op.RECV_FORWARD)


def _waits(program: Program, channels: dict[tuple[int, int], deque[Key]], rank: int, action: Action) -> str:
    """``action`` and what it finds instead of what it waits for."""
    for message in program.messages_of(rank, action) if action.op in RECEIVE else ():
        src, _ = _channel(message, action)
        queue = channels.get((src, rank), ())
        if not queue or queue[0] != _key(action):
            if not queue:
                return f"{action} (nothing has come from rank {src})"
            stage, peer, microbatch, forward = queue[0]
            sent = Action(stage, Op.SEND_FORWARD, microbatch, peer)
            if not forward:
                sent = Action(peer, Op.SEND_BACKWARD, microbatch, stage)
            return f"{action} (the next message from rank {src} is that of {sent})"
    return str(action)
