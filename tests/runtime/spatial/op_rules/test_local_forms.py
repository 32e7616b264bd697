"""Rules that need no message beyond what they read: each part is that of the whole tensor, forward and backward."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from planner.layers import kinds
from runtime.spatial import op_rules
from runtime.spatial.op_rules import form
from runtime.spatial.op_rules.generic import run_on_reads
from tests.runtime.spatial.one_layer import (
    OneLayer,
    check,
    check_all,
    check_connected,
    images,
    layouts,
    one_layer,
    spatial,
)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


POOLS = [
    (kernel, stride, padding, dilation, ceil)
    for kernel, stride, padding, dilation, ceil in product((2, 3, 5), (1, 2, 3), (0, 1, 2), (1, 2), (False, True))
    if padding <= kernel // 2
]


@pytest.mark.parametrize(("kernel", "stride", "padding", "dilation", "ceil"), POOLS)
def test_max_pooling_pads_at_the_tensor_s_edges_only(
    kernel: int, stride: int, padding: int, dilation: int, ceil: bool
) -> None:
    x = images(11, 9) - 5  # all below the zeros of ordinary padding
    one = spatial(lambda x: F.max_pool2d(x, kernel, stride, padding, dilation, ceil), x)
    check_all(one, "pool", seed=kernel, count=3)


@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "ceil"), sorted({(k, s, p, c) for k, s, p, d, c in POOLS if d == 1})
)
@pytest.mark.parametrize("counted", [True, False])
def test_averages_divide_by_what_one_device_divides_by(
    kernel: int, stride: int, padding: int, ceil: bool, counted: bool
) -> None:
    one = spatial(lambda x: F.avg_pool2d(x, kernel, stride, padding, ceil, counted), images(11, 9))
    check_all(one, "pool", seed=kernel, count=3)


def test_pools_of_one_and_three_dims_and_with_a_divisor() -> None:
    for function in (
        lambda x: F.avg_pool2d(x, 3, 2, 1, divisor_override=5),
        lambda x: F.avg_pool2d(x, (3, 2), (1, 3), (1, 0), count_include_pad=False),
        lambda x: F.max_pool2d(x, (2, 5), (2, 1), (0, 2)),
    ):
        check_all(spatial(function, images(8, 10)), "pool")
    check_all(spatial(lambda x: F.avg_pool1d(x, 3, 2, 1, True, False), images(13)), "pool")
    check_all(spatial(lambda x: F.max_pool1d(x, 3, 2, 1), images(13)), "pool")
    check_all(spatial(lambda x: F.max_pool3d(x, 3, 2, 1), images(6, 5, 7)), "pool")
    check_all(spatial(lambda x: F.avg_pool3d(x, 2, 1, 1), images(4, 5, 3)), "pool")


@pytest.mark.parametrize("size", [(1, 1), (3, 4), (5, 2), (7, 11), (4, 12)])
def test_adaptive_pools_have_the_bins_of_the_whole_tensor(size: tuple[int, int]) -> None:
    x = images(8, 12)
    if size != (1, 1):  # which is another kind
        check_all(spatial(lambda x: F.adaptive_avg_pool2d(x, size), x), "adaptive_pool")
    check_all(spatial(lambda x: F.adaptive_max_pool2d(x, size, return_indices=True), x, outputs=2), "adaptive_pool")


def test_adaptive_pools_of_one_and_three_dims() -> None:
    check_all(spatial(lambda x: F.adaptive_avg_pool1d(x, 5), images(13)), "adaptive_pool")
    check_all(spatial(lambda x: F.adaptive_avg_pool3d(x, (2, 3, 2)), images(5, 6, 7)), "adaptive_pool")
    check_all(spatial(lambda x: F.adaptive_max_pool3d(x, (2, 3, 2)), images(5, 6, 7), outputs=2), "adaptive_pool")


def test_places_of_maxima_are_those_in_the_whole_tensor() -> None:
    x = images(9, 11)
    for numbers in ((3, 2, 1), (2, 2, 0), (3, 1, 1), (2, 3, 1, 2)):
        plain = spatial(lambda x, numbers=numbers: F.max_pool2d(x, *numbers), x).layer
        both = spatial(lambda x, numbers=numbers: F.max_pool2d(x, *numbers, return_indices=True), x, outputs=2)
        both = replace(both, layer=replace(both.layer, kind="pool", attributes={**plain.attributes, **_op(both)}))
        check_all(both, "pool", count=4)


def _op(one: OneLayer) -> dict[str, Any]:
    return {"op": one.layer.attributes["op"]}


def test_of_equal_numbers_the_gradient_goes_to_the_first() -> None:
    ties = images(9, 10).relu().round()
    check_all(spatial(lambda x: F.max_pool2d(x, 3, 2, 1), ties), "pool")
    check_all(spatial(lambda x: F.adaptive_max_pool2d(x, (4, 3)), ties, outputs=2), "adaptive_pool")


RESIZED: list[dict[str, Any]] = [
    *({"scale_factor": factor} for factor in (2, 3.0, 1.7, (2, 0.6), 0.5, 2.0000001)),
    *({"size": size} for size in ((14, 18), (5, 20), (21, 9), (7, 1), (3, 4))),
]


@pytest.mark.parametrize("how", RESIZED, ids=str)
@pytest.mark.parametrize("mode", ["nearest", "nearest-exact", "bilinear", "bicubic"])
def test_interpolation_lies_where_it_lies_in_the_whole_tensor(mode: str, how: dict[str, Any]) -> None:
    for aligned in (False, True) if mode.startswith("bi") else (None,):
        one = spatial(
            lambda x, aligned=aligned: F.interpolate(x, mode=mode, align_corners=aligned, **how), images(7, 9)
        )
        check_all(one, "upsample", count=3)


def test_interpolation_of_one_and_three_dims() -> None:
    for aligned in (False, True):
        lin = {"scale_factor": 1.5, "align_corners": aligned}
        check_all(spatial(lambda x, lin=lin: F.interpolate(x, mode="linear", **lin), images(11)), "upsample")
        check_all(spatial(lambda x, lin=lin: F.interpolate(x, mode="trilinear", **lin), images(4, 5, 6)), "upsample")
    check_all(spatial(lambda x: F.interpolate(x, scale_factor=2), images(11)), "upsample")
    check_all(spatial(lambda x: F.interpolate(x, scale_factor=2, mode="trilinear"), images(4, 5, 6)), "upsample")


@pytest.mark.parametrize("factor", [3, 7, 49, 0.1, 1.1])
def test_nearest_in_float32_rounds_as_one_device_does(factor: float) -> None:
    one = spatial(lambda x: F.interpolate(x, scale_factor=factor), images(50).float())
    for cuts in layouts(one, 1):
        check(one, cuts, tolerance=1e-5)


@pytest.mark.parametrize("mode", ["constant", "reflect", "replicate", "circular"])
def test_padding_is_that_of_the_whole_tensor(mode: str) -> None:
    for amounts in ((1, 2, 3, 0), (4, 4, 4, 4), (0, 1)):
        if mode != "constant" and len(amounts) == 2:
            continue
        check_all(spatial(lambda x, amounts=amounts: F.pad(x, amounts, mode=mode), images(6, 5)), "pad", count=8)
    if mode == "constant":
        check_all(spatial(lambda x: F.pad(x, (-1, 2, 9, -2), value=3.5), images(6, 5)), "pad", count=8)
        check_all(spatial(lambda x: F.pad(x, (-1, -1, -2, -2)), images(6, 5)), "pad")
    else:
        check_all(spatial(lambda x: F.pad(x, (2, 1), mode=mode), images(7)), "pad")
        check_all(spatial(lambda x: F.pad(x, (2, 1, 0, 1, 2, 2), mode=mode), images(4, 3, 5)), "pad")


def test_margins_are_the_neighbour_s_rows() -> None:
    x = images(12, 9)
    cuts = {"height": (0, 5, 6, 12), "width": (0, 4, 9)}
    for function in (
        lambda x: F.max_pool2d(x, 3, 1, 1),
        lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False),
        lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
        lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect"),
        torch.tanh,
    ):
        for margin in (1, 3):
            check(spatial(function, x), cuts, margin)


def test_slices_and_parts() -> None:
    x = images(12, 9, channels=6)
    for function in (
        lambda x: x[:, :, 3:],
        lambda x: x[:, :, 1:10:3],
        lambda x: x[:, -4:],
        lambda x: x.narrow(2, 4, 6),
    ):
        check_all(spatial(function, x), "slice")
    names = "sample channel height width"
    select = one_layer(lambda x: x[:, :, 5], [x], [names], ["sample channel width"])
    check_all(select, "slice")
    for function, ends in (
        (lambda x: x.chunk(2, 1), 2),
        (lambda x: x.chunk(4, 2), 4),
        (lambda x: x.split([6, 3], 3), 2),
    ):
        check_all(spatial(function, x, outputs=ends), "slice")
    check_all(one_layer(lambda x: x.unbind(1), [x], [names], ["sample height width"] * 6), "slice")
    check_all(spatial(lambda x: x.chunk(1, 1), x, outputs=1), "slice")


def test_concatenation_and_stacking() -> None:
    tensors = [images(5, 4, channels=channels) for channels in (2, 5, 1)]
    names = "sample channel height width"
    joined = one_layer(lambda a, b, c: torch.cat((a, b, c), 1), tensors, [names] * 3, [names])
    check_all(joined, "concat", count=12)
    check_connected(joined, {"channel": (0, 2, 4, 8)})
    rows = [images(5, 4), images(3, 4)]
    check_all(one_layer(lambda a, b: torch.cat((a, b, a), 2), rows, [names] * 2, [names]), "concat", count=12)
    stack = one_layer(
        lambda a, b: torch.stack((a, b), 2), [rows[0]] * 2, [names] * 2, ["sample channel dim2 height width"]
    )
    check_all(stack, "concat", count=12)


def test_views_permutations_and_expansion() -> None:
    x = images(4, 6)
    names = "sample channel height width"
    for function, result in (
        (lambda x: x.permute(0, 2, 3, 1), "sample height width channel"),
        (lambda x: x.transpose(1, -1), "sample width height channel"),
        (lambda x: x.flatten(1), "sample feature"),
        (lambda x: x.flatten(2), "sample channel dim2"),
        (lambda x: x.reshape(2, 3, 2, 2, 6), "sample channel dim2 dim3 width"),
        (lambda x: x.reshape(6, 4, 6), "sample height width"),
        (lambda x: x.unsqueeze(2), "sample channel dim2 height width"),
    ):
        check_all(one_layer(function, [x], [names], [result]), "reshape", count=8)
    thin = images(1, 6)
    check_all(one_layer(lambda x: x.squeeze(2), [thin], [names], ["sample channel width"]), "reshape")
    check_all(one_layer(lambda x: x.expand(2, 3, 5, 6), [thin], [names], [names]), "reshape", count=8)


def test_softmax_and_normalisation_inside_a_sample() -> None:
    x = images(6, 5, channels=4)
    names = "sample channel height width"
    weight = torch.randn(4).double()
    bias = torch.randn(4).double()
    check_all(spatial(lambda x: F.softmax(x, 1), x), "softmax")
    check_all(spatial(lambda x: F.log_softmax(x, -1), x), "softmax")
    functions: tuple[Callable[..., Any], ...] = (
        lambda x, w, b: F.group_norm(x, 2, w, b),
        lambda x, w, b: F.group_norm(x, 4, w, b),
        lambda x, w, b: F.group_norm(x, 1, w, b),
        lambda x, w, b: F.instance_norm(x, weight=w, bias=b),
    )
    for function in functions:
        check_all(one_layer(function, [x, weight, bias], [names], [names], 2), "layer_norm", count=8)
        check_all(one_layer(function, [x, weight, bias], [names], [names]), "layer_norm", count=8)  # constants
    check_all(spatial(lambda x: F.group_norm(x, 2), x), "layer_norm")
    places = torch.randn(2, 6, 5).double()
    whole = one_layer(lambda x, w, b: F.layer_norm(x, (6, 5), w, b), [x, *places], [names], [names], 2)
    check_all(whole, "layer_norm")
    check_all(
        one_layer(lambda x, w: F.rms_norm(x, (5,), w), [x, torch.randn(5).double()], [names], [names], 1), "layer_norm"
    )


def test_embeddings() -> None:
    indices = torch.randint(11, (3, 5))
    table = torch.randn(11, 6).double()
    one = one_layer(lambda i, w: F.embedding(i, w, 2), [indices, table], ["sample time"], ["sample time feature"], 1)
    check_all(one, "embedding")
    constant = one_layer(F.embedding, [indices, table], ["sample time"], ["sample time feature"])
    check_all(constant, "embedding")


def queries(samples: int = 2, heads: int = 4, times: int = 7, features: int = 3) -> Tensor:
    return torch.randn(samples, heads, times, features).double()


def test_attention() -> None:
    names = "sample head time feature"
    three = [queries() for _ in range(3)]
    masks = [torch.randn(7, 7).double(), torch.ones(7, 7).tril().bool()]
    sdpa = F.scaled_dot_product_attention
    causal = one_layer(lambda q, k, v: sdpa(q, k, v, is_causal=True), three, [names] * 3, [names])
    check_all(causal, "attention", count=12)
    check_all(one_layer(lambda q, k, v: sdpa(q, k, v, scale=0.3), three, [names] * 3, [names]), "attention")
    more = [queries(), queries(times=9), queries(times=9, features=5)]
    check_all(one_layer(lambda q, k, v: sdpa(q, k, v, is_causal=True), more, [names] * 3, [names]), "attention")
    for mask in masks:
        one = one_layer(lambda q, k, v, m: sdpa(q, k, v, m), [*three, mask], [names] * 3, [names])
        check_all(one, "attention")
    given = [*three, torch.randn(2, 1, 7, 7).double()]
    check_all(one_layer(lambda q, k, v, m: sdpa(q, k, v, m), given, [names] * 4, [names]), "attention")
    shared = [queries(), queries(heads=2), queries(heads=2)]
    grouped = one_layer(lambda q, k, v: sdpa(q, k, v, is_causal=True, enable_gqa=True), shared, [names] * 3, [names])
    check_all(grouped, "attention", count=12)


def test_elementwise_operators_take_their_part_of_everything() -> None:
    x = images(5, 4)
    y = images(5, 4)
    names = "sample channel height width"
    row = torch.randn(1, 3, 1, 4).double()
    channel = torch.randn(3).double()
    check_all(one_layer(lambda a, b: torch.add(a, b, alpha=3), [x, y], [names] * 2, [names]), "pointwise")
    check_all(one_layer(lambda a, b: a * b, [x, x.mean(2, keepdim=True)], [names] * 2, [names]), "pointwise")
    for parameters in (0, 1):  # or a constant
        check_all(one_layer(lambda a, b: a * b, [x, row], [names], [names], parameters), "pointwise", count=8)
        check_all(one_layer(F.prelu, [x, channel], [names], [names], parameters), "pointwise", count=8)
        check_all(one_layer(F.prelu, [x, channel[:1]], [names], [names], parameters), "pointwise")
    check_all(one_layer(lambda a, b: a.type_as(b), [x, y.float()], [names] * 2, [names]), "pointwise")
    check_all(one_layer(torch.broadcast_tensors, [x, y[:, :, :1]], [names] * 2, [names] * 2), "pointwise")
    check_all(one_layer(lambda a: a.detach(), [x], [names], [names]), "pointwise")
    check_all(one_layer(lambda a: a.relu(), [x], [names], [names]), "pointwise")
    check_all(one_layer(lambda a, m: a.masked_fill(m, 2.0), [x, row > 0], [names], [names]), "pointwise")


def test_what_is_not_known_is_computed_whole_and_cut() -> None:
    x = images(4, 6)
    check_all(spatial(lambda x: x.cumsum(2), x), "opaque")
    check_all(spatial(lambda x: x.flip(1), x), "opaque")
    check_all(spatial(torch.ones_like, x), "opaque")
    check_all(spatial(lambda x: F.max_pool2d(x, 2, return_indices=True), x, outputs=2), "opaque")


def test_recurrent_layers_keep_samples_apart() -> None:
    lstm = torch.nn.LSTM(3, 4, batch_first=True).double()
    weights = [each.detach() for each in lstm.parameters()]
    state = torch.zeros(1, 5, 4).double()

    def function(x: Tensor, *rest: Tensor) -> Any:
        h, c, *own = rest
        return torch.ops.aten.lstm.input(x, [h, c], own, True, 1, 0.0, True, False, True)

    names = ["sample time feature", *["layer sample feature"] * 2]
    one = one_layer(function, [torch.randn(5, 6, 3).double(), state, state, *weights], names, names, 4)
    check_all(one, "lstm", dims=("sample",))


def test_a_rule_is_that_of_a_layer_kind_of_its_family() -> None:
    written = {
        name.removeprefix("run_"): getattr(module, name)
        for module in (import_module(f"{op_rules.__name__}.{family}") for family in op_rules._FAMILIES)
        for name in vars(module)
        if name.startswith("run_") and name.removeprefix("run_") in kinds()
    }
    assert {name: form(name) for name in written} == written
    named = {f"run_{name}" for name in written} | {"run_on_reads", "run_whole_samples"}
    assert {
        node.name
        for path in Path(op_rules.__path__[0]).glob("*.py")
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("run_")
    } <= named


def test_a_kind_without_a_rule_of_its_own_reads_all_that_it_needs() -> None:
    assert form("reduce") is run_on_reads
