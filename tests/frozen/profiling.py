"""What the profiler makes of networks and of measurements, without a clock."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from planner.costs.layers.interpolation import layer_cost
from planner.ir.profile import Measurement, MeasuringProcess, ModelSource
from planner.layers import kind as kind_named
from profiler.capture.graph import capture
from profiler.measure.sizes import KeyChange, Limits, likely_sizes, next_size
from profiler.merge import process_spread
from profiler.source.source import load_model

NETWORKS = ("windows", "summed_classes", "mean_over_classes", "square_of_a_mean", "own_sum", "fixed_samples")
BATCH = 96


def values() -> dict[str, Callable[[], Any]]:
    """What is frozen, by name."""
    captured = {f"captured-{name}": partial(captured_layers, name) for name in NETWORKS}
    return {**captured, "sizes": sizes_asked_for, "spread": spread_of_processes}


def captured_layers(network: str) -> dict[str, Any]:
    """How parts of a batch make up what samples are reduced to; of each layer what it is, reads, makes and computes."""
    captured = capture(load_model(ModelSource(f"tests.frozen.networks:{network}", {}, (), "float64"), 0))
    specs = captured.graph.values()
    layers = {
        layer.name: {
            "kind": layer.kind,
            "attributes": {name: str(value) for name, value in sorted(layer.attributes.items())},
            "inputs": [*layer.inputs],
            "outputs": [[*spec.dims, *spec.shape, spec.dtype] for spec in layer.outputs],
            "flops": kind_named(layer.kind).forward_flops(layer, tuple(specs[name] for name in layer.inputs)),
        }
        for layer in captured.graph.layers
    }
    return {"polymorphic": captured.polymorphic, "reductions": dict(captured.reductions), "layers": layers}


def sizes_asked_for() -> dict[str, list[int]]:
    """Of costs with jumps, the sizes that are measured one after another, and those that are likely at first."""
    changes = [KeyChange(samples, ("rough",)) for samples in (2, 5, 9, 14, 23, 37, 61)]
    measured: dict[int, list[Measurement]] = {}
    likely = likely_sizes(BATCH, measured, changes, Limits(), layer_cost)
    while (size := next_size(BATCH, measured, changes, Limits(), layer_cost)) is not None:
        measured[size] = [_measured("smooth", size, 1e-3), _measured("rough", size, 4e-3 * (1 + size % 5))]
    return {"likely": [*likely], "measured": [*measured]}


def spread_of_processes() -> dict[str, float]:
    """Of three processes, one of which did not measure every size."""
    steps = ({"1": 0.010, "8": 0.060}, {"1": 0.011, "8": 0.080}, {"1": 0.0135})
    return process_spread([MeasuringProcess(1e-3, 1e-3, 0.0, False, step_s) for step_s in steps])


def _measured(layer: str, samples: int, sample_s: float) -> Measurement:
    forward_s = sample_s * (samples + 0.5)
    return Measurement(layer, samples, forward_s, 2 * forward_s, forward_s, forward_s, 0, 0, 10)
