"""Costs of all layers at one size as running sums, so that any stretch of layers is priced by one subtraction."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from planner.costs.evidence import weakest
from planner.costs.layer import QUANTITIES, layer_cost
from planner.costs.measured_alike import MeasuredAlike, measured_alike
from planner.ir.cluster import Evidence
from planner.ir.errors import MissingMeasurementError
from planner.ir.graph import BYTES_PER_ELEMENT, Graph, Layer
from planner.ir.profile import Measurement, Profile
from planner.layers import kind as kind_named

Array = NDArray[np.float64]
Run = tuple[int, int]
"""Layers ``[first, last)`` by index in the graph."""


@dataclass(frozen=True, slots=True, eq=False)
class SizeTable:
    """All layers on one kind of device at one number of samples; each array has a running sum of length layers + 1.

    Attributes:
        forward_s, backward_s, backward_input_s, backward_weight_s, saved_bytes: running sums.
        workspace_bytes: by layer, no sum.
        evidence: by layer.
    """

    forward_s: Array
    backward_s: Array
    backward_input_s: Array
    backward_weight_s: Array
    saved_bytes: Array
    workspace_bytes: Array
    evidence: tuple[Evidence, ...]


@dataclass(frozen=True, slots=True, eq=False)
class ParameterTable:
    """What parameters cost on one kind of device: running sums over layers."""

    accumulate_s: Array
    update_s: Array


@dataclass(frozen=True, slots=True, eq=False)
class GraphTable:
    """What does not depend on the device: running sums over layers.

    Attributes:
        parameter_bytes: a tied parameter counts at the first layer that uses it.
        buffer_bytes: state that is not trained.
        norm_channels: by layer, no sum: channels of a normalisation over the samples of all ranks, else 0.
        norm_bytes: by layer: bytes of one of its statistics.
    """

    parameter_bytes: Array
    buffer_bytes: Array
    norm_channels: NDArray[np.int64]
    norm_bytes: NDArray[np.int64]


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


@dataclass(slots=True, eq=False)
class CostTables:
    """The profile's look-ups, each made once."""

    profile: Profile
    graph: GraphTable = field(init=False)
    _sizes: dict[tuple[str, float], SizeTable] = field(init=False, default_factory=dict, repr=False)
    _parameters: dict[str, ParameterTable] = field(init=False, default_factory=dict, repr=False)
    _measured: dict[str, tuple[Sequence[Measurement], ...]] = field(init=False, default_factory=dict, repr=False)
    _largest: dict[str, int] = field(init=False, default_factory=dict, repr=False)
    _left: dict[str, tuple[Array, Array]] = field(init=False, default_factory=dict, repr=False)
    _alike: dict[str, tuple[MeasuredAlike, ...]] = field(init=False, default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        self.graph = _graph_table(self.profile.graph)

    def at(self, kind: str, samples: float) -> SizeTable:
        """All layers on a device of ``kind`` at ``samples`` samples.

        Raises:
            MissingMeasurementError: a layer was not measured on that kind, or says nothing about that size.
        """
        found = self._sizes.get((kind, samples))
        if found is None:
            found = self._sizes[kind, samples] = self._size_table(kind, samples)
        return found

    def parameters(self, kind: str) -> ParameterTable:
        """What parameters cost on a device of ``kind``.

        Raises:
            MissingMeasurementError: a layer that brings parameters has no cost.
        """
        found = self._parameters.get(kind)
        if found is None:
            found = self._parameters[kind] = _parameter_table(self.profile, kind, self.graph)
        return found

    def left_bytes(self, kind: str, samples: float, runs: Iterable[Run]) -> float:
        """What the layers of ``runs`` keep between a backward for the input and the one for the weights.

        A layer whose weight gradient is left for later keeps its inputs and the gradient of its outputs.
        """
        found = self._left.get(kind)
        if found is None:
            found = self._left[kind] = _left(self.profile, kind)
        fixed, each = found
        return span(fixed, runs) + samples * span(each, runs)

    def largest_measured(self, kind: str) -> int:
        """The most samples at which every layer was measured on ``kind``."""
        found = self._largest.get(kind)
        if found is None:
            found = self._largest[kind] = min(measured[-1].samples for measured in self._by_layer(kind))
        return found

    def overhead_s(self, kind: str) -> float:
        """What the executor takes per action."""
        return self.profile.action_overhead_s.get(kind, 0.0)

    def evidence(self, kind: str, samples: float, runs: Iterable[Run]) -> Evidence:
        """The weakest evidence among the layers of ``runs``."""
        table = self.at(kind, samples)
        return weakest(evidence for first, last in runs for evidence in table.evidence[first:last])

    def _size_table(self, kind: str, samples: float) -> SizeTable:
        values, evidence = self._costs(kind, samples)
        sums = [_running(values[:, column]) for column in range(len(QUANTITIES) - 1)]
        return SizeTable(sums[0], sums[1], sums[2], sums[3], sums[4], values[:, -1], evidence)

    def _costs(self, kind: str, samples: float) -> tuple[Array, tuple[Evidence, ...]]:
        """(layer, quantity), and how well each layer's are known."""
        alike = self._alike.get(kind)
        if alike is None:
            alike = self._alike[kind] = measured_alike(self._by_layer(kind))
        if alike:
            return alike[0].at(samples)
        costs = [layer_cost(measured, samples) for measured in self._by_layer(kind)]
        values = np.array([cost.values for cost in costs], dtype=np.float64).reshape(len(costs), len(QUANTITIES))
        return values, tuple(cost.evidence for cost in costs)

    def _by_layer(self, kind: str) -> tuple[Sequence[Measurement], ...]:
        found = self._measured.get(kind)
        if found is None:
            found = self._measured[kind] = _by_layer(self.profile, kind)
        return found


def _left(profile: Profile, kind: str) -> tuple[Array, Array]:
    """By layer, as running sums: bytes whatever the number of samples, and bytes a sample."""
    graph, values = profile.graph, profile.graph.values()
    later = {m.layer for m in profile.measurements.get(kind, ()) if m.backward_weight_s > 0}
    fixed, each = [], []
    for layer in graph.layers:
        specs = [values[name] for name in layer.inputs] + list(layer.outputs) if layer.name in later else []
        floats = [spec for spec in specs if spec.is_float]
        fixed.append(float(sum(spec.num_bytes for spec in floats if not spec.has_samples)))
        each.append(sum(spec.num_bytes for spec in floats if spec.has_samples) / graph.samples)
    return _running(np.array(fixed)), _running(np.array(each))


def _by_layer(profile: Profile, kind: str) -> tuple[Sequence[Measurement], ...]:
    collected: dict[str, list[Measurement]] = {layer.name: [] for layer in profile.graph.layers}
    for measurement in profile.measurements.get(kind, ()):
        if measurement.layer in collected:
            collected[measurement.layer].append(measurement)
    missing = [name for name, found in collected.items() if not found]
    if missing:
        raise MissingMeasurementError(
            f"{len(missing)} of {len(collected)} layers were not measured on {kind}",
            [f"such as {', '.join(missing[:3])}"],
            ["profile the model again on every kind of device"],
        )
    return tuple(sorted(found, key=lambda m: m.samples) for found in collected.values())


def _parameter_table(profile: Profile, kind: str, graph: GraphTable) -> ParameterTable:
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
    found = [costs.get(layer.name) for layer in profile.graph.layers]
    accumulate = np.array([cost.accumulate_s if cost else 0.0 for cost in found])
    update = np.array([cost.update_s if cost else 0.0 for cost in found])
    return ParameterTable(_running(accumulate), _running(update))


def _graph_table(graph: Graph) -> GraphTable:
    seen: set[str] = set()
    parameters = []
    for layer in graph.layers:
        new = set(layer.parameters) - seen
        seen |= new
        parameters.append(float(sum(graph.parameters[name].num_bytes for name in new)))
    norms = [_norm(layer) for layer in graph.layers]
    return GraphTable(
        _running(np.array(parameters)),
        _running(np.array([float(layer.buffer_bytes) for layer in graph.layers])),
        np.array([channels for channels, _ in norms], dtype=np.int64),
        np.array([num_bytes for _, num_bytes in norms], dtype=np.int64),
    )


def _norm(layer: Layer) -> tuple[int, int]:
    if kind_named(layer.kind).REDUCTION != "statistics":
        return 0, 0
    spec = layer.outputs[0]
    channel = spec.dims.index("channel") if "channel" in spec.dims else 1
    return spec.shape[channel], BYTES_PER_ELEMENT[spec.dtype]


def _running(values: Array) -> Array:
    return np.concatenate(([0.0], np.cumsum(values)))
