"""Complete pipelines, simulated member by member: no plan of such stages has a shorter step.

What messages take from one another, on cards and from computing, is left out; on a channel they keep their order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import accumulate, combinations, pairwise, product
from math import comb, inf

import numpy as np

from planner.ir.layout import samples_of
from planner.ir.schedule import Action, Edge, Op, Pipeline, StageGraph
from planner.proof.prices import SpacePrices, pieces, read
from planner.proof.space import Array, PlanSpace, ProofGroup
from planner.schedules import schedule as schedule_named
from planner.schedules import traits

FEW_WINDOWS = 40
CAPS = (1, 2, 3, 4, 6)
PASSES = (Op.FORWARD, Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)
Row = tuple[Action, ...]


def least_step_s(
    prices: SpacePrices, size: int, groups: Sequence[ProofGroup], cuts: Sequence[int], most: Sequence[int]
) -> tuple[float, str]:
    """The least step of stages of ``groups`` between ``cuts``, and the schedule that takes it; infinity if none fits.

    Args:
        most: micro-batches that each stage can keep.
    """
    pipeline = _Pipeline(prices, size, groups, cuts)
    best = (inf, "")
    graph = StageGraph(len(groups), len(pipeline.batches), tuple(pipeline.edges))
    for name in prices.space.schedules:
        for windows in _windows(most, graph, name) if traits(name).windowed else [()]:
            rows = schedule_named(name)(Pipeline(graph, windows=windows)).rows
            signs = ([1 if a.op is Op.FORWARD else -(a.op is not Op.BACKWARD_WEIGHT) for a in row] for row in rows)
            if all(max(accumulate(row)) <= window for row, window in zip(signs, most, strict=True)):
                best = min(best, (pipeline.step_s(rows), name))
    return best


class _Pipeline:
    """What its passes and messages take.

    Attributes:
        takes: by stage, of a pass by samples of the micro-batch, by member; ``adds`` into gradients.
        waits_s: by stage, what a receive costs each member.
        tails: by stage, sums of gradients and update; ``meetings`` with other stages in between.
        edges: who hands what to whom, with bytes a sample there and back.
        routes: by edge, way and samples of a micro-batch: from which member to which, and seconds.
    """

    def __init__(self, prices: SpacePrices, size: int, groups: Sequence[ProofGroup], cuts: Sequence[int]) -> None:
        space = prices.space
        self.batches = space.micro_batches(size)
        sizes = sorted({size, self.batches[-1]})
        stages = list(zip(groups, pairwise(cuts), strict=True))
        kinds = [[kind for kind, _ in space.members_of(group.devices)] for group in groups]
        of_parameters = [
            np.array([prices.of_stage(kind, *ends) for kind in own])
            for own, (_, ends) in zip(kinds, stages, strict=True)
        ]
        overhead_s = space.problem.profile.action_overhead_s
        self.takes = [_passes_s(prices, group, ends, sizes) for group, ends in stages]
        self.adds = [each[:, 0] for each in of_parameters]
        self.waits_s = [np.array([overhead_s.get(kind, 0.0) for kind in own]) for own in kinds]
        self.tails = [
            (prices.waited_s(group, size, *ends), float(each[:, 1].max()))
            for (group, ends), each in zip(stages, of_parameters, strict=True)
        ]
        self.meetings = prices.meetings(groups, cuts)
        self.edges = _edges_between(space, cuts)
        self.routes = dict[tuple[Edge, bool, int], list[tuple[int, int, float]]]()
        for (edge, of_edge), n in product(self.edges.items(), sizes):
            messages = _messages(prices, groups[edge.src], groups[edge.dst], of_edge, n)
            self.routes[edge, True, n], self.routes[edge, False, n] = messages

    def step_s(self, rows: Sequence[Row]) -> float:
        """From the first action to the end of the last update, in the order of ``rows``."""
        clock = [np.zeros(len(each)) for each in self.adds]
        arrived = dict[tuple[Edge, bool, int], Array]()
        wires = defaultdict[tuple[Edge, bool, int, int], float](float)
        accumulating = set[int]()
        queue = [list(reversed(row)) for row in rows]
        while any(queue):
            before = sum(map(len, queue))
            for stage, row in enumerate(queue):
                while row:
                    op = row[-1].op
                    m = row[-1].microbatch or 0
                    there = op is Op.FORWARD
                    into = list(self._edges(op, stage, receives=True))
                    if any((edge, there, m) not in arrived for edge in into):
                        break
                    row.pop()
                    now = clock[stage] + len(into) * self.waits_s[stage]
                    for edge in into:
                        now = np.maximum(now, arrived[edge, there, m] + self.waits_s[stage])
                    clock[stage] = now = now + self.takes[stage][op, self.batches[m]]
                    if op in (Op.BACKWARD, Op.BACKWARD_WEIGHT):
                        clock[stage] = now = now + self.adds[stage] * (stage in accumulating)
                        accumulating.add(stage)
                    for edge in self._edges(op, stage, receives=False):
                        arrival = np.zeros(len(clock[edge.dst if there else edge.src]))
                        for source, target, seconds in self.routes[edge, there, self.batches[m]]:
                            wire = edge, there, source, target
                            wires[wire] = max(wires[wire], now[source]) + seconds
                            arrival[target] = max(arrival[target], wires[wire])
                        arrived[edge, there, m] = arrival
            if sum(map(len, queue)) == before:
                raise ValueError("the actions of a schedule wait in a circle")
        return self._updated_s(clock)

    def _updated_s(self, clock: Sequence[Array]) -> float:
        """The end of the last update; ``clock``: by stage and member, the end of its last pass."""
        done_s = [float(each.max()) + waited_s for each, (waited_s, _) in zip(clock, self.tails, strict=True)]
        meetings = zip(self.meetings, self.tails, strict=True)
        return max(max(done_s[s] for s in others) + sums_s + update_s for (others, sums_s), (_, update_s) in meetings)

    def _edges(self, op: Op, stage: int, *, receives: bool) -> Iterator[Edge]:
        """On which a pass of the stage waits, or sends."""
        goes_back = op in (Op.BACKWARD, Op.BACKWARD_INPUT)
        for edge in self.edges if op is Op.FORWARD or goes_back else ():
            end = edge.dst if receives != goes_back else edge.src
            if end == stage and (edge.gradient or not goes_back):
                yield edge


def _passes_s(
    prices: SpacePrices, group: ProofGroup, ends: tuple[int, int], sizes: Sequence[int]
) -> dict[tuple[Op, int], Array]:
    """Seconds of each pass of a stage in micro-batches of ``sizes`` samples, by member."""
    space = prices.space
    first, last = ends
    met_s = prices.met_s(group.devices, group.recompute) @ (space.members[last] - space.members[first])
    seconds = dict[tuple[Op, int], Array]()
    for n in sizes:
        members = zip(space.members_of(group.devices), samples_of(group.shares, n), strict=True)
        sums = [prices.sums(kind, own, group.recompute) for (kind, _), own in members]
        rows = np.array([each[:4, last] - each[:4, first] for each in sums]).T
        if met_s[0] > 0:  # members keep in step
            rows[:3] = rows[:3].max(axis=1, keepdims=True) + met_s[[0, 1, 1], None]
        seconds.update({(op, n): row for op, row in zip(PASSES, rows, strict=True)})
    return seconds


def _edges_between(space: PlanSpace, cuts: Sequence[int]) -> dict[Edge, Array]:
    """Who hands what to whom, with bytes a sample there and back."""
    edges = dict[Edge, Array]()
    for a, b in combinations(range(len(cuts) - 1), 2):
        facts = space.crossing(np.array([cuts[a]]), cuts[a + 1], cuts[b], np.array([cuts[b + 1]]))[:, 0, 0]
        if facts[2] > 0:
            edges[Edge(a, b, (), bool(facts[3] > 0))] = facts[:2]
    return edges


def _messages(
    prices: SpacePrices, source: ProofGroup, target: ProofGroup, sizes: Array, n: int
) -> Iterator[list[tuple[int, int, float]]]:
    """Of a micro-batch of ``n`` samples there, then back: from which member to which, and seconds."""
    lines = prices.lines(source.devices, target.devices)
    parts = pieces(samples_of(source.shares, n), samples_of(target.shares, n))
    for num_bytes, there in zip(sizes, (True, False), strict=True):
        takes = {k: min(float(read(line, num_bytes * k)) for line in lines) for k in {k for *_, k in parts}}
        yield [(a, b, takes[k]) if there else (b, a, takes[k]) for a, b, k in parts]


def _windows(most: Sequence[int], graph: StageGraph, schedule: str) -> list[tuple[int, ...]]:
    """Forwards before the first backward, by stage: all there are, if few; else multiples of the stages downstream."""
    held = list(most)
    depths = [0] * len(most)
    num = len(most)
    falls = not traits(schedule).splits_backward
    edges = sorted((edge.src, edge.dst) for edge in graph.edges if edge.gradient)
    for source, reader in edges * falls:  # no more than a stage that gets its gradients, where no W waits
        held[reader] = min(held[reader], held[source])
    for source, reader in reversed(edges):
        depths[source] = max(depths[source], depths[reader] + 1)
    is_few = comb(graph.num_microbatches + num - 1, num) <= FEW_WINDOWS
    multiples = (tuple(min(w, cap * b + 1) for w, b in zip(held, depths, strict=True)) for cap in CAPS)
    every = product(*(range(1, window + 1) for window in held)) if is_few else multiples
    return sorted({windows for windows in every if all(windows[a] >= windows[b] for a, b in edges * falls)})
