"""What strong scaling found, by point, and the rows that say so.

A network's profile on V100s by rooflines alone: nothing of it is run.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from benchmarks.report import Row, at_most
from planner.costs.layers.roofline import on_cluster
from planner.extras.catalogue.clusters import machines_of
from planner.ir.cluster import DATASHEET
from planner.ir.graph import Graph, TensorSpec
from planner.ir.profile import Measurement, ModelSource, Optimizer, ParameterCost, Profile, Provenance
from planner.layers.sized import SPACE
from profiler import load_model
from profiler.capture.graph import capture

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
        error = measured_s / point.predicted_s - 1
        yield Row(f"{point.name}: error", 100 * error, "%", f"within {100 * GOAL_ERROR:g}", abs(error) <= GOAL_ERROR)
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
    hosts, devices = max(1, num_devices // _PER_HOST), min(num_devices, _PER_HOST)
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
