from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.sites.arrangement import longest_first, sample_order
from planner.sites.partition import best_stretches


def longest(work: list[int], ranks: tuple[int, ...] | list[int], speeds: list[float]) -> float:
    return max(
        sum(value for value, own in zip(work, ranks, strict=True) if own == rank) / speed
        for rank, speed in enumerate(speeds)
    )


@given(st.lists(st.integers(0, 30), min_size=1, max_size=7), st.integers(1, 3))
def test_on_equal_ranks_the_bound_of_graham_holds(work: list[int], num_ranks: int) -> None:
    speeds = [1.0] * num_ranks
    best = min(longest(work, ranks, speeds) for ranks in product(range(num_ranks), repeat=len(work)))
    assert longest(work, longest_first(work, speeds), speeds) <= (4 / 3 - 1 / (3 * num_ranks)) * best + 1e-9


@given(
    st.lists(st.integers(0, 30), min_size=1, max_size=6),
    st.lists(st.sampled_from([1.0, 2.0, 3.0]), min_size=1, max_size=3),
)
def test_on_unequal_ranks_it_is_within_twice_the_best(work: list[int], speeds: list[float]) -> None:
    best = min(longest(work, ranks, speeds) for ranks in product(range(len(speeds)), repeat=len(work)))
    assert longest(work, longest_first(work, speeds), speeds) <= 2 * best + 1e-9


def test_a_rank_without_speed_gets_nothing() -> None:
    assert set(longest_first([3, 2, 1, 0], [0.0, 1.0, 0.0])) == {1}


@pytest.mark.parametrize(
    ("work", "speeds", "order"),
    [
        ([5, 4, 3, 2, 2, 2], [1.0, 1.0], None),
        ([1, 1, 1, 1], [1.0, 1.0], [0, 2, 1, 3]),
        ([1, 2], [2.0, 1.0], [1, 0]),
        ([7], [1.0, 1.0], [0]),
        ([], [1.0, 1.0], []),
    ],
)
def test_samples_of_one_rank_lie_side_by_side(work: list[int], speeds: list[float], order: list[int] | None) -> None:
    found = sample_order(np.array(work, np.int64), speeds, 0.0)
    assert sorted(found) == list(range(len(work)))
    if order is not None:
        assert found == order
    else:
        before = np.cumsum([work[sample] for sample in found]).tolist()
        assert sum(work) // 2 in before


def test_a_large_sample_comes_first_and_the_rest_fills_what_it_leaves() -> None:
    work = [10, 10, 23, 10, 10, 10, 7, 20]  # 100 on ten ranks: two large ones, then each rank has its 10
    found = sample_order(np.array(work), [1.0] * 10, 0.01)
    assert found[0] == 2
    assert found[1] == 6  # what fills up the third rank


@pytest.mark.parametrize(("work", "speeds"), [([20, 7, 5, 4], [2.0, 4.0, 3.0]), ([22, 4, 6, 0], [3.0, 4.0, 1.0])])
def test_on_unequal_ranks_no_order_of_these_cuts_fewer_samples(work: list[int], speeds: list[float]) -> None:
    def num_cuts(order: Sequence[int]) -> int:
        ends = np.concatenate([[0], np.cumsum([work[sample] for sample in order])])
        return best_stretches(ends, speeds, sum(work) / sum(speeds)).num_cuts

    assert num_cuts(sample_order(np.array(work), speeds, 0.0)) == min(map(num_cuts, permutations(range(len(work)))))


@given(st.lists(st.integers(1, 100), min_size=1, max_size=12), st.integers(1, 6))
def test_the_order_is_one_of_all_samples(work: list[int], num_ranks: int) -> None:
    found = sample_order(np.array(work), [1.0] * num_ranks, 0.06)
    assert sorted(found) == list(range(len(work)))
