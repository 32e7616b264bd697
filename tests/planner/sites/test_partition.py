from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.site_balance import morton
from planner.sites import partition as module
from planner.sites.keys import Ints, pack, samples_of, unpack
from planner.sites.partition import bisection


def grid(*shape: int) -> Ints:
    blocks = np.stack(np.meshgrid(*[np.arange(length) for length in shape], indexing="ij"), -1).reshape(-1, 3)
    return pack(np.zeros(len(blocks), np.int64), blocks)


def by_recursion(keys: Ints, work: Ints, goals: list[int]) -> list[int]:
    """The same order, node by node: the plain version."""
    samples, blocks = unpack(keys)

    def order(items: list[int], low: int) -> list[int]:
        if len(items) < 2:
            return items
        found, total, heaviest = [], sum(int(work[item]) for item in items), max(int(work[item]) for item in items)
        inside = [goal - low for goal in goals if heaviest < goal - low < total - heaviest]
        twice = min((2 * goal for goal in inside), key=lambda goal: (abs(goal - total), goal), default=total)
        for axis in range(3):
            row = sorted(items, key=lambda item: tuple(np.roll(blocks[item], -axis).tolist()))
            loads, plane = [int(work[item]) for item in row], [int(blocks[item, axis]) for item in row]
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
    keys, work = pack(table[:, 0], table[:, 1:4]), table[:, 4]
    assert bisection(keys, work, np.array(goals, np.int64)).tolist() == by_recursion(keys, work, goals)
    assert bisection(keys, work).tolist() == by_recursion(keys, work, [])


def test_thirds_of_a_bar_are_bars() -> None:
    keys = grid(9, 4, 4)
    order = bisection(keys, np.full(144, 7, np.int64), np.array([336, 672]))
    extents = [np.ptp(unpack(keys[part])[1], axis=0).tolist() for part in np.split(order, 3)]
    assert extents == [[2, 3, 3]] * 3


def test_the_picture() -> None:
    text = next(part for part in str(module.__doc__).split("\n\n") if re.match(r"\s*work +\d", part))
    numbers = np.array([re.findall(r"\d+", line)[:8] for line in text.splitlines()], np.int64)  # x to the right, y down
    work, places = numbers[:, :4], numbers[:, 4:]
    order = bisection(grid(4, 4, 1), work.T.ravel())
    np.testing.assert_array_equal(np.argsort(order).reshape(4, 4).T, places)


@pytest.mark.parametrize("power", [1, 2, 3])
def test_an_eighth_of_a_cube_is_a_cube(power: int) -> None:
    keys = grid(2**power, 2**power, 2**power)
    order = bisection(keys, np.full(len(keys), 5, np.int64))
    for part in np.split(order, 8):
        blocks = unpack(keys[part])[1]
        assert (blocks.max(axis=0) - blocks.min(axis=0) + 1).tolist() == [2 ** (power - 1)] * 3


def test_the_gap_between_two_clusters_is_the_first_cut() -> None:
    blocks = unpack(grid(2, 6, 6))[1]
    keys = pack(np.zeros(144, np.int64), np.concatenate([blocks, blocks + np.array([5, 0, 0])]))
    order = bisection(keys, np.ones(144, np.int64))
    assert unpack(keys[order[:72]])[1][:, 0].max() <= 1


def test_a_block_heavier_than_all_others_does_not_hide_them() -> None:
    keys = grid(7, 1, 1)
    for heavy in range(7):
        work = np.zeros(7, np.int64)
        work[heavy] = 1 << 50
        assert sorted(bisection(keys, work).tolist()) == list(range(7))


def test_falling_work_takes_no_more_depth_than_its_bits() -> None:
    work = np.array([1 << max(50 - i, 0) for i in range(400)])
    assert sorted(bisection(grid(400, 1, 1), work).tolist()) == list(range(400))


@pytest.mark.parametrize("order", [bisection, morton])
def test_samples_stay_together_and_everything_is_there(order: object) -> None:
    random = np.random.default_rng(0)
    keys = np.unique(pack(random.integers(4, size=500), random.integers(-8, 8, size=(500, 3))))
    found = order(keys, random.integers(1, 99, size=len(keys)))  # type: ignore[operator]
    assert sorted(found.tolist()) == list(range(len(keys)))
    assert (np.diff(samples_of(keys[found])) >= 0).all()
    assert order(keys[:0], np.zeros(0, np.int64)).tolist() == []  # type: ignore[operator]


def test_morton_takes_the_bits_in_turn() -> None:
    keys = grid(2, 2, 2)
    assert morton(keys, np.ones(8, np.int64)).tolist() == list(range(8))
    blocks = unpack(grid(4, 4, 1)[morton(grid(4, 4, 1), np.ones(16, np.int64))])[1]
    assert blocks[:, :2].tolist()[:8] == [[0, 0], [0, 1], [1, 0], [1, 1], [0, 2], [0, 3], [1, 2], [1, 3]]
    below = pack(np.zeros(2, np.int64), np.array([[0, 0, 0], [-1, 0, 0]]))
    assert morton(below, np.ones(2, np.int64)).tolist() == [1, 0]
