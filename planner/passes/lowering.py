"""Lowering: from the order of compute to a program with every message, reduction and update explicit."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial

from planner.ir.cluster import RankIds
from planner.ir.program import Message, Program, Route
from planner.ir.schedule import MESSAGE, Action, Op, Schedule, StageGraph

_FORWARD = (Op.FORWARD,)
_BACKWARD = (Op.BACKWARD, Op.BACKWARD_INPUT)
_GRADIENTS_END_WITH = (Op.BACKWARD, Op.BACKWARD_WEIGHT, Op.SEND_BACKWARD)  # let the neighbour start, then reduce


def lower(
    schedule: Schedule,
    stages: StageGraph,
    ranks: tuple[RankIds, ...],
    messages: Mapping[Route, tuple[Message, ...]],
    num_ranks: int,
    *,
    ahead: bool = True,
) -> Program:
    """The program of ``schedule``: a receive just before its consumer, a send just after its producer.

    (The executor posts receives ahead of time; where a receive stands is where it is waited for.)  A rank's row is that
    of its position; between stages of one rank nothing is sent.  A stage on several ranks sums its gradients after its
    last backward, and every stage is updated at the end; where the schedule says when a stage is updated, it is summed
    just before.  Stages without a backward are neither summed nor updated.  What a stage prepares of a micro-batch
    stands before the receives of the forward one before that micro-batch's.

    Args:
        ahead: if False, what is prepared stands just before the forward that needs it, after its receives.

    Raises:
        ValueError: as of :func:`with_rows`.
    """
    return with_rows(Program(((),) * num_ranks, stages, ranks, messages), schedule, range(num_ranks), ahead)


def with_rows(draft: Program, schedule: Schedule, kept: Container[int], ahead: bool = True) -> Program:
    """The program ``draft``, which has no actions, with the rows of the ranks ``kept``; as of :func:`lower`.

    Raises:
        ValueError: a rank has to run several positions of the schedule, whose order among each other nobody gave, or
            the stages of a position are on different ranks.
    """
    _require_one_group(schedule, draft.ranks)
    rows = (_lowered(draft, schedule, rank, ahead) if rank in kept else () for rank in range(len(draft.rows)))
    return replace(draft, rows=tuple(rows))


def _lowered(draft: Program, schedule: Schedule, rank: int, ahead: bool) -> tuple[Action, ...]:
    positions = [row for row in schedule.rows if row and rank in draft.ranks[row[0].stage]]
    if len(positions) > 1:
        heads = ", ".join(str(row[0]) for row in positions)
        raise ValueError(f"rank {rank} runs {len(positions)} positions of the schedule (they start with {heads})")
    computes = [compute for position in positions for compute in position]
    row = [
        action
        for compute, before in zip(computes, _prepared(draft.stages, computes, ahead), strict=True)
        for action in _moved(draft, rank, compute, before, ahead)
    ]
    if schedule.blocking or schedule.streams:
        marked = partial(replace, blocking=schedule.blocking, streams=schedule.streams)
        row = [marked(action) if action.op in MESSAGE else action for action in row]
    return tuple(_with_reductions(row, draft.ranks))


def _require_one_group(schedule: Schedule, ranks: tuple[RankIds, ...]) -> None:
    for position, row in enumerate(schedule.rows):
        groups = {frozenset(ranks[action.stage]): action.stage for action in row}
        if len(groups) > 1:
            (a, first), (b, second), *_ = groups.items()
            text = f"stage {first} is on ranks {sorted(a)}, stage {second} on ranks {sorted(b)}"
            raise ValueError(f"position {position} of the schedule is on several groups of ranks: {text}")


def _prepared(stages: StageGraph, computes: list[Action], ahead: bool) -> list[tuple[Action, ...]]:
    """What is prepared with each action of a row: for its stage's next forward, and with the first for that as well."""
    by_compute: list[tuple[Action, ...]] = [() for _ in computes]
    for stage in stages.prepares:
        at = [index for index, action in enumerate(computes) if (action.stage, action.op) == (stage, Op.FORWARD)]
        needed = [Action(stage, Op.PREPARE, computes[index].microbatch) for index in at]
        for number, index in enumerate(at):
            first = number + 1 if ahead and number else number
            by_compute[index] = tuple(needed[first : number + 2 if ahead else number + 1])
    return by_compute


def _moved(program: Program, rank: int, compute: Action, prepared: tuple[Action, ...], ahead: bool) -> Iterator[Action]:
    """``compute`` between the receives it needs and the sends of what it makes; ``prepared`` goes before or between."""
    stage = compute.stage
    microbatch = compute.microbatch
    before: Iterable[Action] = ()
    after: Iterable[Action] = ()
    if compute.op in _FORWARD:
        before = [Action(stage, Op.RECV_FORWARD, microbatch, edge.src) for edge in program.stages.into(stage)]
        after = [Action(stage, Op.SEND_FORWARD, microbatch, edge.dst) for edge in program.stages.out_of(stage)]
    elif compute.op in _BACKWARD:
        before = [Action(stage, Op.RECV_BACKWARD, microbatch, edge.dst) for edge in program.stages.out_of(stage)]
        # Backward comes to later stages first: in this order sends are received, so that those to one rank may join.
        later_first = reversed(program.stages.into(stage))
        after = [Action(stage, Op.SEND_BACKWARD, microbatch, edge.src) for edge in later_first]
    receives = [action for action in before if program.messages_of(rank, action)]
    yield from (*prepared, *receives) if ahead else (*receives, *prepared)
    yield compute
    yield from (action for action in after if program.messages_of(rank, action))


def _with_reductions(row: list[Action], ranks: tuple[RankIds, ...]) -> Iterator[Action]:
    updated = {action.stage for action in row if action.op is Op.UPDATE}
    last = {
        action.stage: index
        for index, action in enumerate(row)
        if action.op in _GRADIENTS_END_WITH and action.stage not in updated
    }
    for index, action in enumerate(row):
        if action.op is Op.UPDATE and len(ranks[action.stage]) > 1:
            yield Action(action.stage, Op.REDUCE_GRAD, action.microbatch)
        yield action
        if last.get(action.stage) == index and len(ranks[action.stage]) > 1:
            yield Action(action.stage, Op.REDUCE_GRAD)
    yield from (Action(stage, Op.UPDATE) for stage in sorted(last))
