"""Ways to divide a whole network over N devices: the same grid for every layer, Dryden's, and the planner's mix.

All are one stage on all devices and one micro-batch, so that layouts alone differ.
"""

from __future__ import annotations

import os
import statistics
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.report import Row, at_most, error_within
from halopipe.planning.edits import with_devices
from planner.costs.candidate import Candidate
from planner.costs.cost_model import CostModel
from planner.costs.layers.part_shapes import part_shapes
from planner.costs.layers.roofline import on_cluster
from planner.costs.predict import forecast
from planner.costs.pricing import Pricing
from planner.costs.shards.device_mesh import factorisations
from planner.costs.shards.sharding_spec import ShardingSpec
from planner.costs.stages.layouts import BACKWARD, FORWARD, LayoutPrices
from planner.costs.stages.stage_cost import stage_cost
from planner.extras.baselines.dryden import distributions
from planner.extras.catalogue.clusters import machines_of
from planner.ir.cluster import DATASHEET, MEASURED
from planner.ir.errors import InfeasibleError
from planner.ir.graph import Graph, TensorSpec
from planner.ir.layout import equal_shares
from planner.ir.plan import Decision, Prediction
from planner.ir.problem import CHANNEL_DIMS, SAMPLE_DIMS, SPATIAL_DIMS, Problem
from planner.ir.profile import Measurement, ModelSource, Optimizer, ParameterCost, PartShape, Profile, Provenance
from planner.layers.sized import REPLICA, SPACE
from planner.solvers.budget import Budget
from planner.solvers.candidates.candidate import decision_of, with_options
from planner.solvers.layouts.stage import Question, best_layouts, labelled_graph
from profiler import load_model
from profiler.capture.graph import capture

ALL = (SAMPLE_DIMS, SPATIAL_DIMS, CHANNEL_DIMS)
Grid = Mapping[str, int]
"""Parts by dim; ``channel`` stands for heads and features too."""

_CHANNELS = ("head", "feature")
_TIME_LIMIT_S = 30.0


@dataclass(frozen=True, slots=True)
class LayerPrediction:
    """A layer on one rank.

    Attributes:
        is_measured: whether exactly this part was measured.
    """

    forward_s: float
    backward_s: float
    is_measured: bool


@dataclass(frozen=True, slots=True)
class Way:
    """A network divided over devices.

    Attributes:
        name: for people.
        options: of each layer, by index.
        is_proven: of the planner's mix: whether nothing is better among all of the layouts it may use.
    """

    name: str
    options: Mapping[int, ShardingSpec]
    decision: Decision
    prediction: Prediction
    is_proven: bool = False

    @property
    def step_s(self) -> float:
        """As predicted."""
        return self.prediction.step_s

    def layers_by_split(self) -> Counter[str]:
        """How many layers are divided in each way."""
        return Counter(str(option) for option in self.options.values())


@dataclass(frozen=True, slots=True)
class Lead:
    """Which layout of a layer is cheapest, all other layers as they are; seconds are what the layer takes of a step.

    Attributes:
        runner_up: the next; equal to the winner where there is no other.
    """

    layer: str
    kind: str
    chosen: str
    chosen_s: float
    winner: str
    winner_s: float
    runner_up: str
    runner_up_s: float

    @classmethod
    def of(cls, layer: str, kind: str, options: Sequence[ShardingSpec], seconds: Sequence[float], chosen: int) -> Lead:
        """From all options."""
        order = sorted(range(len(options)), key=seconds.__getitem__)
        first = order[0]
        second = order[min(1, len(order) - 1)]
        places = ((str(options[k]), seconds[k]) for k in (chosen, first, second))
        return cls(layer, kind, *(part for place in places for part in place))


class Ways:
    """Ways to divide a network for ``samples`` samples on the first ``num_ranks`` devices like those of its profile."""

    def __init__(self, profile: Profile, samples: int, num_ranks: int, allow: tuple[str, ...] = ALL) -> None:
        cluster = profile.cluster
        if num_ranks != len(cluster.devices):
            profile = replace(profile, cluster=with_devices(cluster, num_ranks))
        self.problem = Problem(profile, samples, micro_batch_sizes=(samples,), allow=allow)
        self.cost_model = CostModel(profile)
        self.prices = LayoutPrices(self.cost_model, self.problem.ranks, samples, allow)
        self.layers = tuple(range(len(self.prices.layers)))

    @property
    def question(self) -> Question:
        """What is asked of the inner search."""
        return Question(self.layers)

    def uniform(self, grid: Grid) -> Way:
        """Every layer by ``grid``, as far as it can be; along what it cannot be cut, its ranks hold the same."""
        name = " x ".join(f"{dim}:{parts}" for dim, parts in grid.items() if parts > 1)
        return self._way(name or "one device", {index: self._nearest(index, grid) for index in self.layers})

    def best_uniform(self, dims: Sequence[str] = ("sample", "height", "width")) -> Way:
        """The fastest grid over ``dims`` that uses every device; not more parts of samples than there are."""
        grids = [
            dict(zip(dims, parts, strict=True))
            for parts in reversed(factorisations(len(self.problem.ranks), len(dims)))
        ]
        able = [grid for grid in grids if self.problem.global_batch % grid.get("sample", 1) == 0]

        def seconds(grid: Grid) -> float:
            return stage_cost(self.prices, {k: self._nearest(k, grid) for k in self.layers}).step_s(1)

        return self.uniform(min(able, key=seconds))

    def dryden(self) -> Way:
        """The heuristic of Dryden et al. 2019: samples and space by shortest paths."""
        return self._way("Dryden", distributions(self.problem, self.cost_model, self.problem.global_batch))

    def mix(self, most_options: int = 0) -> Way:
        """The planner's: the best layout of each layer, for all layers together.

        Args:
            most_options: of each layer, so many that are cheapest by themselves (0: all); nothing is proven of others.
        """
        options = None if not most_options else self._cheapest(most_options)
        found = best_layouts(self.prices, self.question, Budget(_TIME_LIMIT_S), options=options)
        if not found.chosen:
            raise InfeasibleError("no layout was found", [f"{len(self.problem.ranks)} ranks"])
        way = self._way("best mix", found.chosen)
        return replace(way, is_proven=options is None and found.answer.status == "proven")

    def leads(self, way: Way, most_options: int = 0) -> list[Lead]:
        """Of each layer, which layouts are the cheapest while all other layers stay as in ``way``.

        As ``halopipe explain --layer`` finds them, for all layers at once.
        """
        sets = [self.prices.options(k) for k in self.layers] if not most_options else self._cheapest(most_options)
        options = []
        places = []
        for index, found in zip(self.layers, sets, strict=True):
            own = way.options[index]
            place = next((k for k, o in enumerate(found) if (o.cuts, o.margin) == (own.cuts, own.margin)), None)
            options.append(found if place is not None else (*found, own))
            places.append(len(found) if place is None else place)
        graph = labelled_graph(self.prices, self.question, options)
        totals = [cost.copy() for cost in graph.node_cost]
        for (u, v), cost in graph.edge_cost.items():
            totals[u] += cost[:, places[v]]
            totals[v] += cost[places[u], :]
        return [
            Lead.of(self.prices.layers[index].name, self.prices.layers[index].kind, each, total.tolist(), place)
            for index, each, total, place in zip(self.layers, options, totals, places, strict=True)
        ]

    def per_layer(self, way: Way, rank: int) -> dict[str, LayerPrediction]:
        """What each layer is predicted to take on a rank, messages apart, by name."""
        found = {}
        for index, option in way.options.items():
            table = self.prices.layer(index, (option,))
            name = self.prices.layers[index].name
            seconds = table.seconds[:, 0, rank]
            found[name] = LayerPrediction(
                float(seconds[FORWARD]), float(seconds[BACKWARD]), self._is_measured(index, option, rank)
            )
        return found

    def measured_share(self, way: Way) -> float:
        """Of the compute of all ranks, how much is of parts that were measured at their own shapes."""
        known = total = 0.0
        for index, option in way.options.items():
            compute = self.prices.layer(index, (option,)).seconds[[FORWARD, BACKWARD], 0].sum(axis=0)
            for rank, seconds in enumerate(compute.tolist()):
                total += seconds
                known += seconds if self._is_measured(index, option, rank) else 0.0
        return known / total if total else 1.0

    def _way(self, name: str, options: Mapping[int, ShardingSpec]) -> Way:
        problem = self.problem
        ranks = self.problem.ranks
        shares = equal_shares(problem.global_batch, len(ranks))
        plain = Candidate.chain((0, len(self.layers)), (ranks,), (shares,), (problem.global_batch,), "1f1b")
        candidate = with_options(_Prices(self.prices), plain, options) if len(ranks) > 1 else plain
        decision = decision_of(problem, candidate)
        prediction = forecast(Pricing(self.cost_model), decision, problem.memory_margin).prediction
        placed = {k: ShardingSpec.placed(decision.layers[layer.name]) for k, layer in enumerate(self.prices.layers)}
        return Way(name, placed, decision, prediction)

    def _nearest(self, index: int, grid: Grid) -> ShardingSpec:
        """Of the layer's options within ``grid``, the one with the most parts."""
        best = None
        most = 0
        for option in self.prices.options(index):
            parts = {_axis(dim): count for dim, count in option.grid if not dim.startswith(REPLICA)}
            size = int(np.prod(list(parts.values()), dtype=np.int64))
            if size > most and not option.margin and all(n <= grid.get(dim, 1) for dim, n in parts.items()):
                best = option
                most = size
        if best is None:
            raise InfeasibleError(f"{self.prices.layers[index].name} cannot be laid out on a grid {dict(grid)}")
        return best

    def _cheapest(self, count: int) -> list[tuple[ShardingSpec, ...]]:
        all_options = [self.prices.options(index) for index in self.layers]
        found = []
        for index, options in zip(self.layers, all_options, strict=True):
            graph = labelled_graph(self.prices, Question((index,)), [options])
            order = np.argsort(graph.node_cost[0], kind="stable")[:count]
            found.append(tuple(options[k] for k in sorted(order.tolist())))
        return found

    def _is_measured(self, index: int, option: ShardingSpec, rank: int) -> bool:
        shards = self.prices.shards(index, (option,))
        prices = self.prices
        kind = prices.cost_model.kind(prices.ranks[rank])
        layer = prices.layers[index].name
        if abs(float(shards.share[0, rank]) - 1.0) < 1e-12:
            samples = int(shards.samples[0, rank])
            return bool(prices.cost_model.tables.at(kind, samples).evidence[index] == MEASURED)
        return prices.parts.evidence(layer, kind, shards, 0, rank) == (MEASURED,)


@dataclass(frozen=True, slots=True)
class _Prices:
    """What ``with_options`` asks of layouts, where there is one group and one size."""

    one: LayoutPrices

    def prices(self, ranks: tuple[int, ...], samples: int) -> LayoutPrices:
        return self.one


def shapes_of(
    sizes: Collection[int], allow: tuple[str, ...], num_ranks: int
) -> Callable[[Graph, Sequence[int]], tuple[PartShape, ...]]:
    """What ``profiler.profile`` asks which parts to measure: those at ``sizes`` samples."""
    return _Shapes(tuple(sizes), allow, num_ranks)


@dataclass(frozen=True, slots=True)
class _Shapes:
    sizes: tuple[int, ...]
    allow: tuple[str, ...]
    num_ranks: int

    def __call__(self, graph: Graph, sizes: Sequence[int]) -> tuple[PartShape, ...]:
        return part_shapes(graph, self.sizes, self.allow, self.num_ranks)


def _axis(dim: str) -> str:
    return "channel" if dim in _CHANNELS else dim


GOAL_ERROR = 0.10
KINDS = ("conv", "batch_norm")
"""Of layers that take nearly all of the time of these networks."""


@dataclass(frozen=True, slots=True)
class LayerPoint:
    """A layer of a point, on one rank: predicted and measured seconds of one pass.

    Attributes:
        is_measured: whether exactly this part was profiled.
    """

    layer: str
    kind: str
    rank: int
    way: str
    predicted_s: float
    measured_s: float
    is_measured: bool


@dataclass(frozen=True, slots=True)
class Point:
    """One network divided over some devices in one way.

    Attributes:
        role: why it is looked at (``best mix``); ``way``: what it is.
        splits: how many layers are divided in each way.
        measured_share: of the compute of all ranks, how much is of parts that were profiled at their own shapes.
        measured_s: None where it was not run; where ranks share cores, the processor time of the busiest.
        cpu_s: processor time of the busiest rank; ``wall_s``: of the slowest.
        alone_s: one device's step in the turns before and behind; None where it had none.
    """

    network: str
    ranks: int
    samples: int
    role: str
    way: str
    splits: Mapping[str, int]
    predicted_s: float
    evidence: str
    measured_share: float
    is_proven: bool = False
    measured_s: float | None = None
    cpu_s: float | None = None
    wall_s: float | None = None
    layers: tuple[LayerPoint, ...] = ()
    alone_s: float | None = None

    @property
    def name(self) -> str:
        """For a row."""
        return f"{self.network}, {self.ranks} rank{'s' if self.ranks > 1 else ''}, {self.role}"


def num_cores() -> int:
    """That ranks may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def rows_of(points: Sequence[Point]) -> Iterator[Row]:
    """Of what was run."""
    one = points[0]
    for point in points:
        clock = "processor time of a rank" if point.ranks > num_cores() else "measured step"
        yield Row(f"{point.name}: predicted step", 1e3 * point.predicted_s, "ms")
        measured_s = point.measured_s or 0.0
        yield Row(f"{point.name}: {clock}", 1e3 * measured_s, "ms")
        yield error_within(f"{point.name}: error", measured_s / point.predicted_s, 100 * GOAL_ERROR)
        if point.ranks > 1 and measured_s:
            yield Row(f"{point.name}: predicted speed-up", one.predicted_s / point.predicted_s, f"of {point.ranks}")
            if point.alone_s is not None:
                yield Row(f"{point.name}: measured speed-up", point.alone_s / measured_s, f"of {point.ranks}")
            by_cpu = (one.cpu_s or 0.0) / (point.cpu_s or measured_s)
            yield Row(f"{point.name}: speed-up by processor time", by_cpu, f"of {point.ranks}")
        yield from layer_rows(point)


def layer_rows(point: Point) -> Iterator[Row]:
    """Of all layers and ranks of a point, parts measured at their own shapes alone."""
    for way in ("forward", "backward"):
        known = [each for each in point.layers if each.way == way and each.is_measured and each.predicted_s > 0]
        if not known:
            continue
        errors = [each.measured_s / each.predicted_s - 1 for each in known]
        within = [abs(error) <= GOAL_ERROR for error in errors]
        total_s = sum(each.predicted_s for each in known)
        in_time = sum(each.predicted_s for each, ok in zip(known, within, strict=True) if ok) / total_s
        name = f"{point.name}, {way} of layers"
        median = 100 * statistics.median(map(abs, errors))
        yield at_most(f"{name}: median absolute error", median, "%", 100 * GOAL_ERROR)
        yield Row(f"{name}: within {100 * GOAL_ERROR:g} %", 100 * sum(within) / len(within), f"% of {len(within)}")
        yield Row(f"{name}: within {100 * GOAL_ERROR:g} %, by time", 100 * in_time, "% of predicted time")
        yield Row(f"{name}: error of their sum", 100 * _error_of_sum(known), "%")
        for kind in KINDS:
            of_kind = [each for each in known if each.kind == kind]
            if of_kind:
                yield Row(f"{name}: error of the sum of {kind}", 100 * _error_of_sum(of_kind), "%")


def _error_of_sum(layers: Sequence[LayerPoint]) -> float:
    return sum(each.measured_s for each in layers) / sum(each.predicted_s for each in layers) - 1


def further_rows(run_points: Sequence[Point], points: Sequence[Point]) -> Iterator[Row]:
    """Of what was predicted alone."""
    one = run_points[0]
    for point in points:
        speed_up = one.predicted_s / point.predicted_s
        yield Row(f"{point.name}: predicted step", 1e3 * point.predicted_s, "ms")
        yield Row(f"{point.name}: predicted speed-up", speed_up, f"of {point.ranks}")
        yield Row(f"{point.name}: efficiency", 100 * speed_up / point.ranks, "%")
        yield Row(f"{point.name}: compute whose parts were measured", 100 * point.measured_share, "%")


def large_rows(points: Sequence[Point]) -> Iterator[Row]:
    """Speed-up against the fewest devices."""
    least = min(points, key=lambda point: (point.ranks, point.predicted_s))
    for point in points:
        ideal = point.ranks / least.ranks
        yield Row(f"{point.name} (V100, roofline): predicted step", 1e3 * point.predicted_s, "ms")
        speed_up = least.predicted_s / point.predicted_s
        yield Row(f"{point.name} (V100, roofline): speed-up over {least.ranks}", speed_up, f"of {ideal:g}")


_PER_HOST = 4
_MACHINES = """
halopipe: cluster
version: 1
hosts:
  - {{name: n, count: {hosts}, devices: [{{device: V100-16GB, count: {devices}}}]}}
links:
  within-host: NVLink-2
  across-hosts: {{bandwidth: 25GB/s, latency: 5us}}
"""
"""As Lassen, where Dryden et al. ran: four V100 a host, two rails of InfiniBand EDR between; the latency is ours."""

_UNKNOWN_S = 1.0
"""In place of a measurement; on devices without figures a roof does not ask for it."""


def roofline_profile(source: ModelSource, graph: Graph, num_devices: int) -> Profile:
    """What ``graph`` would cost on ``num_devices``, four a host, if every layer reached its roof."""
    hosts = max(1, num_devices // _PER_HOST)
    devices = min(num_devices, _PER_HOST)
    cluster = machines_of(_MACHINES.format(hosts=hosts, devices=devices)).cluster
    unknown = "nothing was measured"
    measurements = tuple(
        Measurement(
            layer.name,
            samples,
            _UNKNOWN_S,
            _UNKNOWN_S,
            _UNKNOWN_S,
            _UNKNOWN_S if layer.parameters else 0.0,
            sum(spec.at(samples, graph.samples).num_bytes for spec in layer.outputs),
            0,
            0,
            evidence=DATASHEET,
        )
        for samples in _sizes(graph.samples)
        for layer in graph.layers
    )
    costs = {layer.name: ParameterCost(_UNKNOWN_S, _UNKNOWN_S) for layer in graph.layers if layer.parameters}
    empty = Profile(source, Optimizer(), graph, cluster, {unknown: measurements}, {unknown: costs}, Provenance({}))
    return on_cluster(empty, cluster)


def enlarged_graph(source: ModelSource, times: int) -> Graph:
    """The graph of a fully convolutional network, captured at the source's shape, at ``times`` its height and width.

    A capture computes the network once, which takes minutes at full size.  Every extent of space must be a multiple of
    what the network divides it by, so that all of them grow alike.
    """
    graph = capture(load_model(source)).graph

    def larger(spec: TensorSpec) -> TensorSpec:
        shape = (extent * times if dim in SPACE else extent for dim, extent in zip(spec.dims, spec.shape, strict=True))
        return replace(spec, shape=tuple(shape))

    layers = tuple(replace(layer, outputs=tuple(map(larger, layer.outputs))) for layer in graph.layers)
    return replace(graph, inputs={name: larger(spec) for name, spec in graph.inputs.items()}, layers=layers)


def _sizes(samples: int) -> list[int]:
    return [size for size in range(1, samples + 1) if samples % size == 0]
