from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import Tensor, nn

from runtime.stage.cut import StageFunction
from runtime.stage.modes import MicrobatchShard, RunConfig
from runtime.stage.random.streams import CounterRng
from runtime.stage.stage import StagePasses

F64 = torch.float64
ONE_ROW = [MicrobatchShard(microbatch, 1, 0, 1) for microbatch in range(3)]


def passes(loss: bool = False, run_config: RunConfig | None = None) -> tuple[StagePasses, nn.Parameter]:
    """y = w x + c and z = 2 x with received x, an integer c; the loss is the mean of w x."""
    weight = nn.Parameter(torch.tensor([2.0, 3.0], dtype=F64))

    def function(num_samples: int, x: Tensor, c: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        return ((w * x).mean(),) if loss else (w * x + c, 2 * x)

    outputs = ("loss",) if loss else ("y", "z")
    stage = StageFunction(function, ("x", "c"), outputs, {"w": weight}, frozenset())
    return StagePasses(stage, frozenset({"x", "c"}), "loss" if loss else None, run_config), weight


X = {"x": torch.tensor([[1.0, 2.0]], dtype=F64), "c": torch.tensor([[1, 1]])}
GY = torch.tensor([[1.0, 10.0]], dtype=F64)
GZ = torch.tensor([[100.0, 100.0]], dtype=F64)


@pytest.mark.parametrize("recompute", [False, True])
def test_backward_of_one_output_or_both(recompute: bool) -> None:
    stage, weight = passes(run_config=RunConfig(recompute=recompute))
    stage.forward(ONE_ROW[0], X, 1.0)
    stage.forward(ONE_ROW[1], X, 1.0)
    assert stage.backward(1, {"y": GY, "z": GZ})["x"].tolist() == [[202, 230]]
    found = stage.backward(0, {"y": GY})
    assert list(found) == ["x"]  # an integer has no gradient
    assert found["x"].tolist() == [[2, 30]]
    assert weight.grad.tolist() == [2, 40]


def test_a_gradient_that_is_a_part_of_a_larger_one_does_not_keep_that() -> None:
    def function(num_samples: int, x: Tensor, large: Tensor) -> tuple[Tensor, ...]:
        return (torch.cat((x, large), 1),)

    stage_function = StageFunction(function, ("x", "large"), ("y",), {}, frozenset())
    stage = StagePasses(stage_function, frozenset({"x", "large"}), None)
    stage.forward(ONE_ROW[0], {"x": torch.ones(1, 2), "large": torch.ones(1, 1000)}, 1.0)
    given = torch.arange(1002.0)[None]
    found = stage.backward(0, {"y": given})
    assert torch.equal(torch.cat((found["x"], found["large"]), 1), given)
    assert found["x"].untyped_storage().nbytes() == found["x"].nbytes
    assert found["large"].data_ptr() == given[:, 2:].data_ptr()  # what is nearly all of it is not copied


@pytest.mark.parametrize("recompute", [False, True])
def test_no_gradient_at_all_gives_zeros(recompute: bool) -> None:
    stage, weight = passes(run_config=RunConfig(recompute=recompute))
    stage.forward(ONE_ROW[0], X, 1.0)
    assert stage.backward(0, {})["x"].tolist() == [[0, 0]]
    assert weight.grad is None
    assert stage.num_in_flight == 0


def test_the_two_halves_make_the_whole() -> None:
    whole, expected = passes()
    split, weight = passes(run_config=RunConfig(split=frozenset({0, 1})))
    for stage in (whole, split):
        stage.forward(ONE_ROW[0], X, 1.0)
        stage.forward(ONE_ROW[1], X, 1.0)
    inputs = [whole.backward(m, {"y": GY, "z": GZ})["x"] for m in range(2)]
    assert torch.equal(split.backward_input(0, {"y": GY, "z": GZ})["x"], inputs[0])
    split.backward_input(1, {"y": GY, "z": GZ})
    split.backward_weight(0)
    split.backward_weight(1)
    assert torch.equal(weight.grad, expected.grad)


@pytest.mark.parametrize("recompute", [False, True])
def test_a_loss_is_kept_by_micro_batch_and_weighted(recompute: bool) -> None:
    stage, weight = passes(loss=True, run_config=RunConfig(recompute=recompute))
    for microbatch, share in ((1, 0.25), (0, 0.75)):
        assert stage.forward(ONE_ROW[microbatch], X, share) == {}
        stage.backward(microbatch, {})
    assert {m: loss.item() for m, loss in stage.losses.items()} == {0: 4.0, 1: 4.0}
    assert weight.grad.tolist() == [0.5, 1.0]


@pytest.mark.parametrize("split", [False, True])
def test_a_micro_batch_has_one_backward_for_its_input(split: bool) -> None:
    stage, _ = passes(run_config=RunConfig(split=frozenset({0}) if split else frozenset()))
    backward = stage.backward_input if split else stage.backward
    assert not any(output.requires_grad for output in stage.forward(ONE_ROW[0], X, 1.0).values())
    backward(0, {"y": GY})
    with pytest.raises(KeyError):
        backward(0, {"y": GY})


def test_forward_alone_keeps_nothing() -> None:
    stage, _ = passes(run_config=RunConfig(trains=False))
    x = X["x"].clone()
    alive = weakref.ref(x)
    assert stage.forward(ONE_ROW[0], {"x": x, "c": X["c"]}, 1.0)["y"].tolist() == [[3, 7]]
    del x
    assert alive() is None
    assert stage.num_in_flight == 0


def watched(run_config: RunConfig) -> tuple[StagePasses, list[weakref.ref]]:
    """y = w sin(exp(x)), and what lives of each run's exp(x), which the backward of sin needs."""
    weight = nn.Parameter(torch.tensor(2.0, dtype=F64))
    made: list[weakref.ref] = []

    def function(num_samples: int, x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        inside = x.exp()
        made.append(weakref.ref(inside.untyped_storage()))
        return (w * inside.sin(),)

    stage = StageFunction(function, ("x",), ("y",), {"w": weight}, frozenset())
    return StagePasses(stage, frozenset({"x"}), None, run_config), made


@pytest.mark.parametrize("halves", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
def test_memory_is_held_from_forward_to_backward_and_with_recompute_only_in_backward(
    recompute: bool, halves: bool
) -> None:
    stage, made = watched(RunConfig(recompute=recompute, split=frozenset({0}) if halves else frozenset()))
    x = torch.ones(1, 2, dtype=F64)
    stage.forward(ONE_ROW[0], {"x": x}, 1.0)
    received = weakref.ref(x.untyped_storage())
    del x
    gc.collect()
    assert is_alive(made[0]) is not recompute
    assert is_alive(received)  # for its gradient, or to run again
    stage.backward_input(0, {"y": torch.ones(1, 2, dtype=F64)})
    assert len(made) == 1 + recompute
    assert not any(map(is_alive, made))  # nothing is left that this operator does not need in W
    assert not is_alive(received)
    stage.backward_weight(0)


def test_outputs_that_are_made_again_are_not_kept_while_backward_runs() -> None:
    weight = nn.Parameter(torch.tensor(2.0, dtype=F64))
    outputs: list[weakref.ref] = []
    alive: list[bool] = []

    def function(num_samples: int, x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        inside = x.exp()
        if inside.requires_grad:
            inside.register_hook(lambda gradient: alive.append(is_alive(outputs[-1])))
        y = w * inside
        outputs.append(weakref.ref(y.untyped_storage()))
        return (y,)

    stage = StageFunction(function, ("x",), ("y",), {"w": weight}, frozenset())
    runs = StagePasses(stage, frozenset({"x"}), None, RunConfig(recompute=True))
    runs.forward(ONE_ROW[0], X, 1.0)
    runs.backward(0, {"y": GY})
    assert alive == [False]


def is_alive(reference: weakref.ref) -> bool:
    return reference() is not None


def test_values_of_any_kind_pass_through() -> None:
    """A tuple of outputs: one is an input, one needs no gradient, one holds truth values."""
    weight = nn.Parameter(torch.ones(2, dtype=F64))

    def function(num_samples: int, x: Tensor, where: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        return x, x.detach() * 3, where & (x > 1), torch.where(where, w * x, x)

    stage = StageFunction(function, ("x", "where"), ("a", "b", "c", "d"), {"w": weight}, frozenset())
    runs = StagePasses(stage, frozenset({"x", "where"}), None)
    where = torch.tensor([[True, True]])
    outputs = runs.forward(ONE_ROW[0], {"x": X["x"], "where": where}, 1.0)
    assert outputs["c"].tolist() == [[False, True]]
    found = runs.backward(0, {"a": GY, "b": GZ, "d": GY})
    assert {name: gradient.tolist() for name, gradient in found.items()} == {"x": [[2, 20]]}
    assert weight.grad.tolist() == [1, 20]


def counting(run_config: RunConfig) -> tuple[StagePasses, Tensor]:
    """y = w x n, after n, a buffer, has been raised by one."""
    weight = nn.Parameter(torch.ones(2, dtype=F64))
    count = torch.zeros((), dtype=F64)

    def function(num_samples: int, x: Tensor, w: Tensor, n: Tensor) -> tuple[Tensor, ...]:
        return (w * x * n.add_(1).clone(),)

    stage = StageFunction(function, ("x",), ("y",), {"w": weight, "n": count}, frozenset({"n"}))
    return StagePasses(stage, frozenset({"x"}), None, run_config), count


def test_recompute_writes_no_buffer_twice_and_sees_it_as_forward_did() -> None:
    stage, count = counting(RunConfig(recompute=True))
    for microbatch in range(2):
        assert stage.forward(ONE_ROW[microbatch], X, 1.0)["y"].tolist() == [[microbatch + 1, 2 * (microbatch + 1)]]
    assert [stage.backward(m, {"y": GY})["x"].tolist() for m in range(2)] == [[[1, 10]], [[2, 20]]]
    assert count.item() == 2


def test_evaluation_leaves_no_trace() -> None:
    stage, count = counting(RunConfig())
    x = X["x"].clone()
    alive = weakref.ref(x)
    outputs = stage.evaluate(ONE_ROW[0], {"x": x})
    assert outputs["y"].tolist() == [[1, 2]]
    assert not outputs["y"].requires_grad
    assert count.item() == 0
    del x
    assert alive() is None
    assert stage.num_in_flight == 0


def test_sizes_are_given_in_order_and_what_runs_is_told_before_each_run() -> None:
    def function(num_samples: int, time: int, points: int, x: Tensor) -> tuple[Tensor, ...]:
        return (x * time + points,)

    told: list[MicrobatchShard] = []

    class Noted(CounterRng):
        def at(self, microbatch_shard: MicrobatchShard) -> None:
            told.append(microbatch_shard)

    stage = StageFunction(function, ("x",), ("y",), {}, frozenset(), ("time", "points"))
    draw = Noted(7)
    runs = StagePasses(stage, frozenset({"x"}), None, RunConfig(recompute=True), rng=draw)
    assert runs.sizes == ("time", "points")
    runs.reset(step=3)
    microbatch_shard = MicrobatchShard(0, 1, 2, 5, (10, 7))
    assert runs.forward(microbatch_shard, X, 1.0)["y"].tolist() == [[17, 27]]
    assert runs.backward(0, {"y": GY})["x"].tolist() == [[10, 100]]
    assert told == [microbatch_shard] * 2
    assert draw.step == 3


def test_autocast_lowers_what_it_lowers_and_parameters_stay() -> None:
    weight = nn.Parameter(torch.randn(3, 2))

    def function(num_samples: int, x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        return nn.functional.linear(x, w), x.softmax(-1)

    stage = StageFunction(function, ("x",), ("y", "z"), {"w": weight}, frozenset())
    gradients = []
    for recompute in (False, True):
        weight.grad = None
        runs = StagePasses(stage, frozenset({"x"}), None, RunConfig(recompute=recompute, autocast=torch.bfloat16))
        outputs = runs.forward(ONE_ROW[0], {"x": torch.ones(1, 2)}, 1.0)
        assert {name: output.dtype for name, output in outputs.items()} == {"y": torch.bfloat16, "z": torch.float32}
        found = runs.backward(0, {"y": torch.ones(1, 3, dtype=torch.bfloat16)})
        assert found["x"].dtype == weight.grad.dtype == torch.float32
        gradients.append((found["x"], weight.grad))
    assert all(torch.equal(here, there) for here, there in zip(*gradients, strict=True))
    assert not torch.is_autocast_enabled("cpu")
