"""Layers that treat samples, rows or elements by themselves make the parts that one device makes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.runtime.spatial.checks import check_all, images, spatial
from tests.runtime.spatial.one_layer import one_layer


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


def test_softmax_and_normalisation_inside_a_sample() -> None:
    x, names = images(6, 5, channels=4), "sample channel height width"
    weight, bias = torch.randn(4).double(), torch.randn(4).double()
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
    indices, table = torch.randint(11, (3, 5)), torch.randn(11, 6).double()
    one = one_layer(lambda i, w: F.embedding(i, w, 2), [indices, table], ["sample time"], ["sample time feature"], 1)
    check_all(one, "embedding")
    constant = one_layer(F.embedding, [indices, table], ["sample time"], ["sample time feature"])
    check_all(constant, "embedding")


def queries(samples: int = 2, heads: int = 4, times: int = 7, features: int = 3) -> Tensor:
    return torch.randn(samples, heads, times, features).double()


def test_attention() -> None:
    names = "sample head time feature"
    three, masks = [queries() for _ in range(3)], [torch.randn(7, 7).double(), torch.ones(7, 7).tril().bool()]
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
    x, y, names = images(5, 4), images(5, 4), "sample channel height width"
    row, channel = torch.randn(1, 3, 1, 4).double(), torch.randn(3).double()
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
