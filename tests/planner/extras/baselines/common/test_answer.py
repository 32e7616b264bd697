from __future__ import annotations

import pytest

from benchmarks.chains import chain_profile
from planner.costs.cost_model import CostModel
from planner.extras.baselines.common.answer import slowest_kind
from planner.ir.problem import Problem


@pytest.mark.parametrize("speeds", [(1.0, 0.5), (0.5, 1.0), (10.0, 2.0, 2.0), (2.0, 10.0)])
def test_planners_for_like_devices_count_on_the_slowest(speeds: tuple[float, ...]) -> None:
    """Whatever kinds are called and come first."""
    profile = chain_profile(3, len(speeds), speeds=speeds)
    assert slowest_kind(Problem(profile, 4), CostModel(profile), 2) == f"kind-{min(speeds):g}"
