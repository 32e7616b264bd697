"""The best way to divide a transformer's step over a cluster, with a proof.

    space       tensor x sequence x context x pipeline x data on the devices or some of them; any number of blocks on
                each stage; interleaving, of chunks alike; micro-batch; recomputation; ZeRO: all that divide the network
                and the batch (:class:`DegreesSpace`).  Of unlike GPUs each pool alone, and pipelines of 1F1B through
                several, of which each stage has a pool and a tensor degree of its own
    order       divisions by the work of their longest stage, then ways by what they can take at least
                (:mod:`planner.extras.transformers.step`), stages by :mod:`planner.extras.transformers.division`; the
                smallest first, each simulated in turn
    proof       until the least of the next is not below the best step / (1 + gap): nothing behind it is better by more

What does not fit in memory is left out.  With ``gap`` 0 and no limit of time the answer is that of exhaustive
enumeration (tests say so), and the more devices, the shorter the step.  Where a pipeline takes longer than its least,
what its division had dropped for it is met as well, up to ``_MOST_AGAIN`` labels; what is left then stays in the gap.
"""

from __future__ import annotations

import heapq
import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, product
from math import inf
from operator import itemgetter

from planner.extras.transformers.cluster import GpuCluster
from planner.extras.transformers.division import DivisionSearch, seats_of, shortest_s
from planner.extras.transformers.fits import MemoryFit, changes, least, packed, undivided
from planner.extras.transformers.layers import ModuleSet, useful_sets
from planner.extras.transformers.memory import block_bytes
from planner.extras.transformers.pools import Pools
from planner.extras.transformers.shape import Offload, ParallelDegrees, Recompute, Transformer
from planner.extras.transformers.space import DegreesSpace
from planner.extras.transformers.step import StepPrediction, least_s, predict
from planner.ir.errors import InfeasibleError, UsageError
from planner.ir.lazy import once_by

TIE = 0.03
"""Two steps that are closer are a tie: runs of one source are as far from their predictions (benchmarks.published)."""
RIVALS = 8
_MOST_LABELS = 60_000
_MOST_AGAIN = 20_000
"""Of pipelines through several pools in all, about 20 s of a core: the answer is that of the work, not of the hour.
And of a division that is met again with what it dropped."""
_MOST_LOOKS = 8
_WIDTH = 32
"""Contexts of pipelines through several pools that have a first look; labels of each number of stages of it."""


@dataclass(frozen=True, slots=True)
class PricedDegrees:
    """A way and its prediction."""

    ways: ParallelDegrees
    prediction: StepPrediction


@dataclass(frozen=True, slots=True)
class BestDegrees:
    """The best, and what is known of the rest.

    Attributes:
        rivals: the best of other divisions into tensor, pipeline and data ranks that were simulated, by their steps.
        bound_s: no way of the space has a shorter step.
        num_ways: divisions, with all their details, that were looked at; of those ``num_large`` do not fit in memory.
        num_simulated: ways that were simulated.
        usable_bytes: of the device that is fullest.
    """

    best: PricedDegrees
    rivals: tuple[PricedDegrees, ...]
    bound_s: float
    num_ways: int
    num_large: int
    num_simulated: int
    usable_bytes: float

    @property
    def gap(self) -> float:
        """Best / bound - 1; 0 is a proof."""
        return self.best.prediction.step.seconds / self.bound_s - 1

    @property
    def ties(self) -> tuple[PricedDegrees, ...]:
        """Rivals that the model cannot tell from the best."""
        limit = (1 + TIE) * self.best.prediction.step.seconds
        return tuple(rival for rival in self.rivals if rival.prediction.step.seconds <= limit)


def search(
    shape: Transformer,
    cluster: GpuCluster | Pools,
    devices: int,
    global_batch: int,
    space: DegreesSpace | None = None,
    *,
    gap: float = 0.0,
    time_limit_s: float = 60.0,
    rivals: int = RIVALS,
) -> BestDegrees:
    """The way with the shortest step that fits.

    Args:
        devices: as many or fewer; of pools all that there are.
        gap: stop once the best is proved to be so close (0.01 = 1 %).
        time_limit_s: then the best so far is given, with its gap.
        rivals: divisions to show beside it; they are simulated too.

    Raises:
        UsageError: nothing of the space divides network, devices and batch.
        InfeasibleError: nothing fits in memory.
    """
    start_s = time.monotonic()
    solver = _DegreesSearch(shape, cluster, devices, global_batch, space or DegreesSpace(), gap, start_s + time_limit_s)
    if isinstance(cluster, GpuCluster):
        grounds = [(cluster, devices)]
    else:
        grounds = [(pool.cluster, pool.devices) for pool in cluster.pools]
        grounds += [(cluster.whole, devices)] if cluster.whole is not None else []
    for ground, number in grounds:
        solver.divide(ground, number)
    if isinstance(cluster, Pools):
        solver.take_all(start_s + time_limit_s / 2)  # each pool alone: with others it is never worse
        solver.divide_pools(cluster)
    if not solver.num_ways:
        raise solver.undivided()
    return solver.run(rivals)


@dataclass(frozen=True, slots=True)
class _Group:
    """A division whose details are not looked at yet; ``cluster`` is where it is."""

    cluster: GpuCluster
    ways: ParallelDegrees


@dataclass(frozen=True, slots=True)
class _Way:
    """A way of a division; ``is_ready`` once it fits, and is only to be simulated: chunks that are interleaved.

    Attributes:
        dearer: more sets of modules to compute again, each with a longer block than the one before.
    """

    cluster: GpuCluster
    ways: ParallelDegrees
    is_ready: bool = False
    dearer: Sequence[ModuleSet] = ()


_Queued = _Group | _Way | DivisionSearch


@dataclass
class _DegreesSearch:
    shape: Transformer
    cluster: GpuCluster | Pools
    devices: int
    global_batch: int
    space: DegreesSpace
    gap: float
    stop_s: float
    num_ways: int = 0
    num_large: int = 0
    num_labels: int = 0
    least_large: tuple[MemoryFit, GpuCluster] | None = None
    simulated: dict[ParallelDegrees, PricedDegrees] = field(default_factory=dict)
    loose: list[tuple[float, DivisionSearch]] = field(default_factory=list)
    best_s: float = inf
    _heap: list[tuple[float, int, _Queued]] = field(default_factory=list)
    _order: Iterator[int] = field(default_factory=count)

    def divide(self, cluster: GpuCluster, devices: int) -> None:
        """All divisions over alike devices, by the work of their longest stage."""
        for ways in self.space.divisions(self.shape, cluster, devices, self.global_batch):
            choices = product(
                (False, True), self.space.experts(self.shape, ways), self.space.exchanges(self.shape, ways)
            )
            chunked = replace(ways, interleave=max(self.space.interleave))
            bounds_s = (
                self._shortest_s(
                    cluster,
                    replace(
                        chunked, sequence_parallel=on, expert=expert, whole_experts=whole, context_exchange=exchange
                    ),
                )
                for on, (expert, whole), exchange in choices
            )
            bound_s = min(bounds_s, default=inf)
            self.num_ways += bound_s < inf
            self._push(bound_s, _Group(cluster, ways))

    def _shortest_s(self, cluster: GpuCluster, ways: ParallelDegrees) -> float:
        """No division of the blocks is shorter."""
        micro_batches = ways.micro_batches(self.global_batch)
        return shortest_s(self.shape.layers, ways, micro_batches, ways.pipeline, self._block_s(cluster, ways))

    @once_by(lambda _, at, ways: (at.name, *_of_block(ways)))
    def _block_s(self, cluster: GpuCluster, ways: ParallelDegrees) -> float:
        """Both passes of a block, without what ZeRO adds."""
        alone = replace(ways, pipeline=1, data=1, zero=0, interleave=1)
        return min((seat.block_s for seat in seats_of(self.shape, [cluster], alone, [ways.tensor])), default=inf)

    def divide_pools(self, pools: Pools) -> None:
        """Pipelines through several pools; a first look where they are short at a glance."""
        clusters = [pool.cluster for pool in pools.pools]
        of_stages = self.space.degrees_of_stages(self.shape, max(cluster.per_host for cluster in clusters))
        stages = self.space.pipeline[0] if self.space.pipeline else None
        divisions = []
        for ways, degrees in product(self.space.through_pools(self.shape, pools, self.global_batch), of_stages):
            seats = [
                seat
                for seat in seats_of(self.shape, clusters, ways, degrees)
                if seat.cluster.per_host % seat.ways.tensor == 0
                and not (ways.sequence_parallel and self.shape.seq * ways.micro_batch % seat.ways.tensor)
            ]
            if seats and not (ways.sequence_parallel and all(seat.ways.tensor == 1 for seat in seats)):
                division = DivisionSearch(
                    self.shape, pools, ways, self.global_batch, seats, stages, above_s=self.best_s
                )
                divisions.append(division)
        self.num_ways += len(divisions)
        for division in divisions:
            self._push(division.bound_s, division)
        for division in sorted(divisions, key=DivisionSearch.glance_s)[:_MOST_LOOKS]:
            self._look_at(division)

    def _look_at(self, division: DivisionSearch) -> None:
        """Pipelines of short steps, found soon: the best are simulated."""
        division.above_s = self.best_s
        for ways, bound_s in division.dive(_WIDTH):
            if bound_s < self.best_s and not self._is_late():
                self._simulate(ways)
                division.above_s = self.best_s

    def _push(self, bound_s: float, item: _Queued) -> None:
        if bound_s < inf:
            heapq.heappush(self._heap, (bound_s, next(self._order), item))

    def take_all(self, stop_s: float) -> None:
        """Until nothing that is left can be better."""
        while self._heap and self._heap[0][0] * (1 + self.gap) < self.best_s and not self._is_late(stop_s):
            self._take()

    def run(self, rivals: int) -> BestDegrees:
        """Until the best is proved."""
        self.take_all(self.stop_s)
        self._take_smallest()
        left_s = self._heap[0][0] if self._heap else inf
        loose_s = min((self._tightened(bound_s, division) for bound_s, division in self.loose), default=inf)
        if not self.simulated:
            raise self._infeasible()
        bound_s = min(left_s, loose_s, self.best_s)
        best = min(self.simulated.values(), key=_order)
        num_simulated = len(self.simulated)
        shown = self._rivals(rivals)
        memory = best.prediction.memory
        usable = self.cluster.alone(best.ways).at(best.ways, memory.stage).usable_bytes
        return BestDegrees(best, shown, bound_s, self.num_ways, self.num_large, num_simulated, usable)

    def _is_late(self, stop_s: float = inf) -> bool:
        is_over = self.num_labels > _MOST_LABELS or time.monotonic() > min(stop_s, self.stop_s)
        return is_over and (bool(self.simulated) or isinstance(self.cluster, GpuCluster))

    def _take_smallest(self) -> None:
        """Where the time is over before a way that fits was met: the one that holds least is the answer, if it fits."""
        if self.simulated or not self._heap or not isinstance(self.cluster, GpuCluster):
            return
        fit = least(self.shape, self.cluster, self.devices, self.global_batch, self.space)
        if fit is not None and fit.fits:
            self._simulate(fit.ways)
        elif fit is not None:
            self.least_large = fit, self.cluster

    def _take(self) -> PricedDegrees | None:
        """The item with the least bound: looked into, or simulated."""
        item = heapq.heappop(self._heap)[2]
        if isinstance(item, DivisionSearch):
            return self._advance(item)
        if isinstance(item, _Group):
            details = self.space.details(self.shape, item.cluster, item.ways, self.global_batch)
            self.num_ways += len(details) - 1
            for ways in details:
                if ways.recompute is Recompute.SELECTIVE:
                    self._push_sets(item.cluster, ways, self._sets(item.cluster, ways))
                else:
                    self._push(self._shortest_s(item.cluster, ways), _Way(item.cluster, ways))
        elif item.is_ready:
            return self._simulate(item.ways)
        else:
            self._open(item.cluster, item.ways, item.dearer)
        return None

    def _push_sets(self, cluster: GpuCluster, ways: ParallelDegrees, sets: Sequence[ModuleSet]) -> None:
        """A way by the first of some sets of modules; the others wait for their turn behind it."""
        if sets:
            first = replace(ways, recompute_modules=sets[0].modules)
            micro_batches = ways.micro_batches(self.global_batch)
            bound_s = shortest_s(self.shape.layers, ways, micro_batches, ways.pipeline, sets[0].block_s)
            self._push(bound_s, _Way(cluster, first, dearer=sets[1:]))

    @once_by(lambda _, at, ways: (at.name, *_of_block(ways)))
    def _sets(self, cluster: GpuCluster, ways: ParallelDegrees) -> Sequence[ModuleSet]:
        """Sets of modules by the time of a block, but for those that take longer than others and free no more."""
        return useful_sets(self.shape, cluster, ways, self.space.module_sets(self.shape))

    def _fitting_sets(self, cluster: GpuCluster, ways: ParallelDegrees, sets: Sequence[ModuleSet]) -> list[ModuleSet]:
        """Those that can fit.

        A stage holds less, the more of a block is free: at least one block of one micro-batch is kept, and what is
        computed again is held of one.  Dense blocks beside the others are left aside, whose modules are others.
        """
        alike = replace(self.shape, first_dense=0)
        of_sets = {each.modules: replace(ways, recompute_modules=each.modules) for each in sets}

        def kept_bytes(one: ModuleSet) -> float:
            return block_bytes(alike, of_sets[one.modules], cluster.width)

        def fits(one: ModuleSet) -> bool:
            return packed(alike, cluster, of_sets[one.modules], self.global_batch).fits

        by_kept = sorted(sets, key=kept_bytes, reverse=True)
        too_large = by_kept
        if fits(by_kept[-1]):
            too_large = by_kept[: bisect_left(by_kept, True, key=fits)]
        self.num_large += len(too_large)
        return [one for one in sets if one not in too_large]

    def _open(self, cluster: GpuCluster, ways: ParallelDegrees, dearer: Sequence[ModuleSet] = ()) -> None:
        """A way whose turn it is: left out, if it is too large, or bounded stage by stage."""
        fit = packed(self.shape, cluster, ways, self.global_batch)
        if dearer:
            self._push_sets(cluster, ways, dearer if fit.fits else self._fitting_sets(cluster, ways, dearer))
        if not fit.fits:
            self.num_large += 1
            if self.least_large is None or fit.memory.total < self.least_large[0].memory.total:
                self.least_large = fit, cluster
            return
        if isinstance(self.cluster, Pools) and cluster is not self.cluster.whole:
            ways = replace(ways, pools=(cluster.name,) * ways.pipeline)
        if ways.interleave > 1:
            bound_s = least_s(self.shape, cluster, ways, self.global_batch)
            self._push(bound_s, _Way(cluster, ways, is_ready=True))
        else:
            seats = seats_of(self.shape, [cluster], ways, [ways.tensor])
            division = DivisionSearch(self.shape, cluster, ways, self.global_batch, seats, ways.pipeline)
            self._push(division.bound_s, division)

    def _advance(self, division: DivisionSearch) -> PricedDegrees | None:
        if isinstance(division.cluster, Pools):
            division.above_s = self.best_s
            self.num_labels += 1
        made = division.advance()
        self._push(division.bound_s, division)
        if made is None:
            return None
        ways, bound_s = made
        choice = self._simulate(ways)
        if choice.prediction.step.seconds > bound_s * (1 + 1e-9) and not division.keep_all:
            self.loose.append((bound_s, division))
        return choice

    def _simulate(self, ways: ParallelDegrees) -> PricedDegrees:
        if ways not in self.simulated:
            self.simulated[ways] = PricedDegrees(ways, predict(self.shape, self.cluster, ways, self.global_batch))
            self.best_s = min(self.best_s, self.simulated[ways].prediction.step.seconds)
        return self.simulated[ways]

    def _tightened(self, bound_s: float, division: DivisionSearch) -> float:
        """What a division can still take at least, with all that it dropped for a pipeline that took longer."""
        if bound_s * (1 + self.gap) >= self.best_s:
            return bound_s
        complete = replace(division, keep_all=True, above_s=self.best_s, labels_met=0, _heap=[], _known={})
        while complete.bound_s * (1 + self.gap) < self.best_s:
            if complete.labels_met > _MOST_AGAIN or self._is_late():
                return max(bound_s, complete.bound_s)
            made = complete.advance()
            if made is not None:
                self._simulate(made[0])
        return complete.bound_s

    def _rivals(self, number: int) -> tuple[PricedDegrees, ...]:
        """Of each further division the way that can be the shortest, simulated."""
        shown: dict[tuple[object, ...], PricedDegrees] = {}
        for choice in sorted(self.simulated.values(), key=_order):
            shown.setdefault(_division(choice.ways), choice)
        while self._heap and len(shown) <= number and not self._is_late():
            item = self._heap[0][2]
            is_open = isinstance(item, DivisionSearch) and isinstance(item.cluster, Pools)
            if not is_open and _division(item.ways) in shown:
                heapq.heappop(self._heap)
            elif (made := self._take()) is not None:
                shown.setdefault(_division(made.ways), made)
        return tuple(sorted(shown.values(), key=_order)[1 : number + 1])

    def undivided(self) -> UsageError:
        """What to say where nothing of the space divides network, devices and batch."""
        grounds = [pool.cluster for pool in self.cluster.pools] if isinstance(self.cluster, Pools) else [self.cluster]
        per_host = [ground.per_host for ground in grounds]
        return undivided(self.shape, self.devices, self.global_batch, per_host, self.space)

    def _infeasible(self) -> Exception:
        gib = 2**30
        if self.least_large is None and self.space.base.offload is Offload.NONE and not any(self.space.shards):
            return self.undivided()
        if self.least_large is None:
            reasons = [f"no copies come in groups of {number} (--shards)" for number in self.space.shards if number]
            offload = self.space.base.offload
            if offload is Offload.PARAMETERS and (3 not in self.space.zero or min(self.space.pipeline, default=1) > 1):
                reasons.append("weights in the host's memory are of ZeRO-3 and one stage")
            elif offload is not Offload.NONE:
                reasons.append(f"the hosts' memory has no room for what --offload {offload.value} puts there")
            return InfeasibleError(f"{self.shape.name} does not fit on {self.cluster.name}", reasons, self._remedies())
        fit, cluster = self.least_large
        memory = fit.memory
        state = "weights, gradients and optimiser"
        parts = (state, memory.state), ("activations", memory.activations), ("one pass", memory.working)
        largest, held = max(parts, key=itemgetter(1))
        return InfeasibleError(
            f"{self.shape.name} does not fit on {fit.ways.devices} {cluster.device}",
            [
                f"every way needs at least {memory.total / gib:.1f} GiB, usable {fit.usable_bytes / gib:.1f} GiB",
                f"that is: {fit.ways}; largest part: {largest}, {held / gib:.1f} GiB",
            ],
            self._remedies(),
        )

    def _remedies(self) -> list[str]:
        """Other questions whose answer was tried to fit."""
        if isinstance(self.cluster, Pools):
            return ["more hosts in the cluster file, or devices with more memory"]
        fitting = changes(self.shape, self.cluster, self.devices, self.global_batch, self.space)
        texts = [f"{each.options(self.shape, self.devices)} ({each.fit})" for each in fitting]
        return texts or [f"devices with more memory than {self.cluster.usable_bytes / 2**30:.1f} GiB that may be used"]


def _of_block(ways: ParallelDegrees) -> tuple[object, ...]:
    """What both passes of a block depend on."""
    experts = ways.expert, ways.whole_experts
    context = ways.context, ways.context_exchange
    recompute = ways.recompute, ways.recompute_modules
    return ways.tensor, ways.micro_batch, ways.sequence_parallel, *recompute, *experts, *context


def _order(choice: PricedDegrees) -> tuple[float, int, int, int, str]:
    """By the step; of equal ones the simpler."""
    ways = choice.ways
    return choice.prediction.step.seconds, ways.interleave, ways.zero, int(ways.sequence_parallel), str(ways)


def _division(ways: ParallelDegrees) -> tuple[object, ...]:
    return ways.degrees, ways.pools, ways.data, ways.context
