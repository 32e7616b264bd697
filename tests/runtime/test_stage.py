from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from runtime.cut import StageFunction
from runtime.stage import StageProgram

F64 = torch.float64


def program(loss: bool = False) -> tuple[StageProgram, nn.Parameter]:
    """y = w x + c and z = 2 x with received x, an integer c; the loss is the mean of w x."""
    weight = nn.Parameter(torch.tensor([2.0, 3.0], dtype=F64))

    def function(num_samples: int, x: Tensor, c: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        return ((w * x).mean(),) if loss else (w * x + c, 2 * x)

    outputs = ("loss",) if loss else ("y", "z")
    stage = StageFunction(function, ("x", "c"), outputs, {"w": weight}, frozenset())
    return StageProgram(stage, frozenset({"x", "c"}), "loss" if loss else None), weight


X = {"x": torch.tensor([[1.0, 2.0]], dtype=F64), "c": torch.tensor([[1, 1]])}
GY, GZ = torch.tensor([[1.0, 10.0]], dtype=F64), torch.tensor([[100.0, 100.0]], dtype=F64)


def test_forward_hands_out_values_without_history() -> None:
    stage, _ = program()
    outputs = stage.forward(0, 1, X, 1.0)
    assert outputs["y"].tolist() == [[3, 7]]
    assert not any(output.requires_grad for output in outputs.values())


def test_backward_of_one_output_or_both() -> None:
    stage, weight = program()
    stage.forward(0, 1, X, 1.0)
    stage.forward(1, 1, X, 1.0)
    assert stage.backward(1, {"y": GY, "z": GZ})["x"].tolist() == [[202, 230]]
    found = stage.backward(0, {"y": GY})
    assert list(found) == ["x"]  # an integer has no gradient
    assert found["x"].tolist() == [[2, 30]]
    assert weight.grad.tolist() == [2, 40]


def test_no_gradient_at_all_gives_zeros() -> None:
    stage, weight = program()
    stage.forward(0, 1, X, 1.0)
    assert stage.backward(0, {})["x"].tolist() == [[0, 0]]
    assert weight.grad is None


def test_the_two_halves_make_the_whole() -> None:
    whole, expected = program()
    split, weight = program()
    for stage in (whole, split):
        stage.forward(0, 1, X, 1.0)
        stage.forward(1, 1, X, 1.0)
    inputs = [whole.backward(m, {"y": GY, "z": GZ})["x"] for m in range(2)]
    assert torch.equal(split.backward_input(0, {"y": GY, "z": GZ})["x"], inputs[0])
    assert weight.grad is None
    split.backward_input(1, {"y": GY, "z": GZ})
    split.backward_weight(0)
    split.backward_weight(1)
    assert torch.equal(weight.grad, expected.grad)


def test_a_loss_is_kept_by_micro_batch_and_weighted() -> None:
    stage, weight = program(loss=True)
    for microbatch, share in ((1, 0.25), (0, 0.75)):
        assert stage.forward(microbatch, 1, X, share) == {}
        stage.backward(microbatch, {})
    assert {m: loss.item() for m, loss in stage.losses.items()} == {0: 4.0, 1: 4.0}
    assert weight.grad.tolist() == [0.5, 1.0]


def test_a_micro_batch_is_forgotten_after_its_backward() -> None:
    stage, _ = program()
    stage.forward(0, 1, X, 1.0)
    stage.backward(0, {"y": GY})
    with pytest.raises(KeyError):
        stage.backward(0, {"y": GY})
