from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.ir.box import Box, Interval, intersect, volume, whole

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
