"""Whether the program of a plan is one that its schedule gives, with a profile or without.

Without a profile nobody says what stages hand to each other.  The sends and receives do: an edge is where there are
any, and who exchanges with whom follows from the samples that two stages share.  Where a stage's layers have layouts of
their own each of its senders may meet each receiver, so that only their being there is checked.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import zip_longest

from planner import schedules
from planner.check.structure import is_in_parts
from planner.ir.errors import HalopipeError
from planner.ir.plan import Decision, Size, samples_in
from planner.ir.program import Message, Part, Program, Route
from planner.ir.schedule import COMPUTE, MESSAGE, Action, Edge, Op, Pipeline, StageGraph, Windows
from planner.layers.division import has_layouts
from planner.passes import lower, validate
from planner.passes.versions import in_flight

_AHEAD = (Op.SEND_FORWARD, Op.RECV_FORWARD)
_HALVES = (Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)
_BACKWARD = (Op.BACKWARD, *_HALVES)

MessageEnds = dict[tuple[int, int, Size, bool], tuple[set[int], set[int]]]
"""Ranks that send and that receive, by (source, destination, size of the micro-batch, forward)."""


def misplaced_actions(decision: Decision, rows: tuple[tuple[Action, ...], ...]) -> Iterator[str]:
    """Actions of stages that a rank is not in."""
    for rank, row in enumerate(rows):
        for index, action in enumerate(row):
            if rank not in decision.stages[action.stage].ranks:
                where = f"stage {action.stage} is on ranks {list(decision.stages[action.stage].ranks)}"
                yield f"decision.program[{rank}][{index}]: {action} on rank {rank}; {where}"


def illegal_program(decision: Decision, program: Program) -> Iterator[str]:
    """Why the program could not be run; nothing if it is legal."""
    try:
        validate(program, staleness=_staleness(decision, program))
    except (ValueError, HalopipeError) as error:
        yield f"decision.program: the program is not legal: {error}"


def stated_program(decision: Decision, rows: tuple[tuple[Action, ...], ...]) -> Program:
    """The program with the messages that its own sends and receives tell of."""
    ranks = tuple(stage.ranks for stage in decision.stages)
    ends: MessageEnds = {}
    routes: dict[tuple[int, int], bool] = {}
    for rank, row in enumerate(rows):
        for action in row:
            if action.op not in MESSAGE or action.edge is None or action.microbatch is None:
                continue
            forward = action.op in _AHEAD
            src, dst = action.edge
            routes[src, dst] = routes.get((src, dst), False) or not forward
            key = (src, dst, decision.sizes[action.microbatch], forward)
            at_source, at_destination = ends.setdefault(key, (set(), set()))
            (at_source if action.is_at_source else at_destination).add(rank)
    edges = tuple(Edge(src, dst, (), gradient) for (src, dst), gradient in sorted(routes.items()))
    prepares = tuple(sorted({action.stage for row in rows for action in row if action.op is Op.PREPARE}))
    by_size = {
        (edge.src, edge.dst, size): _messages(decision, edge, size, ends)
        for edge in edges
        for size in set(decision.sizes)
    }
    messages: dict[Route, tuple[Message, ...]] = {
        (edge.src, edge.dst, number): by_size[edge.src, edge.dst, size]
        for edge in edges
        for number, size in enumerate(decision.sizes)
    }
    stages = StageGraph(len(decision.stages), len(decision.sizes), edges, prepares, decision.num_parts)
    return Program(rows, stages, ranks, messages)


def _messages(decision: Decision, edge: Edge, size: Size, ends: MessageEnds) -> tuple[Message, ...]:
    part = (Part("", (), 1),)
    ways = [_pairs(decision, edge, size, ends.get((edge.src, edge.dst, size, way))) for way in (True, False)]
    pairs = sorted(ways[0] | ways[1])
    return tuple(Message(*pair, part * (pair in ways[0]), part * (pair in ways[1])) for pair in pairs)


def _pairs(decision: Decision, edge: Edge, size: Size, ends: tuple[set[int], set[int]] | None) -> set[tuple[int, int]]:
    """Who exchanges with whom, of the ranks that exchange at all in some micro-batch of this size."""
    sources, destinations = ends if ends is not None else (set(), set())
    pairs = {(a, b) for a in sources for b in destinations if a != b}
    plain = not any(has_layouts(decision, stage) or is_in_parts(decision, stage) for stage in (edge.src, edge.dst))
    if plain:
        first, second = (_spans(decision, stage, samples_in(size)) for stage in (edge.src, edge.dst))
        near = {(a, b) for a, b in pairs if max(first[a][0], second[b][0]) < min(first[a][1], second[b][1])}
        covered = {a for a, _ in near} == sources and {b for _, b in near} == destinations
        if covered or decision.sizes.count(size) == 1:
            return near
    return pairs


def _spans(decision: Decision, stage: int, samples: int) -> dict[int, tuple[int, int]]:
    """The samples of each rank of a stage: from, to."""
    ranks = decision.stages[stage].ranks
    at = 0
    if len(ranks) == 1:
        return {ranks[0]: (0, samples)}
    spans = {}
    for rank, count in zip(ranks, decision.layout_of(stage).samples(samples), strict=True):
        spans[rank] = (at, at + count)
        at += count
    return spans


def _staleness(decision: Decision, program: Program) -> tuple[int, ...]:
    try:
        return schedules.staleness(decision.schedule, _pipeline(decision, program, ()))
    except HalopipeError:
        return ()


def _pipeline(decision: Decision, program: Program, windows: Windows) -> Pipeline:
    groups = [frozenset(stage.ranks) for stage in decision.stages]
    numbers = {group: number for number, group in enumerate(dict.fromkeys(groups))}
    positions = tuple(numbers[group] for group in groups)
    apart = positions == tuple(range(len(decision.stages)))
    return Pipeline(program.stages, () if apart else positions, windows)


def schedule_order(decision: Decision, program: Program, name: str) -> Decision:
    """The decision under another schedule: the same windows, where those say anything.

    Raises:
        HalopipeError: that schedule cannot order these stages.
        ValueError: likewise.
    """
    windows = _windows(program)[0] if schedules.traits(decision.schedule).windowed else ()
    is_ahead = not program.stages.prepares or _first_difference(decision, program, windows, True) is None
    ordered = _lowered(decision, program, name, windows, is_ahead)
    return replace(decision, schedule=name, program=tuple(tuple(map(str, row)) for row in ordered.rows))


def schedule_faults(decision: Decision, program: Program) -> Iterator[str]:
    """Where a legal program first differs from what the schedule gives."""
    name = decision.schedule
    if name not in schedules.names():
        yield f"decision.schedule: no schedule {name!r}; known: {', '.join(schedules.names())}"
        return
    traits = schedules.traits(name)
    if traits.trains != program.trains:
        passes = ("forward passes alone", "training")
        yield f"decision.schedule: {name} is for {passes[traits.trains]}, the program is {passes[program.trains]}"
        return
    split = any(action.op in _HALVES for row in program.rows for action in row)
    if program.trains and traits.splits_backward != split:
        halves = ("whole (B)", "split (I, W)")
        yield f"decision.schedule: backwards of {name} are {halves[traits.splits_backward]}, here {halves[split]}"
        return
    windows = [(), *_windows(program)] if traits.windowed else [()]
    differing: list[str] = []
    for each in dict.fromkeys(windows):
        for ahead in (True, False) if program.stages.prepares else (True,):
            difference = _first_difference(decision, program, each, ahead)
            if difference is None:
                return
            differing.append(difference)
    if not traits.timed:  # those are ordered by costs, which nobody wrote down
        yield differing[-1]


def _lowered(decision: Decision, program: Program, name: str, windows: Windows, ahead: bool) -> Program:
    """The program in the order of a schedule."""
    order = schedules.schedule(name)(_pipeline(decision, program, windows))
    return lower(order, program.stages, program.ranks, program.messages, len(program.rows), ahead=ahead)


def _first_difference(decision: Decision, program: Program, windows: Windows, ahead: bool) -> str | None:
    name = decision.schedule
    try:
        expected = _lowered(decision, program, name, windows, ahead)
    except (ValueError, HalopipeError) as error:
        return f"decision.schedule: {name} cannot order these stages: {error}"
    for rank, (stated_row, expected_row) in enumerate(zip(program.rows, expected.rows, strict=True)):
        for index, (here, there) in enumerate(zip_longest(stated_row, expected_row)):
            if str(here) != str(there):
                stated = "nothing" if here is None else str(here)
                path = f"decision.program[{rank}][{index}]"
                return f"{path}: the program has {stated} where schedule {name} has {there or 'nothing'}"
    return None


def _windows(program: Program) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Windows that a program may be made with: forwards before a stage's first backward; the most in flight."""
    warm_ups = []
    for stage, ranks in enumerate(program.ranks):
        ops = [action.op for action in program.rows[ranks[0]] if action.stage == stage and action.op in COMPUTE]
        first_backward = next((index for index, op in enumerate(ops) if op in _BACKWARD), len(ops))
        warm_ups.append(ops[:first_backward].count(Op.FORWARD))
    longer = program.stages.parts - 1  # by so much is a warm-up longer where micro-batches are cut
    most = in_flight(program.rows, len(program.ranks))
    first, highest = (tuple(max(1, count - longer) for count in counts) for counts in (warm_ups, most))
    return first, highest
