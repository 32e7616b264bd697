"""Validation: a program does everything once, in order, on the right weights, and ends.

Checked one after the other, so that each check may rely on those before it:

1. stages and ranks exist, and edges go from earlier to later stages;
2. every rank's row holds exactly what its stages and messages ask for, each action once, every send with its receive
   (a program of forwards alone asks for no backward and no update); inputs are prepared where a stage reads such;
   messages block all or none;
3. whatever an action needs from its own rank comes earlier in the row, and the last update of a stage is its last
   action;
4. forward and backward of a micro-batch use the same weights, and none that are older than claimed
   (``planner.passes.versions``);
5. no stage has more micro-batches in flight than it may (``planner.passes.versions``);
6. no deadlock, also if a send ends only when its receive is posted (``planner.passes.ending`` says what is assumed).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from planner.ir.errors import IllegalProgramError
from planner.ir.program import Program
from planner.ir.schedule import COMPUTE, MESSAGE, Action, Op, format_grid
from planner.passes.ending import stuck
from planner.passes.numbering import Numbering, Peers
from planner.passes.versions import faults, is_versioned, updates_of

_WIDTH = 6  # actions shown on each side of the culprit
_BLOCKS = {True: "blocks", False: "does not block"}


def validate(program: Program, *, staleness: Sequence[int] = (), held_sends: bool = False) -> None:
    """Raises :class:`IllegalProgramError`, with the culprit marked in the grid, unless ``program`` is legal.

    Args:
        staleness: by stage, the most updates that the weights of a micro-batch may lack; empty: any.
        held_sends: prove that it ends even if every send, not only one that blocks, holds its rank until its receive
            has been posted.
    """
    _check_stages(program)
    numbering = Numbering(program)
    _check_complete(numbering)
    _check_manner(program)
    _check_order(numbering)
    if is_versioned(program):
        for fault in faults(program, staleness):
            raise _illegal(program, f"rank {fault.rank}: {fault.why}", (fault.rank, fault.action))
    _check_ends(numbering, held_sends or program.blocking)


def _illegal(program: Program, why: str, mark: tuple[int, Action] | None = None) -> IllegalProgramError:
    grid = format_grid(program.rows, mark, _WIDTH)
    return IllegalProgramError("the program is illegal", [why, grid], ["halopipe plan, to make the program anew"])


def _check_stages(program: Program) -> None:
    stages = program.stages
    num_ranks = len(program.rows)
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
    for (src, dst), messages in {((a, b), route) for (a, b, _), route in program.messages.items()}:
        for message in messages:
            if message.src not in program.ranks[src] or message.dst not in program.ranks[dst]:
                text = f"a message of edge {src} to {dst} goes from rank {message.src} to {message.dst}"
                raise _illegal(program, f"{text}, which do not run these stages")


def _check_complete(numbering: Numbering) -> None:
    program = numbering.program
    trains = numbering.program.trains
    updates = updates_of(program)
    for rank, row in enumerate(numbering.rows):
        expected = list(_expected(numbering, rank, trains, updates))
        if len(row) == len(expected) and set(row) == set(expected):
            continue
        expected_numbers = set(expected)
        for action, number in zip(program.rows[rank], row, strict=True):
            if number not in expected_numbers:
                text = f"rank {rank} has {action}, but {_why_not(program, rank, action, trains, updates)}"
                raise _illegal(program, text, (rank, action))
            if (count := row.count(number)) > 1:
                raise _illegal(program, f"rank {rank} has {action} {count} times", (rank, action))
        raise _lacks(program, rank, [numbering.action(number) for number in expected if number not in set(row)])


def _check_manner(program: Program) -> None:
    """Only what can be done in some way says in which; all messages of a program go in one."""
    first: Action | None = None
    for rank, row in enumerate(program.rows):
        for action in row:
            if action.version and action.op not in COMPUTE:
                raise _illegal(program, f"rank {rank}: {action} uses no weights, but names a version", (rank, action))
            if action.op in MESSAGE:
                first = first or action
                if action.blocking != first.blocking:
                    text = f"{action} {_BLOCKS[action.blocking]}, {first} {_BLOCKS[first.blocking]}"
                    raise _illegal(program, f"rank {rank}: {text}: all messages do or none", (rank, action))
                if action.streams != first.streams:
                    text = f"{action} and {first} stream in different ways"
                    raise _illegal(program, f"rank {rank}: {text}: all messages go in one", (rank, action))
            elif action.blocking or action.streams:
                does = "blocks" if action.blocking else "streams"
                raise _illegal(program, f"rank {rank}: {action} {does}, but is no message", (rank, action))


def _lacks(program: Program, rank: int, missing: list[Action]) -> IllegalProgramError:
    row = program.rows[rank]
    related = [a for a in row if (a.stage, a.microbatch) == (missing[0].stage, missing[0].microbatch)]
    nearest = related[-1:] or list(row[-1:])
    mark = (rank, nearest[0]) if nearest else None
    lacks = ", ".join(map(str, missing[:3])) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
    return _illegal(program, f"rank {rank} lacks {lacks}" + (" (near the mark)" if mark else ""), mark)


def _expected(numbering: Numbering, rank: int, trains: bool, updates: tuple[int | None, ...]) -> Iterator[int]:
    """Every action that ``rank`` must have, micro-batch by micro-batch."""
    program = numbering.program
    count = numbering.program.stages.num_microbatches
    present = numbering.places[rank]
    for stage, ranks in enumerate(program.ranks):
        if rank not in ranks:
            continue
        messages = list(_messages(numbering, stage, trains))
        forward, whole, *halves = (
            numbering.number(Action(stage, op, 0))
            for op in (Op.FORWARD, Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)
        )
        prepare = numbering.number(Action(stage, Op.PREPARE, 0)) if stage in program.stages.prepares else -1
        for m in range(count):
            yield forward + m
            if prepare >= 0:
                yield prepare + m
            if trains:  # split where the row has a half of the backward and not the whole
                is_split = whole + m not in present and any(half + m in present for half in halves)
                yield from (half + m for half in halves) if is_split else (whole + m,)
            for first, by_microbatch in messages:
                if rank in by_microbatch[m]:
                    yield first + m
        for last in updates if trains else ():
            if len(ranks) > 1:
                yield numbering.number(Action(stage, Op.REDUCE_GRAD, last))
            yield numbering.number(Action(stage, Op.UPDATE, last))


def _messages(numbering: Numbering, stage: int, trains: bool) -> Iterator[tuple[int, Sequence[Peers]]]:
    """Sends and receives of a stage: the number of the first micro-batch's, and by micro-batch which ranks have it."""
    stages = numbering.program.stages
    ops = [(Op.RECV_FORWARD, Op.SEND_BACKWARD, edge.src) for edge in stages.into(stage)]
    ops += [(Op.SEND_FORWARD, Op.RECV_BACKWARD, edge.dst) for edge in stages.out_of(stage)]
    for ahead, back, peer in ops:
        for op in (ahead, back) if trains else (ahead,):
            kind = numbering.kind(stage, op, peer)
            yield kind * numbering.span, numbering.moves[kind]


def _why_not(program: Program, rank: int, action: Action, trains: bool, updates: tuple[int | None, ...]) -> str:
    """Why ``action`` has no place on ``rank``."""
    stages = program.stages
    if not 0 <= action.stage < stages.num_stages:
        return f"stages are 0 to {stages.num_stages - 1}"
    if rank not in program.ranks[action.stage]:
        return f"stage {action.stage} is on ranks {list(program.ranks[action.stage])}"
    if action.microbatch is not None and not 0 <= action.microbatch < stages.num_microbatches:
        return f"micro-batches are 0 to {stages.num_microbatches - 1}"
    if action.op is Op.REDUCE_GRAD and len(program.ranks[action.stage]) == 1:
        return f"stage {action.stage} is on one rank: there is nothing to sum"
    if action.op in (Op.REDUCE_GRAD, Op.UPDATE):
        when = "once a step" if updates == (None,) else f"after micro-batches {', '.join(map(str, updates))}"
        return f"every stage is updated {when}"
    if action.op in MESSAGE and action.edge is not None:
        src, dst = action.edge
        return f"no message between ranks goes that way: edge {src} to {dst} has none for this rank and micro-batch"
    if action.op is Op.PREPARE:
        return f"stage {action.stage} reads nothing that is prepared"
    return "its backward is whole (B) and split (I, W) at once"


def _check_order(numbering: Numbering) -> None:
    program = numbering.program
    unmet = numbering.unmet(missing=False)
    if unmet is not None:
        action = program.rows[unmet.rank][unmet.index]
        text = f"rank {unmet.rank} runs {action} before {unmet.needed[0]}, which it needs"
        raise _illegal(program, text, (unmet.rank, action))
    if not program.trains:
        return
    for rank, row in enumerate(program.rows):
        updated: set[int] = set()
        for action in reversed(row):
            if action.op is Op.UPDATE:
                updated.add(action.stage)
            elif action.stage not in updated:
                text = f"rank {rank} runs {action} after the update of stage {action.stage}"
                raise _illegal(program, text, (rank, action))


def _check_ends(numbering: Numbering, held_sends: bool) -> None:
    waiting = stuck(numbering, held_sends)
    if waiting:
        first = waiting[0]
        program = numbering.program
        why = "; ".join(f"rank {each.rank} waits in {each.why}" for each in waiting)
        mark = (first.rank, program.rows[first.rank][first.index])
        raise _illegal(program, f"the program never ends: {why}", mark)
