"""Which ranks of a program do the same at the same times: of replicas one is simulated, and stands for the others.

The ranks of every stage are cut into k blocks of equal length, one after another; block c of all stages together is a
*slice*.  Rank p of a stage's block 0 stands for rank p of its block c if what costs anything is left as it is by

    an exchange of two slices whose ranks are on the same hosts
    an exchange of all slices of some hosts with those of others                                   ``_on_hosts``

for then the two do the same in any simulation, by induction over its events.  It is, where each rank has a device like
its own in the first slice, and as many samples of each micro-batch; where ranks of a slice are in the same island,
host or rack exactly if those are in the first; where any two slices are on the same hosts, one by one, or on no host in
common, and as many slices on some hosts as on others.  As blocks have equal numbers of samples, messages stay within
slices.  A network card carries each message that stands for others as often as there are slices on its hosts
(``copies``); the sum of a stage's gradients is one.

    stage 0   0 1 2 3 | 4 5 6 7      stage 1   8 9 | 10 11      k = 2: 0 1 2 3 8 9 and 4 5 6 7 10 11

Not looked for: with layouts of layers, tied parameters, divided optimiser states, inputs that are prepared,
micro-batches in parts, and where links are stated pair by pair.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from math import gcd
from typing import TypeVar

from planner.costs.stages.action_costs import StageCosts
from planner.ir.cluster import Cluster
from planner.ir.program import Message, Program, Route
from planner.ir.timeline import MemorySample, Span, Timeline

T = TypeVar("T")
Routes = Mapping[Route, tuple[Message, ...]]


@dataclass(frozen=True, slots=True)
class Symmetry:
    """What stands for what.

    Attributes:
        stands_for: by rank of a stage, the rank of the first slice that does the same.
        copies: how many slices there are on the same hosts.
    """

    stands_for: Mapping[int, int]
    copies: int

    @property
    def kept(self) -> frozenset[int]:
        """The ranks of the first slice."""
        return frozenset(self.stands_for.values())

    @property
    def two_slices(self) -> frozenset[int]:
        """The ranks of the first slice and of another."""
        copies: dict[int, list[int]] = {}
        for rank, first in self.stands_for.items():
            copies.setdefault(first, []).append(rank)
        return frozenset(chain.from_iterable(ranks[:2] for ranks in copies.values()))

    def routes(self, messages: Routes, kept: frozenset[int] = frozenset()) -> Routes:
        """The messages of the first slice alone, or of ``kept``."""
        kept = kept or self.kept
        of_route = dict[int, tuple[Message, ...]]()  # like micro-batches have one object
        for route in messages.values():
            if id(route) not in of_route:
                of_route[id(route)] = tuple(one for one in route if one.src in kept)
        return {key: of_route[id(route)] for key, route in messages.items()}

    def spread(self, by_rank: Sequence[T]) -> tuple[T, ...]:
        """What is of ranks of the first slice, for all ranks; of ranks without a stage as it is."""
        return tuple(by_rank[self.stands_for.get(rank, rank)] for rank in range(len(by_rank)))

    def timeline(self, first_slice: Timeline) -> Timeline:
        """That of the first slice's ranks, for all ranks."""
        spans = dict[int, list[Span]]()
        memory = dict[int, list[MemorySample]]()
        for span in first_slice.spans:
            spans.setdefault(span.rank, []).append(span)
        for sample in first_slice.memory:
            memory.setdefault(sample.rank, []).append(sample)
        ranks = sorted({*self.stands_for, *memory})
        return Timeline(
            first_slice.source,
            first_slice.step_s,
            tuple(
                Span(rank, span.action, span.start_s, span.stop_s)
                for rank in ranks
                for span in spans.get(self.stands_for.get(rank, rank), ())
            ),
            tuple(
                MemorySample(rank, sample.at_s, sample.num_bytes)
                for rank in ranks
                for sample in memory.get(self.stands_for.get(rank, rank), ())
            ),
        )

    def holds(self, program: Program) -> bool:
        """Whether the rows of ranks that are stood for are those of the ranks that stand for them."""
        return all(program.rows[rank] == program.rows[first] for rank, first in self.stands_for.items())

    def first(self, program: Program) -> Program:
        """The program with the rows and messages of the first slice alone."""
        rows = tuple(row if rank in self.kept else () for rank, row in enumerate(program.rows))
        return replace(program, rows=rows, messages=self.routes(program.messages))

    def legal_as(self, program: Program) -> Program:
        """The program of two slices: what is legal there is legal, and what is not, not.

        Of two, so that what is summed over slices is a sum.
        """
        own = self.two_slices
        return replace(
            program,
            rows=tuple(row if rank in own else () for rank, row in enumerate(program.rows)),
            ranks=tuple(tuple(rank for rank in ranks if rank in own) for ranks in program.ranks),
            messages=self.routes(program.messages, own),
        )


def symmetry_of(costs: StageCosts) -> Symmetry | None:
    """The most slices that a plan has; None: one alone, or they are not looked for."""
    if costs.cost_model.preparations.inputs or costs.tied_ranks or any(stage.zero for stage in costs.stages):
        return None
    groups = [stage.ranks for stage in costs.stages]
    samples = [tuple(stage.samples.values()) for stage in costs.stages]
    return slices(costs.cost_model.cluster, groups, samples) if all(samples) else None


def slices(
    cluster: Cluster, groups: Sequence[tuple[int, ...]], samples: Sequence[Sequence[Sequence[float]]]
) -> Symmetry | None:
    """The most slices of stages on ``groups``.

    Args:
        samples: of each stage, for every size of a micro-batch those of its ranks.
    """
    most = 1 if cluster.pairs else gcd(*map(len, groups))
    for count in range(most, 1, -1):
        if most % count == 0 and all(_repeats(own, count) for of_stage in samples for own in of_stage):
            symmetry = _on_hosts(cluster, [tuple(_blocks(ranks, count)) for ranks in groups])
            if symmetry is not None:
                return symmetry
    return None


def _repeats(samples: Sequence[float], count: int) -> bool:
    """Whether as many blocks have the same numbers of samples."""
    length = len(samples) // count
    return tuple(samples) == tuple(samples[:length]) * count


def _blocks(ranks: Sequence[int], count: int) -> Iterator[tuple[int, ...]]:
    length = len(ranks) // count
    return (tuple(ranks[begin : begin + length]) for begin in range(0, len(ranks), length))


def _on_hosts(cluster: Cluster, blocks: Sequence[tuple[tuple[int, ...], ...]]) -> Symmetry | None:
    """``blocks``: of each stage."""
    slices = [tuple(chain.from_iterable(own)) for own in zip(*blocks, strict=True)]
    stands_for: dict[int, int] = {}
    for ranks in slices:
        for rank, first in zip(ranks, slices[0], strict=True):
            if stands_for.setdefault(rank, first) != first:
                return None
    if len(stands_for) != len(slices) * len(set(slices[0])):  # a rank of several slices
        return None
    if len({_traits(cluster, ranks) for ranks in slices}) > 1:
        return None
    hosts = Counter(tuple(dict.fromkeys(cluster.devices[rank].host for rank in ranks)) for ranks in slices)
    if len(set(hosts.values())) > 1 or len(set(chain.from_iterable(hosts))) < sum(map(len, hosts)):
        return None
    return Symmetry(stands_for, len(slices) // len(hosts))


def _traits(cluster: Cluster, ranks: Sequence[int]) -> object:
    """What a slice's devices are, and which of them are in the same groups."""
    own = [cluster.devices[rank] for rank in ranks]
    devices = tuple((each.kind, each.memories, each.core_share, each.streams) for each in own)
    paths = [(cluster.devices[rank].host, *cluster.groups_of(rank)) for rank in ranks]
    apart = []
    for level in zip(*paths, strict=True):
        names = list(dict.fromkeys(level))
        apart.append(tuple(map(names.index, level)))
    return devices, tuple(apart)
