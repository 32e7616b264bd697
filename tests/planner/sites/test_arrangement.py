"""The one order of a micro-batch's blocks, and the intervals of it that ranks own."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations_with_replacement, permutations, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.site_balance import cut, imbalance, rank_work
from planner.ir.errors import UsageError
from planner.sites.arrangement import arrange, cut_places, halo_sites, longest_first, sample_order
from planner.sites.bisection import bisection
from planner.sites.keys import Numbers, pack, samples_of, unpack
from planner.sites.partition import best_stretches, bottleneck
from planner.sites.work import BlockWork
from tests.planner.sites.clouds import blocks

WORKS = st.lists(st.lists(st.sampled_from([0.0, 0.1, 1.0, 3.0, 40.0]), max_size=5), min_size=1, max_size=4)
SPEEDS = st.lists(st.sampled_from([0.0, 1.0, 2.0]), min_size=1, max_size=5).filter(any)
TOLERANCES = st.sampled_from([0.0, 0.06, 0.5])


@given(WORKS, SPEEDS, TOLERANCES)
def test_every_block_has_one_owner_and_each_rank_one_of_the_best_intervals(
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
    last = len(arrangement.keys)
    every = combinations_with_replacement(range(last + 1), len(speeds) - 1)
    best = min(bottleneck(arrangement.before, [0, *inner, last], speeds) for inner in every)
    places = cut_places(arrangement, speeds, tolerance)
    assert bottleneck(arrangement.before, places, speeds) <= (1 + tolerance) * best * (1 + 1e-8)


@given(st.permutations(range(20)), WORKS)
def test_the_order_of_blocks_given_changes_nothing(shuffled: list[int], works: list[list[float]]) -> None:
    work = blocks(*works)
    places = np.array([place for place in shuffled if place < len(work.keys)], np.int64)
    one = arrange(work, [1.0] * 3)
    two = arrange(BlockWork(work.keys[places], work.work_s[places]), [1.0] * 3)
    assert one.keys.tolist() == two.keys.tolist()
    assert one.before.tolist() == two.before.tolist()


@given(st.lists(st.integers(1, 30), min_size=1, max_size=8), st.integers(1, 4))
def test_samples_that_balance_stay_whole(sizes: list[int], num_ranks: int) -> None:
    """Twins: for each sample there is one of the same work for every rank."""
    work = blocks(*[[float(size)] * 4 for size in sizes for _ in range(num_ranks)])
    owned = cut(arrange(work, [1.0] * num_ranks), [1.0] * num_ranks)
    for sample in range(len(sizes) * num_ranks):
        assert len(np.unique(owned.ranks[samples_of(owned.keys) == sample])) == 1
    assert imbalance(rank_work(owned, work)) <= 1.06 + 1e-9


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("works", "speeds", "counts"),
    [
        ([[1.0] * 120], [1, 1, 2, 2], [20, 20, 40, 40]),
        ([[0.0] * 12], [1, 1, 1, 1], [3, 3, 3, 3]),  # no work at all: by number
        ([[], [1.0], [], [2.0, 2.0], []], [1, 1], [1, 2]),
        ([[]], [0, 2], [0, 0]),
    ],
)
def test_each_rank_gets_its_share_of_blocks(works: list[list[float]], speeds: list[float], counts: list[int]) -> None:
    arrangement = arrange(blocks(*works), speeds)
    owned = cut(arrangement, speeds)
    assert sorted(np.bincount(owned.ranks, minlength=len(speeds)).tolist()) == counts
    assert sorted(arrangement.samples.tolist()) == [number for number, each in enumerate(works) if each]
    if not counts[-1]:
        assert owned.owner(np.array([3]), np.array([[5, -5, 0]])).tolist() == [0]


def test_seconds_come_back_from_units() -> None:
    work = blocks([0.25, 0.5], [1e-6, 3.0])
    arrangement = arrange(work)
    seconds = dict(zip(work.keys.tolist(), work.work_s.tolist(), strict=True))
    found = np.diff(arrangement.before) * arrangement.unit_s
    np.testing.assert_allclose(found, [seconds[key] for key in arrangement.keys.tolist()], rtol=1e-8)


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("lengths", "speeds", "samples"),
    [
        ([60], [1.0] * 3, [0] * 3),
        ([60], [1.0, 1.0, 2.0, 2.0], [0] * 4),
        ([20, 45], [3.0, 3.0, 3.0, 4.0], [1, 1, 1, 0]),  # the larger one comes first
    ],
)
def test_ranks_meet_in_planes(lengths: list[int], speeds: list[float], samples: list[int]) -> None:
    """Bars of 4 x 4 blocks: each rank's part is as long as its share, and its ends are flat."""
    bars = [np.argwhere(np.ones((length, 4, 4), np.bool_)) - 30 for length in lengths]
    number = np.repeat(range(len(bars)), [len(bar) for bar in bars])
    work = BlockWork(np.sort(pack(number, np.concatenate(bars))), np.ones(len(number)))
    owned = cut(arrange(work, speeds), speeds)
    of_blocks, places = unpack(owned.keys)
    parts = [owned.ranks == rank for rank in range(len(speeds))]
    assert [set(of_blocks[part].tolist()) for part in parts] == [{sample} for sample in samples]
    planes = [sum(lengths) * speed / sum(speeds) for speed in speeds]
    assert [len(np.unique(places[part, 0])) for part in parts] == planes


@pytest.mark.parametrize("speeds", [[1.0, 1.0], [3.0, 1.0, 2.0], [1.0] * 5])
def test_only_samples_in_which_ranks_meet_are_cut_in_space_and_those_as_ever(speeds: list[float]) -> None:
    random = np.random.default_rng(len(speeds))
    places = [np.unique(random.integers(-6, 6, (40 * (2 + sample % 3), 3)), axis=0) for sample in range(4)]
    samples = np.repeat(range(4), [len(each) for each in places])
    work = BlockWork(np.sort(pack(samples, np.concatenate(places))), random.integers(1, 9, len(samples)) * 1e-6)
    asked: list[set[int]] = []

    def noted(keys: Numbers, units: Numbers, goals: Numbers) -> Numbers:
        asked.append(set(samples_of(keys).tolist()))
        return bisection(keys, units, goals)

    arrangement = arrange(work, speeds, 0.01, noted)
    owned = cut(arrangement, speeds, 0.01)
    shared = {s for s in range(4) if len(np.unique(owned.ranks[samples_of(owned.keys) == s])) > 1}
    assert shared <= asked[0] < {0, 1, 2, 3}
    for sample in range(4):
        own = arrangement.keys[samples_of(arrangement.keys) == sample]
        assert sample in asked[0] or own.tolist() == sorted(own.tolist())


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("work", "speeds", "tolerance", "match"),
    [
        *(([3.0], speeds, 0.0, "no rank has a speed") for speeds in ([], [0.0], [-1.0, 2.0], [float("nan")])),
        ([3.0], [float("inf"), 1.0], 0.0, "no rank has a speed"),
        ([3.0], [1.0], -0.1, "not a tolerance"),
        *(([3.0, work], [1.0], 0.0, "work is not in seconds") for work in (-1.0, float("nan"), float("inf"))),
    ],
)
def test_what_means_nothing_is_refused(work: list[float], speeds: list[float], tolerance: float, match: str) -> None:
    with pytest.raises(UsageError, match=match):
        arrange(blocks(work), speeds, tolerance)
    if len(work) == 1:
        with pytest.raises(UsageError, match=match):
            cut(arrange(blocks(work)), speeds, tolerance)


def longest(work: list[int], ranks: Sequence[int], speeds: list[float]) -> float:
    return max(
        sum(value for value, own in zip(work, ranks, strict=True) if own == rank) / speed
        for rank, speed in enumerate(speeds)
    )


@given(
    st.lists(st.integers(0, 30), min_size=1, max_size=6),
    st.lists(st.sampled_from([1.0, 2.0, 3.0]), min_size=1, max_size=3),
)
def test_the_longest_first_is_within_the_published_bounds(work: list[int], speeds: list[float]) -> None:
    """Graham's of equal ranks, and twice the best of unequal ones; a rank without speed gets nothing."""
    for of_ranks, bound in (([1.0] * len(speeds), 4 / 3 - 1 / (3 * len(speeds))), (speeds, 2.0)):
        best = min(longest(work, ranks, of_ranks) for ranks in product(range(len(of_ranks)), repeat=len(work)))
        assert longest(work, longest_first(work, of_ranks), of_ranks) <= bound * best + 1e-9
    assert set(longest_first(work, [0.0, 1.0, 0.0])) == {1}


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("work", "speeds", "begins"),
    [
        ([1, 1, 1, 1], [1.0, 1.0], [0, 2, 1, 3]),  # those of one rank side by side
        ([1, 2], [2.0, 1.0], [1, 0]),
        ([], [1.0, 1.0], []),
        ([10, 10, 23, 10, 10, 10, 7, 20], [1.0] * 10, [2, 6]),  # a large one, and what fills up its last rank
    ],
)
def test_the_order_of_samples(work: list[int], speeds: list[float], begins: list[int]) -> None:
    found = sample_order(np.array(work, np.int64), speeds, 0.01)
    assert sorted(found) == list(range(len(work)))
    assert found[: len(begins)] == begins


@pytest.mark.parametrize(("work", "speeds"), [([20, 7, 5, 4], [2.0, 4.0, 3.0]), ([22, 4, 6, 0], [3.0, 4.0, 1.0])])
def test_on_unequal_ranks_no_order_of_these_cuts_fewer_samples(work: list[int], speeds: list[float]) -> None:
    def num_cuts(order: Sequence[int]) -> int:
        ends = np.concatenate([[0], np.cumsum([work[sample] for sample in order])])
        return best_stretches(ends, speeds, sum(work) / sum(speeds)).num_cuts

    assert num_cuts(sample_order(np.array(work), speeds, 0.0)) == min(map(num_cuts, permutations(range(len(work)))))


def test_the_halo_between_ranks_is_that_of_sets() -> None:
    random = np.random.default_rng(0)
    source = random.integers(5, size=40).astype(np.int32)
    target = random.integers(5, size=30).astype(np.int32)
    neighbours = random.integers(-1, 40, size=(9, 30)).astype(np.int32)
    found = halo_sites(source, target, neighbours, 5)
    for src, dst in product(range(5), repeat=2):
        read = {int(row) for row in neighbours[:, target == dst].ravel() if row >= 0 and source[row] == src}
        assert found[src, dst] == (len(read) if src != dst else 0)
