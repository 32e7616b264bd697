"""Batch normalisation over cut samples, space and channels is that of one device, whoever holds copies."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from planner.ir.box import volume, whole
from planner.ir.errors import StageFailedError
from runtime.pipeline.routing import slices
from runtime.spatial.deferred import DeferredGradients
from runtime.transport import InProcessTransport
from tests.runtime.spatial.threads import Case, Cuts, Part, added_up, case, close, gradient_of, run_on_threads

MOMENTUM, EPS = 0.3, 1e-3
SHAPE = (3, 5, 7, 6)
DIMS = "sample channel height width"
AFFINE, RUNNING = ("weight", "bias"), ("running_mean", "running_var")

CUTS: dict[str, tuple[Cuts, int]] = {
    "height": ({"height": (0, 3, 7)}, 0),
    "uneven height": ({"height": (0, 1, 6, 7)}, 0),
    "an empty part of height": ({"height": (0, 4, 4, 7)}, 0),
    "samples": ({"sample": (0, 2, 3)}, 0),
    "samples, one rank without": ({"sample": (0, 3, 3)}, 0),
    "samples x height": ({"sample": (0, 1, 3), "height": (0, 5, 7)}, 0),
    "height x width": ({"height": (0, 2, 7), "width": (0, 4, 6)}, 0),
    "channels": ({"channel": (0, 2, 5)}, 0),
    "more ranks than channels": ({"channel": (0, 2, 2, 4, 5)}, 0),
    "channels x height": ({"channel": (0, 3, 5), "height": (0, 2, 7)}, 0),
    "channels x empty height": ({"channel": (0, 3, 5), "height": (0, 7, 7)}, 0),
    "replicas": ({"replica": (0, 1, 2)}, 0),
    "replicas x height": ({"replica": (0, 1, 2), "height": (0, 3, 7)}, 0),
    "height x replicas": ({"height": (0, 3, 7), "replica": (0, 1, 2)}, 0),
    "a margin": ({"height": (0, 3, 7)}, 2),
    "margins on both sides": ({"height": (0, 2, 4, 7)}, 1),
    "margins of two dims": ({"height": (0, 3, 7), "width": (0, 3, 6)}, 2),
    "margins and an empty part": ({"height": (0, 3, 3, 7)}, 1),
    "replicas with margins": ({"replica": (0, 1, 2), "height": (0, 3, 7)}, 1),
}


def layer(
    shape: tuple[int, ...] = SHAPE, dims: str = DIMS, *, training: bool = True, keeps: bool = True, affine: bool = True
) -> Case:
    torch.manual_seed(0)
    x = 2 * torch.randn(shape, dtype=torch.float64) + 7
    weight, bias, mean, var = (torch.rand(shape[1], dtype=torch.float64) + 0.5 for _ in range(4))
    arguments = {
        "input": x,
        "weight": weight if affine else None,
        "bias": bias if affine else None,
        "running_mean": mean if keeps else None,
        "running_var": var if keeps else None,
        "training": training,
        "momentum": MOMENTUM,
        "eps": EPS,
        "cudnn_enabled": False,
    }
    one = case(torch.ops.aten.batch_norm.default, arguments, {"input": dims}, dims, *(AFFINE if affine else ()))
    assert one.layer.kind == "batch_norm"
    return one


def check(one: Case, parts: list[Part]) -> None:
    shape = tuple(one.arguments["input"].shape)
    y, tensors = one.whole()
    y.backward(added_up(shape, [(part.step.done, part.dy) for part in parts]))
    for part in parts:
        assert part.reached
        close(part.result, y.detach()[slices(part.step.done, whole(shape))])
        for name in RUNNING:
            if name in tensors:
                close(part.tensors[name], tensors[name][slices(part.boxes[name], whole(tuple(tensors[name].shape)))])
    for name in ("input", *one.parameters):
        close(gradient_of(name, one, parts), tensors[name].grad)


@pytest.mark.parametrize("name", CUTS)
def test_outputs_gradients_and_running_statistics_are_those_of_one_device(name: str) -> None:
    cuts, margin = CUTS[name]
    one = layer()
    check(one, run_on_threads(one, cuts, margin, by_channel=RUNNING))


@pytest.mark.parametrize("name", ["replicas x height", "channels x height", "an empty part of height", "a margin"])
@pytest.mark.parametrize("way", ["frozen", "keeps nothing", "evaluation", "without weight and bias"])
def test_other_ways_to_normalise(name: str, way: str) -> None:
    cuts, margin = CUTS[name]
    one = layer(training=way != "frozen", keeps=way != "keeps nothing", affine="without" not in way)
    if way == "evaluation":
        one = replace(one, target=_in_evaluation)
    state = () if way == "keeps nothing" else RUNNING
    check(one, run_on_threads(one, cuts, margin, by_channel=state, training=way != "evaluation"))


def _in_evaluation(**arguments: Any) -> Tensor:
    """As the runtime's rule for evaluation has it, whatever the captured argument says."""
    return torch.ops.aten.batch_norm.default(**{**arguments, "training": False})


def test_ranks_that_have_the_whole_statistics_write_their_own_channels() -> None:
    one = layer()
    _, tensors = one.whole()
    for part in run_on_threads(one, {"channel": (0, 2, 5), "height": (0, 3, 7)}):
        own = slices(part.step.own[1:2], whole(SHAPE[1:2]))
        for name in RUNNING:
            close(part.tensors[name][own], tensors[name][own])
            others = [c for c in range(SHAPE[1]) if c not in range(*own[0].indices(SHAPE[1]))]
            assert torch.equal(part.tensors[name][others], one.arguments[name][others])


def test_in_one_and_in_three_dims_of_space() -> None:
    for shape, dims in (((4, 3), "sample channel"), ((2, 3, 5, 4, 3), "sample channel depth height width")):
        one = layer(shape, dims)
        cuts = {"sample": (0, 1, 4)} if len(shape) == 2 else {"depth": (0, 2, 5), "width": (0, 1, 3)}
        check(one, run_on_threads(one, cuts, by_channel=RUNNING))


def test_ranks_with_equal_channels_have_the_same_bits() -> None:
    parts = run_on_threads(layer(), {"channel": (0, 3, 5), "height": (0, 2, 7)}, by_channel=RUNNING)
    for a, b in ((0, 1), (2, 3)):
        assert all(torch.equal(parts[a].tensors[name], parts[b].tensors[name]) for name in RUNNING)


class _Counting(InProcessTransport):
    """Notes what is sent."""

    sizes: ClassVar[dict[int, list[int]]] = {}

    def start_exchange(self, sent: Any, received: Any, key: Any = None) -> Any:
        self.sizes.setdefault(self.rank, []).extend(tensor.nbytes for tensor in sent.values())
        return super().start_exchange(sent, received)


@pytest.mark.parametrize(("cuts", "channels"), [({"height": (0, 3, 7)}, 5), ({"channel": (0, 2, 5)}, 0)])
def test_one_message_forward_and_one_backward_and_none_where_channels_are_apart(
    monkeypatch: pytest.MonkeyPatch, cuts: Cuts, channels: int
) -> None:
    monkeypatch.setattr(_Counting, "sizes", {})
    run_on_threads(layer(), cuts, by_channel=RUNNING, transport=_Counting)
    expected = [8 * (1 + 2 * channels), 8 * 2 * channels] if channels else []
    assert all(sizes == expected for sizes in _Counting.sizes.values())
    assert len(_Counting.sizes) == (2 if channels else 0)


def test_what_was_put_off_is_done_while_the_sum_is_on_its_way() -> None:
    done: list[int] = []

    def later() -> DeferredGradients:
        found = DeferredGradients()
        found.put(lambda: done.append(1))
        return found

    one = layer()
    check(one, run_on_threads(one, {"height": (0, 3, 7)}, by_channel=RUNNING, later=later))
    assert done == [1, 1]


def test_fewer_than_two_values_a_channel_have_no_variance() -> None:
    with pytest.raises(StageFailedError, match="batch norm of 1 values a channel"):
        run_on_threads(layer((1, 3), "sample channel"), {"replica": (0, 1, 2)}, by_channel=RUNNING)


def test_cases_hold_what_their_names_say() -> None:
    one = layer()
    for name, (cuts, margin) in CUTS.items():
        parts = run_on_threads(one, cuts, margin, by_channel=RUNNING)
        own = [part.step.own for part in parts]
        assert any(not volume(box) for box in own) == any(w in name for w in ("empty", "without", "more ranks"))
        assert (len(set(own)) < len(own)) == ("replicas" in name)
        assert any(part.step.done != part.step.own for part in parts) == ("margin" in name)
