"""Costs of all layers at one size: running sums, so that any stretch is one subtraction, and what has no sum.

:class:`HeldBackRanges` says how far off such costs may be where they were read between measured sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from planner.costs.layers.confidence import INTERPOLATED_RANGE, Range, default_range, range_of, weakest
from planner.costs.layers.features import Features
from planner.costs.layers.interpolation import (
    QUANTITIES,
    LayerCost,
    MeasuredAlike,
    hit,
    layer_cost,
    measured_alike,
    neighbours,
)
from planner.costs.layers.regression import FamilyModels, FamilyName, family_names
from planner.costs.layers.roofline import under_a_roof
from planner.costs.layers.shards import MeasuredParts
from planner.ir.cluster import INTERPOLATED, Evidence
from planner.ir.errors import MissingMeasurementError
from planner.ir.graph import BYTES_PER_ELEMENT, Graph, Layer
from planner.ir.lazy import once
from planner.ir.profile import Measurement, Profile
from planner.layers import kind as kind_named

Run = tuple[int, int]
"""Layers ``[first, last)`` by index in the graph."""
IndexSpans = tuple[tuple[int, ...], ...]
"""Layers by index that are computed again in the backward, each span by itself."""


def span(sums: Array, runs: Iterable[Run]) -> float:
    """The sum over the layers of ``runs``."""
    return float(sum(sums[last] - sums[first] for first, last in runs))


def runs_of(indices: Iterable[int]) -> tuple[Run, ...]:
    """Sorted layer indices as runs."""
    ordered = sorted(indices)
    if not ordered:
        return ()
    breaks = [k + 1 for k, (a, b) in enumerate(pairwise(ordered)) if b != a + 1]
    return tuple((ordered[a], ordered[b - 1] + 1) for a, b in pairwise([0, *breaks, len(ordered)]))


def layers_of(runs: Iterable[Run]) -> tuple[int, ...]:
    """The layers of runs, by index."""
    return tuple(index for first, last in runs for index in range(first, last))


def before(runs: Iterable[Run], layer: int) -> tuple[Run, ...]:
    """The part of ``runs`` that comes before ``layer``."""
    return tuple((first, min(last, layer)) for first, last in runs if first < layer)


@dataclass(eq=False)
class CostTables:
    """The profile's look-ups, each made once.

    Attributes:
        parts: of layers, as measured at their own shapes or as models of families say.
    """

    profile: Profile
    graph: GraphTable = field(init=False)
    parts: MeasuredParts = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.graph = graph_table(self.profile.graph)
        self.parts = MeasuredParts(self.profile, self.families)

    @once
    def at(self, kind: str, samples: float) -> SizeTable:
        """All layers on a device of ``kind`` at ``samples`` samples.

        Raises:
            MissingMeasurementError: nothing was measured on that kind, or nothing says what a layer costs at that size.
        """
        values, evidence, bounds = self._costs(kind, samples)
        sums = [running(values[:, column]) for column in range(len(QUANTITIES) - 1)]
        return SizeTable(sums[0], sums[1], sums[2], sums[3], sums[4], values[:, -1], evidence, bounds)

    @once
    def columns(self, kind: str, samples: float) -> Array:
        """``[6, layers]``: forward, backward, its halves, saved bytes and workspace of each; raises as :meth:`at`."""
        table = self.at(kind, samples)
        sums = (table.forward_s, table.backward_s, table.backward_input_s, table.backward_weight_s)
        rows = [np.diff(running) for running in (*sums, table.saved_bytes)]
        return np.asarray(np.maximum(np.array([*rows, table.workspace_bytes]), 0.0))

    @once
    def parameters(self, kind: str) -> ParameterTable:
        """What parameters cost on a device of ``kind``.

        Raises:
            MissingMeasurementError: a layer that brings parameters has no cost.
        """
        return parameter_table(self.profile, kind, self.graph)

    def deferred_bytes(self, kind: str, samples: float, runs: Iterable[Run]) -> float:
        """What the layers of ``runs`` keep between a backward for the input and the one for the weights.

        A layer whose weight gradient is left for later keeps its inputs and the gradient of its outputs.
        """
        fixed, each = self._deferred(kind)
        return span(fixed, runs) + samples * span(each, runs)

    @once
    def _deferred(self, kind: str) -> tuple[Array, Array]:
        """By layer, as running sums: bytes whatever the number of samples, and bytes a sample."""
        graph = self.profile.graph
        fixed = []
        each = []
        for (layer, inputs), later in zip(graph.with_inputs(), self.deferring(kind), strict=True):
            specs = (*inputs, *layer.outputs) if later else ()
            floats = [spec for spec in specs if spec.is_float]
            fixed.append(float(sum(spec.num_bytes for spec in floats if not spec.has_samples)))
            each.append(sum(spec.num_bytes for spec in floats if spec.has_samples) / graph.samples)
        return running(np.array(fixed)), running(np.array(each))

    @once
    def deferring(self, kind: str) -> Flags:
        """By layer, whether its weight gradients can be left for later: others make theirs with those of inputs."""
        later = {m.layer for m in self.profile.measurements.get(kind, ()) if m.backward_weight_s > 0}
        return np.array([layer.name in later for layer in self.profile.graph.layers], dtype=bool)

    @once
    def largest_measured(self, kind: str) -> int:
        """The most samples at which every layer was measured on ``kind``."""
        return min(measured[-1].samples for measured in self._by_layer(kind) if measured)

    def layer(self, kind: str, index: int, samples: float) -> LayerCost:
        """Layer number ``index`` on a device of ``kind``, with the range that such figures kept to.

        Raises:
            MissingMeasurementError: nothing says what it costs at that size.
        """
        cost = self._layer(kind, index, samples)
        low, high = self._range(kind, index, samples, cost)
        return LayerCost(cost.values, cost.evidence, low, high)

    @once
    def families(self, kind: str) -> FamilyModels:
        """Models of what was measured on ``kind``."""
        return FamilyModels(self.profile, kind, self._features)

    @cached_property
    def _features(self) -> Features:
        return Features(self.profile.graph)

    def overhead_s(self, kind: str) -> float:
        """What a receive costs beside waiting: by so much the action is longer that waited for it."""
        return self.profile.action_overhead_s.get(kind, 0.0)

    def evidence(self, kind: str, samples: float, runs: Iterable[Run]) -> Evidence:
        """The weakest evidence among the layers of ``runs``."""
        table = self.at(kind, samples)
        return weakest(evidence for first, last in runs for evidence in table.evidence[first:last])

    def _costs(self, kind: str, samples: float) -> tuple[Array, tuple[Evidence, ...], Bounds]:
        """(layer, quantity), and how well each layer's are known."""
        layers = range(len(self.profile.graph.layers))
        for alike in self._alike(kind):
            values, evidence = alike.at(samples)
            return (
                values,
                evidence,
                Bounds(lambda: [self._range(kind, k, samples, self._layer(kind, k, samples)) for k in layers]),
            )
        costs = [self._layer(kind, index, samples) for index in layers]
        values = np.array([cost.values for cost in costs], dtype=np.float64).reshape(len(costs), len(QUANTITIES))
        bounds = Bounds(lambda: [self._range(kind, index, samples, cost) for index, cost in enumerate(costs)])
        return values, tuple(cost.evidence for cost in costs), bounds

    def _layer(self, kind: str, index: int, samples: float) -> LayerCost:
        measured = self._by_layer(kind)[index]
        return layer_cost(measured, samples, lambda: self._otherwise(kind, index, samples))

    def _otherwise(self, kind: str, index: int, samples: float) -> tuple[LayerCost, ...]:
        """What layers like it say, else a datasheet."""
        families = self.families(kind)
        return families.whole(index, samples) or under_a_roof(
            self.profile, kind, index, samples, families.features, self._by_layer(kind)[index]
        )

    def _range(self, kind: str, index: int, samples: float, cost: LayerCost) -> Range:
        """Factors between which four of five such figures turned out."""
        measured = self._by_layer(kind)[index]
        exact = hit(measured, samples)
        if not samples or exact is not None:
            return _own_range(exact, cost.evidence)
        line = neighbours(measured, samples)
        if line is None:
            return cost.low, cost.high
        low, high = self._held_back(kind).range(index, line.low.key, line.inside)
        least, most = (1.0, 1.0) if cost.evidence == INTERPOLATED else _own_range(line.low, cost.evidence)
        return min(low, least), max(high, most)

    @once
    def _alike(self, kind: str) -> tuple[MeasuredAlike, ...]:
        return measured_alike(self._by_layer(kind))

    @once
    def _held_back(self, kind: str) -> HeldBackRanges:
        return HeldBackRanges(self.profile.graph, self._by_layer(kind))

    @once
    def _by_layer(self, kind: str) -> tuple[Sequence[Measurement], ...]:
        """The measurements of each layer, by growing number of samples."""
        collected: dict[str, list[Measurement]] = {layer.name: [] for layer in self.profile.graph.layers}
        for measurement in self.profile.measurements.get(kind, ()):
            if measurement.layer in collected:
                collected[measurement.layer].append(measurement)
        missing = [name for name, measured in collected.items() if not measured]
        if len(missing) == len(collected):
            raise MissingMeasurementError(
                f"{len(missing)} of {len(collected)} layers were not measured on {kind}",
                [f"such as {', '.join(missing[:3])}"],
                ["profile the model again on every kind of device"],
            )
        return tuple(sorted(measured, key=lambda m: m.samples) for measured in collected.values())


def _own_range(measured: Measurement | None, evidence: Evidence) -> Range:
    """That of a figure which no run gave, if it says one."""
    if measured is None or not measured.low:
        return default_range(evidence)
    return measured.low, measured.high


Array = NDArray[np.float64]
Flags = NDArray[np.bool_]


@dataclass(eq=False)
class Bounds:
    """Factors on the seconds of each layer, between which four of five such figures turned out; 1 where measured.

    Computed when they are first asked for.
    """

    make: Callable[[], Sequence[Range]] = field(repr=False)

    @cached_property
    def columns(self) -> tuple[Array, ...]:
        """(low, high), each by layer."""
        return tuple(np.array(self.make(), dtype=np.float64).reshape(-1, 2).T)


@dataclass(frozen=True, slots=True, eq=False)
class SizeTable:
    """All layers on one kind of device at one number of samples; each array has a running sum of length layers + 1.

    Attributes:
        forward_s, backward_s, backward_input_s, backward_weight_s, saved_bytes: running sums.
        workspace_bytes: by layer, no sum.
        evidence: by layer.
        low, high: by layer, no sum: see :class:`Bounds`.
    """

    forward_s: Array
    backward_s: Array
    backward_input_s: Array
    backward_weight_s: Array
    saved_bytes: Array
    workspace_bytes: Array
    evidence: tuple[Evidence, ...]
    bounds: Bounds = field(repr=False)

    @property
    def low(self) -> Array:
        """By layer, the factor that one in ten lies below."""
        return self.bounds.columns[0]

    @property
    def high(self) -> Array:
        """By layer, the factor that one in ten lies above."""
        return self.bounds.columns[1]


@dataclass(frozen=True, slots=True, eq=False)
class ParameterTable:
    """What parameters cost on one kind of device: running sums over layers."""

    accumulate_s: Array
    update_s: Array


@dataclass(frozen=True, slots=True)
class TiedParameter:
    """A parameter that several layers use.

    Attributes:
        layers: that use it, by index, ascending.
        part: of what the parameters of the first of these layers cost, what this one does: by bytes.
    """

    name: str
    num_bytes: int
    layers: tuple[int, ...]
    part: float


@dataclass(frozen=True, slots=True, eq=False)
class GraphTable:
    """What does not depend on the device: running sums over layers.

    Attributes:
        parameter_bytes: a tied parameter counts at the first layer that uses it.
        buffer_bytes: state that is not trained; ``own_buffer_bytes``: that of each layer alone.
        norm_channels: by layer, no sum: channels of a normalisation over the samples of all ranks, else 0.
        norm_bytes: by layer: bytes of one of its statistics.
        tied: the parameters that several layers use.
    """

    parameter_bytes: Array
    buffer_bytes: Array
    own_buffer_bytes: Array
    norm_channels: NDArray[np.int64]
    norm_bytes: NDArray[np.int64]
    tied: tuple[TiedParameter, ...]


def parameter_table(profile: Profile, kind: str, graph: GraphTable) -> ParameterTable:
    """What the parameters of all layers cost on devices of ``kind``.

    Raises:
        MissingMeasurementError: a layer that brings parameters has no cost.
    """
    costs = profile.parameters.get(kind, {})
    own_bytes = np.diff(graph.parameter_bytes)
    missing = [
        layer.name
        for layer, num_bytes in zip(profile.graph.layers, own_bytes, strict=True)
        if num_bytes and layer.name not in costs
    ]
    if missing:
        raise MissingMeasurementError(
            f"the profile does not say what the parameters of {missing[0]} cost on {kind}",
            [f"{len(missing)} layers with parameters have no cost"],
            ["profile the model again on every kind of device"],
        )
    layer_costs = [costs.get(layer.name) for layer in profile.graph.layers]
    accumulate = np.array([cost.accumulate_s if cost else 0.0 for cost in layer_costs])
    update = np.array([cost.update_s if cost else 0.0 for cost in layer_costs])
    return ParameterTable(running(accumulate), running(update))


def graph_table(graph: Graph) -> GraphTable:
    """The graph's own table."""
    counted: set[str] = set()
    parameters = []
    for layer in graph.layers:
        new = set(layer.parameters) - counted
        counted |= new
        parameters.append(float(sum(graph.parameters[name].num_bytes for name in new)))
    norms = [_norm(layer) for layer in graph.layers]
    buffers = np.array([float(layer.buffer_bytes) for layer in graph.layers])
    shared = np.array([float(sum(size for _, size in layer.shared_buffers)) for layer in graph.layers])
    return GraphTable(
        running(np.array(parameters)),
        running(buffers),
        running(buffers - shared),
        np.array([channels for channels, _ in norms], dtype=np.int64),
        np.array([num_bytes for _, num_bytes in norms], dtype=np.int64),
        tuple(_tied(graph, parameters)),
    )


def _tied(graph: Graph, own_bytes: Sequence[float]) -> Iterator[TiedParameter]:
    for name, layers in graph.tied_layers().items():
        size = graph.parameters[name].num_bytes
        yield TiedParameter(name, size, layers, size / max(1.0, own_bytes[layers[0]]))


def _norm(layer: Layer) -> tuple[int, int]:
    if kind_named(layer.kind).REDUCTION != "statistics":
        return 0, 0
    spec = layer.outputs[0]
    channel = spec.dims.index("channel") if "channel" in spec.dims else 1
    return spec.shape[channel], BYTES_PER_ELEMENT[spec.dtype]


def running(values: Array) -> Array:
    """Running sums, from 0."""
    return np.concatenate(([0.0], np.cumsum(values)))


@dataclass(eq=False)
class HeldBackRanges:
    """Ranges of interpolated figures on one kind of device, by family, between measured sizes or beyond them.

    A family of few measurements has the range of all.  Nothing is computed before the first question.

    Attributes:
        by_layer: the measurements of each layer of ``graph``, by growing number of samples.
    """

    graph: Graph
    by_layer: Sequence[Sequence[Measurement]]

    def range(self, index: int, key: str, inside: bool) -> Range:
        """Of layer number ``index``, read on back end ``key``."""
        return self._range_of(family_names(self.graph, self.graph.layers[index], key)[0], inside)

    @once
    def _range_of(self, family: FamilyName, inside: bool) -> Range:
        of_all = range_of(self._ratios.get(((), inside), ()), INTERPOLATED_RANGE)
        return range_of(self._ratios.get((family, inside), ()), of_all)

    @cached_property
    def _ratios(self) -> dict[tuple[FamilyName, bool], list[float]]:
        """Measured over predicted of what is held back, by family, () for all, and whether it lies between others."""
        ratios: dict[tuple[FamilyName, bool], list[float]] = {}
        for layer, measured in zip(self.graph.layers, self.by_layer, strict=True):
            for position, one in enumerate(measured):
                others = (*measured[:position], *measured[position + 1 :])
                line = neighbours(others, one.samples)
                actual_s = one.passes_s
                if line is None or actual_s <= 0:
                    continue
                predicted_s = sum(layer_cost(others, one.samples).values[:2])
                if predicted_s > 0:
                    name = family_names(self.graph, layer, line.low.key)[0]
                    for each in (name, ()):
                        ratios.setdefault((each, line.inside), []).append(actual_s / predicted_s)
        return ratios
