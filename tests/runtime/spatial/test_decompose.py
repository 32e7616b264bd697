"""Ranks of a divided stage drop what one device drops: by global index, copies and margins included."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from planner.ir.box import Interval, whole
from planner.ir.plan import Placement
from runtime.spatial.decompose import DrawnPlaces, place_of
from runtime.spatial.layer_shard import LayerShard
from runtime.stage.modes import MicrobatchShard
from runtime.stage.random import streams
from runtime.stage.random.layers import drawing
from runtime.stage.random.streams import CounterRng, NodeStream
from tests.runtime.spatial.one_layer import OneLayer, check, one_layer

NAMES = "sample channel height width"
CUTS: list[dict[str, tuple[int, ...]]] = [
    {"sample": (0, 1, 1, 5)},
    {"height": (0, 3, 4, 9)},
    {"height": (0, 4, 9), "width": (0, 1, 6)},
    {"sample": (0, 2, 5), "channel": (0, 1, 3), "width": (0, 6, 6)},
    {"replica": (0, 1, 2)},
]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture(autouse=True, params=[16, 1 << 14])
def block(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of few samples, and one of all."""
    for module in (streams, __import__("runtime.stage.random.streams", fromlist=["draws"])):
        monkeypatch.setattr(module, "BLOCK", request.param)


def in_training(one: OneLayer, dim: int | None = 0) -> OneLayer:
    """``one`` with its random numbers drawn as in training."""
    samples = one.specs[0].shape[one.specs[0].dims.index("sample")]
    draw = CounterRng(3)
    draw.at(MicrobatchShard(1, samples, 0, samples))

    drawn = drawing(one.target)
    assert drawn is not None

    def at(step: LayerShard | None) -> Callable[..., Any]:
        place = None if step is None else partial(place_of, step)
        return partial(drawn, NodeStream(draw, "node", dim, place))

    return replace(one, operator_at=at)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: F.dropout(x, 0.4),
        lambda x: F.dropout2d(x, 0.4),
        lambda x: F.alpha_dropout(x, 0.4, training=True),
        lambda x: F.feature_alpha_dropout(x, 0.4, training=True),
        lambda x: F.rrelu(x, training=True),
    ],
)
def test_layers_drop_by_global_index(function: Callable[[Tensor], Tensor]) -> None:
    x = torch.randn(5, 3, 9, 6).double()
    one = in_training(one_layer(function, [x], [NAMES], [NAMES]))
    for cuts in CUTS:
        check(one, cuts)
    check(one, CUTS[2], margin=2)


@pytest.mark.parametrize("dim", [0, None])
def test_attention_drops_weights_by_global_index(dim: int | None) -> None:
    names = "sample head time feature"
    three = [torch.randn(3, 4, 7, 2).double() for _ in range(3)]
    for causal in (False, True):
        one = one_layer(
            lambda q, k, v, causal=causal: F.scaled_dot_product_attention(q, k, v, dropout_p=0.3, is_causal=causal),
            three,
            [names] * 3,
            [names],
        )
        for cuts in ({"sample": (0, 1, 3)}, {"head": (0, 1, 4)}, {"head": (0, 2, 4), "time": (0, 3, 4, 7)}):
            check(in_training(one, dim), cuts)


def test_what_is_computed_whole_draws_whole_samples() -> None:
    x = torch.randn(5, 3, 9, 6).double()
    one = in_training(one_layer(lambda x: torch.rand_like(x), [x], [NAMES], [NAMES]))
    assert one.layer.kind == "opaque"
    for cuts in CUTS:
        check(one, cuts)


def test_copies_of_a_layer_whose_numbers_cannot_be_drawn_in_parts_draw_alike() -> None:
    one = one_layer(lambda x: torch.poisson(x), [torch.rand(4, 6).double()], ["sample feature"], ["sample feature"])
    layers = {"layer": one.layer}

    def draws_all(cuts: dict[str, tuple[int, ...]], kind: str = "opaque") -> bool:
        made = {"layer": replace(one.layer, kind=kind)}
        return DrawnPlaces(lambda name: None, made, {"layer": Placement(0, cuts)}).draws_all("layer")  # type: ignore[arg-type, return-value]

    assert layers["layer"].kind == "opaque"
    assert draws_all({"replica": (0, 1, 2)}, "pointwise")
    assert draws_all({"feature": (0, 1, 6)})
    assert not draws_all({"feature": (0, 1, 6)}, "pointwise")
    assert not draws_all({"sample": (0, 1, 4)})


def test_the_place_of_a_part() -> None:
    one = one_layer(lambda x: F.dropout(x, 0.5), [torch.randn(4, 3, 9, 6)], [NAMES], [NAMES])
    steps = [step for step, _ in one.ranks({"sample": (0, 1, 4), "height": (0, 5, 9)})]
    found = place_of(steps[3])
    assert (found.start, found.count, found.total, found.shape) == (1, 3, 4, (4, 3, 9, 6))
    assert found.box == (Interval(1, 4), Interval(0, 3), Interval(5, 9), Interval(0, 6))
    assert place_of(steps[3], is_main=False).box is None
    assert place_of(steps[0]).box != whole((4, 3, 9, 6))
