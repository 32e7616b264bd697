from __future__ import annotations

import pickle
from itertools import combinations_with_replacement

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.site_balance import cut, imbalance, rank_work
from planner.ir.errors import UsageError
from planner.sites.arrangement import Arrangement, arrange, cut_places
from planner.sites.keys import Ints, pack, samples_of, unpack
from planner.sites.partition import BlockWork, SiteLevel, SiteLoad, bisection, block_work, bottleneck
from tests.planner.sites.clouds import blocks

WORKS = st.lists(st.lists(st.sampled_from([0.0, 0.1, 1.0, 3.0, 40.0]), max_size=5), min_size=1, max_size=4)
SPEEDS = st.lists(st.sampled_from([0.0, 1.0, 2.0]), min_size=1, max_size=5).filter(any)


@given(WORKS, SPEEDS, st.sampled_from([0.0, 0.06, 0.5]))
def test_every_block_has_one_owner_and_each_rank_an_interval(
    works: list[list[float]], speeds: list[float], tolerance: float
) -> None:
    work = blocks(*works)
    arrangement = arrange(work, speeds, tolerance)
    assert sorted(arrangement.keys.tolist()) == work.keys.tolist()
    owned = cut(arrangement, speeds, tolerance)
    ranks = owned.owner_of_blocks(arrangement.keys)
    assert (np.diff(ranks) >= 0).all()
    assert not len(ranks) or 0 <= ranks.min() <= ranks.max() < len(speeds)
    assert owned.keys.tolist() == work.keys.tolist()


@given(WORKS, SPEEDS, st.sampled_from([0.0, 0.06, 0.5]))
def test_cuts_are_within_the_tolerance_of_the_best_intervals(
    works: list[list[float]], speeds: list[float], tolerance: float
) -> None:
    arrangement = arrange(blocks(*works), speeds, tolerance)
    last = len(arrangement.keys)
    every = combinations_with_replacement(range(last + 1), len(speeds) - 1)
    best = min(bottleneck(arrangement.before, [0, *inner, last], speeds) for inner in every)
    places = cut_places(arrangement, speeds, tolerance)
    assert bottleneck(arrangement.before, places, speeds) <= (1 + tolerance) * best * (1 + 1e-8)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=8), st.integers(1, 4))
def test_samples_that_balance_stay_whole(sizes: list[int], num_ranks: int) -> None:
    """Twins: for each sample there is one of the same work for every rank."""
    work = blocks(*[[float(size)] * 4 for size in sizes for _ in range(num_ranks)])
    owned = cut(arrange(work, [1.0] * num_ranks), [1.0] * num_ranks)
    for sample in range(len(sizes) * num_ranks):
        assert len(np.unique(owned.ranks[samples_of(owned.keys) == sample])) == 1
    assert imbalance(rank_work(owned, work)) <= 1.06 + 1e-9


def test_stages_of_other_ranks_own_intervals_of_the_same_order() -> None:
    work = blocks([1.0] * 40, [1.0] * 25, [2.0] * 30)
    arrangement = arrange(work, [1.0] * 4)
    four, two = cut(arrangement, [1.0] * 4, 0.0), cut(arrangement, [1.0] * 2, 0.0)
    keys = arrangement.keys
    moved = [(int(a), int(b)) for a, b in zip(four.owner_of_blocks(keys), two.owner_of_blocks(keys), strict=True)]
    assert sorted(set(moved)) == [(0, 0), (1, 0), (2, 1), (3, 1)]


def test_unequal_speeds_get_their_share_of_one_sample() -> None:
    work = blocks([1.0] * 120)
    owned = cut(arrange(work, [1, 1, 2, 2]), [1, 1, 2, 2])
    assert rank_work(owned, work).tolist() == [20, 20, 40, 40]


@pytest.mark.parametrize("speeds", [[1.0], [1.0] * 3, [0.0, 2.0]])
def test_no_sites_at_all(speeds: list[float]) -> None:
    arrangement = arrange(blocks([]), speeds)
    owned = cut(arrangement, speeds)
    assert (len(owned.keys), len(arrangement.samples), arrangement.unit_s) == (0, 0, 0.0)
    assert owned.owner(np.array([3]), np.array([[5, -5, 0]])).tolist() == [0]


def test_empty_samples_take_no_place() -> None:
    arrangement = arrange(blocks([], [1.0], [], [2.0, 2.0], []), [1.0, 1.0])
    assert sorted(arrangement.samples.tolist()) == [1, 3]
    assert len(arrangement.sample_ends) == 3


def test_blocks_without_work_are_shared_by_number() -> None:
    owned = cut(arrange(blocks([0.0] * 12)), [1.0] * 4)
    assert np.bincount(owned.ranks).tolist() == [3, 3, 3, 3]


def test_one_block_heavier_than_everything_has_a_rank_to_itself() -> None:
    work = blocks([1.0, 1.0, 1000.0, 1.0, 1.0, 1.0])
    owned = cut(arrange(work, [1.0] * 3), [1.0] * 3, tolerance=0)
    assert max(rank_work(owned, work)) == 1000.0


def test_more_ranks_than_blocks_leave_some_with_nothing() -> None:
    work = blocks([1.0, 1.0], [1.0])
    owned = cut(arrange(work, [1.0] * 8), [1.0] * 8)
    assert sorted(np.bincount(owned.ranks, minlength=8).tolist()) == [0] * 5 + [1] * 3


@given(st.permutations(range(12)), WORKS)
def test_the_order_of_blocks_given_changes_nothing(shuffled: list[int], works: list[list[float]]) -> None:
    work = blocks(*works)
    places = np.array([place for place in shuffled if place < len(work.keys)], np.int64)
    places = np.concatenate([places, np.arange(12, max(12, len(work.keys)))]).astype(np.int64)
    one, two = arrange(work, [1.0] * 3), arrange(BlockWork(work.keys[places], work.work_s[places]), [1.0] * 3)
    assert one.keys.tolist() == two.keys.tolist()
    assert one.before.tolist() == two.before.tolist()


def test_equal_ranks_may_change_their_names() -> None:
    work = blocks([1.0] * 30, [3.0] * 7, [2.0] * 11)
    speeds = np.array([1.0, 2.0, 1.0, 2.0])
    owned = cut(arrange(work, speeds), speeds)
    swapped = cut(arrange(work, speeds[[2, 3, 0, 1]]), speeds[[2, 3, 0, 1]])
    assert owned.ranks.tolist() == swapped.ranks.tolist()


def test_seconds_come_back_from_units() -> None:
    work = blocks([0.25, 0.5], [1e-6, 3.0])
    arrangement = arrange(work)
    seconds = dict(zip(work.keys.tolist(), work.work_s.tolist(), strict=True))
    found = np.diff(arrangement.before) * arrangement.unit_s
    np.testing.assert_allclose(found, [seconds[key] for key in arrangement.keys.tolist()], rtol=1e-8)


def test_a_large_cloud_is_balanced_to_one_block() -> None:
    random = np.random.default_rng(0)
    sites = np.unique(np.abs(random.normal(0, 20, size=(4000, 3))).astype(np.int64), axis=0) - 30
    level = SiteLevel(np.zeros(len(sites), np.int64), sites)
    work = block_work([level], [SiteLoad(0, random.integers(1, 28, size=len(sites)), 1e-9)])
    for num_ranks in (2, 3, 8):
        owned = cut(arrange(work, [1.0] * num_ranks), [1.0] * num_ranks)
        assert imbalance(rank_work(owned, work)) <= 1 + work.work_s.max() * num_ranks / work.work_s.sum()


@pytest.mark.parametrize("speeds", [[1.0] * 3, [1.0, 1.0, 2.0, 2.0], [1.0] * 5])
def test_the_stage_that_the_order_is_for_meets_in_planes(speeds: list[float]) -> None:
    """A bar of 60 x 4 x 4 blocks: each rank's part is as long as its share, and its ends are flat."""
    bar = np.stack(np.meshgrid(np.arange(60), np.arange(4), np.arange(4), indexing="ij"), -1).reshape(-1, 3) - 30
    work = BlockWork(np.sort(pack(np.zeros(len(bar), np.int64), bar)), np.ones(len(bar)))
    owned = cut(arrange(work, speeds), speeds)
    x = unpack(owned.keys)[1][:, 0]
    parts = [np.unique(x[owned.ranks == rank]) for rank in range(len(speeds))]
    assert [len(part) for part in parts] == [60 * speed / sum(speeds) for speed in speeds]
    assert sum(len(part) for part in parts) == 60


def test_a_large_sample_behind_a_small_one_is_cut_in_planes_too() -> None:
    bars = [np.argwhere(np.ones((length, 4, 4), np.bool_)) for length in (20, 45)]
    samples = np.repeat([0, 1], [len(bar) for bar in bars])
    work = BlockWork(np.sort(pack(samples, np.concatenate(bars))), np.ones(len(samples)))
    speeds = [3.0, 3.0, 3.0, 4.0]
    owned = cut(arrange(work, speeds), speeds)
    samples, blocks_of = unpack(owned.keys)
    parts = [owned.ranks == rank for rank in range(4)]
    assert [set(samples[part].tolist()) for part in parts] == [{1}, {1}, {1}, {0}]
    assert [len(np.unique(blocks_of[part, 0])) for part in parts] == [15, 15, 15, 20]


@pytest.mark.parametrize("speeds", [[1.0, 1.0], [3.0, 1.0, 2.0], [1.0] * 5])
def test_only_samples_in_which_ranks_meet_are_cut_in_space_and_those_as_ever(speeds: list[float]) -> None:
    random = np.random.default_rng(len(speeds))
    places = [np.unique(random.integers(-6, 6, (40 * (2 + sample % 3), 3)), axis=0) for sample in range(4)]
    samples = np.repeat(range(4), [len(each) for each in places])
    work = BlockWork(np.sort(pack(samples, np.concatenate(places))), random.integers(1, 9, len(samples)) * 1e-6)
    asked: list[set[int]] = []

    def noted(keys: Ints, units: Ints, goals: Ints) -> Ints:
        asked.append(set(samples_of(keys).tolist()))
        return bisection(keys, units, goals)

    arrangement = arrange(work, speeds, 0.01, noted)
    owned = cut(arrangement, speeds, 0.01)
    shared = {s for s in range(4) if len(np.unique(owned.ranks[samples_of(owned.keys) == s])) > 1}
    assert shared <= asked[0] < {0, 1, 2, 3}
    for sample in range(4):
        own = arrangement.keys[samples_of(arrangement.keys) == sample]
        assert sample in asked[0] or own.tolist() == sorted(own.tolist())


def test_an_arrangement_can_be_sent() -> None:
    arrangement = arrange(blocks([1.0, 2.0], [3.0]))
    again: Arrangement = pickle.loads(pickle.dumps(arrangement))
    assert again.keys.tolist() == arrangement.keys.tolist()
    assert cut(again, [1.0, 1.0]).ranks.tolist() == cut(arrangement, [1.0, 1.0]).ranks.tolist()


@pytest.mark.parametrize("speeds", [[], [0.0], [-1.0, 2.0], [float("nan")], [float("inf"), 1.0]])
def test_speeds_that_mean_nothing_are_refused(speeds: list[float]) -> None:
    arrangement: Arrangement = arrange(blocks([1.0]))
    for call in (lambda: arrange(blocks([1.0]), speeds), lambda: cut(arrangement, speeds)):
        with pytest.raises(UsageError, match="no rank has a speed"):
            call()


def test_a_tolerance_or_work_that_means_nothing_is_refused() -> None:
    with pytest.raises(UsageError, match="not a tolerance"):
        cut(arrange(blocks([1.0])), [1.0], -0.1)
    for value in (-1.0, float("nan"), float("inf")):
        with pytest.raises(UsageError, match="work is not in seconds"):
            arrange(BlockWork(pack(np.array([0, 0]), np.array([[0, 0, 0], [1, 0, 0]])), np.array([3.0, value])))
