"""Orders of a candidate's stages: those that do not depend on one another may come in any.

The number of a stage decides when ranks send to it and take from it, before or after others: a rank's receives are in
the order of the stages that send, its sends of a backward in the reverse.  So what a step takes depends on the order
of two stages that do not depend on one another if some stage has to do with both: it reads from both, or both from it.
All else in a program follows from the DAG of its stages, but where a schedule asks the clock which stage comes first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from planner.costs.candidate import Candidate
from planner.ir.graph import Graph, producer
from planner.schedules import traits

T = TypeVar("T")
Flags = NDArray[np.bool_]
"""``[stages, stages]``: of the first and the second of a pair, whether something holds."""


def in_every_order(graph: Graph, candidate: Candidate) -> Iterator[Candidate]:
    """The candidate, then the same with its stages in every other order that makes another program."""
    yield candidate
    reads = np.zeros((candidate.num_stages, candidate.num_stages), dtype=bool)
    stage = {layer.name: own for layer, own in zip(graph.layers, candidate.stage_of, strict=True)}
    for layer in graph.layers:
        reads[[stage[maker] for maker in map(producer, layer.inputs) if maker in stage], stage[layer.name]] = True
    np.fill_diagonal(reads, val=False)
    told_apart = (reads @ reads.T) | (reads.T @ reads) | traits(candidate.schedule).timed
    for middle in range(len(reads)):
        reads |= reads[:, [middle]] & reads[[middle]]
    for order in islice(_orders(reads, told_apart), 1, None):
        yield _reordered(candidate, order)


def _orders(before: Flags, told_apart: Flags) -> Iterator[list[int]]:
    """An order for each way to put the one or the other first of pairs that are told apart; first that of numbers.

    Args:
        before: which stages come before which, closed under transitivity.
    """
    open_pairs = np.argwhere(np.triu(told_apart & ~before & ~before.T, 1))
    if not len(open_pairs):
        yield np.argsort(before.sum(axis=0), kind="stable").tolist()
        return
    itself = np.eye(len(before), dtype=bool)
    for first, second in (open_pairs[0], open_pairs[0, ::-1]):
        more = (before | itself)[:, [first]] & (before | itself)[[second]]
        yield from _orders(before | more, told_apart)


def _reordered(candidate: Candidate, order: list[int]) -> Candidate:
    """The candidate with its stages in this order, by their numbers now."""

    def each(values: tuple[T, ...]) -> tuple[T, ...]:
        return tuple(values[stage] for stage in order) if values else values

    return replace(
        candidate,
        stage_of=tuple(order.index(stage) for stage in candidate.stage_of),
        groups=each(candidate.groups),
        shares=each(candidate.shares),
        windows=each(candidate.windows),
        recompute=each(candidate.recompute),
        blocks=each(candidate.blocks),
        zero=each(candidate.zero),
        spans=each(candidate.spans),
    )
