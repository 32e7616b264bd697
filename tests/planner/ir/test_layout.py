from __future__ import annotations

from planner.ir.box import Interval
from planner.ir.layout import Layout, cut_points, scaled_intervals


def test_samples_are_shared_as_the_cut_points_say() -> None:
    layout = Layout({"sample": cut_points((3, 1))})
    assert layout.samples(4) == (3, 1)


def test_cut_points_are_scaled_to_the_extent_and_rounded_half_up() -> None:
    assert scaled_intervals((0, 1, 2), 5) == (Interval(0, 3), Interval(3, 5))
    assert scaled_intervals((0, 3, 4), 8) == (Interval(0, 6), Interval(6, 8))
    assert Layout({"sample": (0, 1, 2)}).samples(1) == (1, 0)


def test_each_part_of_a_grid_has_the_samples_of_its_place() -> None:
    assert Layout({"height": (0, 1, 2), "sample": (0, 3, 4), "sites": (0, 5, 9)}).samples(8) == (6, 2, 6, 2)
    assert Layout({"height": (0, 1, 2)}).samples(8) == (8, 8)


def test_no_samples_are_no_rows() -> None:
    assert Layout({"sample": (0, 1, 2)}).samples(0) == (0, 0)
