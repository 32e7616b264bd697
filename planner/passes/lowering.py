"""Lowering: from the order of compute to a program with every message, reduction and update explicit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from planner.ir.program import Message, Program, Route
from planner.ir.schedule import Action, Op, Schedule, StageGraph

_FORWARD, _BACKWARD = (Op.FORWARD,), (Op.BACKWARD, Op.BACKWARD_INPUT)
_GRADIENTS_END_WITH = (Op.BACKWARD, Op.BACKWARD_WEIGHT, Op.SEND_BACKWARD)  # let the neighbour start, then reduce


def lower(
    schedule: Schedule,
    stages: StageGraph,
    ranks: tuple[tuple[int, ...], ...],
    messages: Mapping[Route, tuple[Message, ...]],
    num_ranks: int,
) -> Program:
    """The program of ``schedule``: a receive just before its consumer, a send just after its producer.

    (The executor posts receives ahead of time; where a receive stands is where it is waited for.)  A stage on several
    ranks sums its gradients after its last backward; every stage is updated at the end.

    Raises:
        ValueError: a rank has to run several positions of the schedule, whose order among each other nobody gave.
    """
    draft = Program(tuple(() for _ in range(num_ranks)), stages, ranks, messages)
    rows = []
    for rank in range(num_ranks):
        positions = [row for row in schedule.rows if row and rank in ranks[row[0].stage]]
        if len(positions) > 1:
            heads = ", ".join(str(row[0]) for row in positions)
            raise ValueError(f"rank {rank} runs {len(positions)} positions of the schedule (they start with {heads})")
        row = [action for position in positions for compute in position for action in _moved(draft, rank, compute)]
        rows.append(tuple(_with_reductions(row, ranks)))
    return Program(tuple(rows), stages, ranks, messages)


def _moved(program: Program, rank: int, compute: Action) -> Iterator[Action]:
    """``compute`` between the receives it needs and the sends of what it makes."""
    stage, microbatch = compute.stage, compute.microbatch
    before: list[Action] = []
    after: list[Action] = []
    if compute.op in _FORWARD:
        before = [Action(stage, Op.RECV_FORWARD, microbatch, edge.src) for edge in program.stages.into(stage)]
        after = [Action(stage, Op.SEND_FORWARD, microbatch, edge.dst) for edge in program.stages.out_of(stage)]
    elif compute.op in _BACKWARD:
        before = [Action(stage, Op.RECV_BACKWARD, microbatch, edge.dst) for edge in program.stages.out_of(stage)]
        after = [Action(stage, Op.SEND_BACKWARD, microbatch, edge.src) for edge in program.stages.into(stage)]
    yield from (action for action in before if program.messages_of(rank, action))
    yield compute
    yield from (action for action in after if program.messages_of(rank, action))


def _with_reductions(row: list[Action], ranks: tuple[tuple[int, ...], ...]) -> Iterator[Action]:
    last = {action.stage: index for index, action in enumerate(row) if action.op in _GRADIENTS_END_WITH}
    for index, action in enumerate(row):
        yield action
        if last.get(action.stage) == index and len(ranks[action.stage]) > 1:
            yield Action(action.stage, Op.REDUCE_GRAD)
    yield from (Action(stage, Op.UPDATE) for stage in sorted(last))
