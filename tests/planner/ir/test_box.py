from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.ir import box as module
from planner.ir.box import Box, Interval, Transfer, intersect, transfers, volume, whole
from planner.ir.graph import TensorSpec
from planner.ir.layout import Layout

LENGTH = 8


def boxes(dims: int = 2) -> st.SearchStrategy[Box]:
    ends = st.tuples(st.integers(0, LENGTH), st.integers(0, LENGTH)).map(sorted)
    return st.tuples(*[ends.map(lambda pair: Interval(*pair))] * dims)


def marked(box: Box) -> np.ndarray:
    found = np.zeros((LENGTH,) * len(box), int)
    found[tuple(slice(interval.start, interval.stop) for interval in box)] = 1
    return found


@given(boxes(), boxes())
def test_intersection_is_what_both_contain(a: Box, b: Box) -> None:
    both = marked(a) * marked(b)
    shared = intersect(a, b)
    assert (shared is None) == (both.sum() == 0)
    if shared is not None:
        assert (marked(shared) == both).all()
        assert volume(shared) == both.sum()


def test_a_scalar_has_one_element() -> None:
    assert whole(()) == ()
    assert volume(()) == 1
    assert intersect((), ()) == ()


def test_an_interval_that_ends_before_it_starts_is_empty() -> None:
    assert len(Interval(5, 3)) == 0
    assert str(Interval(2, 4)) == "[2, 4)"


def test_boxes_of_another_number_of_dims_do_not_meet() -> None:
    with pytest.raises(ValueError, match="zip"):
        intersect(whole((3,)), whole((3, 3)))


def test_the_picture_of_the_module() -> None:
    owned = {0: (Interval(0, 4),), 1: (Interval(4, 8),)}
    needed = {0: (Interval(0, 5),), 1: (Interval(3, 8),)}
    moved = [move for move in transfers(owned, needed) if move.src != move.dst]
    drawn = "   ".join(f"{move.src} -> {move.dst} {move.box[0]}" for move in moved)
    assert drawn == "1 -> 0 [4, 5)   0 -> 1 [3, 4)"
    assert drawn in (module.__doc__ or "")


@given(
    st.lists(st.integers(0, LENGTH), max_size=3).map(sorted),
    st.lists(st.integers(0, LENGTH), max_size=2).map(sorted),
    st.lists(boxes(), min_size=1, max_size=4),
)
def test_every_needed_element_comes_once_and_from_its_owner(
    rows: list[int], columns: list[int], wanted: list[Box]
) -> None:
    layout = Layout({"height": (0, *rows, LENGTH), "width": (0, *columns, LENGTH)})
    parts = layout.boxes(TensorSpec(("height", "width"), (LENGTH, LENGTH), "float32"), 1)
    owned = dict(enumerate(parts))
    needed = {rank + 1: box for rank, box in enumerate(wanted)}
    arrived = {rank: np.zeros((LENGTH, LENGTH), int) for rank in needed}
    for move in transfers(owned, needed):
        assert (marked(move.box) <= marked(owned[move.src])).all()
        arrived[move.dst] += marked(move.box)
    for rank, box in needed.items():
        assert (arrived[rank] == marked(box)).all()


def test_of_replicas_the_own_one_is_taken_and_others_share_the_load() -> None:
    box = whole((4,))
    moves = transfers(dict.fromkeys((0, 1, 2), box), dict.fromkeys((1, 3, 4, 5), box))
    assert moves == tuple(Transfer(src, dst, box) for src, dst in ((1, 1), (1, 3), (2, 4), (0, 5)))


def test_empty_boxes_move_nothing() -> None:
    empty = (Interval(3, 3),)
    assert transfers({0: whole((4,))}, {1: empty}) == ()
    assert transfers({0: empty}, {1: whole((4,))}) == ()
