"""The first five losses of ResNets on real images under a plan, beside one device's."""

from __future__ import annotations

import pytest

from halopipe.launch.run import run_plan
from halopipe.run_spec.options import RunOptions
from planner.ir.profile import ModelSource
from tests.halopipe.plans import plan_of


def resnet50(*depths: int) -> ModelSource:
    arguments = {"width": "8", "num_classes": "10", "depths": str(list(depths))}
    return ModelSource("profiler.models.resnet:resnet50", arguments, (8, 3, 32, 32))


WHOLE = pytest.mark.exhaustive("four processes that capture a hundred and fifty layers each")


@pytest.mark.parametrize(
    ("source", "dtype", "tolerance"),
    [
        pytest.param(resnet50(1, 1), "float64", 1e-10, id="a block of two stages"),
        pytest.param(resnet50(3, 4, 6, 3), "float64", 1e-10, id="whole", marks=WHOLE),
        pytest.param(resnet50(3, 4, 6, 3), "float32", 1e-4, id="whole in float32", marks=WHOLE),
    ],
)
def test_five_losses_of_a_pipeline_equal_one_device_s(source: ModelSource, dtype: str, tolerance: float) -> None:
    plan = plan_of(source, [0.6], (4, 4))
    options = RunOptions(steps=5, warmup=1, data="halopipe.data:digits", check_numerics=True, dtype=dtype)
    result = run_plan(plan, options)
    assert result is not None
    assert result.numerics is not None
    assert result.numerics.num_steps == 5
    assert result.numerics.worst["loss"].error <= tolerance
    assert len(set(result.losses)) == 5
