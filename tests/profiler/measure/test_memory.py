"""How high memory rises while layers run, beside what torch's allocator counts of the whole network."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch

from cuda_ops.memory import available, meter_of
from planner.costs.memory.levels import Course, course
from planner.ir.profile import LEVEL_NAMES, ModelSource
from profiler import Captured, LoadedModel, load_model
from profiler.capture.graph import capture
from profiler.capture.sizes import NUM_SAMPLES
from profiler.measure.memory import footprints
from profiler.source.model import example_of

pytestmark = pytest.mark.skipif(bool(available()), reason="no compiler for the counting allocator")

NETWORKS = {
    "residual": ModelSource(
        "profiler.models.resnet:resnet18", {"width": "8", "num_classes": "5", "depths": "[1, 1]"}, (4, 3, 32, 32)
    ),
    "transformer": ModelSource(
        "profiler.models.gpt:gpt",
        {"vocabulary": "50", "width": "32", "layers": "2", "heads": "2", "context": "16"},
        (4, 16),
    ),
}


def course_of(captured: Captured, model: LoadedModel) -> Course:
    graph = captured.graph
    found = footprints(captured, example_of(graph.inputs, model, graph.samples), graph.samples)
    names = [layer.name for layer in graph.layers]
    seen: set[str] = set()
    gradients = []
    for layer in graph.layers:
        gradients.append(sum(graph.parameters[name].num_bytes for name in {*layer.parameters} - seen))
        seen |= {*layer.parameters}
    levels = np.array([[getattr(found[n].levels, each) for n in names] for each in LEVEL_NAMES], dtype=float)
    return course(np.array([found[n].saved_bytes for n in names], dtype=float), np.array(gradients, float), levels)


@pytest.mark.parametrize("source", NETWORKS.values(), ids=NETWORKS)
def test_the_levels_of_layers_make_up_the_peaks_of_the_network(source: ModelSource) -> None:
    torch.set_num_threads(1)
    model = load_model(source)
    captured = capture(model)
    expected = course_of(captured, model)
    graph = captured.graph_module
    tensors = example_of(captured.graph.inputs, model, captured.graph.samples)
    names = [node.target for node in graph.graph.nodes if node.op == "placeholder"]
    inputs = [captured.graph.samples if name == NUM_SAMPLES else tensors[name] for name in names]
    meter = meter_of(torch.device("cpu"))
    assert meter is not None
    peaks = []
    for _ in range(2):  # gradients are made, then there
        gc.collect()
        meter.take_peak()
        start = meter.current_bytes
        loss = graph(*inputs)
        loss = loss[0] if isinstance(loss, tuple) else loss
        peaks.append(meter.take_peak() - start)
        loss.backward()
        peaks.append(meter.take_peak() - start)
        del loss
    assert expected.forward == pytest.approx(peaks[0], rel=0.03)
    assert expected.backward_first == pytest.approx(peaks[1], rel=0.03)
    assert expected.backward_later == pytest.approx(peaks[3], rel=0.03)
