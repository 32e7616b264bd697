from __future__ import annotations

from itertools import combinations_with_replacement
from math import inf

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.sites.keys import Ints
from planner.sites.partition import balanced_cuts, bottleneck

WORK = st.lists(st.integers(0, 30), max_size=9)
SPEEDS = st.lists(st.sampled_from([0.0, 0.5, 1.0, 2.0, 3.3]), min_size=1, max_size=4).filter(any)


def prefix_of(work: list[int]) -> Ints:
    return np.concatenate([[0], np.cumsum(work)]).astype(np.int64)


@given(WORK, SPEEDS)
def test_no_other_cuts_are_better(work: list[int], speeds: list[float]) -> None:
    prefix, items = prefix_of(work), len(work)
    cuts = balanced_cuts(prefix, speeds)
    assert (cuts[0], cuts[-1], len(cuts)) == (0, items, len(speeds) + 1)
    assert cuts == sorted(cuts)
    every = combinations_with_replacement(range(items + 1), len(speeds) - 1)
    best = min(bottleneck(prefix, [0, *inner, items], speeds) for inner in every)
    assert bottleneck(prefix, cuts, speeds) == pytest.approx(best, rel=1e-8)


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=200), st.integers(1, 8))
def test_cuts_are_within_one_item_of_the_mean(work: list[int], num_ranks: int) -> None:
    prefix = prefix_of(work)
    cuts = balanced_cuts(prefix, [1.0] * num_ranks)
    assert bottleneck(prefix, cuts, [1.0] * num_ranks) <= sum(work) / num_ranks + max(work)


@pytest.mark.parametrize(
    ("work", "speeds", "cuts"),
    [
        ([1] * 8, [1.0] * 4, [0, 2, 4, 6, 8]),
        ([1] * 9, [1.0, 2.0], [0, 3, 9]),
        ([1] * 12, [1.0, 1.0, 2.0, 2.0], [0, 2, 4, 8, 12]),
        ([100, 1, 1], [1.0] * 3, [0, 0, 1, 3]),
        ([1, 1, 100], [1.0] * 3, [0, 2, 3, 3]),
        ([1, 1], [1.0] * 4, [0, 0, 1, 1, 2]),
        ([5, 5], [0.0, 1.0, 0.0], [0, 0, 2, 2]),
        ([], [1.0, 1.0], [0, 0, 0]),
    ],
)
def test_cuts_that_one_expects(work: list[int], speeds: list[float], cuts: list[int]) -> None:
    assert balanced_cuts(prefix_of(work), speeds) == cuts


def test_huge_and_tiny_work_side_by_side() -> None:
    work = [1 << 48, 1, 1, 1, 1 << 48, 1, 1]
    assert balanced_cuts(prefix_of(work), [1.0, 1.0]) in ([0, 3, 7], [0, 4, 7], [0, 2, 7])


def test_work_without_speed_never_ends() -> None:
    assert bottleneck(prefix_of([1, 2]), [0, 1, 2], [0.0, 1.0]) == inf
    assert bottleneck(prefix_of([1, 2]), [0, 0, 2], [0.0, 2.0]) == 1.5
