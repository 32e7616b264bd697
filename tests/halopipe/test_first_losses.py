"""The first five losses of ResNet-50 on real images under a plan, beside one device's."""

from __future__ import annotations

import pytest

from halopipe.launch.run import run_plan
from halopipe.run_spec.options import RunOptions
from planner.ir.profile import ModelSource
from tests.halopipe.plans import plan_of

RESNET50 = ModelSource("profiler.models.resnet:resnet50", {"width": "8", "num_classes": "10"}, (8, 3, 32, 32))


LONG = pytest.mark.exhaustive("a second run of the same network")


@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-10), pytest.param("float32", 1e-4, marks=LONG)])
def test_five_losses_of_a_pipeline_equal_one_device_s(dtype: str, tolerance: float) -> None:
    plan = plan_of(RESNET50, [0.6], (4, 4))
    options = RunOptions(steps=5, warmup=1, data="halopipe.data:digits", check_numerics=True, dtype=dtype)
    result = run_plan(plan, options)
    assert result is not None
    assert result.numerics is not None
    assert result.numerics.num_steps == 5
    assert result.numerics.worst["loss"].error <= tolerance
    assert len(set(result.losses)) == 5
