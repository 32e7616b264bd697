"""BaPipe's closed forms of a step and of what is kept, against the simulator and the table of lifetimes."""

from __future__ import annotations

import pytest

from planner.costs.memory.memory_bound import kept_by
from planner.extras.baselines.bapipe import AS, FBP, SNO, SO, BapipePipeline, DeviceRow, kept, minibatch_s
from planner.extras.baselines.common.problem import ChainCosts
from tests.planner.costs.simulator.test_streaming import MIB, REGIMES, boards, step_s

OURS = {SNO: "1f1b-sno", SO: "1f1b-so", AS: "1f1b-as", FBP: "fbp-as"}


@pytest.mark.parametrize("transfer", REGIMES.values(), ids=REGIMES)
@pytest.mark.parametrize("schedule", [AS, FBP])
@pytest.mark.parametrize(("p", "m"), [(2, 3), (3, 8), (4, 4)])
def test_a_step_is_what_its_closed_form_says(p: int, m: int, schedule: str, transfer: float) -> None:
    ones = (1.0 * m,) * p
    chain = ChainCosts(tuple(map(str, range(p))), ones, (2.0 * m,) * p, ones, ones, (*(MIB * m,) * (p - 1), 0.0))
    pipeline = BapipePipeline(schedule, m, tuple(map(float, range(1, p))))
    closed_s = minibatch_s(chain, DeviceRow((1.0,) * p, MIB / transfer), pipeline)
    assert step_s(boards(p, transfer), OURS[schedule], m) == pytest.approx(closed_s)


@pytest.mark.parametrize("schedule", OURS)
@pytest.mark.parametrize(("p", "m"), [(1, 4), (4, 3), (4, 9), (7, 40)])
def test_a_stage_keeps_the_features_of_as_many_micro_batches_as_the_table_says(schedule: str, p: int, m: int) -> None:
    assert kept_by(OURS[schedule], p, m) == tuple(kept(schedule, number, p, m) for number in range(1, p + 1))
