"""Columns over the layers of a graph: running sums, so that any stretch is one subtraction, and what has no sum."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from planner.costs.quantiles import Range
from planner.ir.cluster import Evidence
from planner.ir.errors import MissingMeasurementError
from planner.ir.graph import BYTES_PER_ELEMENT, Graph, Layer
from planner.ir.profile import Profile
from planner.layers import kind as kind_named

Array = NDArray[np.float64]
Flags = NDArray[np.bool_]


@dataclass(slots=True, eq=False)
class Bounds:
    """Factors on the seconds of each layer, between which four of five such figures turned out; 1 where measured.

    Computed when they are first asked for.
    """

    make: Callable[[], Sequence[Range]] = field(repr=False)
    _found: tuple[Array, ...] = field(init=False, default=(), repr=False)

    def columns(self) -> tuple[Array, ...]:
        """(low, high), each by layer."""
        if not self._found:
            pairs = np.array(self.make(), dtype=np.float64).reshape(-1, 2)
            self._found = pairs[:, 0], pairs[:, 1]
        return self._found


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
        return self.bounds.columns()[0]

    @property
    def high(self) -> Array:
        """By layer, the factor that one in ten lies above."""
        return self.bounds.columns()[1]


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
    found = [costs.get(layer.name) for layer in profile.graph.layers]
    accumulate = np.array([cost.accumulate_s if cost else 0.0 for cost in found])
    update = np.array([cost.update_s if cost else 0.0 for cost in found])
    return ParameterTable(running(accumulate), running(update))


def graph_table(graph: Graph) -> GraphTable:
    """The graph's own table."""
    seen: set[str] = set()
    parameters = []
    for layer in graph.layers:
        new = set(layer.parameters) - seen
        seen |= new
        parameters.append(float(sum(graph.parameters[name].num_bytes for name in new)))
    norms = [_norm(layer) for layer in graph.layers]
    return GraphTable(
        running(np.array(parameters)),
        running(np.array([float(layer.buffer_bytes) for layer in graph.layers])),
        np.array([channels for channels, _ in norms], dtype=np.int64),
        np.array([num_bytes for _, num_bytes in norms], dtype=np.int64),
    )


def _norm(layer: Layer) -> tuple[int, int]:
    if kind_named(layer.kind).REDUCTION != "statistics":
        return 0, 0
    spec = layer.outputs[0]
    channel = spec.dims.index("channel") if "channel" in spec.dims else 1
    return spec.shape[channel], BYTES_PER_ELEMENT[spec.dtype]


def running(values: Array) -> Array:
    """Running sums, from 0."""
    return np.concatenate(([0.0], np.cumsum(values)))
