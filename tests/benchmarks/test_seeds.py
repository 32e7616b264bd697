from __future__ import annotations

import pytest

from benchmarks.seeds import parareal, terapipe
from benchmarks.seeds.branches import Network, best_plan
from benchmarks.seeds.primitives import adjoints
from benchmarks.seeds.schedules import predicted
from planner.extras.token_slices.search import best_slices


def test_predicted_gains_are_the_closed_forms() -> None:
    rows = list(predicted())
    assert len(rows) == 16
    assert [row.name for row in rows if not row.holds] == []
    assert all(row.value > 1.1 for row in rows)


def test_branches_side_by_side_are_faster_than_their_best_chain() -> None:
    network = Network((2, 2), 1, 64, 1e-3)
    side_by_side, chain = (best_plan(network, (16,), is_chain=each, num_devices=3) for each in (False, True))
    assert side_by_side.search.status == chain.search.status == "proven"
    assert side_by_side.prediction.step_s < chain.search.bound_s
    one = best_plan(network, (16,), is_chain=False, num_devices=1)
    assert one.prediction.step_s == pytest.approx(128 * 5 * 3e-3, rel=1e-3)


def test_slices_side_by_side_gain_what_the_closed_form_says() -> None:
    rows = [row for slices in (2, 5) for count in (1, 4) for row in parareal.predicted(slices, count)]
    assert [row.name for row in rows if not row.holds] == []
    assert all(row.value > 1.1 for row in rows)
    assert parareal.planned(2).value > 1.2


def test_token_slices_gain_most_on_the_largest_model_as_published() -> None:
    largest = terapipe.SETTINGS[-1]
    slices, formula_s = best_slices(terapipe.slice_times(largest).both, largest.stages, largest.samples)
    whole_s, step_s = (terapipe.step_s(largest, each) for each in ((terapipe.TOKENS,), slices))
    assert sum(slices) == terapipe.TOKENS
    assert step_s >= 0.999 * formula_s  # messages come on top
    assert whole_s / step_s > largest.published


def test_the_adjoints_of_random_exchanges_are_exact() -> None:
    row = adjoints(4)
    assert row.holds
    assert row.value > 0  # something was compared
