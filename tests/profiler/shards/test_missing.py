"""A layer's missing size and a part of it, measured in a process of this machine."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cuda_ops import device_description
from planner.ir.cluster import Cluster, DeviceSpec
from planner.ir.errors import MissingDeviceError, StaleFileError
from planner.ir.graph import Graph
from planner.ir.profile import ModelSource, Optimizer, PartShape, Profile, Provenance
from profiler.capture.graph import capture
from profiler.shards.missing import measure_missing
from profiler.source.source import load_model

SOURCE = ModelSource(
    "profiler.models.resnet:resnet18", {"width": "4", "num_classes": "5", "depths": "[1]"}, (4, 3, 16, 16)
)


@pytest.fixture(scope="module")
def graph() -> Graph:
    return capture(load_model(SOURCE)).graph


def profile(graph: Graph) -> Profile:
    kind = device_description().processor
    device = DeviceSpec("n0/cpu0", kind, "n0", 2**30)
    return Profile(SOURCE, Optimizer(), graph, Cluster((device,), {}), {kind: ()}, {kind: {}}, Provenance({}))


def test_sizes_and_parts_that_are_asked_for_are_measured(graph: Graph) -> None:
    first = next(layer for layer in graph.layers if layer.kind == "conv")
    channels, height, width = first.outputs[0].shape[1:]
    shape = PartShape((first.name,), 1, (channels, height // 2, width))
    given = profile(graph)
    found = measure_missing(given, given.cluster.devices[0].kind, (3,), (shape,), quick=True)
    assert {(m.layer, m.samples) for m in found.whole} == {(layer.name, 3) for layer in graph.layers}
    assert [(m.layer, m.samples, m.part) for m in found.parts] == [(first.name, 1, shape.part)]
    assert all(m.forward_s > 0 for m in (*found.whole, *found.parts))


def test_a_model_that_is_another_one_now_is_refused(graph: Graph) -> None:
    given = profile(replace(graph, samples=8))
    with pytest.raises(StaleFileError):
        measure_missing(given, given.cluster.devices[0].kind, (2,), (), quick=True)


def test_another_kind_of_device_is_refused(graph: Graph) -> None:
    with pytest.raises(MissingDeviceError, match="Cray X cannot be measured"):
        measure_missing(profile(graph), "Cray X", (2,), ())
