from __future__ import annotations

import pytest
import torch

from planner.ir.errors import NumericsError
from runtime.numerics import TOLERANCES, Difference, loss_differences, report, tensor_differences

EXACT = TOLERANCES[torch.float64]


def difference(error: float, kind: str = "gradient", name: str = "w", accepted: float = 1e-2) -> Difference:
    return Difference(name, kind, 0, 1.0 + error, 1.0, error, accepted)


def test_losses_are_compared_as_far_as_both_go() -> None:
    found = loss_differences([1.0, 2.2, 5.0], [1.0, 2.0], EXACT, [0.0, 0.03])
    assert [each.error for each in found] == pytest.approx([0.0, 0.1])
    assert [each.accepted for each in found] == pytest.approx([1e-10, 0.3])
    assert loss_differences([0.0], [0.0], EXACT)[0].error == 0.0


def test_a_tensor_is_judged_by_its_own_norm_unless_it_is_negligible() -> None:
    expected = {"big": torch.tensor([3.0, 4.0]), "small": torch.tensor([1e-3]), "noise": torch.tensor([1e-14])}
    here = {"big": torch.tensor([3.0, 4.5]), "small": torch.tensor([2e-3]), "noise": torch.tensor([2e-14])}
    found = {each.name: each for each in tensor_differences("gradient", here, expected, EXACT)}
    assert found["big"].error == pytest.approx(0.1)
    assert found["small"].error == pytest.approx(1.0)
    assert found["noise"].error == pytest.approx(2e-15)


def test_equal_zeros_are_equal() -> None:
    zeros = {"w": torch.zeros(3)}
    assert tensor_differences("gradient", zeros, zeros, EXACT)[0].error == 0.0


def test_another_shape_or_name_is_an_error() -> None:
    with pytest.raises(NumericsError, match=r"w has shape \(3,\), on one device \(2,\)"):
        tensor_differences("gradient", {"w": torch.zeros(3)}, {"w": torch.zeros(2)}, EXACT)
    with pytest.raises(NumericsError, match="on one device none"):
        tensor_differences("gradient", {"w": torch.zeros(3)}, {}, EXACT)


def test_the_report_holds_the_worst_of_each_kind() -> None:
    found = report([difference(1e-3), difference(5e-3, name="v"), difference(1e-5, "loss")], "float32")
    assert found.worst["gradient"].name == "v"
    assert (found.num_steps, found.num_tensors) == (1, 2)
    assert str(found) == (
        "as one device over 1 steps in float32; largest relative errors: gradient 5.0e-03, loss 1.0e-05"
    )


@pytest.mark.parametrize("error", [1e-1, float("nan"), float("inf")])
def test_the_worst_beyond_tolerance_is_named_with_both_numbers(error: float) -> None:
    with pytest.raises(NumericsError) as caught:
        report([difference(1e-4), difference(error, name="conv1.weight")], "float32")
    assert "gradient of conv1.weight at step 0" in caught.value.details[0]
    assert "one device 1, relative error" in caught.value.details[0]
    assert caught.value.exit_code == 6


def test_no_more_than_the_worst_few_are_named_the_worst_first() -> None:
    many = [difference(0.1 * k, name=f"w{k}") for k in range(1, 9)]
    with pytest.raises(NumericsError) as caught:
        report(many, "float64")
    assert "w8" in caught.value.details[0]
    assert caught.value.details[-1] == "... and 3 more"
    assert caught.value.remedies == ()


def test_what_one_device_rounds_itself_is_accepted_from_a_plan() -> None:
    here, there = {"w": torch.tensor([1.05])}, {"w": torch.tensor([1.0])}
    assert tensor_differences("gradient", here, there, EXACT)[0].accepted == 1e-10
    assert tensor_differences("gradient", here, there, EXACT, {"w": 0.01})[0].accepted == pytest.approx(0.1)
    assert TOLERANCES[torch.float32].loss == 1e-4
