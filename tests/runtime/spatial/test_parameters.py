"""Which part of a parameter a rank has, who else has it, and what cannot be divided."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial

import pytest
import torch
from torch import Tensor, nn

from planner.ir.box import Interval
from planner.ir.errors import UnsupportedModelError
from planner.ir.plan import Decision, Placement, Stage
from planner.layers.stage_rules import require_stages
from profiler.capture.graph import capture
from profiler.source.losses import TrainedLoss
from profiler.source.model import LoadedModel
from runtime.optim.whole_state import gathered
from runtime.spatial.parameters import ParameterPart, groups_of_parameters, parts_of, sliced
from runtime.transport import InProcessTransport
from tests.runtime.engines import Network
from tests.runtime.ranks import on_ranks
from tests.runtime.spatial.channel_models import divided, network

HALVES = ({"channel": (1, 1)}, 1)
GRID = ({"sample": (1, 1), "channel": (1, 3)}, 1)


def of(model: Network, decision: Decision, rank: int = 0) -> dict[str, ParameterPart]:
    return parts_of(model[1], decision, 0, rank)


def test_ranks_with_equal_filters_share_a_part() -> None:
    model = network("convolutions")
    decision = divided(model, (5,), {}, GRID)
    parts = [of(model, decision, rank) for rank in range(4)]
    assert [part["0.weight"].box[0] for part in parts] == [Interval(0, 2), Interval(2, 8)] * 2
    assert [part["6.bias"].box for part in parts] == [(Interval(0, 1),), (Interval(1, 4),)] * 2
    assert [part["0.weight"].group for part in parts] == [(0, 2), (1, 3)] * 2
    assert [part["0.weight"].is_first for part in parts] == [True, True, False, False]
    assert [part["0.weight"].speaks for part in parts] == [True, False, False, False]
    assert groups_of_parameters(model[1].graph, decision) == ((0, 2), (1, 3))


def test_running_statistics_go_by_channel_and_the_count_of_batches_is_whole() -> None:
    model = network("convolutions")
    parts = of(model, divided(model, (5,), {}, GRID), rank=3)
    assert parts["1.running_mean"].box == parts["1.running_var"].box == (Interval(2, 8),)
    assert parts["1.num_batches_tracked"].is_whole
    assert parts["1.num_batches_tracked"].group == (0, 1, 2, 3)


def test_with_space_alone_everything_is_whole_and_shared_by_all() -> None:
    model = network("convolutions")
    decision = divided(model, (5,), {}, ({"height": (1, 1), "width": (1, 1)}, 1))
    parts = of(model, decision)
    assert all(part.is_whole and not part.is_divided and part.group == (0, 1, 2, 3) for part in parts.values())
    assert groups_of_parameters(model[1].graph, decision) == ((0, 1, 2, 3),)


def test_shared_channels_cut_the_weight_twice_and_the_bias_once() -> None:
    model = network("mlp")
    decision = divided(model, (5,), {"2": ({"feature": (1, 1, 1)}, 3)}, ({"feature": (1, 1, 1)}, 1))
    part = of(model, decision, rank=1)
    assert part["2.weight"].box == (Interval(0, 9), Interval(4, 8))
    assert part["2.bias"].box == (Interval(3, 6),)
    assert part["2.weight"].group == (1,)


def test_a_rank_without_filters_is_alone_and_speaks_for_nobody() -> None:
    model = network("mlp")
    decision = divided(model, (5,), {}, ({"feature": (1, 30, 1, 1)}, 1))
    parts = [of(model, decision, rank)["4.weight"] for rank in range(4)]
    assert [len(part.box[0]) for part in parts] == [0, 4, 0, 0]
    assert [part.group for part in parts] == [(0,), (1,), (2,), (3,)]
    assert [part.speaks for part in parts] == [False, True, False, False]
    assert [part.is_whole for part in parts] == [False, True, False, False]
    assert all(part.is_divided for part in parts)
    assert groups_of_parameters(model[1].graph, decision) == ()


def test_a_part_is_a_parameter_of_its_own_and_the_whole_the_users_object() -> None:
    model = network("convolutions")
    parts = of(model, divided(model, (5,), {"6": ({"sample": (1, 1)}, 1)}, HALVES), rank=1)
    attributes = {**dict(model[0].module.named_parameters()), **dict(model[0].module.named_buffers())}
    found = sliced(attributes, parts)
    assert found["6.weight"] is attributes["6.weight"]
    assert isinstance(found["0.weight"], nn.Parameter)
    assert torch.equal(found["0.weight"], attributes["0.weight"][4:])
    assert found["0.weight"].requires_grad
    assert found["0.weight"].untyped_storage().nbytes() == found["0.weight"].nbytes
    assert type(found["1.running_mean"]) is Tensor
    assert found["1.running_mean"].shape == (4,)


def test_parts_are_put_together_again() -> None:
    whole = torch.arange(24.0).view(4, 6)
    boxes = ((Interval(0, 4), Interval(0, 0)), *((Interval(0, 4), Interval(a, b)) for a, b in ((0, 1), (1, 6), (1, 6))))

    def run(end: InProcessTransport) -> Tensor:
        part = ParameterPart((4, 6), boxes, (2, 3, 0, 1), (2, 3, 0, 1).index(end.rank))
        return gathered(part.cut(whole).clone(), part, end)

    assert all(torch.equal(found, whole) for found in on_ranks(4, run))


class _Shared(nn.Module):
    """Two linear maps with one weight; the second may read it turned."""

    def __init__(self, turns: bool) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4, bias=False)
        self.turns = turns

    def forward(self, x: Tensor) -> Tensor:
        weight = self.first.weight.t() if self.turns else self.first.weight
        return nn.functional.linear(self.first(x).tanh(), weight)


class _Normed(nn.Module):
    """A linear map whose weight is made of a parameter by another operator of the same layer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight.t())


@cache
def captured(name: str) -> Network:
    module = {"shared": partial(_Shared, False), "turned": partial(_Shared, True), "normed": _Normed}[name]().double()
    x, target = (torch.randn(3, 4, dtype=torch.float64) for _ in range(2))
    model = LoadedModel(module, (x,), (target,), TrainedLoss(nn.functional.mse_loss, unpacked=True))
    return model, capture(model)


def test_a_weight_that_two_layers_use_alike_is_divided() -> None:
    model = captured("shared")
    parts = of(model, divided(model, (3,), {}, ({"feature": (1, 3)}, 1)), rank=1)
    assert parts["first.weight"].box == (Interval(1, 4), Interval(0, 4))


def test_a_weight_that_layers_use_otherwise_is_refused_and_both_are_named() -> None:
    model = captured("shared")
    first, second = (layer.name for layer in model[1].graph.layers if layer.kind == "linear")
    decision = divided(model, (3,), {second: ({"feature": (3, 1)}, 1)}, ({"feature": (1, 3)}, 1))
    with pytest.raises(UnsupportedModelError, match=r"first\.weight cannot be divided") as caught:
        require_stages(decision, model[1].graph)
    assert caught.value.details[0].startswith(f"layer {first} uses [0, 1) x [0, 4) of it at position 0, layer {second}")
    assert len(caught.value.remedies) == 3


def test_a_weight_that_is_read_through_a_view_stays_whole_or_is_refused() -> None:
    by_features = ({"feature": (1, 3)}, 1)
    alone = captured("normed")
    assert of(alone, divided(alone, (3,), {}, by_features))["weight"].group == (0, 1)
    model = captured("turned")
    with pytest.raises(UnsupportedModelError, match="cannot be divided"):
        of(model, divided(model, (3,), {}, by_features))
    parts = of(model, divided(model, (3,), {}, ({"sample": (1, 1), "replica": (1, 1)}, 1)))
    assert parts["first.weight"].group == (0, 1, 2, 3)


def test_a_parameter_of_two_stages_is_not_divided_in_one_of_them() -> None:
    model = captured("shared")
    decision = divided(model, (3,), {}, ({"feature": (1, 3)}, 1))
    names = list(decision.layers)
    layers = {name: Placement(1) if name in names[1:] else placed for name, placed in decision.layers.items()}
    two = replace(decision, layers=layers, stages=(*decision.stages, Stage((2,), ("n0/cpu2",))))
    with pytest.raises(UnsupportedModelError, match=r"first\.weight cannot be divided") as caught:
        require_stages(two, model[1].graph)
    assert "another stage" in caught.value.details[0]
