from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from planner.ir.errors import NumericsError
from runtime.numerics.compare import (
    NUM_BUCKETS,
    ROUNDING_FACTOR,
    TOLERANCES,
    Sketch,
    loss_differences,
    report,
    sketches,
    tensor_differences,
)
from runtime.numerics.difference import Difference

EXACT = TOLERANCES[torch.float64]
SINGLE = TOLERANCES[torch.float32]


def difference(error: float, kind: str = "gradient", name: str = "w", accepted: float = 1e-2) -> Difference:
    return Difference(name, kind, 0, 1.0 + error, 1.0, error, accepted)


def test_losses_are_compared_as_far_as_both_go() -> None:
    found = loss_differences([1.0, 2.2, 5.0], [1.0, 2.0], SINGLE, [0.0, 3e-5])
    assert [each.error for each in found] == pytest.approx([0.0, 0.1])
    assert [each.accepted for each in found] == pytest.approx([1e-4, 3e-4])
    assert loss_differences([0.0], [0.0], EXACT)[0].error == 0.0


def test_a_tensor_is_judged_by_its_own_norm_unless_it_is_negligible() -> None:
    expected = {"big": torch.tensor([3.0, 4.0]), "small": torch.tensor([1e-3]), "noise": torch.tensor([1e-14])}
    here = {"big": torch.tensor([3.0, 4.5]), "small": torch.tensor([2e-3]), "noise": torch.tensor([2e-14])}
    found = {each.name: each for each in tensor_differences("gradient", sketches(here), sketches(expected), EXACT)}
    assert found["big"].error == pytest.approx(0.1)
    assert found["small"].error == pytest.approx(1.0)
    assert found["noise"].error == pytest.approx(2e-15)


def test_what_is_left_of_terms_that_cancel_is_judged_by_their_rounding() -> None:
    def error(found: float) -> float:
        here, there = ({"big": torch.tensor([1.0]), "bias": torch.tensor([value])} for value in (found, 1e-9))
        return tensor_differences("gradient", sketches(here), sketches(there), EXACT)[1].error

    assert error(1e-9 + 1e-18) < EXACT.tensor  # a hundredth of the rounding of 1, a billionth of the bias
    assert error(1e-9 * (1 + 1e-6)) > EXACT.tensor
    assert error(0.0) == pytest.approx(1e-3)


def test_another_shape_or_name_is_an_error() -> None:
    with pytest.raises(NumericsError, match=r"w has shape \(3,\), on one device \(2,\)"):
        tensor_differences("gradient", sketches({"w": torch.zeros(3)}), sketches({"w": torch.zeros(2)}), EXACT)
    with pytest.raises(NumericsError, match="on one device none"):
        tensor_differences("gradient", sketches({"w": torch.zeros(3)}), {}, EXACT)


def test_the_report_holds_the_worst_of_each_kind() -> None:
    found = report([difference(1e-3), difference(5e-3, name="v"), difference(1e-5, "loss")], "float32")
    assert found.worst["gradient"].name == "v"
    assert (found.num_steps, found.num_tensors) == (1, 2)
    assert "over the first step in float32; largest relative errors: gradient 5.0e-03, loss 1.0e-05" in str(found)


@pytest.mark.parametrize("error", [0.8, float("nan"), float("inf")])
def test_the_worst_few_beyond_tolerance_are_named_with_both_numbers_the_worst_first(error: float) -> None:
    others = [difference(0.1 * k, name=f"w{k}") for k in range(1, 8)]
    with pytest.raises(NumericsError) as caught:
        report([difference(1e-4), *others, difference(error, name="conv1.weight")], "float64")
    assert "gradient of conv1.weight at step 0" in caught.value.details[0]
    assert "one device 1, relative error" in caught.value.details[0]
    assert caught.value.details[-1] == "... and 3 more"
    assert (caught.value.exit_code, caught.value.remedies) == (6, ())


def one(error: float, rounding: float, dtype: torch.dtype = torch.float32) -> Difference:
    """A gradient that is off by ``error``, where one device's own rounding is ``rounding``."""
    here, there = (sketches({"w": torch.tensor([value], dtype=torch.float64)}) for value in (1.0 + error, 1.0))
    return tensor_differences("gradient", here, there, TOLERANCES[dtype], {"w": rounding})[0]


def test_what_one_device_rounds_itself_is_accepted_from_a_plan() -> None:
    assert one(1e-3, 0.0).accepted == 1e-2
    assert one(1e-3, 3e-3).accepted == pytest.approx(3e-2)
    assert one(1e-3, 0.0, torch.float64).accepted == 1e-10
    assert one(1e-3, 1e-10, torch.float64).accepted == pytest.approx(1e-9)
    assert one(1e-3, 0.01, torch.float64).accepted == 1e-7
    assert TOLERANCES[torch.float32].loss == 1e-4


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("rounding", [0.0, 1e-3, 1e-2, 1.0, 100.0])
def test_no_rounding_excuses_an_error_that_a_wrong_weight_makes(dtype: torch.dtype, rounding: float) -> None:
    for error in (1.4, 0.5, 1 / 8):
        found = one(error, rounding, dtype)
        assert found.accepted < error
        assert found.is_wrong or found.is_hidden
        with pytest.raises(NumericsError):
            report([found], str(dtype))


def test_where_rounding_may_be_the_cause_it_is_said_that_nobody_can_judge() -> None:
    found = one(0.2, 0.1)
    assert found.is_hidden
    with pytest.raises(NumericsError, match="cannot be judged in float32") as caught:
        report([found], "float32")
    assert caught.value.remedies == ("--check-numerics --dtype float64",)
    told = report([found, one(0.0, 0.1)], "float32", strict=False)
    assert told.hidden == 1
    assert "1 of them cannot be judged in float32" in str(told)
    later = Difference("loss", "loss", 3, 1.2, 1.0, 0.2, 1e-3, 1.0)
    assert report([one(0.0, 0.0), later], "float32").num_steps == 0  # steps magnify rounding: it is left out
    assert one(0.2, 0.001).is_wrong
    assert one(1.1, 0.1).is_wrong  # further than rounding can be


@pytest.mark.parametrize("size", [1, 5, NUM_BUCKETS, NUM_BUCKETS + 1, 1000, 3_000_000])
def test_the_difference_of_sketches_is_that_of_tensors(size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    first = torch.randn(size, generator=generator, dtype=torch.float64)
    for share in (1e-12, 1e-3, 1.0):
        second = first + share * torch.randn(size, generator=generator, dtype=torch.float64)
        expected = torch.linalg.vector_norm(second - first).item()
        found = Sketch.of(first).distance(Sketch.of(second))
        assert found == pytest.approx(expected, rel=1e-3 if size <= NUM_BUCKETS else 0.4)
    assert Sketch.of(first).distance(Sketch.of(first.clone())) == 0.0
    assert Sketch.of(first).norm == pytest.approx(torch.linalg.vector_norm(first).item())
    assert ROUNDING_FACTOR > 1.4  # what a sketch adds to an error is less


def test_a_sketch_of_complex_numbers_has_both_parts() -> None:
    tensor = torch.randn(8, dtype=torch.complex128)
    assert Sketch.of(tensor).norm == pytest.approx(float(torch.linalg.vector_norm(tensor)))
    assert Sketch.of(tensor).distance(Sketch.of(tensor.conj())) == pytest.approx(2 * float(tensor.imag.norm()))


@pytest.mark.parametrize(
    ("dtype", "larger"),
    [
        ("float16", ["--dtype float32,", "--dtype float64"]),
        ("bfloat16", ["--dtype float64"]),
        ("float32", ["--dtype float64"]),
        ("float64", []),
    ],
)
def test_where_one_device_overflows_dtypes_that_hold_more_are_named(dtype: str, larger: list[str]) -> None:
    overflowed = replace(difference(float("nan")), found=float("inf"), expected=float("inf"))
    with pytest.raises(NumericsError) as caught:
        report([overflowed], dtype)
    *others, example = caught.value.remedies
    assert example == "an example without such numbers"
    assert all(name in remedy for name, remedy in zip(larger, others, strict=True))


def test_where_one_device_overflows_that_is_what_is_said() -> None:
    overflowed = difference(float("nan"), name="w")
    fine = difference(1e-3)
    overflowed = replace(overflowed, found=float("inf"), expected=float("inf"))
    with pytest.raises(NumericsError, match="one device's own numbers are not finite") as caught:
        report([fine, overflowed], "float16")
    assert "float16 holds numbers up to 6.55e+04" in caught.value.details
    with pytest.raises(NumericsError, match="does not compute what one device does"):
        report([overflowed, difference(0.9, name="v")], "float16")
