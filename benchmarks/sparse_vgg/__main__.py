"""A sparse VGG-16 on two unequal workers: our plan and SparsePipe's, predicted beside measured.

    python -m benchmarks.sparse_vgg [--quick] [--json]

Two processes on this machine, each with a core of its own, over gloo, are *virtual devices* of a third and a sixth of
a core's speed (:mod:`benchmarks.devices.virtual_device`): one is twice as fast as the other, and neither needs its core
all the time, so that what else runs here matters little.  Cores that slept would be woken on one physical core, maybe,
where two ranks that compute at once slow each other: they are kept awake (:func:`benchmarks.devices.ranks.awake`, which
takes root), as in :mod:`benchmarks.accuracy`.  The network is profiled once, on clouds of 3,224 voxels, and
the profile's seconds are made three and six times as long.  All plans are made and their predictions written down
first; then every plan trains on the same batches, plan after plan, several times over.  Clouds have from 800 to 6,000
voxels, batches 3,224 a sample on the mean.  The network is SparsePipe's, half as
wide, with 512 numbers between the linear layers: a step takes a second or two.

    ours                 the planner's choice
    SparsePipe           its stages by its own formula, published restrictions and all: with two devices that leaves one
                         stage on both, each with half of the samples, whatever their speeds and the samples' sizes
    ... in any order     the best stages by its formula without those restrictions
    one device           the faster one alone
    one stage, shared    one stage on both, sites cut by predicted work and speed

What SparsePipe leaves open is chosen in its favour: the size of micro-batches by our simulator.  Its kernel maps are
made when features have arrived, and not ahead, by each rank of its own samples alone.  It is executed by the same
runtime, so normalisation is over the whole micro-batch, which its own training leaves to each rank.

Steps in which a process waited for its core more than 2 % of the time are left out, as long as enough are left.
"""

from __future__ import annotations

import os
import random
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

import torch
from torch import Tensor

import planner
from benchmarks.devices.ranks import (
    WARM_UP,
    CapturedNetwork,
    RankStep,
    Step,
    awake,
    hide_gpus,
    on_ranks,
    sgd,
    timed_steps,
)
from benchmarks.devices.virtual_device import HeldTransport, VirtualDevice, hold, with_devices
from benchmarks.report import Row, at_least, error_within, run
from cuda_ops.sparse.geometry import KernelMap, MapSpec, SiteRoute
from cuda_ops.sparse.local import LocalMap, RowHalo
from cuda_ops.sparse.preparation import Clouds, padded
from planner.costs.candidate import Candidate
from planner.costs.cost_model import CostModel
from planner.costs.predict import Forecast, forecast
from planner.costs.pricing import Pricing
from planner.extras.baselines import sparsepipe
from planner.extras.baselines.common.answer import Trial, bandwidth_bytes_per_s, candidates, names_in, stages_in
from planner.extras.baselines.common.problem import block_ends, blocks_at, network
from planner.ir.plan import Decision
from planner.ir.problem import Problem
from planner.ir.profile import ModelSource, Profile
from planner.sites.work import SiteLevel
from planner.solvers.candidates.candidate import decision_of
from planner.solvers.candidates.choose import best_of
from planner.solvers.candidates.evaluate import Evaluator
from planner.solvers.candidates.feasibility import micro_batch_sizes
from profiler import profile
from profiler.models.sparse_blocks import shapes
from runtime.engine import Engine
from runtime.optim.ties import groups_of
from runtime.pipeline.microbatches import Batch as RawBatch
from runtime.rank import RankContext
from runtime.sparse.ahead import PreparationClock
from runtime.sparse.batch import ArrangedClouds, PreparedBatch
from runtime.sparse.preparing import Preparing
from runtime.sparse.share import SiteShare
from runtime.transport import Transport

FACTORS = (3.0, 6.0)
"""Seconds of each rank's device for one of a core's."""
NUM_CLASSES = 40
MOST_DELAY = 0.02
FEWEST = 3
GOAL_PERCENT = 10.0


@dataclass(frozen=True, slots=True)
class Setting:
    """How large it is.

    Attributes:
        voxels: mean of a sample; least and most of one.
        rounds: how often every plan is run, of ``steps`` steps each.
    """

    width: int
    hidden: int
    samples: int
    voxels: tuple[int, int, int]
    rounds: int
    steps: int

    @property
    def source(self) -> ModelSource:
        """The network."""
        arguments = {"width": str(self.width), "hidden": str(self.hidden), "num_classes": str(NUM_CLASSES)}
        return ModelSource("profiler.models.sparse_vgg:sparse_vgg16", arguments, (self.samples, self.voxels[0], 1))


FULL = Setting(32, 512, 16, (3224, 800, 6000), 3, 4)
QUICK = Setting(4, 16, 8, (400, 100, 750), 1, 3)


def measure(quick: bool) -> list[Row]:
    """Profile, plan, then run; the cores are kept awake throughout."""
    setting = QUICK if quick else FULL
    load = os.getloadavg()[0]
    with awake() as are_awake:
        found = with_devices(profile(setting.source, num_workers=2, quick=True), FACTORS)
        planned = cases(Problem(found, setting.samples, confidence=0.0))
        steps = _run(setting, planned)
    return [
        Row("load of the machine before and after, larger of both", max(load, os.getloadavg()[0]), "processes"),
        Row("cores kept awake", float(are_awake), "1: yes"),
        *rows(planned, {name: undisturbed(each) for name, each in steps.items()}),
    ]


def _run(setting: Setting, planned: Sequence[Case]) -> dict[str, list[Step]]:
    """Steps by plan, all plans by turns."""
    network = Network(setting.source, FACTORS)
    mean, least, most = setting.voxels
    data = batches(setting.steps, setting.samples, NUM_CLASSES, least, most, mean)
    steps: dict[str, list[Step]] = {case.name: [] for case in planned}
    for _ in range(setting.rounds):
        for case in planned:
            steps[case.name] += network.run(case, data)
    return steps


def undisturbed(steps: Sequence[Step]) -> list[Step]:
    """Those in which no process waited for its core; if they are too few, the third that waited least."""
    quiet = [step for step in steps if step.delay <= MOST_DELAY]
    if len(quiet) >= FEWEST:
        return quiet
    return sorted(steps, key=lambda step: step.delay)[: max(FEWEST, len(steps) // 3)]


def rows(planned: Sequence[Case], steps: Mapping[str, Sequence[Step]]) -> Iterator[Row]:
    """Of every plan, then what is compared."""
    measured_s = {name: statistics.median(step.seconds for step in each) for name, each in steps.items()}
    predicted_s = {case.name: case.predicted_s for case in planned}
    for case in planned:
        seconds = measured_s[case.name]
        yield Row(f"{case.name}: predicted step", 1e3 * case.predicted_s, "ms")
        yield Row(f"{case.name}: measured step", 1e3 * seconds, "ms")
        yield error_within(f"{case.name}: error", seconds / case.predicted_s, GOAL_PERCENT)
        yield Row(f"{case.name}: balance", statistics.median(s.balance for s in steps[case.name]), "max/mean")
        yield Row(f"{case.name}: steps counted", len(steps[case.name]), "steps")
        yield Row(f"{case.name}: longest wait for a core", 100 * max(s.delay for s in steps[case.name]), "%")
    for name in (SPARSEPIPE, UNRESTRICTED, ONE, SHARED):
        yield at_least(f"{name} / {OURS}, measured", measured_s[name] / measured_s[OURS], "ratio", 1.0)
        yield Row(f"{name} / {OURS}, predicted", predicted_s[name] / predicted_s[OURS], "ratio")


Batch = tuple[tuple[Tensor, ...], tuple[Tensor, ...]]
"""(coordinates, features, counts), (targets): samples first, padded to the largest cloud of all batches."""

_NEAR = 0.01


def sizes(samples: int, least: int, most: int, mean: int, seed: int) -> list[int]:
    """Voxels of each sample of a batch: uniform from ``least`` to ``most``, drawn again until their mean is ``mean``.

    (Within a hundredth: what is predicted is a step on clouds of ``mean`` voxels.)
    """
    draw = random.Random(seed)
    while True:
        found = [draw.randint(least, most) for _ in range(samples)]
        if abs(sum(found) / samples / mean - 1) <= _NEAR:
            return found


def batch(counts: list[int], num_classes: int, points: int, seed: int) -> Batch:
    """Shapes of such sizes, with one feature a voxel and a class each."""
    clouds = [shapes("clouds", (1, count, 1), seed + 101 * number) for number, count in enumerate(counts)]
    raw = padded([cloud.coords[:, 1:] for cloud in clouds], [cloud.feats for cloud in clouds], points)
    generator = torch.Generator().manual_seed(seed)
    return raw, (torch.randint(num_classes, (len(counts),), generator=generator),)


def batches(number: int, samples: int, num_classes: int, least: int, most: int, mean: int) -> list[Batch]:
    """``number`` batches of ``samples`` samples."""
    return [batch(sizes(samples, least, most, mean, seed), num_classes, most, seed) for seed in range(number)]


OURS = "ours"
SPARSEPIPE = "SparsePipe"
UNRESTRICTED = "SparsePipe, devices in any order"
ONE = "one device"
SHARED = "one stage, sites shared by work"


@dataclass(frozen=True, slots=True)
class Case:
    """A plan with its name.

    Attributes:
        forecast: what the simulator says of it.
        counts_samples: a stage's ranks take equal numbers of whole samples, whatever their sizes.
    """

    name: str
    decision: Decision
    forecast: Forecast
    counts_samples: bool = False

    @property
    def predicted_s(self) -> float:
        """Of a step."""
        return self.forecast.prediction.step_s


def cases(problem: Problem) -> list[Case]:
    """All plans of the problem."""
    found = [
        _case(problem, name, planner.plan(problem, by).decision, by == "sparsepipe")
        for name, by in (
            (OURS, "best-first"),
            (SPARSEPIPE, "sparsepipe"),
            (ONE, "one-device"),
            (SHARED, "data-parallel"),
        )
    ]
    evaluator = Evaluator(problem, CostModel(problem.profile))
    best = best_of(evaluator, unrestricted(problem, evaluator.cost_model))
    found.insert(2, _case(problem, UNRESTRICTED, decision_of(problem, best.candidate), True))
    return found


def unrestricted(problem: Problem, cost_model: CostModel) -> Iterator[Candidate]:
    """The best plans by SparsePipe's formula where devices stand in any order and stages have any number of them.

    (Published, a later stage has fewer devices than stand before it: with two devices that leaves one stage.)
    """
    ranks = {cost_model.kind(rank): rank for rank in problem.ranks}
    bandwidth = bandwidth_bytes_per_s(problem, problem.ranks)
    trial = Trial(problem.time_limit_s)
    for size in micro_batch_sizes(problem, cost_model):
        networks = {kind: network(problem, cost_model, kind, size, prepares=True) for kind in ranks}
        first = next(iter(networks.values()))
        ends = block_ends(first, len(ranks))
        if ends is not None:
            networks = {kind: blocks_at(fine, ends) for kind, fine in networks.items()}
            first = next(iter(networks.values()))
        types = [sparsepipe.DeviceType(kind, found.graph, 1) for kind, found in networks.items()]
        stages = []
        for stage in stages_in(sparsepipe.best_pipeline(types, bandwidth)):
            counts = stage["devices"]
            taken = [ranks[kind] for kind, count in counts.items() if count] if isinstance(counts, dict) else []
            stages.append((first.layers(names_in(stage)), tuple(sorted(taken))))
        yield from (
            replace(each, prepares_ahead=False) for each in candidates(problem, cost_model, stages, size, trial)
        )


def _case(problem: Problem, name: str, decision: Decision, counts_samples: bool) -> Case:
    idle = len(problem.profile.cluster.devices) - decision.num_ranks
    # Every process has a row.  A virtual device is the rank's own thread: nobody prepares the next step beside it.
    decision = replace(decision, program=decision.program + ((),) * idle, prepares_next_step=False)
    profile = problem.profile
    if counts_samples and len(decision.stages) == 1:
        profile = counted_out(profile, len(decision.stages[0].ranks))
    seen = forecast(Pricing.of(profile), decision, problem.memory_margin, problem.memory_bytes)
    return Case(name, decision, seen, counts_samples)


def counted_out(profile: Profile, num_ranks: int) -> Profile:
    """As ``profile`` for ranks of a stage that prepare as many samples each, and those alone."""
    made = {
        kind: tuple(replace(cost, seconds=cost.seconds / num_ranks, shared_s=0.0) for cost in costs)
        for kind, costs in profile.preparations.items()
    }
    return replace(profile, preparations=made)


_COUNTS = "counts"


class Network(CapturedNetwork):
    """A network that is run on devices of several speeds.

    Args:
        factors: of each rank's device.
    """

    def __init__(self, source: ModelSource, factors: Sequence[float]) -> None:
        super().__init__(source)
        self._factors = tuple(factors)

    def run(self, case: Case, batches: Sequence[Batch], warm_up: int = WARM_UP) -> list[Step]:
        """A training step on each of ``batches``, after some to warm up."""
        groups = groups_of(case.decision, self.captured.graph)

        def work(transport: Transport) -> list[RankStep]:
            return self._run(case, batches, warm_up, transport)

        found = on_ranks(len(self._factors), work, groups)
        return [Step(ranks) for ranks in zip(*found, strict=True)]

    def _run(self, case: Case, batches: Sequence[Batch], warm_up: int, transport: Transport) -> list[RankStep]:
        device = VirtualDevice(self._factors[transport.rank])
        held = HeldTransport(transport, device)
        told = {"model": self.captured, "module": self.model.module, "transport": held}
        engine = Engine(RankContext(case.decision, sgd, **told))  # type: ignore[arg-type]
        if case.counts_samples:
            count_samples(engine, case.decision)
        hold(engine, device)
        warm = [tuple(batches[0])] * warm_up
        return timed_steps(engine, device, transport, [*warm, *map(tuple, batches)])[warm_up:]


class CountedClouds(ArrangedClouds):
    """One rank's samples of a stage on all ranks: all that there is in ``clouds``, whose rows stay as they are sorted.

    Args:
        clouds: of the whole micro-batch, where those of other ranks have no sites.
    """

    def __init__(self, clouds: Clouds, position: int) -> None:
        self.clouds = clouds
        self._position = position
        self._levels = {route: SiteLevel(*clouds.level(route)) for route in clouds.preparation.size_of}
        self._orders: dict[SiteRoute, tuple[Tensor, Tensor, Tensor]] = {}
        self._maps: dict[MapSpec, KernelMap] = {}

    def places(self, speeds: Sequence[float]) -> list[int]:
        """The rank's own interval is everything, of one block; others are empty."""
        return [0] * (self._position + 1) + [1] * (len(speeds) - self._position)

    def _order(self, route: SiteRoute) -> tuple[Tensor, Tensor, Tensor]:
        rows = torch.arange(-1, len(self._levels[route].samples))
        return rows[1:], torch.zeros_like(rows[1:]), rows.int()


class CountedBatch(PreparedBatch):
    """A batch of which every rank takes as many whole samples, in their order, and prepares those alone."""

    def __init__(self, raw: RawBatch, given: Preparing, position: int) -> None:
        super().__init__(raw, given.prepared, given.price, given.speeds)
        self._position = position

    def clouds(self, microbatch: int) -> Clouds | ArrangedClouds:
        found = self._clouds.get(microbatch)
        if found is None:
            rows = self.rows[microbatch]
            shares = self._speeds
            ends = (self._position, self._position + 1)
            first, last = (round(rows * sum(shares[:end]) / sum(shares)) for end in ends)
            tensors = {name: self.raw.part(name, microbatch, 0, rows) for name in self.prepared.raw}
            counts = tensors[_COUNTS]
            tensors[_COUNTS] = torch.cat([0 * counts[:first], counts[first:last], 0 * counts[last:]])
            clouds = self.prepared.preparation.clouds(list(tensors.values()))
            found = self._clouds[microbatch] = CountedClouds(clouds, self._position)
        return found


class CountedShare(SiteShare):
    """One rank's samples of such a batch: nobody reads another's rows, so that the maps of its own are the rank's."""

    def _map(self, name: str) -> LocalMap:
        prepared = self._batch.prepared
        clouds = cast("CountedClouds", self._clouds).clouds
        found = prepared.preparation.recipe.passage(clouds, prepared.names[name]).kernel_map
        return LocalMap(found.neighbours, found.reverse, found.reverse.shape[1], RowHalo({}, {}))


@dataclass(frozen=True, slots=True)
class CountedPreparing:
    """Prepares such batches on the rank at ``position``."""

    given: Preparing
    position: int

    @property
    def clock(self) -> PreparationClock:
        """Of nobody: a step is prepared in itself."""
        return self.given.clock

    @property
    def looks_ahead(self) -> bool:
        """Never."""
        return False

    def expect(self, raw: RawBatch, rank: int) -> None:
        """Nothing is begun."""

    def batch(self, raw: RawBatch) -> PreparedBatch:
        """``raw`` as the graph's inputs."""
        return CountedBatch(raw, self.given, self.position)


def count_samples(engine: Engine, decision: Decision) -> None:
    """Has the ranks of a stage take equal numbers of whole samples; call it before the engine is held.

    Raises:
        ValueError: the plan has another stage beside one of several ranks, which would have to know of all rows.
    """
    sizes = [len(stage.ranks) for stage in decision.stages]
    if max(sizes) == 1 or engine.preparing is None:
        return
    if len(sizes) > 1:
        raise ValueError(f"stages on {sizes} ranks: samples are counted out in plans of one stage alone")
    position = decision.stages[0].ranks.index(engine._transport.rank)
    engine._runner.preparing = CountedPreparing(engine.preparing, position)  # type: ignore[assignment]
    layout = decision.layout_of(0)

    def share(stage: int, batch: PreparedBatch, microbatch: int) -> SiteShare:
        samples = layout.samples(batch.rows[microbatch])
        return CountedShare.of(batch, microbatch, samples, position, samples)

    engine._runner.specializer._site_share = share  # type: ignore[method-assign]


main = partial(run, str(__doc__).splitlines()[0], measure)

if __name__ == "__main__":
    hide_gpus()
    sys.exit(main())
