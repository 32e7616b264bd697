"""Kinds, attributes and dims of layers, as modules and the user's code write them; losses; a user's rules."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from planner.ir.errors import UnknownNameError, UnsupportedModelError
from planner.ir.graph import Graph, Layer, TensorSpec
from planner.layers import check_samples_apart, kinds
from profiler import LoadedModel, mean_of_squares
from profiler.capture.graph import capture
from profiler.capture.kinds import NO_RULES, Rules
from profiler.capture.layers import output_names
from profiler.source.losses import TrainedLoss

IMAGE = (2, 4, 9, 9)
SEQUENCE = (2, 5, 4)


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
            self.relu = relu
            self.linear = nn.Linear(4, 4)
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


PICTURE = (2, 4, 6, 9)
NAMES = ("sample", "channel", "height", "width")


class Net(nn.Module):
    def __init__(self, function: Callable[[Any, Tensor], Tensor], **parts: nn.Module) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def graph_of(
    function, *targets: Tensor, loss=None, rules: Rules = NO_RULES, shape=PICTURE, **parts: nn.Module
) -> Graph:
    loss_fn = TrainedLoss(loss, True) if loss else TrainedLoss(mean_of_squares)
    return capture(LoadedModel(Net(function, **parts), (torch.randn(shape),), targets, loss_fn), rules).graph


def told(layer: Layer) -> dict[str, Any]:
    return {name: value for name, value in layer.attributes.items() if name != "op"}


def part(dim: int, *starts: int, step: int = 1, drops: bool = False) -> dict[str, Any]:
    return {"dim": dim, "starts": starts, "step": step, "drops": drops}


@pytest.mark.parametrize(
    ("function", "attributes", "dims", "shape"),
    [
        (lambda m, x: x[:, :, 1:5], part(2, 1), NAMES, (2, 4, 4, 9)),
        (lambda m, x: x[:, :, :, -5:-1:2], part(3, 4, step=2), NAMES, (2, 4, 6, 2)),
        (lambda m, x: x[:, 20:], part(1, 4), NAMES, (2, 0, 6, 9)),
        (lambda m, x: x.narrow(1, 2, 2), part(1, 2), NAMES, (2, 2, 6, 9)),
        (lambda m, x: x[:, -1], part(1, 3, drops=True), ("sample", "height", "width"), (2, 6, 9)),
        (lambda m, x: x.select(2, 1), part(2, 1, drops=True), ("sample", "channel", "width"), (2, 4, 9)),
        (lambda m, x: x.chunk(3, 3)[2], part(3, 0, 3, 6), NAMES, (2, 4, 6, 3)),
        (lambda m, x: x.split([1, 3], 1)[1], part(1, 0, 1), NAMES, (2, 1, 6, 9)),
        (lambda m, x: x.split(4, 3)[1], part(3, 0, 4, 8), NAMES, (2, 4, 6, 4)),
        (lambda m, x: x.unbind(2)[1], part(2, *range(6), drops=True), ("sample", "channel", "width"), (2, 4, 9)),
    ],
)
def test_slices_and_parts(function, attributes: dict[str, Any], dims: tuple[str, ...], shape: tuple[int, ...]) -> None:
    layers = [layer for layer in graph_of(function).layers if not layer.name.startswith("loss")]
    slices = [layer for layer in layers if told(layer) != part(0, 0)]  # the samples of x[:, ...], all of them
    assert [layer.kind for layer in layers] == ["slice"] * len(layers)
    last = [layer for layer in slices if told(layer).get("dim") == attributes["dim"]][-1]
    assert told(last) == attributes
    assert (last.outputs[0].dims, last.outputs[0].shape) == (dims, shape)


@pytest.mark.parametrize(
    ("function", "dims"),
    [
        (lambda m, x: x.mean((2, 3)), ("sample", "channel")),
        (lambda m, x: x.mean((-1, -2), keepdim=True), NAMES),
        (lambda m, x: F.adaptive_avg_pool2d(x, 1), NAMES),
        (lambda m, x: F.adaptive_avg_pool2d(x, (1, 1)), NAMES),
    ],
)
def test_means_over_all_of_space(function, dims: tuple[str, ...]) -> None:
    layer = graph_of(function).layers[0]
    assert (layer.kind, told(layer), layer.outputs[0].dims) == ("global_pool", {}, dims)


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: x.argmax() + x,
        lambda m, x: x.std() + x,
        lambda m, x: x.cumsum(2),
    ],
)
def test_reductions_over_all_dims_and_over_none_are_opaque(function) -> None:
    assert graph_of(function).layers[0].kind == "opaque"


@pytest.mark.parametrize(
    ("function", "reduced", "keeps", "dims"),
    [
        (lambda m, x: x.mean(1), (1,), False, ("sample", "height", "width")),
        (lambda m, x: x.mean((3, -3)), (1, 3), False, ("sample", "height")),
        (lambda m, x: x.mean(3, keepdim=True), (3,), True, NAMES),
        (lambda m, x: x.amax((2, 3)), (2, 3), False, ("sample", "channel")),
        (lambda m, x: x.max(1)[0], (1,), False, ("sample", "height", "width")),
        (lambda m, x: x.var(1, keepdim=True), (1,), True, NAMES),
        (lambda m, x: F.normalize(x), (1,), True, NAMES),
    ],
)
def test_reductions_over_some_dims(function, reduced: tuple[int, ...], keeps: bool, dims: tuple[str, ...]) -> None:
    layer = graph_of(function).layers[0]
    assert (layer.kind, told(layer), layer.outputs[0].dims) == ("reduce", {"dims": reduced, "keeps": keeps}, dims)


@pytest.mark.parametrize("first", [lambda m, x: x, lambda m, x: F.pad(x.tanh(), (1, 2))[:, :, 1:]])
def test_what_is_convolved_along_one_dim_has_channels_and_a_width(first) -> None:
    graph = graph_of(lambda m, x: m.conv(first(m, x)), shape=(2, 4, 9), conv=nn.Conv1d(4, 3, 3))
    assert {spec.dims for spec in graph.values().values() if len(spec.dims) == 3} == {("sample", "channel", "width")}
    sequence = graph_of(lambda m, x: m.conv(x.transpose(1, 2)), shape=(2, 9, 4), conv=nn.Conv1d(4, 3, 3))
    assert sequence.inputs["inputs"].dims == ("sample", "time", "feature")


def test_a_mean_over_samples_that_lie_in_a_later_dim_is_no_global_pool() -> None:
    layers = graph_of(
        lambda m, x: x.permute(1, 2, 0).mean((2,), keepdim=True) + m.a(x).mean(), shape=(2, 3, 4), a=nn.Linear(4, 1)
    )
    assert layers.by_name()["mean"].kind == "opaque"


@pytest.mark.parametrize(
    ("function", "kept", "dims"),
    [
        (lambda m, x: x.permute(0, 2, 3, 1), (0, 2, 3, 1), ("sample", "height", "width", "channel")),
        (lambda m, x: x.transpose(1, -1), (0, 3, 2, 1), ("sample", "width", "height", "channel")),
        (lambda m, x: x.movedim(1, 3), (0, 2, 3, 1), ("sample", "height", "width", "channel")),
        (lambda m, x: x.flatten(2), (0, 1, -1), ("sample", "channel", "dim2")),
        (lambda m, x: x.flatten(1), (0, -1), ("sample", "feature")),
        (lambda m, x: x.unsqueeze(1), (0, -1, 1, 2, 3), ("sample", "dim1", "channel", "height", "width")),
        (lambda m, x: x.view(-1, 2, 2, 6, 9), (0, -1, -1, 2, 3), ("sample", "dim1", "dim2", "height", "width")),
        (lambda m, x: x.reshape(x.shape[0], 4, 3, 18), (0, 1, -1, -1), ("sample", "channel", "dim2", "dim3")),
        (lambda m, x: x.reshape(x.shape[0] * 4, 6, 9), (-1, 2, 3), ("sample", "height", "width")),
    ],
)
def test_reshapes_keep_dims_that_they_leave_alone(function, kept: tuple[int, ...], dims: tuple[str, ...]) -> None:
    layer = graph_of(function).layers[0]
    assert (layer.kind, told(layer), layer.outputs[0].dims) == ("reshape", {"kept": kept}, dims)


def test_expansion_and_dims_of_extent_1() -> None:
    layers = graph_of(lambda m, x: x.mean((2, 3), True).expand(-1, -1, 6, 9) + x).by_name()
    assert told(layers["expand"]) == {"kept": (0, 1, -1, -1)}
    assert layers["expand"].outputs[0].dims == ("sample", "channel", "dim2", "dim3")
    pooled = graph_of(lambda m, x: F.adaptive_avg_pool2d(x, 1).flatten(1)).by_name()["flatten"]
    assert (told(pooled), pooled.outputs[0].dims) == ({"kept": (0, 1)}, ("sample", "channel"))
    squeezed = graph_of(lambda m, x: m.a(x).squeeze(1), a=nn.Conv2d(4, 1, 1)).by_name()["squeeze"]
    assert (told(squeezed), squeezed.outputs[0].dims) == ({"kept": (0, 2, 3)}, ("sample", "height", "width"))


OF_OTHER_DIMS = {
    "attention": ("sample", "head", "time", "feature"),
    "linear": ("sample", "channel", "height", "feature"),
    "segment": ("sample", "channel", "cell"),
    **dict.fromkeys(("embedding", "loss", "lstm", "reshape", "segment_expand", "sparse_conv", "sparse_pool"), ()),
}
"""What a kind makes of an image whose dims are not called like those of the image."""


@pytest.mark.every_case
@pytest.mark.parametrize("kind", kinds())
def test_what_a_kind_makes_of_an_image_can_be_cut_along_its_height_but_for_those_that_say_otherwise(kind: str) -> None:
    image = TensorSpec(NAMES, (2, 4, 6, 9), "float32")
    assert output_names(kind, 4, (image,), {}) == OF_OTHER_DIMS.get(kind, NAMES)


def test_names_stay_through_channels_last() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        return m.up(F.gelu(m.down(m.norm(x.permute(0, 2, 3, 1))))).permute(0, 3, 1, 2) + x

    graph = graph_of(forward, norm=nn.LayerNorm(4), down=nn.Linear(4, 8), up=nn.Linear(8, 4))
    found = {layer.name: layer.outputs[0].dims for layer in graph.layers}
    assert found["norm"] == found["down"] == found["gelu"] == found["up"] == ("sample", "height", "width", "channel")
    assert found["permute_2"] == found["add"] == NAMES


def test_what_is_stacked_keeps_its_names() -> None:
    layer = graph_of(lambda m, x: torch.stack((x, x.sin()), 2)).by_name()["stack"]
    assert layer.outputs[0].dims == ("sample", "channel", "dim2", "height", "width")


def test_a_padded_convolution_is_a_padding_and_a_convolution() -> None:
    graph = graph_of(lambda m, x: m.conv(x), conv=nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular"))
    first, second = graph.layers[:2]
    assert (first.name, first.kind, first.attributes["mode"]) == ("conv.pad", "pad", "circular")
    assert (second.kind, second.attributes["padding"]) == ("conv", (0, 0))


LABELS = torch.zeros(2, 6, 9, dtype=torch.int64)


@pytest.mark.parametrize(
    ("loss", "target", "terms"),
    [
        (F.mse_loss, torch.rand(PICTURE), "elements"),
        (F.l1_loss, torch.rand(PICTURE), "elements"),
        (F.smooth_l1_loss, torch.rand(PICTURE), "elements"),
        (F.binary_cross_entropy_with_logits, torch.rand(PICTURE), "elements"),
        (lambda y, t: F.binary_cross_entropy(y.sigmoid(), t), torch.rand(PICTURE), "elements"),
        (lambda y, t: (y - t).square().mean(), torch.rand(PICTURE), "elements"),
        (F.cross_entropy, LABELS, "places"),
        (F.cross_entropy, torch.rand(PICTURE).softmax(1), "places"),
        (lambda y, t: F.nll_loss(y.log_softmax(1), t), LABELS, "places"),
        (lambda y, t: F.mse_loss(y, t, reduction="sum"), torch.rand(PICTURE), None),
        (lambda y, t: F.cross_entropy(y, t, reduction="sum"), LABELS, None),
        (lambda y, t: F.multi_margin_loss(y.mean((2, 3)), t), LABELS[:, 0, 0], None),
    ],
)
def test_losses_say_what_they_are_means_over(loss, target: Tensor, terms: str | None) -> None:
    layer = graph_of(lambda m, x: x.sin(), target, loss=loss).layers[-1]
    assert (layer.kind, layer.attributes.get("terms")) == ("loss", terms)


def test_targets_and_what_is_broadcast_with_them_have_names() -> None:
    graph = graph_of(lambda m, x: x.sin(), torch.rand(PICTURE), loss=F.mse_loss)
    assert graph.by_name()["loss.broadcast_tensors"].kind == "pointwise"
    assert [spec.dims for spec in graph.by_name()["loss.broadcast_tensors"].outputs] == [NAMES] * 2
    labelled = graph_of(lambda m, x: x.sin(), LABELS, loss=F.cross_entropy)
    assert labelled.inputs["targets"].dims == ("sample", "height", "width")


@torch.library.custom_op("halopipe_tests::doubled", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    return 2 * x


@doubled.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("halopipe_tests::halved", mutates_args=())
def halved(x: Tensor) -> Tensor:
    return F.avg_pool2d(x, 2)


@halved.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], x.shape[1], x.shape[2] // 2, x.shape[3] // 2)


for _op in (doubled, halved):
    _op.register_autograd(lambda context, gradient: gradient)


def test_a_user_says_that_an_operator_is_elementwise() -> None:
    layer = graph_of(lambda m, x: doubled(x)).layers[0]
    assert (layer.kind, layer.attributes["op"]) == ("opaque", "halopipe_tests.doubled.default")
    rules = Rules(elementwise=frozenset({"halopipe_tests::doubled"}))
    assert graph_of(lambda m, x: doubled(x), rules=rules).layers[0].kind == "pointwise"
    model = LoadedModel(Net(lambda m, x: doubled(x)), (torch.randn(PICTURE),), (), TrainedLoss(mean_of_squares))
    said = dataclasses.replace(model, elementwise=rules.elementwise)
    assert [capture(each).graph.layers[0].kind for each in (model, said)] == ["opaque", "pointwise"]


def test_what_is_said_to_be_elementwise_and_is_not_is_refused() -> None:
    rules = Rules(elementwise=frozenset({"halopipe_tests::halved"}))
    with pytest.raises(UnsupportedModelError, match=r"halved\.default is not elementwise") as caught:
        graph_of(lambda m, x: halved(x), rules=rules)
    assert "(2, 4, 6, 9) and makes (2, 4, 3, 4)" in caught.value.details[1]


def test_a_user_gives_a_rule_for_an_operator() -> None:
    numbers = {"kernel": (2, 2), "stride": (2, 2), "padding": (0, 0), "dilation": (1, 1)}
    rules = Rules(kinds={"halopipe_tests::halved": ("pool", lambda node, arguments: {**numbers, "ceil_mode": False})})
    layer = graph_of(lambda m, x: halved(x), rules=rules).layers[0]
    assert (layer.kind, told(layer)) == ("pool", {**numbers, "ceil_mode": False})
    assert layer.outputs[0].dims == NAMES


def test_rules_that_make_no_sense_are_refused() -> None:
    with pytest.raises(UnknownNameError, match="no layer kind 'puddle'"):
        Rules(kinds={"mylib::op": ("puddle", lambda node, arguments: {})})
    with pytest.raises(UnknownNameError, match="'relu' is no operator"):
        Rules(elementwise=frozenset({"relu"}))
