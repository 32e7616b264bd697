"""Random legal programs in random orders, such as no schedule would make: of computes, sends, receives and updates.

A program is written as one random history of all ranks, each event only once all that it needs has happened; a rank's
row is what of it happens there.  The history is a witness that the program ends.  Afterwards neighbours in rows are
exchanged at random, as far as ``validate`` allows it.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

from planner.ir.errors import IllegalProgramError
from planner.ir.graph import Graph
from planner.ir.layout import Layout, cut_points
from planner.ir.program import Program
from planner.ir.schedule import COMPUTE, MESSAGE, RECEIVE, SEND, Action, Op, StageGraph
from planner.layers.boundary import Boundaries
from planner.passes import validate
from tests.planner.passes.requirements import requirements
from tests.planner.random_programs import random_graph

GROUP_SIZES = (1, 1, 1, 2, 2, 3)
SHARES = (0, 1, 1, 2, 3)
URGENCIES = (0.02, 0.3, 1.0, 5.0)
ADDS = (Op.BACKWARD, Op.BACKWARD_WEIGHT, Op.REDUCE_GRAD, Op.UPDATE)

Chosen = tuple[Boundaries, tuple[int, ...], Program]
"""Layers on stages, rows of each micro-batch, and the program."""


def random_case(rng: random.Random) -> Chosen:
    """Stages of random layers on random, overlapping groups of ranks, micro-batches of random size, any legal order."""
    num_ranks = rng.randint(1, 4)
    boundaries = _random_boundaries(rng, num_ranks)
    micro_batches = tuple(rng.randint(1, 4) for _ in range(rng.randint(1, 6)))
    edges = boundaries.edges()
    stages = StageGraph(len(boundaries.ranks), len(micro_batches), edges, boundaries.prepares())
    draft = Program(((),) * num_ranks, stages, boundaries.ranks, boundaries.routes(edges, micro_batches))
    program = _History(rng, draft).program()
    validate(program)
    program = _shaken(rng, program, rng.choice((0, 0, 20)))
    return boundaries, micro_batches, _blocking(program) if rng.random() < 0.25 else program


def _random_boundaries(rng: random.Random, num_ranks: int) -> Boundaries:
    graph = in_double(random_graph(rng, rng.randint(2, 8)))
    num_stages = min(rng.choice((1, 2, 3, 4, 5)), len(graph.layers))
    cuts = [0, *sorted(rng.sample(range(1, len(graph.layers)), num_stages - 1)), len(graph.layers)]
    stage_of = {graph.layers[i].name: s for s in range(num_stages) for i in range(cuts[s], cuts[s + 1])}
    layouts = []
    groups = []
    for _ in range(num_stages):
        size = min(rng.choice(GROUP_SIZES), num_ranks)
        shares = [rng.choice(SHARES) for _ in range(size)]
        shares[rng.randrange(size)] += not any(shares)
        layouts.append(Layout({"sample": cut_points(shares)} if size > 1 else {}))
        groups.append(tuple(sorted(rng.sample(range(num_ranks), size))))
    return Boundaries.of(graph, stage_of, layouts, groups)


def in_double(graph: Graph) -> Graph:
    layers = (
        replace(layer, outputs=tuple(replace(spec, dtype="float64") for spec in layer.outputs))
        for layer in graph.layers
    )
    return replace(
        graph, layers=tuple(layers), inputs={**graph.inputs, "x": replace(graph.inputs["x"], dtype="float64")}
    )


class _History:
    """Writes the rows of one program."""

    def __init__(self, rng: random.Random, draft: Program) -> None:
        self.rng = rng
        self.draft = draft
        self.urgency = {op: rng.choice(URGENCIES) for op in Op}
        count = draft.stages.num_microbatches
        every = rng.randint(1, max(1, count // 2)) if rng.random() < 0.3 else count
        self.trains = rng.random() > 0.08
        self.ends: tuple[int | None, ...] = (None,)
        if self.trains and every < count:
            self.ends = (*range(every - 1, count - 1, every), count - 1)
            self.urgency |= {Op.FORWARD: URGENCIES[0], Op.UPDATE: URGENCIES[-1]}
        split_share = rng.choice((0.0, 0.5, 1.0))
        split = {(s, m) for s in range(draft.stages.num_stages) for m in range(count) if rng.random() < split_share}
        self.left = [list(dict.fromkeys(self._actions(rank, split))) for rank in range(len(draft.rows))]
        self.known = [frozenset(left) for left in self.left]
        self.needs = [{action: self._needs(rank, action) for action in left} for rank, left in enumerate(self.left)]
        self.done: list[set[Action]] = [set() for _ in self.left]
        self.rows: list[list[Action]] = [[] for _ in self.left]
        self.queues: defaultdict[object, list[int | None]] = defaultdict(list)  # messages under way, by channel
        self.agreed: defaultdict[object, list[int | None]] = defaultdict(list)  # the order in which all ranks send
        self.version_of: dict[tuple[int, int | None], int] = {}

    def program(self) -> Program:
        while any(self.left):
            ready = [
                (rank, action) for rank, left in enumerate(self.left) for action in left if self._is_ready(rank, action)
            ]
            self._do(*self.rng.choices(ready, [self.urgency[action.op] for _, action in ready])[0])
        return replace(self.draft, rows=tuple(map(tuple, self.rows)))

    def _actions(self, rank: int, split: set[tuple[int, int]]) -> Iterator[Action]:
        stages = self.draft.stages
        for stage, ranks in enumerate(self.draft.ranks):
            if rank not in ranks:
                continue
            for m in range(stages.num_microbatches):
                halves = (Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT) if (stage, m) in split else (Op.BACKWARD,)
                yield from (Action(stage, op, m) for op in (Op.FORWARD, *(halves if self.trains else ())))
                moved = [Action(stage, Op.RECV_FORWARD, m, edge.src) for edge in stages.into(stage)]
                moved += [Action(stage, Op.SEND_FORWARD, m, edge.dst) for edge in stages.out_of(stage)]
                if self.trains:
                    moved += [Action(stage, Op.SEND_BACKWARD, m, edge.src) for edge in stages.into(stage)]
                    moved += [Action(stage, Op.RECV_BACKWARD, m, edge.dst) for edge in stages.out_of(stage)]
                yield from (action for action in moved if self.draft.messages_of(rank, action))
            for end in self.ends if self.trains else ():
                yield from (Action(stage, Op.REDUCE_GRAD, end),) * (len(ranks) > 1)
                yield Action(stage, Op.UPDATE, end)

    def _members(self, rank: int, action: Action) -> tuple[int, ...]:
        """The ranks that do it at the same time."""
        alone = action.op in MESSAGE or action.op is Op.BACKWARD_WEIGHT
        return (rank,) if alone else self.draft.ranks[action.stage]

    def _is_ready(self, rank: int, action: Action) -> bool:
        members = self._members(rank, action)
        return rank == members[0] and all(self._is_ready_on(member, action) for member in members)

    def _is_ready_on(self, rank: int, action: Action) -> bool:
        done = self.done[rank]
        known = self.known[rank]
        if not self.needs[rank][action] <= done:
            return False
        if action.op in RECEIVE:
            return all(self.queues[channel][:1] == [action.microbatch] for channel in self._channels(rank, action))
        if action.op in SEND:
            agreed = self.agreed[action.stage, action.op, action.peer]
            before = agreed[: agreed.index(action.microbatch)] if action.microbatch in agreed else agreed
            return all(each in done or each not in known for each in (replace(action, microbatch=m) for m in before))
        return True

    def _needs(self, rank: int, action: Action) -> frozenset[Action]:
        """What must be done on ``rank`` before ``action``."""
        known = self.known[rank]
        if action.op in RECEIVE:
            return frozenset()
        if action.op is Op.UPDATE and action.microbatch == self.ends[-1]:
            return frozenset(each for each in known if each.stage == action.stage and each != action)
        groups = requirements(self.draft, rank, action)
        return frozenset(each for group in groups for _, each in group if each in known) | {
            *self._updates_before(action)
        }

    def _updates_before(self, action: Action) -> Iterator[Action]:
        """Those that do not count this action's gradient."""
        for end in self.ends if action.op in ADDS else ():
            if end is not None and action.microbatch is not None and end < action.microbatch:
                yield Action(action.stage, Op.UPDATE, end)

    def _channels(self, rank: int, action: Action) -> list[object]:
        forward = action.op in (Op.SEND_FORWARD, Op.RECV_FORWARD)
        ends = (action.stage, action.peer) if action.op in SEND else (action.peer, action.stage)
        others = [m.dst if m.src == rank else m.src for m in self.draft.messages_of(rank, action)]
        return [(forward, ends, (rank, other) if action.op in SEND else (other, rank)) for other in others]

    def _do(self, rank: int, action: Action) -> None:
        if action.op in SEND:
            agreed = self.agreed[action.stage, action.op, action.peer]
            if action.microbatch not in agreed:
                agreed.append(action.microbatch)
            for channel in self._channels(rank, action):
                self.queues[channel].append(action.microbatch)
        elif action.op in RECEIVE:
            for channel in self._channels(rank, action):
                self.queues[channel].pop(0)
        members = self._members(rank, action)
        if action.op in COMPUTE:
            action = replace(action, version=self._version(rank, members, action))
        for member in members:
            self.rows[member].append(action)
            self.done[member].add(action)
            self.left[member].remove(action)

    def _version(self, rank: int, members: tuple[int, ...], action: Action) -> int:
        key = (action.stage, action.microbatch)
        if action.op is Op.FORWARD:
            made = min(
                sum(each.op is Op.UPDATE and each.stage == action.stage for each in self.done[member])
                for member in members
            )
            self.version_of[key] = self.rng.randint(self.rng.randint(0, made), made)
        return self.version_of[key]


def _shaken(rng: random.Random, program: Program, exchanges: int) -> Program:
    """Neighbours change places wherever that is still legal."""
    for _ in range(exchanges):
        rank = rng.randrange(len(program.rows))
        row = list(program.rows[rank])
        if len(row) < 2:
            continue
        i = rng.randrange(len(row) - 1)
        row[i : i + 2] = row[i + 1], row[i]
        other = replace(program, rows=(*program.rows[:rank], tuple(row), *program.rows[rank + 1 :]))
        program = other if _is_legal(other) else program
    return program


def _blocking(program: Program) -> Program:
    """The same with messages that hold their ranks, if it ends then."""
    rows = tuple(tuple(replace(a, blocking=a.op in MESSAGE) for a in row) for row in program.rows)
    held = replace(program, rows=rows)
    return held if _is_legal(held) else program


def _is_legal(program: Program) -> bool:
    try:
        validate(program)
    except IllegalProgramError:
        return False
    return True
