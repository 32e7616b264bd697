from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.costs.layers.interpolation import layer_cost
from planner.ir.cluster import DATASHEET, INTERPOLATED, MEASURED
from planner.ir.errors import MissingMeasurementError
from planner.ir.profile import Measurement


def measured(samples: int, forward_s: float, key: str = "", evidence: str = MEASURED) -> Measurement:
    return Measurement("conv1", samples, forward_s, 0.0, 0.0, 0.0, 100 * samples, 7, 10, key=key, evidence=evidence)


def forward_s(found: list[Measurement], samples: int) -> float:
    return layer_cost(found, samples).values[0]


def test_a_measured_size_is_what_was_measured() -> None:
    found = layer_cost([measured(1, 0.3), measured(2, 0.5)], 2)
    assert found.values == (0.5, 0.0, 0.0, 0.0, 200.0, 7.0)
    assert found.evidence == MEASURED


def test_no_samples_cost_nothing() -> None:
    assert set(layer_cost([measured(1, 0.3)], 0).values) == {0.0}


def test_between_two_sizes_the_line_is_straight_in_log_log() -> None:
    found = layer_cost([measured(2, 0.1), measured(8, 0.4)], 4)
    assert found.values[0] == pytest.approx(0.2)
    assert found.values[4] == pytest.approx(400)
    assert found.evidence == INTERPOLATED


def test_beyond_the_last_size_the_line_is_straight() -> None:
    assert forward_s([measured(1, 0.5), measured(2, 0.6), measured(4, 0.8)], 6) == pytest.approx(1.0)


def test_below_the_first_size_the_line_is_straight_and_never_negative() -> None:
    assert forward_s([measured(4, 0.5), measured(8, 0.9)], 2) == pytest.approx(0.3)
    assert forward_s([measured(4, 0.1), measured(8, 0.9)], 2) == 0.0


def test_a_change_of_back_end_is_not_bridged() -> None:
    found = [measured(1, 1.0, "slow"), measured(2, 2.0, "slow"), measured(8, 1.0, "fast"), measured(16, 2.0, "fast")]
    assert forward_s(found, 4) == pytest.approx(4.0)
    assert forward_s([measured(1, 1.0, "slow"), *found[2:]], 4) == pytest.approx(0.5)


@pytest.mark.parametrize(
    "found", [[measured(4, 1.0)], [measured(2, 1.0, "slow"), measured(8, 1.0, "fast")]], ids=["one size", "two keys"]
)
def test_what_nobody_measured_is_refused(found: list[Measurement]) -> None:
    with pytest.raises(MissingMeasurementError, match="what conv1 costs at 5 samples"):
        layer_cost(found, 5)


def test_a_figure_is_as_certain_as_its_weakest_part() -> None:
    assert layer_cost([measured(1, 1.0), measured(4, 2.0, evidence=DATASHEET)], 2).evidence == DATASHEET


@given(st.integers(1, 64), st.floats(1e-6, 1.0), st.floats(0.0, 2.0))
def test_a_power_law_is_read_exactly(samples: int, scale: float, exponent: float) -> None:
    found = [measured(n, scale * n**exponent) for n in (1, 4, 16, 64)]
    assert forward_s(found, samples) == pytest.approx(scale * math.pow(samples, exponent))
