"""``profile --on``: what a network costs on devices that are not here."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from planner.extras.kernels.curves import Device
from planner.extras.kernels.estimates import NOTHING, Estimate
from planner.extras.kernels.fit import Fit, fit_rows
from planner.extras.kernels.models import Kernels, kernels_of
from planner.extras.kernels.tables import read_table
from planner.ir.cluster import DATASHEET, KERNELS, Cluster, DeviceSpec
from planner.ir.graph import Graph
from planner.ir.profile import Measurement, ModelSource, Optimizer, ParameterCost, Profile, Provenance
from profiler.extras.modelled.networks import FakeNetwork, fake_network
from profiler.extras.modelled.operators import OperatorPrices
from profiler.extras.modelled.watch import EstimatesByKind, OperatorWatch, WatchClock, added
from profiler.measure.beside_layers import still_optimizer
from profiler.measure.job import MeasuringJob
from profiler.measure.memory import Footprint, watched_passes
from profiler.measure.timing import LayerSegment, SegmentedPass, segments
from profiler.measure.worker import given_sizes
from profiler.session import versions
from profiler.source.model import example_of
from profiler.source.module_kinds import trained_parameters

_MOST_SIZES = 6
_ADDS = 3
_READS_AND_WRITES = 3
"""Adding a gradient reads two numbers and writes one; an update reads parameter and gradient, and writes one; its state
is read and written."""


def profile_on(
    source: ModelSource,
    cluster: Cluster,
    optimizer: Optimizer,
    sizes: tuple[int, ...] = (),
    tables: Iterable[str | Path] = (),
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Profile:
    """The profile of ``source`` on ``cluster``, of whose devices none need be here.

    Args:
        sizes: numbers of samples; empty: the example's, and halves of it down to 1, the six largest steps of these.
        tables: of the user's own kernels (:mod:`planner.extras.kernels.tables`), which come before those that ship.
        progress: called with how many sizes are done, of how many.

    Raises:
        FactoryError, UnsupportedModelError: see :func:`profiler.extras.modelled.networks.fake_network`.
        MissingMeasurementError: a figure of a device is missing, in the dtype of some operator.
        UsageError: the network cannot run at the sizes.
    """
    own = tuple(fit for path in tables for fit in fit_rows(read_table(path)))
    network = fake_network(source)
    graph = network.captured.graph
    kinds = {spec.kind: spec for spec in cluster.devices}
    kernels = {kind: functools.cache(functools.partial(_kernels, spec, own)) for kind, spec in kinds.items()}
    wanted = _sizes(network, source, optimizer, sizes)
    with network.mode:
        still_optimizer(optimizer, trained_parameters(network.model.owners))
        measurements, step_s = _measured(network, wanted, kernels, progress)
    return Profile(
        model=source,
        optimizer=optimizer,
        graph=graph,
        cluster=cluster,
        measurements={kind: tuple(of_kind) for kind, of_kind in measurements.items()},
        parameters={kind: _parameters(graph, optimizer, of(source.dtype)) for kind, of in kernels.items()},
        provenance=Provenance(versions(), kernels=_shares(step_s)),
    )


def _sizes(network: FakeNetwork, source: ModelSource, optimizer: Optimizer, asked: tuple[int, ...]) -> tuple[int, ...]:
    """The numbers of samples to price; of what is captured for one number alone, that."""
    captured = network.captured
    if not asked and captured.polymorphic:
        return _halves(network.model.samples)
    job = MeasuringJob(source, optimizer, asked, quick=True)
    return given_sizes(job, captured.graph.samples, captured.polymorphic)


def _measured(
    network: FakeNetwork,
    sizes: tuple[int, ...],
    kernels: Mapping[str, Callable[[str], Kernels]],
    progress: Callable[[int, int], None],
) -> tuple[dict[str, list[Measurement]], dict[tuple[str, str], float]]:
    """Layers at all sizes, by kind of device; seconds of a step of the last size, by kind and by evidence."""
    measurements: dict[str, list[Measurement]] = {kind: [] for kind in kernels}
    step_s: dict[tuple[str, str], float] = defaultdict(float)
    for done, samples in enumerate(sizes):
        progress(done, len(sizes))
        for layer, footprint, passes in _passes(network, samples, tuple(map(OperatorPrices, kernels.values()))):
            for index, kind in enumerate(kernels):
                measurements[kind].append(_measurement(layer, samples, footprint, passes.of(index)))
                for half in (passes.forward[index], passes.backward[index]) if samples == sizes[-1] else ():
                    step_s[kind, half.evidence] += half.seconds
    return measurements, step_s


def _shares(step_s: Mapping[tuple[str, str], float]) -> dict[str, float]:
    """What share of a kind's step is known by which evidence, the largest first."""
    of_kind: dict[str, float] = defaultdict(float)
    for (kind, _), value_s in step_s.items():
        of_kind[kind] += value_s
    longest = sorted(step_s.items(), key=lambda item: -item[1])
    return {f"{kind}: {name}": round(value_s / of_kind[kind], 4) for (kind, name), value_s in longest if value_s}


def _halves(samples: int) -> tuple[int, ...]:
    """A number, its half, and so on to 1; the largest ones and 1."""
    sizes = [samples]
    while sizes[-1] > 1:
        sizes.append(-(-sizes[-1] // 2))
    return tuple(sorted({*sizes[: _MOST_SIZES - 1], 1}))


def _kernels(spec: DeviceSpec, own: tuple[Fit, ...], dtype: str) -> Kernels:
    name = spec.kind.partition(" (")[0]  # a kind with figures of a cluster file says so behind its name
    peaks = dict(spec.peak_flop_per_s)
    for one, other in (("float16", "bfloat16"), ("bfloat16", "float16")):
        if one not in peaks and other in peaks:
            peaks[one] = peaks[other]
    return kernels_of(Device.of(name, peaks, spec.memory_bytes_per_s, dtype), dtype, own)


@dataclass(frozen=True, slots=True)
class _Passes:
    """By kind of device: forward, backward in one go, and its halves."""

    forward: EstimatesByKind
    backward: EstimatesByKind
    backward_input: EstimatesByKind
    backward_weight: EstimatesByKind

    def of(self, index: int) -> tuple[Estimate, Estimate, Estimate, Estimate]:
        """On one kind."""
        return self.forward[index], self.backward[index], self.backward_input[index], self.backward_weight[index]


def _passes(
    network: FakeNetwork, samples: int, prices: tuple[OperatorPrices, ...]
) -> Iterable[tuple[LayerSegment, Footprint, _Passes]]:
    """Each layer at ``samples`` samples."""
    captured = network.captured
    tensors = example_of(captured.graph.inputs, network.model, samples)
    watch = OperatorWatch(prices)
    nothing = (NOTHING,) * len(prices)
    with watch:
        footprints, whole, split = watched_passes(captured, tensors, samples, watch.meter, WatchClock(watch))

    def total(laps: Iterable[EstimatesByKind]) -> EstimatesByKind:
        return functools.reduce(added, laps, nothing)

    def times(run: SegmentedPass, part: LayerSegment) -> tuple[EstimatesByKind, EstimatesByKind, EstimatesByKind]:
        laps = run.laps(part)
        return total(laps.forward), total(laps.backward), total(laps.weight)

    for part in segments(captured):
        forward, backward, _ = times(whole, part)
        _, of_input, of_weight = times(split, part)
        yield part, footprints[part.name], _Passes(forward, backward, of_input, of_weight)


def _measurement(
    part: LayerSegment, samples: int, footprint: Footprint, times: tuple[Estimate, Estimate, Estimate, Estimate]
) -> Measurement:
    forward, backward, of_input, of_weight = times
    both = forward + backward
    return Measurement(
        part.name,
        samples,
        forward.seconds,
        backward.seconds,
        of_input.seconds,
        of_weight.seconds,
        footprint.saved_bytes,
        footprint.workspace_bytes,
        num_runs=0,
        evidence=DATASHEET if both.evidence.startswith(DATASHEET) else KERNELS,
        levels=footprint.levels,
        low=round(both.low / both.seconds, 4) if both.seconds else 1.0,
        high=round(both.high / both.seconds, 4) if both.seconds else 1.0,
    )


def _parameters(graph: Graph, optimizer: Optimizer, kernels: Kernels) -> dict[str, ParameterCost]:
    """Adding into gradients and updating, by bytes; a tied parameter counts for the first layer that uses it."""
    counted: set[str] = set()
    by_layer = {}
    passes = _READS_AND_WRITES + 2 * optimizer.state_bytes_per_parameter_byte
    for layer in graph.layers:
        own = [graph.parameters[name] for name in dict.fromkeys(layer.parameters) if name not in counted]
        counted.update(layer.parameters)
        if own:
            num_bytes = sum(spec.num_bytes for spec in own)
            add, update = (kernels.memory_bound(each * num_bytes, len(own)).seconds for each in (_ADDS, passes))
            by_layer[layer.name] = ParameterCost(add, update)
    return by_layer
