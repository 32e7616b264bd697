"""Cuts of a row, of samples and ranks, and of space: each beside all of them, or its plain version."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations_with_replacement
from math import inf

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from planner.sites.bisection import bisection
from planner.sites.keys import Numbers, pack, unpack
from planner.sites.partition import Stretch, balanced_cuts, best_stretches, bottleneck


def prefix_of(work: list[int]) -> Numbers:
    return np.concatenate([[0], np.cumsum(work)]).astype(np.int64)


@given(
    st.lists(st.integers(0, 30), max_size=9),
    st.lists(st.sampled_from([0.0, 0.5, 1.0, 2.0, 3.3]), min_size=1, max_size=4).filter(any),
)
@example([1 << 48, 1, 1, 1, 1 << 48, 1, 1], [1.0, 1.0])
def test_no_other_cuts_are_better(work: list[int], speeds: list[float]) -> None:
    prefix = prefix_of(work)
    items = len(work)
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


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("work", "speeds", "cuts"),
    [
        ([1] * 12, [1.0, 1.0, 2.0, 2.0], [0, 2, 4, 8, 12]),
        ([100, 1, 1], [1.0] * 3, [0, 0, 1, 3]),
        ([1, 1, 100], [1.0] * 3, [0, 2, 3, 3]),
        ([1, 1], [1.0] * 4, [0, 0, 1, 1, 2]),
        ([5, 5], [0.0, 1.0, 0.0], [0, 0, 2, 2]),
    ],
)
def test_of_equally_good_cuts_the_proportional_ones(work: list[int], speeds: list[float], cuts: list[int]) -> None:
    assert balanced_cuts(prefix_of(work), speeds) == cuts


def test_work_without_speed_never_ends() -> None:
    assert bottleneck(prefix_of([1, 2]), [0, 1, 2], [0.0, 1.0]) == inf
    assert bottleneck(prefix_of([1, 2]), [0, 0, 2], [0.0, 2.0]) == 1.5


def rows(work: list[int], speeds: list[float], most: float, sample: int = 0, rank: int = 0) -> Iterator[list[Stretch]]:
    """Every row of stretches that keeps to ``most``."""
    if rank == len(speeds):
        if sample == len(work):
            yield []
        return
    for last_rank in range(rank + 1, len(speeds) + 1):
        for last in range(sample, len(work) + 1):
            if sum(work[sample:last]) <= most * sum(speeds[rank:last_rank]) + 1e-6:
                for rest in rows(work, speeds, most, last, last_rank):
                    yield [Stretch(sample, last, rank, last_rank), *rest]


def value(row: list[Stretch], work: list[int], speeds: list[float]) -> tuple[int, float]:
    cuts = sum(one.last_rank - one.first_rank - 1 for one in row if one.first_sample < one.last_sample)
    times = [0.0]
    for one in row:
        speed = sum(speeds[one.first_rank : one.last_rank])
        times.append(sum(work[one.first_sample : one.last_sample]) / speed if speed else 0.0)
    return cuts, max(times)


@given(
    st.lists(st.integers(0, 20), max_size=6),
    st.lists(st.sampled_from([0.0, 1.0, 2.0]), min_size=1, max_size=4).filter(any),
    st.sampled_from([1.0, 1.05, 1.3, 2.0]),
)
def test_no_other_row_has_fewer_cuts_or_is_faster(work: list[int], speeds: list[float], slack: float) -> None:
    most = slack * sum(work) / sum(speeds)
    found = best_stretches(prefix_of(work), speeds, most)
    best = min(value(row, work, speeds) for row in rows(work, speeds, most))
    assert (found.num_cuts, found.time) == pytest.approx(best)
    assert value(list(found.row), work, speeds) == pytest.approx(best)
    assert found.row[0].first_sample == found.row[0].first_rank == 0
    assert (found.row[-1].last_sample, found.row[-1].last_rank) == (len(work), len(speeds))
    for one, two in zip(found.row, found.row[1:], strict=False):
        assert (one.last_sample, one.last_rank) == (two.first_sample, two.first_rank)


def grid(*shape: int) -> Numbers:
    blocks = np.stack(np.meshgrid(*[np.arange(length) for length in shape], indexing="ij"), -1).reshape(-1, 3)
    return pack(np.zeros(len(blocks), np.int64), blocks)


def by_recursion(keys: Numbers, work: Numbers, goals: list[int]) -> list[int]:
    """The same order, node by node: the plain version."""
    samples, blocks = unpack(keys)

    def order(items: list[int], low: int) -> list[int]:
        if len(items) < 2:
            return items
        found = []
        total = sum(int(work[item]) for item in items)
        heaviest = max(int(work[item]) for item in items)
        inside = [goal - low for goal in goals if heaviest < goal - low < total - heaviest]
        twice = min((2 * goal for goal in inside), key=lambda goal: (abs(goal - total), goal), default=total)
        for axis in range(3):
            row = sorted(items, key=lambda item: tuple(np.roll(blocks[item], -axis).tolist()))
            loads = [int(work[item]) for item in row]
            plane = [int(blocks[item, axis]) for item in row]
            if sum(loads):
                half = min(range(1, len(row)), key=lambda at: (abs(2 * sum(loads[:at]) - twice), at))
            else:
                half = len(row) // 2
            surface = plane.count(plane[half - 1]) + plane.count(plane[half])
            found.append((surface if plane[half] - plane[half - 1] <= 1 else 0, axis, row[:half], row[half:]))
        _, _, first, second = min(found)
        return order(first, low) + order(second, low + sum(int(work[item]) for item in first))

    return [
        item
        for sample in np.unique(samples)
        for item in order(np.flatnonzero(samples == sample).tolist(), int(work[samples < sample].sum()))
    ]


@given(
    st.lists(
        st.tuples(st.integers(0, 2), *[st.integers(-3, 3)] * 3, st.integers(1, 40)),
        max_size=40,
        unique_by=lambda row: row[:4],
    ),
    st.lists(st.integers(0, 800), max_size=5).map(sorted),
)
def test_all_nodes_at_once_give_the_order_of_the_recursion(rows: list[tuple[int, ...]], goals: list[int]) -> None:
    table = np.array(rows, np.int64).reshape(-1, 5)
    keys = pack(table[:, 0], table[:, 1:4])
    work = table[:, 4]
    assert bisection(keys, work, np.array(goals, np.int64)).tolist() == by_recursion(keys, work, goals)
    assert bisection(keys, work).tolist() == by_recursion(keys, work, [])


def test_parts_of_bars_and_cubes_are_bars_and_cubes() -> None:
    bar = grid(9, 4, 4)
    cube = grid(8, 8, 8)
    order = bisection(bar, np.full(144, 7, np.int64), np.array([336, 672]))
    assert [np.ptp(unpack(bar[part])[1], axis=0).tolist() for part in np.split(order, 3)] == [[2, 3, 3]] * 3
    order = bisection(cube, np.full(512, 5, np.int64))
    assert [np.ptp(unpack(cube[part])[1], axis=0).tolist() for part in np.split(order, 8)] == [[3, 3, 3]] * 8


@pytest.mark.parametrize("work", [[1 << max(50 - i, 0) for i in range(400)], [0, 0, 0, 1 << 50, 0, 0, 0]])
def test_a_block_heavier_than_all_others_does_not_hide_them_nor_does_depth_grow_with_falling_work(
    work: list[int],
) -> None:
    assert sorted(bisection(grid(len(work), 1, 1), np.array(work)).tolist()) == list(range(len(work)))
