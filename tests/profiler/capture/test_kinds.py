from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from planner.ir.graph import Layer
from planner.layers import check_samples_apart
from profiler import LoadedModel, mean_of_squares
from profiler.capture.graph import capture
from profiler.source.losses import TrainedLoss

IMAGE, SEQUENCE = (2, 4, 9, 9), (2, 5, 4)


@pytest.fixture(autouse=True)
def _one_thread_and_a_seed() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


def first_layer(module: nn.Module | Callable[[Tensor], Tensor], shape: tuple[int, ...]) -> Layer:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = module

        def forward(self, x: Tensor) -> Any:
            return self.part(x)

    return capture(LoadedModel(Net(), (torch.randn(shape),), (), TrainedLoss(mean_of_squares))).graph.layers[0]


def window(kernel: int, stride: int, padding: int, dilation: int, dims: int = 2) -> dict[str, Any]:
    numbers = {"kernel": kernel, "stride": stride, "padding": padding, "dilation": dilation}
    return {name: (number,) * dims for name, number in numbers.items()}


def padding(before: tuple[int, ...], after: tuple[int, ...], mode: str) -> dict[str, Any]:
    return {"before": before, "after": after, "mode": mode}


def interpolation(
    mode: str, space: int, numerators: tuple[int, ...] = (), denominators: tuple[int, ...] = (), aligned: bool = False
) -> dict[str, Any]:
    factors = {"factor_numerators": numerators, "factor_denominators": denominators} if numerators else {}
    return {"mode": mode, "space": space, "align_corners": aligned, **factors}


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize(
    ("module", "shape", "kind", "attributes"),
    [
        (nn.Conv2d(4, 6, 3, 2, 1, groups=2), IMAGE, "conv", {**window(3, 2, 1, 1), "groups": 2}),
        (nn.Conv1d(4, 6, 3, padding="same"), (2, 4, 9), "conv", {**window(3, 1, 1, 1, 1), "groups": 1}),
        (nn.Conv2d(4, 6, 3, padding="valid"), IMAGE, "conv", {**window(3, 1, 0, 1), "groups": 1}),
        (nn.Conv2d(4, 6, 2, padding="same"), IMAGE, "conv", {**window(2, 1, 0, 1), "groups": 1}),
        (nn.Conv2d(4, 6, 4, padding="same", dilation=3), IMAGE, "conv", {**window(4, 1, 4, 3), "groups": 1}),
        (nn.Conv2d(4, 8, 3, groups=4), IMAGE, "conv", {**window(3, 1, 0, 1), "groups": 4}),
        (nn.Conv3d(4, 2, 3, dilation=2), (2, 4, 9, 9, 9), "conv", {**window(3, 1, 0, 2, 3), "groups": 1}),
        (
            nn.ConvTranspose2d(4, 6, 3, 2, 1, output_padding=1),
            IMAGE,
            "transposed_conv",
            {**window(3, 2, 1, 1), "groups": 1, "output_padding": (1, 1)},
        ),
        (nn.MaxPool2d(3), IMAGE, "pool", {**window(3, 3, 0, 1), "ceil_mode": False}),
        (nn.AvgPool2d(3, 2, 1, ceil_mode=True), IMAGE, "pool", {**window(3, 2, 1, 1), "ceil_mode": True}),
        (nn.AdaptiveAvgPool2d(2), IMAGE, "adaptive_pool", {"output_size": (2, 2)}),
        (nn.BatchNorm2d(4), IMAGE, "batch_norm", {"training": True}),
        (nn.AdaptiveAvgPool2d((1, 2)), IMAGE, "adaptive_pool", {"output_size": (1, 2)}),
        (nn.AdaptiveAvgPool2d(1), IMAGE, "global_pool", {}),
        (nn.AdaptiveAvgPool3d(1), (2, 4, 3, 3, 3), "global_pool", {}),
        (nn.AdaptiveMaxPool2d(1), IMAGE, "adaptive_pool", {}),
        (
            nn.GroupNorm(2, 4),
            IMAGE,
            "layer_norm",
            {"dims": (1, 2, 3), "groups": 2, "by_channel": True},
        ),
        (nn.InstanceNorm2d(4), IMAGE, "layer_norm", {"dims": (2, 3), "by_channel": True}),
        (
            nn.InstanceNorm2d(4, track_running_stats=True),
            IMAGE,
            "opaque",
            {"mixes_samples": True, "keeps_samples": "part.running_mean"},
        ),
        (nn.LayerNorm((5, 4)), SEQUENCE, "layer_norm", {"dims": (1, 2)}),
        (nn.Softmax(-1), SEQUENCE, "softmax", {"dim": 2}),
        (nn.LogSoftmax(1), SEQUENCE, "softmax", {"dim": 1}),
        (nn.Linear(4, 3), SEQUENCE, "linear", {}),
        (nn.GELU(), SEQUENCE, "pointwise", {}),
        (nn.ReLU(inplace=True), SEQUENCE, "pointwise", {}),
        (nn.Hardtanh(), SEQUENCE, "pointwise", {}),
        (nn.PReLU(), SEQUENCE, "pointwise", {}),
        (nn.Flatten(), SEQUENCE, "reshape", {"kept": (0, -1)}),
        (nn.Flatten(2), IMAGE, "reshape", {"kept": (0, 1, -1)}),
        (nn.Unflatten(1, (2, 2)), IMAGE, "reshape", {"kept": (0, -1, -1, 2, 3)}),
        (nn.ZeroPad2d((1, 2, 0, -3)), IMAGE, "pad", padding((0, 0, 0, 1), (0, 0, -3, 2), "constant")),
        (nn.ReflectionPad2d((1, 2, 3, 0)), IMAGE, "pad", padding((0, 0, 3, 1), (0, 0, 0, 2), "reflect")),
        (nn.ReplicationPad3d(1), (2, 4, 3, 3, 3), "pad", padding((0, 0, 1, 1, 1), (0, 0, 1, 1, 1), "replicate")),
        (nn.CircularPad1d((2, 1)), (2, 4, 9), "pad", padding((0, 0, 2), (0, 0, 1), "circular")),
        (
            nn.GRU(4, 3, bidirectional=True, batch_first=True),
            SEQUENCE,
            "lstm",
            {"bidirectional": True, "batch_first": True, "num_layers": 1},
        ),
        (nn.Upsample(scale_factor=2), IMAGE, "upsample", interpolation("nearest", 2, (2, 2), (1, 1))),
        (
            nn.Upsample(scale_factor=1.5, mode="nearest-exact"),
            IMAGE,
            "upsample",
            interpolation("nearest-exact", 2, (3, 3), (2, 2)),
        ),
        (nn.Upsample((5, 20), mode="bilinear"), IMAGE, "upsample", interpolation("linear", 2)),
        (
            nn.Upsample((20, 20), mode="bilinear", align_corners=True),
            IMAGE,
            "upsample",
            interpolation("linear", 2, aligned=True),
        ),
        (
            nn.Upsample(scale_factor=(2, 2.5), mode="bicubic"),
            IMAGE,
            "upsample",
            interpolation("cubic", 2, (2, 5), (1, 2)),
        ),
        (nn.Upsample(12, mode="linear"), (2, 4, 9), "upsample", interpolation("linear", 1)),
        (
            nn.Upsample(scale_factor=2, mode="trilinear"),
            (2, 4, 3, 3, 3),
            "upsample",
            interpolation("linear", 3, (2, 2, 2), (1, 1, 1)),
        ),
        (nn.Dropout(), IMAGE, "pointwise", {}),
        (nn.Dropout2d(), IMAGE, "pointwise", {}),
        (nn.PixelShuffle(2), IMAGE, "opaque", {}),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_a_module_has_its_kind_and_attributes(
    module: nn.Module, shape: tuple[int, ...], kind: str, attributes: dict[str, Any]
) -> None:
    layer = first_layer(module, shape)
    found = dict(layer.attributes)
    assert str(found.pop("op")).startswith("aten.")
    assert (layer.kind, found) == (kind, attributes)


def test_concatenation_stacking_and_attention() -> None:
    def forward(x: Tensor) -> Tensor:
        y = x.sin()
        z = torch.cat((y, x), -1)
        w = torch.stack((x, y), 1)
        return nn.functional.scaled_dot_product_attention(w, w, w).sum((1, 3)) + z.sum(2)

    class Net(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return forward(x)

    x = torch.randn(SEQUENCE, requires_grad=True)
    graph = capture(LoadedModel(Net(), (x,), (), TrainedLoss(mean_of_squares))).graph
    layers = graph.by_name()
    assert (layers["cat"].kind, layers["cat"].attributes["dim"]) == ("concat", 2)
    assert layers["cat"].inputs == ("sin", "inputs")
    assert (layers["stack"].kind, layers["stack"].attributes["dim"]) == ("concat", 1)
    attention = layers["scaled_dot_product_attention"]
    assert attention.kind == "attention"
    assert attention.inputs == ("stack",) * 3
    assert attention.outputs[0].dims == ("sample", "head", "time", "feature")


def test_a_layer_used_twice_has_two_names() -> None:
    relu = nn.ReLU()

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.relu, self.linear = relu, nn.Linear(4, 4)
            self.block = nn.Sequential(nn.Linear(4, 4), relu)

        def forward(self, x: Tensor) -> Tensor:
            x = self.relu(self.linear(x)) + x
            return self.block(self.relu(self.linear(x)) * 2 + x)

    graph = capture(LoadedModel(Net(), (torch.randn(SEQUENCE),), (), TrainedLoss(mean_of_squares))).graph
    assert [layer.name for layer in graph.layers] == [
        "linear",
        "relu",
        "add",
        "linear_2",
        "relu_2",
        "mul",
        "add_2",
        "block.0",
        "block.1",
        "loss.square",
        "loss",
    ]


@pytest.mark.parametrize("by_frequency", [False, True])
def test_gradients_by_frequency_keep_samples_together(by_frequency: bool) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = nn.Embedding(7, 3, scale_grad_by_freq=by_frequency)

        def forward(self, tokens: Tensor) -> Tensor:
            return self.part(tokens)

    graph = capture(LoadedModel(Net(), (torch.randint(7, (2, 5)),), (), TrainedLoss(mean_of_squares))).graph
    assert ("part" in check_samples_apart(graph)) == by_frequency
