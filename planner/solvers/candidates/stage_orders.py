"""Orders of a candidate's stages: those that do not depend on one another may come in any.

The number of a stage decides when ranks send to it and take from it, before or behind others: a rank's receives are in
the order of the stages that send, its sends of a backward in the reverse.  So what a step takes depends on the order
of two stages that do not depend on one another if some stage has to do with both: it reads from both, or both from it.
All else in a program follows from the DAG of its stages, but where a schedule asks the clock which stage comes first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import combinations

from planner.costs.candidate import Candidate
from planner.ir.graph import Graph, bits_of, producer
from planner.schedules import traits

Behind = tuple[int, ...]
"""By stage, those that have to come behind it, as a bit set."""


def in_every_order(graph: Graph, candidate: Candidate) -> Iterator[Candidate]:
    """The candidate, then the same with its stages in every other order that makes another program."""
    edges = _edges(graph, candidate.stage_of)
    pairs = _told_apart(edges, candidate.num_stages, traits(candidate.schedule).timed)
    for order in _orders(_closed(edges, candidate.num_stages), pairs):
        yield _reordered(candidate, order)


def _edges(graph: Graph, stage_of: tuple[int, ...]) -> set[tuple[int, int]]:
    """Which stage hands something to which."""
    maker = {layer.name: stage for layer, stage in zip(graph.layers, stage_of, strict=True)}
    read = (
        (maker[producer(value)], stage)
        for layer, stage in zip(graph.layers, stage_of, strict=True)
        for value in layer.inputs
        if producer(value) in maker
    )
    return {(source, reader) for source, reader in read if source != reader}


def _told_apart(edges: set[tuple[int, int]], num_stages: int, is_timed: bool) -> list[tuple[int, int]]:
    """Pairs of stages whose order makes a difference."""
    if is_timed:
        return list(combinations(range(num_stages), 2))
    near: list[tuple[set[int], set[int]]] = [(set(), set()) for _ in range(num_stages)]
    for source, reader in sorted(edges):
        near[source][1].add(reader)
        near[reader][0].add(source)
    pairs = {pair for sides in near for side in sides for pair in combinations(sorted(side), 2)}
    return sorted(pairs)


def _closed(edges: Iterable[tuple[int, int]], num_stages: int) -> Behind:
    """All that depend on a stage, by stage; stages are in topological order."""
    behind = [0] * num_stages
    for source, reader in sorted(edges, reverse=True):
        behind[source] |= behind[reader] | 1 << reader
    return tuple(behind)


def _orders(behind: Behind, pairs: list[tuple[int, int]]) -> Iterator[tuple[int, ...]]:
    """An order of stages for each way to put the one or the other of every pair first."""
    for number, (one, other) in enumerate(pairs):
        if not (behind[one] >> other | behind[other] >> one) & 1:
            rest = pairs[number + 1 :]
            yield from _orders(_with_edge(behind, one, other), rest)
            yield from _orders(_with_edge(behind, other, one), rest)
            return
    left, order = set(range(len(behind))), list[int]()
    while left:
        waiting = set().union(*(bits_of(behind[stage]) for stage in left))
        order.append(min(left - waiting))
        left.remove(order[-1])
    yield tuple(order)


def _with_edge(behind: Behind, source: int, reader: int) -> Behind:
    """The same where ``reader`` and all behind it have to come behind ``source`` and all before it."""
    more = behind[reader] | 1 << reader
    return tuple(own | more if stage == source or own >> source & 1 else own for stage, own in enumerate(behind))


def _reordered(candidate: Candidate, order: tuple[int, ...]) -> Candidate:
    """The candidate with its stages in this order, by their numbers now."""
    if order == tuple(range(len(order))):
        return candidate
    number = {stage: place for place, stage in enumerate(order)}
    by_stage = {
        name: tuple(values[stage] for stage in order) if (values := getattr(candidate, name)) else values
        for name in ("groups", "shares", "windows", "recompute", "blocks", "zero", "spans")
    }
    return replace(candidate, stage_of=tuple(number[stage] for stage in candidate.stage_of), **by_stage)
