"""The benchmark of shapes that nobody measured, on profiles whose costs are known."""

from __future__ import annotations

import pytest

from benchmarks.unseen_shapes import Errors, Held, rows_of, sizes_and_shapes
from planner.ir.profile import Measurement
from tests.planner.networks import mesh_like, priced
from tests.planner.parts import with_parts


def test_errors_are_relative_and_may_be_weighted_by_seconds() -> None:
    errors = Errors()
    errors.add("planner", 1.5, 1.0)
    errors.add("planner", 9.0, 9.0)
    errors.add("planner", None, 1.0)
    assert errors.mape("planner") == pytest.approx(25.0)
    assert errors.mape("planner", weighted=True) == pytest.approx(5.0)


def test_every_shape_is_held_back_once_and_gone_with_all_that_are_like_it() -> None:
    held = Held(priced(*mesh_like(height=32), sizes=(1, 2, 4)))
    folds = list(held.folds(held.whole, by_shape=False))
    assert sum(map(len, folds)) == len({(held.shape[m.layer], m.samples) for m in held.whole})

    def what(m: Measurement) -> tuple[int, int]:
        return held.shape[m.layer], m.samples

    left = held.without(folds[0]).measurements[held.kind]
    assert not {what(m) for m in left} & {what(m) for m in folds[0]}


def test_costs_in_proportion_to_work_are_found_again() -> None:
    errors = sizes_and_shapes(Held(priced(*mesh_like(height=64), sizes=(1, 2, 4, 8))), by_shape=False)
    assert errors.mape("planner") < 10
    assert errors.mape("planner") < errors.mape("roofline")


def test_rows_say_who_predicts_what() -> None:
    profile = with_parts(priced(*mesh_like(height=32), speeds=(1.0,), sizes=(1, 2)), (1, 2), 2)
    names = [row.name for row in rows_of("net", profile)]
    assert "net: sizes: planner" in names
    assert "net: parts: share" in names
    assert "net: parts, none known: planner" in names
