from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.ir.box import Interval, volume
from planner.ir.graph import TensorSpec
from planner.ir.layout import Layout, cut_points, scaled_intervals

IMAGE = TensorSpec(("sample", "channel", "height"), (4, 3, 8), "float32")


def test_no_cuts_is_one_part_with_everything() -> None:
    assert Layout().num_parts == 1
    assert Layout().boxes(IMAGE, 4) == ((Interval(0, 4), Interval(0, 3), Interval(0, 8)),)


def test_samples_are_shared_as_the_cut_points_say() -> None:
    layout = Layout({"sample": cut_points((3, 1))})
    assert [box[0] for box in layout.boxes(IMAGE, 4)] == [Interval(0, 3), Interval(3, 4)]
    assert layout.samples(4) == (3, 1)


def test_several_dims_are_a_grid_whose_last_dim_runs_fastest() -> None:
    layout = Layout({"sample": (0, 2, 4), "height": (0, 4, 8)})
    assert layout.num_parts == 4
    assert [(str(box[0]), str(box[2])) for box in layout.boxes(IMAGE, 4)] == [
        ("[0, 2)", "[0, 4)"),
        ("[0, 2)", "[4, 8)"),
        ("[2, 4)", "[0, 4)"),
        ("[2, 4)", "[4, 8)"),
    ]


def test_a_tensor_without_the_dim_is_replicated() -> None:
    weights = TensorSpec(("channel",), (3,), "float32")
    assert Layout({"height": (0, 4, 8)}).boxes(weights, 4) == ((Interval(0, 3),),) * 2


def test_several_rows_a_sample_are_cut_between_samples() -> None:
    tokens = TensorSpec(("sample", "feature"), (12, 5), "float32")  # 4 samples of 3 tokens
    boxes = Layout({"sample": (0, 3, 4)}).boxes(tokens, 4)
    assert [box[0] for box in boxes] == [Interval(0, 9), Interval(9, 12)]


def test_cut_points_are_scaled_to_the_extent_and_rounded_half_up() -> None:
    assert scaled_intervals((0, 1, 2), 5) == (Interval(0, 3), Interval(3, 5))
    assert scaled_intervals((0, 3, 4), 8) == (Interval(0, 6), Interval(6, 8))
    assert Layout({"sample": (0, 1, 2)}).samples(1) == (1, 0)


def test_no_samples_are_no_rows() -> None:
    assert Layout({"sample": (0, 1, 2)}).samples(0) == (0, 0)


shares = st.lists(st.integers(0, 5), min_size=1, max_size=4).filter(any).map(tuple)


@given(shares, shares, st.integers(0, 9), st.integers(1, 3), st.integers(1, 9))
def test_the_parts_are_a_partition(
    samples: tuple[int, ...], heights: tuple[int, ...], count: int, rows: int, height: int
) -> None:
    spec = TensorSpec(("sample", "height"), (count * rows, height), "float32")
    layout = Layout({"sample": cut_points(samples), "height": cut_points(heights)})
    boxes = layout.boxes(spec, count)
    assert len(boxes) == layout.num_parts == len(samples) * len(heights)
    cells = [
        (i, j) for box in boxes for i in range(box[0].start, box[0].stop) for j in range(box[1].start, box[1].stop)
    ]
    copies = len(heights) if height == 1 else 1  # a dim of extent 1 is whole everywhere
    assert len(set(cells)) * copies == len(cells) == sum(map(volume, boxes)) == count * rows * height * copies
    assert all(interval.start % rows == interval.stop % rows == 0 for interval, _ in boxes)
    assert sum(layout.samples(count)) == count * len(heights)


@pytest.mark.parametrize(("given_shares", "points"), [((4,), (0, 4)), ((3, 1), (0, 3, 4)), ((1, 0, 2), (0, 1, 1, 3))])
def test_shares_become_cut_points(given_shares: tuple[int, ...], points: tuple[int, ...]) -> None:
    assert cut_points(given_shares) == points
