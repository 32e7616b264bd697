"""What a solver chooses, and the way from it to a whole plan.

A ``Candidate`` says where to cut, on which ranks, which micro-batches and schedule; some of its stages may give each
layer a layout of its own.  Ranks come in pools of like devices, and each has its share of the samples.  What may be
chosen of all this is in :mod:`planner.solvers.candidates.feasibility`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, combinations, groupby, pairwise
from typing import Any

from planner.costs.candidate import Candidate, cut_alike
from planner.costs.cost_model import CostModel
from planner.costs.pricing import program_of
from planner.costs.shards.device_mesh import at_least_one, proportional
from planner.costs.shards.sharding_spec import ShardingSpec
from planner.costs.stages.placement import LayoutCosts
from planner.costs.stages.stage_cost import with_ways
from planner.ir.cluster import RankIds
from planner.ir.codec import fingerprint
from planner.ir.errors import MissingMeasurementError
from planner.ir.layout import Shares, equal_shares
from planner.ir.plan import Alternative, Decision, Plan, PlanInputs, Prediction, Search, Stage
from planner.ir.problem import Problem
from planner.layers.recomputed import cores_among
from planner.solvers.candidates.constraints import Constraints


@dataclass(frozen=True, slots=True)
class DevicePool:
    """Devices that nothing tells apart: one kind and memory size, in the same groups.

    Attributes:
        groups: by level, innermost first (``Cluster.groups_of``).
        told_apart: what side constraints say of them, see ``Constraints.device_class``.
        own_links: their host, if links are stated for it alone.
        room_bytes: of all memories of a device together, as bounds need it.
        bytes_beside: of that, the memories beside the main one.
    """

    kind: str
    groups: tuple[str, ...]
    room_bytes: int
    ranks: RankIds
    told_apart: tuple[bool, ...] = ()
    own_links: str = ""
    bytes_beside: int = 0

    @property
    def sort(self) -> tuple[str, int, int]:
        """Equal for pools whose devices share samples equally."""
        return self.kind, self.room_bytes, self.bytes_beside

    @property
    def shape(self) -> tuple[object, ...]:
        """Equal for pools of like devices."""
        memory = self.room_bytes, self.bytes_beside
        return self.kind, memory, len(self.ranks), self.told_apart, self.own_links


def ends_of_hosts(problem: Problem) -> list[int]:
    """How many of the usable ranks there are up to the end of each host but the last."""
    hosts = [problem.cluster.devices[rank].host for rank in problem.ranks]
    return [number for number in range(1, len(hosts)) if hosts[number] != hosts[number - 1]]


def pools(problem: Problem, constraints: Constraints | None = None) -> tuple[DevicePool, ...]:
    """The usable ranks as pools, in order of their first rank; ranks that ``constraints`` tell apart are so."""
    cluster = problem.cluster
    alike: dict[tuple[str, tuple[str, ...], int, int, tuple[bool, ...]], list[int]] = {}
    for rank in problem.ranks:
        device = cluster.devices[rank]
        told_apart = constraints.device_class(rank) if constraints is not None else ()
        limit = problem.room_bytes(rank)
        beside = sum(device.memories[1:])
        alike.setdefault((device.kind, cluster.groups_of(rank), limit, beside, told_apart), []).append(rank)
    linked = {end for pair in cluster.pairs for end in (pair.src_host, pair.dst_host)}
    hosts = [cluster.devices[ranks[0]].host for ranks in alike.values()]
    return tuple(
        DevicePool(kind, groups, limit, tuple(ranks), told_apart, host if host in linked else "", beside)
        for host, ((kind, groups, limit, beside, told_apart), ranks) in zip(hosts, alike.items(), strict=True)
    )


def like_groups(device_pools: Sequence[DevicePool]) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Groups that may change places with all that is in them, as numbers of pools that correspond; innermost first.

    Two hosts of two islands, pools 0 and 1, and 2 and 3:  ((0,), (1,)) and ((2,), (3,)), then ((0, 1), (2, 3)).
    """
    alike: list[tuple[tuple[int, ...], ...]] = []

    def of(members: Sequence[int], level: int) -> tuple[Any, tuple[int, ...]]:
        """The shape of a group of that level, and its pools in an order that is the same in groups of its shape."""
        parts: list[tuple[Any, tuple[int, ...]]]
        if level == 0:
            parts = [(device_pools[number].shape, (number,)) for number in members]
        else:
            inside: dict[str, list[int]] = {}
            for number in members:
                inside.setdefault(device_pools[number].groups[level - 1], []).append(number)
            parts = [of(numbers, level - 1) for numbers in inside.values()]
        parts.sort(key=lambda part: part[0])
        for _, same in groupby(parts, key=lambda part: part[0]):
            numbers = tuple(part[1] for part in same)
            if len(numbers) > 1:
                alike.append(numbers)
        return tuple(shape for shape, _ in parts), tuple(chain.from_iterable(numbers for _, numbers in parts))

    of(range(len(device_pools)), len(device_pools[0].groups))
    return tuple(alike)


def micro_batches(problem: Problem, size: int) -> tuple[int, ...]:
    """The global batch in micro-batches of ``size``."""
    return split_batch(problem.global_batch, size)


def split_batch(global_batch: int, size: int) -> tuple[int, ...]:
    """Micro-batches of ``size`` samples, the last one of what remains."""
    full, rest = divmod(global_batch, size)
    return (size,) * full + ((rest,) if rest else ())


def divided(problem: Problem, candidate: Candidate) -> Candidate:
    """The candidate as it is priced: each stage's ranks divide among them what the problem says."""
    zero = tuple(problem.zero_over(len(group)) for group in candidate.groups)
    return replace(candidate, zero=zero) if any(zero) else candidate


def stages_of(problem: Problem, candidate: Candidate) -> tuple[Stage, ...]:
    """The candidate's stages as a plan writes them down."""
    graph = problem.graph
    devices = problem.cluster.devices
    by_stage: list[list[str]] = [[] for _ in candidate.groups]
    for layer, stage in zip(graph.layers, candidate.stage_of, strict=True):
        by_stage[stage].append(layer.name)
    levels = [
        0 if candidate.has_own_options(stage) else problem.zero_over(len(group))
        for stage, group in enumerate(candidate.groups)
    ]
    return tuple(
        Stage(
            group,
            tuple(devices[rank].name for rank in group),
            candidate.recomputes(stage),
            levels[stage] > 0,
            candidate.blocks_of(stage),
            max(1, levels[stage]),
            cores_among(graph, by_stage[stage]) if candidate.recomputes_cores(stage) else (),
        )
        for stage, group in enumerate(candidate.groups)
    )


def decision_of(problem: Problem, candidate: Candidate) -> Decision:
    """The candidate as a plan writes it down."""
    graph = problem.graph
    rows = candidate.rows or program_of(graph, candidate).rows
    different = {id(row): row for row in rows}  # like ranks have one object
    texts = {key: tuple(map(str, row)) for key, row in different.items()}
    return Decision(
        schedule=candidate.schedule,
        micro_batches=candidate.micro_batches,
        stages=stages_of(problem, candidate),
        layers={layer.name: candidate.placement_of(index) for index, layer in enumerate(graph.layers)},
        program=tuple(texts[id(row)] for row in rows),
        token_slices=candidate.axis_parts,
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
"""Into how many parts, or somewhat fewer, a stage is divided whose ranks share parts of samples."""


def part_shares(problem: Problem, cost_model: CostModel, ranks: RankIds, size: int) -> tuple[int, ...]:
    """Parts of all samples of each rank of a stage, whatever their number: equal, else in proportion to speed.

    Their sum is not ``size``, samples of a full micro-batch, which would make them samples.
    """
    if len({cost_model.kind(rank) for rank in ranks}) == 1:
        each = _PARTS // len(ranks)
        return (each + (each * len(ranks) == size),) * len(ranks)
    speeds = [_samples_per_s(cost_model, cost_model.kind(rank)) for rank in ranks]
    return proportional(_PARTS - (size == _PARTS), speeds)


def group_shares(problem: Problem, cost_model: CostModel, ranks: RankIds, samples: int) -> tuple[int, ...]:
    """Samples of each rank that runs the whole network: equal on devices of one kind, else the least largest time."""
    kinds = [cost_model.kind(rank) for rank in ranks]
    if len(set(kinds)) == 1:
        return equal_shares(samples, len(ranks))

    def seconds(member: int, share: int) -> float:
        try:
            table = cost_model.tables.at(kinds[member], share)
        except MissingMeasurementError:
            return math.inf
        return float(table.forward_s[-1] + table.backward_s[-1])

    most = [samples if problem.micro_batch_sizes else cost_model.tables.largest_measured(kind) for kind in kinds]
    by_speed = at_least_one(proportional(samples, [_samples_per_s(cost_model, kind) for kind in kinds]))
    return least_largest(by_speed, most, seconds)


def least_largest(shares: Shares, most: Sequence[int], seconds: Callable[[int, int], float]) -> tuple[int, ...]:
    """``shares`` of a micro-batch, changed until the largest time of a member is least.

    A sample goes from a slowest member to the one that would be the fastest with it, while that one stays below.  Where
    no time falls as samples are added, no other shares have a lesser largest time: in these some member has more
    samples than here, and with one more it would stay below.

    Args:
        most: samples of each member.
        seconds: that a member, by its place, takes for a number of samples.
    """
    own = list(shares)
    seconds_of = dict[tuple[int, int], float]()

    def at(member: int, share: int) -> float:
        if share > most[member]:
            return math.inf
        if (member, share) not in seconds_of:
            seconds_of[member, share] = seconds(member, share) if share else 0.0
        return seconds_of[member, share]

    while True:
        slowest = max(range(len(own)), key=lambda member: at(member, own[member]))
        others = [member for member in range(len(own)) if member != slowest]
        least = min(others, key=lambda member: at(member, own[member] + 1), default=slowest)
        if own[slowest] < 2 or least == slowest or at(least, own[least] + 1) >= at(slowest, own[slowest]):
            return tuple(own)
        own[slowest] -= 1
        own[least] += 1


FEW_SHARES = 36
"""Ways to share a micro-batch among the members of a group up to which all are looked at."""


def all_shares(problem: Problem, ranks: RankIds, samples: int) -> tuple[tuple[int, ...], ...]:
    """Every way to give each rank of a stage samples, if these are few; equal shares alone on devices that are alike.

    Empty where there are more than ``FEW_SHARES``, and where ranks are more than samples.
    """
    devices = problem.cluster.devices
    sorts = {(devices[rank].kind, problem.memory_limit_bytes(rank), devices[rank].memories) for rank in ranks}
    if len(sorts) == 1:
        return (equal_shares(samples, len(ranks)),)
    if not 0 < math.comb(samples - 1, len(ranks) - 1) <= FEW_SHARES:
        return ()
    inner = combinations(range(1, samples), len(ranks) - 1)
    return tuple(tuple(b - a for a, b in pairwise((0, *points, samples))) for points in inner)


def _samples_per_s(cost_model: CostModel, kind: str) -> float:
    samples = cost_model.tables.largest_measured(kind)
    table = cost_model.tables.at(kind, samples)
    seconds = float(table.forward_s[-1] + table.backward_s[-1])
    return samples / seconds if seconds > 0 else 1.0


def with_options(layouts: LayoutCosts, candidate: Candidate, options: Mapping[int, ShardingSpec]) -> Candidate:
    """``candidate`` with the layouts ``options`` (by layer): of all layers of a stage or of none.

    Where an option leaves open how many ranks share input channels, it is what is cheapest in a full micro-batch.  A
    stage whose layers are all cut alike along samples is one with these shares, as it is priced and written down.
    """
    by_stage: dict[int, dict[int, ShardingSpec]] = {}
    for index, option in options.items():
        by_stage.setdefault(candidate.stage_of[index], {})[index] = replace(option, recompute=False)
    own: list[ShardingSpec | None] = list(candidate.options or (None,) * len(candidate.stage_of))
    shares = list(candidate.shares)
    for stage, of_stage in by_stage.items():
        plain = cut_alike([option.cuts for option in of_stage.values()])
        if plain:
            shares[stage] = _shares(next(iter(of_stage.values())), sum(shares[stage]))
        else:
            prices = layouts.prices(candidate.groups[stage], max(candidate.micro_batches))
            of_stage = with_ways(prices, of_stage)
        for index, option in of_stage.items():
            own[index] = None if plain else option
    return replace(candidate, shares=tuple(shares), options=tuple(own) if any(o is not None for o in own) else ())


def _shares(option: ShardingSpec, samples: int) -> tuple[int, ...]:
    """Samples of each rank; all of them where nothing is cut."""
    return tuple(b - a for a, b in pairwise(option.cuts[0][1])) if option.cuts else (samples,)
