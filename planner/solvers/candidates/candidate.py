"""What a solver chooses, and the way from it to a whole plan.

A ``Candidate`` says where to cut, on which ranks, which micro-batches and schedule; some of its stages may give each
layer a layout of its own.  Ranks come in pools of like devices, and each has its share of the samples.  What may be
chosen of all this is in :mod:`planner.solvers.candidates.feasibility`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from itertools import chain, combinations, groupby, pairwise
from typing import Any

from planner.costs.cost_model import PriceBook
from planner.costs.shards.device_mesh import at_least_one, proportional
from planner.costs.shards.option import Option
from planner.costs.simulator.symmetry import Symmetry
from planner.costs.stages.placement import LayoutBook, cut_alike
from planner.costs.stages.stage_cost import with_ways
from planner.costs.stages.stage_sums import Again
from planner.ir.codec import fingerprint
from planner.ir.errors import MissingMeasurementError
from planner.ir.graph import SAMPLE, Graph
from planner.ir.layout import Layout, cut_points, equal_shares
from planner.ir.plan import (
    Alternative,
    Block,
    Decision,
    Placement,
    Plan,
    PlanInputs,
    Prediction,
    Search,
    Stage,
    sizes_of,
)
from planner.ir.problem import Problem
from planner.ir.program import Program
from planner.ir.schedule import Pipeline
from planner.layers.boundary import Boundaries
from planner.layers.recomputed import cores_among
from planner.passes.lowering import with_rows
from planner.schedules import schedule as schedule_named
from planner.schedules import traits
from planner.solvers.candidates.constraints import Constraints


@dataclass(frozen=True, slots=True)
class Pool:
    """Devices that nothing tells apart: one kind and memory size, in the same groups.

    Attributes:
        groups: by level, innermost first (``Cluster.groups_of``).
        told_apart: what side constraints say of them, see ``Constraints.device_class``.
        own_links: their host, if links are stated for it alone.
        memory_limit_bytes: of both memories together, where a device has ``on_chip_bytes`` beside: as bounds need it.
    """

    kind: str
    groups: tuple[str, ...]
    memory_limit_bytes: int
    ranks: tuple[int, ...]
    told_apart: tuple[bool, ...] = ()
    own_links: str = ""
    on_chip_bytes: int = 0

    @property
    def sort(self) -> tuple[str, int, int]:
        """Equal for pools whose devices share samples equally."""
        return self.kind, self.memory_limit_bytes, self.on_chip_bytes

    @property
    def shape(self) -> tuple[object, ...]:
        """Equal for pools of like devices."""
        memory = self.memory_limit_bytes, self.on_chip_bytes
        return self.kind, memory, len(self.ranks), self.told_apart, self.own_links


def ends_of_hosts(problem: Problem) -> list[int]:
    """How many of the usable ranks there are up to the end of each host but the last."""
    hosts = [problem.profile.cluster.devices[rank].host for rank in problem.ranks]
    return [number for number in range(1, len(hosts)) if hosts[number] != hosts[number - 1]]


def pools(problem: Problem, constraints: Constraints | None = None) -> tuple[Pool, ...]:
    """The usable ranks as pools, in order of their first rank; ranks that ``constraints`` tell apart are so."""
    cluster = problem.profile.cluster
    found: dict[tuple[str, tuple[str, ...], int, int, tuple[bool, ...]], list[int]] = {}
    for rank in problem.ranks:
        device = cluster.devices[rank]
        told_apart = constraints.device_class(rank) if constraints is not None else ()
        limit, on_chip = problem.memory_limit_bytes(rank) + device.on_chip_bytes, device.on_chip_bytes
        found.setdefault((device.kind, cluster.groups_of(rank), limit, on_chip, told_apart), []).append(rank)
    linked = {end for pair in cluster.pairs for end in (pair.src_host, pair.dst_host)}
    hosts = [cluster.devices[ranks[0]].host for ranks in found.values()]
    return tuple(
        Pool(kind, groups, limit, tuple(ranks), told_apart, host if host in linked else "", on_chip)
        for host, ((kind, groups, limit, on_chip, told_apart), ranks) in zip(hosts, found.items(), strict=True)
    )


def like_groups(found: Sequence[Pool]) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Groups that may change places with all that is in them, as numbers of pools that correspond; innermost first.

    Two hosts of two islands, pools 0 and 1, and 2 and 3:  ((0,), (1,)) and ((2,), (3,)), then ((0, 1), (2, 3)).
    """
    alike: list[tuple[tuple[int, ...], ...]] = []

    def of(members: Sequence[int], level: int) -> tuple[Any, tuple[int, ...]]:
        """The shape of a group of that level, and its pools in an order that is the same in groups of its shape."""
        parts: list[tuple[Any, tuple[int, ...]]]
        if level == 0:
            parts = [(found[number].shape, (number,)) for number in members]
        else:
            inside: dict[str, list[int]] = {}
            for number in members:
                inside.setdefault(found[number].groups[level - 1], []).append(number)
            parts = [of(numbers, level - 1) for numbers in inside.values()]
        parts.sort(key=lambda part: part[0])
        for _, same in groupby(parts, key=lambda part: part[0]):
            numbers = tuple(part[1] for part in same)
            if len(numbers) > 1:
                alike.append(numbers)
        return tuple(shape for shape, _ in parts), tuple(chain.from_iterable(numbers for _, numbers in parts))

    of(range(len(found)), len(found[0].groups))
    return tuple(alike)


def micro_batches(problem: Problem, size: int) -> tuple[int, ...]:
    """The global batch in micro-batches of ``size``."""
    return split_batch(problem.global_batch, size)


class Recomputes(IntEnum):
    """What a stage computes again before a backward, or in it: nothing, all activations, or attention's cores alone."""

    NOTHING = 0
    ALL = 1
    CORES = 2


def again_of(recompute: Recomputes, cores: tuple[int, ...]) -> Again:
    """Which layers of a stage that is asked to are computed again; ``cores``: the layers of all, by index."""
    return cores if recompute == Recomputes.CORES else recompute == Recomputes.ALL


@dataclass(frozen=True, slots=True)
class Candidate:
    """A point of the searched space.

    Attributes:
        stage_of: the stage of each layer, in the graph's order; stages are in topological order.
        groups: ranks of each stage; stages on the same ranks, in any order, are virtual stages of one position.
        shares: samples of each rank of each stage, in a full micro-batch.
        micro_batches: samples of each.
        schedule: its name.
        windows: most forwards before the first backward, by stage; empty: the schedule's own.
        recompute: by stage, which activations are computed again for the backward; empty: none anywhere.
        options: by layer: how it is divided where its stage is not cut along samples alone, else None; empty: nowhere.
        prepares_ahead: whether hosts prepare inputs one micro-batch ahead (``passes.lower``).
        prepares_next_step: whether threads prepare the next step's inputs during this one; whoever evaluates the
            candidate decides (:meth:`planner.solvers.candidates.evaluate.Evaluator.evaluate`).
        blocks: by stage, layers that are run in blocks; empty: nowhere.
        token_slices: tokens of each slice that sequences are cut into; empty: they are not.
    """

    stage_of: tuple[int, ...]
    groups: tuple[tuple[int, ...], ...]
    shares: tuple[tuple[int, ...], ...]
    micro_batches: tuple[int, ...]
    schedule: str
    windows: tuple[int, ...] = ()
    recompute: tuple[Recomputes, ...] = ()
    options: tuple[Option | None, ...] = ()
    prepares_ahead: bool = True
    blocks: tuple[tuple[Block, ...], ...] = ()
    token_slices: tuple[int, ...] = ()
    prepares_next_step: bool = False

    @classmethod
    def chain(
        cls,
        bounds: tuple[int, ...],
        groups: tuple[tuple[int, ...], ...],
        shares: tuple[tuple[int, ...], ...],
        micro_batches: tuple[int, ...],
        schedule: str,
    ) -> Candidate:
        """Stage ``s`` has layers ``bounds[s]`` to ``bounds[s + 1]`` of the graph."""
        stage_of = tuple(stage for stage, (first, last) in enumerate(pairwise(bounds)) for _ in range(first, last))
        return cls(stage_of, groups, shares, micro_batches, schedule)

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(self.groups)

    @property
    def positions(self) -> tuple[int, ...]:
        """The position that runs each stage; empty if every stage has its own."""
        groups = [frozenset(group) for group in self.groups]
        numbers = {group: position for position, group in enumerate(dict.fromkeys(groups))}
        return () if len(numbers) == len(groups) else tuple(numbers[group] for group in groups)

    def layouts(self) -> tuple[Layout, ...]:
        """The layout of each stage; nothing is cut on a stage of one rank."""
        return tuple(Layout({SAMPLE: cut_points(share)} if len(share) > 1 else {}) for share in self.shares)

    def option_of(self, layer: int) -> Option | None:
        """How the layer is divided; None if it is as its stage's shares say."""
        return self.options[layer] if self.options else None

    def placement_of(self, layer: int) -> Placement:
        """How a plan writes down where the layer runs."""
        stage, option = self.stage_of[layer], self.option_of(layer)
        return Placement(stage, self.layouts()[stage].cuts) if option is None else option.placement(stage)

    def blocks_of(self, stage: int) -> tuple[Block, ...]:
        """What is run in blocks of a stage."""
        return self.blocks[stage] if self.blocks else ()

    def stage_names(self, graph: Graph) -> dict[str, int]:
        """The stage of each layer by name."""
        return {layer.name: stage for layer, stage in zip(graph.layers, self.stage_of, strict=True)}

    def recomputes(self, stage: int) -> bool:
        """Whether ``stage`` computes all its activations again."""
        return bool(self.recompute) and self.recompute[stage] == Recomputes.ALL

    def recomputes_cores(self, stage: int) -> bool:
        """Whether ``stage`` computes attention's cores again, and nothing else."""
        return bool(self.recompute) and self.recompute[stage] == Recomputes.CORES and traits(self.schedule).trains


def has_own_options(candidate: Candidate, stage: int) -> bool:
    """Whether the layers of ``stage`` are each divided in their own way."""
    return any(own is not None for own, at in zip(candidate.options, candidate.stage_of, strict=False) if at == stage)


def split_batch(global_batch: int, size: int) -> tuple[int, ...]:
    """Micro-batches of ``size`` samples, the last one of what remains."""
    full, rest = divmod(global_batch, size)
    return (size,) * full + ((rest,) if rest else ())


def boundaries_of(graph: Graph, candidate: Candidate) -> Boundaries:
    """Who owns, needs and sends what."""
    own = {
        layer.name: option.layout
        for layer, option in zip(graph.layers, candidate.options, strict=False)
        if option is not None
    }
    placed = {
        layer.name: option.placement(candidate.stage_of[index])
        for index, layer in enumerate(graph.layers)
        if (option := candidate.option_of(index)) is not None and (option.ways > 1 or option.margin)
    }
    names, blocks = candidate.stage_names(graph), dict(enumerate(candidate.blocks))
    return Boundaries.of(graph, names, candidate.layouts(), candidate.groups, own, placed, blocks)


def program_of(graph: Graph, candidate: Candidate, symmetry: Symmetry | None = None) -> Program:
    """The candidate's program, validated by whoever predicts it; of a symmetric one the first slice."""
    boundaries = boundaries_of(graph, candidate).sliced(candidate.token_slices)
    edges, sizes = boundaries.edges(), sizes_of(candidate.micro_batches, candidate.token_slices)
    stages, routes = boundaries.stages(edges, sizes), boundaries.routes(edges, sizes)
    num_ranks = 1 + max(rank for group in candidate.groups for rank in group)
    order = schedule_named(candidate.schedule)(Pipeline(stages, candidate.positions, candidate.windows))
    kept, messages = (range(num_ranks), routes) if symmetry is None else (symmetry.kept, symmetry.routes(routes))
    draft = Program(((),) * num_ranks, stages, candidate.groups, messages)
    return with_rows(draft, order, kept, candidate.prepares_ahead)


def decision_of(problem: Problem, candidate: Candidate) -> Decision:
    """The candidate as a plan writes it down."""
    profile = problem.profile
    devices = profile.cluster.devices
    program = program_of(profile.graph, candidate)
    by_stage: list[list[str]] = [[] for _ in candidate.groups]
    for layer, stage in zip(profile.graph.layers, candidate.stage_of, strict=True):
        by_stage[stage].append(layer.name)
    return Decision(
        schedule=candidate.schedule,
        micro_batches=candidate.micro_batches,
        stages=tuple(
            Stage(
                group,
                tuple(devices[rank].name for rank in group),
                candidate.recomputes(stage),
                problem.shards(len(group)) and not has_own_options(candidate, stage),
                candidate.blocks_of(stage),
                max(1, problem.zero_over(len(group))) if not has_own_options(candidate, stage) else 1,
                cores_among(profile.graph, by_stage[stage]) if candidate.recomputes_cores(stage) else (),
            )
            for stage, group in enumerate(candidate.groups)
        ),
        layers={layer.name: candidate.placement_of(index) for index, layer in enumerate(profile.graph.layers)},
        program=tuple(tuple(str(action) for action in row) for row in program.rows),
        token_slices=candidate.token_slices,
        prepares_next_step=candidate.prepares_next_step,
    )


def plan_of(
    problem: Problem,
    decision: Decision,
    prediction: Prediction,
    search: Search,
    alternatives: Iterable[Alternative] = (),
) -> Plan:
    """The plan, with the fingerprints of what it was made for."""
    profile = problem.profile
    inputs = PlanInputs(
        model=profile.model,
        optimizer=profile.optimizer,
        model_fingerprint=fingerprint(profile.graph),
        profile_fingerprint=fingerprint(profile.bare),
        cluster_fingerprint=fingerprint(profile.cluster),
        request=problem.request,
        corrections=profile.calibration.corrections,
    )
    return Plan(inputs, decision, prediction, search, tuple(alternatives))


_PARTS = 1000
"""Into how many parts, or somewhat fewer, the sites of a stage are divided."""


def site_shares(problem: Problem, book: PriceBook, ranks: tuple[int, ...], size: int) -> tuple[int, ...]:
    """Parts of the sites of each rank of a stage, whatever the number of samples: equal, else in proportion to speed.

    Their sum is not ``size``, samples of a full micro-batch, which would make them samples.
    """
    if len({book.kind(rank) for rank in ranks}) == 1:
        each = _PARTS // len(ranks)
        return (each + (each * len(ranks) == size),) * len(ranks)
    speeds = [_samples_per_s(book, book.kind(rank)) for rank in ranks]
    return proportional(_PARTS - (size == _PARTS), speeds)


def group_shares(problem: Problem, book: PriceBook, ranks: tuple[int, ...], samples: int) -> tuple[int, ...]:
    """Samples of each rank that runs the whole network: equal on devices of one kind, else the least largest time."""
    kinds = [book.kind(rank) for rank in ranks]
    if len(set(kinds)) == 1:
        return equal_shares(samples, len(ranks))

    def seconds(member: int, share: int) -> float:
        try:
            table = book.tables.at(kinds[member], share)
        except MissingMeasurementError:
            return math.inf
        return float(table.forward_s[-1] + table.backward_s[-1])

    most = [samples if problem.micro_batch_sizes else book.tables.largest_measured(kind) for kind in kinds]
    by_speed = at_least_one(proportional(samples, [_samples_per_s(book, kind) for kind in kinds]))
    return least_largest(by_speed, most, seconds)


def least_largest(
    shares: tuple[int, ...], most: Sequence[int], seconds: Callable[[int, int], float]
) -> tuple[int, ...]:
    """``shares`` of a micro-batch, changed until the largest time of a member is least.

    A sample goes from a slowest member to the one that would be the fastest with it, while that one stays below.  Where
    no time falls as samples are added, no other shares have a lesser largest time: in these some member has more
    samples than here, and with one more it would stay below.

    Args:
        most: samples of each member.
        seconds: that a member, by its place, takes for so many samples.
    """
    own, known = list(shares), dict[tuple[int, int], float]()

    def at(member: int, share: int) -> float:
        if share > most[member]:
            return math.inf
        if (member, share) not in known:
            known[member, share] = seconds(member, share) if share else 0.0
        return known[member, share]

    while True:
        slowest = max(range(len(own)), key=lambda member: at(member, own[member]))
        others = [member for member in range(len(own)) if member != slowest]
        least = min(others, key=lambda member: at(member, own[member] + 1), default=slowest)
        if own[slowest] < 2 or least == slowest or at(least, own[least] + 1) >= at(slowest, own[slowest]):
            return tuple(own)
        own[slowest] -= 1
        own[least] += 1


FEW_SHARES = 36
"""Up to so many ways to share a micro-batch among the members of a group are all looked at."""


def all_shares(problem: Problem, ranks: tuple[int, ...], samples: int) -> tuple[tuple[int, ...], ...]:
    """Every way to give each rank of a stage samples, if these are few; equal shares alone on devices that are alike.

    Empty where there are more than ``FEW_SHARES``, and where ranks are more than samples.
    """
    devices = problem.profile.cluster.devices
    sorts = {(devices[rank].kind, problem.memory_limit_bytes(rank), devices[rank].on_chip_bytes) for rank in ranks}
    if len(sorts) == 1:
        return (equal_shares(samples, len(ranks)),)
    if not 0 < math.comb(samples - 1, len(ranks) - 1) <= FEW_SHARES:
        return ()
    inner = combinations(range(1, samples), len(ranks) - 1)
    return tuple(tuple(b - a for a, b in pairwise((0, *points, samples))) for points in inner)


def _samples_per_s(book: PriceBook, kind: str) -> float:
    samples = book.tables.largest_measured(kind)
    table = book.tables.at(kind, samples)
    seconds = float(table.forward_s[-1] + table.backward_s[-1])
    return samples / seconds if seconds > 0 else 1.0


def with_options(layouts: LayoutBook, candidate: Candidate, options: Mapping[int, Option]) -> Candidate:
    """``candidate`` with the layouts ``options`` (by layer): of all layers of a stage or of none.

    Where an option leaves open how many ranks share input channels, it is what is cheapest in a full micro-batch.  A
    stage whose layers are all cut alike along samples is one with these shares, as it is priced and written down.
    """
    by_stage: dict[int, dict[int, Option]] = {}
    for index, option in options.items():
        by_stage.setdefault(candidate.stage_of[index], {})[index] = replace(option, recompute=False)
    own: list[Option | None] = list(candidate.options or (None,) * len(candidate.stage_of))
    shares = list(candidate.shares)
    for stage, found in by_stage.items():
        plain = cut_alike([option.cuts for option in found.values()])
        if plain:
            shares[stage] = _shares(next(iter(found.values())), sum(shares[stage]))
        else:
            prices = layouts.prices(candidate.groups[stage], max(candidate.micro_batches))
            found = with_ways(prices, found)
        for index, option in found.items():
            own[index] = None if plain else option
    return replace(candidate, shares=tuple(shares), options=tuple(own) if any(o is not None for o in own) else ())


def _shares(option: Option, samples: int) -> tuple[int, ...]:
    """Samples of each rank; all of them where nothing is cut."""
    return tuple(b - a for a, b in pairwise(option.cuts[0][1])) if option.cuts else (samples,)
