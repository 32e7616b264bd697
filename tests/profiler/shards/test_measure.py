"""Parts of layers: which are measured, what they compute at their own shapes, what is missing of a profile."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cuda_ops import device_description
from cuda_ops.dense.conv_kernels import onednn_convolution
from planner.costs.layers.interpolation import layer_cost
from planner.costs.layers.part_shapes import part_shapes
from planner.ir.cluster import Cluster, DeviceSpec
from planner.ir.errors import MissingDeviceError, StaleFileError
from planner.ir.graph import Graph
from planner.ir.profile import Measurement, ModelSource, Optimizer, PartShape, Profile, Provenance
from planner.layers import kind
from profiler.capture.graph import capture
from profiler.measure.back_ends import back_end_keys
from profiler.measure.memory import footprints
from profiler.measure.partial_results import SizeCosts
from profiler.measure.sizes import Limits
from profiler.measure.timing import QUICK, segments
from profiler.shards.arguments import part_box
from profiler.shards.measure import measure_round, next_parts, rounds, whole_values
from profiler.shards.missing import measure_missing
from profiler.shards.network import PartPass, part_network
from profiler.source.losses import mean_of_squares
from profiler.source.model import LoadedModel
from profiler.source.source import load_model
from runtime.captured import CapturedModule
from tests.profiler.capture.test_graph import captured, loaded
from tests.profiler.test_models import TINY

NETWORKS = {factory.__name__: factory for factory in TINY}
RESNET = NETWORKS["resnet18"]
SOME = ("resnet18", "unet3d", "gpt", "gnmt", "cosmoflow")
EVERYTHING = ("sample", "spatial", "channel")
APART = frozenset({"batch_norm", "layer_norm", "global_pool", "loss", "adaptive_pool", "upsample", "transposed_conv"})
"""Kinds of which a part by itself is not that part of the whole: statistics and sums over the part alone, or work that
starts at another place."""


def tensors_of(graph: CapturedModule, batch: LoadedModel) -> dict[str, Tensor]:
    return dict(zip(graph.graph.inputs, (*batch.inputs, *batch.targets), strict=True))


def shapes_of(graph: CapturedModule, sizes: tuple[int, ...] = (2, 4), num_ranks: int = 4) -> tuple[PartShape, ...]:
    return part_shapes(graph.graph, sizes, EVERYTHING, num_ranks)


def whole_part(graph: CapturedModule, shape: PartShape, samples: int, value: Tensor) -> Tensor:
    """The part of what the layer computes."""
    layer = graph.graph.by_name()[shape.layers[0]]
    values = graph.graph.values()
    inputs = tuple(values[name].at(samples, graph.graph.samples) for name in layer.inputs)
    spec = layer.outputs[0].at(samples, graph.graph.samples)
    work = kind(layer.kind).work(layer, inputs)
    box = part_box(spec if work.shape == layer.outputs[0].shape else work, samples, shape)
    return value[tuple(slice(interval.start, interval.stop) for interval in box)]


@pytest.mark.parametrize("factory", [NETWORKS[name] for name in SOME], ids=SOME)
def test_a_part_computes_what_the_layer_does_there(factory: Callable[..., Any]) -> None:
    graph, _ = captured(factory)
    value_of = whole_values(graph, tensors_of(graph, loaded(factory, 4)), 4)
    kinds = {layer.name: layer.kind for layer in graph.graph.layers}
    node_of = {node.name: node for node in graph.graph_module.graph.nodes}
    shapes = shapes_of(graph, (4,), 2)
    network = part_network(graph, value_of, 4, shapes)
    run = PartPass(network)
    for part in segments(network.captured):
        run.forward(part)
        shape = network.shapes[part.name]
        name = shape.layers[0]
        if kinds[name] in APART:
            continue
        found = run.value(part.results[0])
        expected = whole_part(graph, shape, 4, value_of(node_of[graph.node_of_value[name]]))
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4, msg=lambda text, n=name: f"{n}: {text}")
    known = set(network.shapes.values())
    of_classes = {"loss"}  # of parts of the classes: only with the others' sums is it anything
    moved = {"slice", "reshape", "pad", "opaque"}
    assert {kinds[shape.layers[0]] for shape in shapes if shape not in known} <= moved | of_classes
    assert {kinds[shape.layers[0]] for shape in known} - APART


class Windows(nn.Module):
    """Convolutions and pools with every option that a part must mind."""

    def __init__(self) -> None:
        super().__init__()
        self.strided = nn.Conv2d(4, 8, (5, 2), stride=2, padding=(1, 0), dilation=(2, 1))
        self.same = nn.Conv2d(8, 8, 3, padding="same", dilation=2)
        self.grouped = nn.Conv2d(8, 12, 3, padding=1, groups=4)
        self.depthwise = nn.Conv2d(12, 12, 3, padding=1, groups=12)
        self.up = nn.ConvTranspose2d(12, 6, 3, stride=2, padding=1, output_padding=1)
        self.mean = nn.AvgPool2d(3, stride=1, padding=1)
        self.most = nn.MaxPool2d(2)
        self.smaller = nn.AdaptiveAvgPool2d((4, 4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.depthwise(self.grouped(self.same(self.strided(x))))
        x = self.most(self.mean(self.up(x)))
        return self.smaller(nn.functional.interpolate(x, scale_factor=2, mode="nearest"))


@pytest.fixture(scope="module")
def windows() -> tuple[CapturedModule, LoadedModel]:
    torch.manual_seed(0)
    model = LoadedModel(Windows(), (torch.randn(2, 4, 32, 32),), (), mean_of_squares)
    return capture(model), model


def test_windows_of_every_kind_are_cut(windows: tuple[CapturedModule, LoadedModel]) -> None:
    graph, model = windows
    value_of = whole_values(graph, tensors_of(graph, model), 2)
    kinds = {layer.name: layer.kind for layer in graph.graph.layers}
    node_of = {node.name: node for node in graph.graph_module.graph.nodes}
    shapes = shapes_of(graph, (2,), 2)
    network = part_network(graph, value_of, 2, shapes)
    left_out = {(kinds[s.layers[0]], s.layers[0], s.part) for s in shapes if s not in set(network.shapes.values())}
    assert not left_out
    run = PartPass(network)
    for part in segments(network.captured):
        run.forward(part)
        shape = network.shapes[part.name]
        found = run.value(part.results[0])
        if kinds[shape.layers[0]] == "loss":
            continue
        assert tuple(found.shape[1:]) == shape.part
        if kinds[shape.layers[0]] in ("conv", "pool"):
            value = value_of(node_of[graph.node_of_value[shape.layers[0]]])
            torch.testing.assert_close(found, whole_part(graph, shape, 2, value), rtol=1e-4, atol=1e-5)


def test_filters_inside_of_a_group_are_left_out(windows: tuple[CapturedModule, LoadedModel]) -> None:
    graph, model = windows
    value_of = whole_values(graph, tensors_of(graph, model), 2)
    extents = graph.graph.by_name()["grouped"].outputs[0].shape[2:]
    inside, groups = (PartShape(("grouped",), 2, (filters, *extents)) for filters in (4, 6))
    assert list(part_network(graph, value_of, 2, (inside, groups)).shapes.values()) == [groups]


def test_rounds_take_one_part_of_each_layer_from_the_least_pass_that_has_its_samples() -> None:
    a = ("conv1", "conv2")
    b = ("pool",)
    shapes = [PartShape(a, 1, (1,)), PartShape(b, 1, (1,)), PartShape(a, 1, (2,)), PartShape(a, 3, (1,))]
    shapes.append(PartShape(a, 5, (1,)))  # of more samples than any pass
    found = rounds(shapes, (2, 4))
    assert [(each.samples, each.shapes) for each in found] == [
        (2, (shapes[0], shapes[1])),
        (2, (shapes[2],)),
        (4, (shapes[3],)),
    ]


def test_every_part_is_measured_for_all_layers_like_it() -> None:
    graph, _ = captured(RESNET)
    tensors = tensors_of(graph, loaded(RESNET, 2))
    shapes = tuple(shape for shape in shapes_of(graph, (2,), 2) if shape.part[-2:] == (4, 8) and shape.samples == 2)
    names = [name for shape in shapes for name in shape.layers]
    memory = footprints(graph, tensors, 2)
    layers = graph.graph.by_name()
    whole = SizeCosts(2, tuple(Measurement(n, 2, 1.0, 1.0, 1.0, 0.0, memory[n].saved_bytes, 0, 1) for n in layers))
    passes: list[tuple[str, float, float]] = []
    value_of = whole_values(graph, tensors, 2)
    (each,) = rounds(shapes, (2,))
    found = list(measure_round(graph, value_of, each, whole, QUICK, lambda *seen: passes.append(seen)))
    assert [one.layer for one in found] == names
    assert len(passes) == QUICK.num_warm_ups + QUICK.min_runs + QUICK.split_runs + 1
    assert {layers[name].kind for name in names} >= {"conv", "batch_norm"}
    for one in found:
        seconds = (one.forward_s, one.backward_s, one.backward_input_s, one.backward_weight_s)
        assert all(math.isfinite(value) and value >= 0 for value in seconds)
        assert one.part[-2:] == (4, 8)
        assert one.saved_bytes == round(memory[one.layer].saved_bytes / 2)
        assert one.workspace_bytes > 0
        assert bool(one.key) == (layers[one.layer].kind == "conv")
        assert bool(one.backward_weight_s) == (layers[one.layer].kind == "conv")


def test_what_is_measured_leaves_the_model_alone() -> None:
    graph, model = captured(RESNET)
    tensors = tensors_of(graph, loaded(RESNET, 2))
    value_of = whole_values(graph, tensors, 2)
    before = {name: tensor.clone() for name, tensor in model.module.state_dict().items()}
    network = part_network(graph, value_of, 2, shapes_of(graph, (2,), 2))
    run = PartPass(network)
    parts = segments(network.captured)
    for part in parts:
        run.forward(part)
    run.start_backward()
    for part in reversed(parts):
        run.backward(part)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.module.state_dict().items())
    assert all(parameter.grad is None for parameter in model.module.parameters())


def test_a_part_for_which_torch_would_take_a_loop_runs_in_onednn() -> None:
    torch.manual_seed(0)
    model = LoadedModel(nn.Conv3d(16, 16, 3, padding=1), (torch.randn(1, 16, 16, 64, 64),), (), mean_of_squares)
    graph = capture(model)
    value_of = whole_values(graph, tensors_of(graph, model), 1)
    name = next(layer.name for layer in graph.graph.layers if layer.kind == "conv")
    shape = PartShape((name,), 1, (16, 8, 64, 64))
    network = part_network(graph, value_of, 1, [shape])
    assert back_end_keys(network.captured, 1) == {"part0": "Mkldnn"}
    (part,) = segments(network.captured)
    assert part.calls[0].target is onednn_convolution
    run = PartPass(network)
    run.forward(part)
    node = next(n for n in graph.graph_module.graph.nodes if n.name == graph.node_of_value[name])
    expected = whole_part(graph, shape, 1, value_of(node))
    torch.testing.assert_close(run.value(part.results[0]), expected, rtol=1e-3, atol=1e-4)


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


SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
SHAPES = tuple(PartShape(("conv", "twin"), n, (8, 4)) for n in SIZES)


def measured_of(shape: PartShape, seconds: float) -> list[Measurement]:
    return [
        Measurement(name, shape.samples, seconds / 3, 2 * seconds / 3, 0, 0, 0, 0, 10, part=shape.part)
        for name in shape.layers
    ]


def sampled(
    cost: Callable[[int], float], share: float = 0.5, shapes: tuple[PartShape, ...] = SHAPES
) -> list[list[int]]:
    """The numbers of samples that are asked for, turn by turn; a cost of 0: it cannot be run alone."""
    tried: list[PartShape] = []
    found: list[Measurement] = []
    turns = []
    while turn := next_parts(shapes, tried, found, {"conv": share}, Limits(), layer_cost):
        assert not set(turn) & set(tried)
        turns.append([shape.samples for shape in turn])
        tried += turn
        found += [one for shape in turn if cost(shape.samples) for one in measured_of(shape, cost(shape.samples))]
    return turns


def test_smooth_parts_need_the_ends_and_a_middle() -> None:
    assert sampled(lambda n: 0.01 * n) == [[1, 32], [6]]


def test_parts_of_small_layers_need_the_ends_alone() -> None:
    assert sampled(lambda n: 0.01 * n if n < 12 else 0.005 * n, share=0.01) == [[1, 32]]


@pytest.mark.parametrize(("below", "above"), [(3, 4), (12, 16), (24, 32)])
def test_a_cliff_is_bracketed(below: int, above: int) -> None:
    asked = {n for turn in sampled(lambda n: 0.01 * n * (1.0 if n <= below else 0.5)) for n in turn}
    assert {below, above} <= asked
    assert len(asked) < len(SIZES)


def test_what_cannot_be_run_alone_is_tried_at_the_ends_and_the_middle_and_left() -> None:
    assert sampled(lambda n: 0.0) == [[1, 32], [6]]


def test_lines_of_one_or_two_are_measured_whole() -> None:
    assert sampled(lambda n: 0.01 * n, shapes=SHAPES[:1]) == [[1]]
    assert sampled(lambda n: 0.01 * n, shapes=SHAPES[3:5]) == [[4, 6]]
    assert sampled(lambda n: 0.01 * n, shapes=()) == []


def test_parts_of_other_extents_and_layers_are_lines_of_their_own() -> None:
    other = tuple(PartShape(("pool",), n, (4, 4)) for n in SIZES[:3])
    assert sampled(lambda n: 0.01 * n, shapes=(*SHAPES, *other))[0] == [1, 32, 1, 3]
