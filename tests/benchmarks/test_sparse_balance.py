"""Who owns which blocks of sites, what ranks read of one another, and how evenly the benchmark's clouds are divided."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import sparse_balance
from benchmarks.site_balance import (
    Ownership,
    SiteMap,
    cut,
    equal_counts,
    equal_slabs,
    halo,
    imbalance,
    ownership_of,
    random_blocks,
    rank_work,
)
from benchmarks.sparse_balance import Case, batch_rows, case_of, reverse, scan_rows, shape
from planner.ir.errors import UsageError
from planner.sites.arrangement import arrange
from planner.sites.keys import pack
from planner.sites.work import SiteLevel, SiteLoad, block_work
from tests.planner.sites.clouds import blocks

RESULTS = Path(sparse_balance.__file__).parent / "results" / "sparse_balance.json"
ROW = np.array([[-1, 0, 1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6, 7, -1]])
NOTHING = np.zeros(0, np.int64)


def scattered(seed: int = 0) -> Ownership:
    random = np.random.default_rng(seed)
    return random_blocks(np.unique(pack(random.integers(3, size=60), random.integers(-6, 6, size=(60, 3)))), 5, seed)


@given(
    st.lists(st.tuples(st.integers(0, 2), *[st.integers(-40, 40)] * 3), min_size=1, max_size=60, unique=True),
    st.integers(1, 4),
    st.sampled_from([2, 3, 4, 8, 16]),
)
def test_a_coarse_site_belongs_to_the_owner_of_its_origin(
    rows: list[tuple[int, ...]], num_ranks: int, stride: int
) -> None:
    sites = np.array(rows)
    coarse = np.unique(np.column_stack([sites[:, 0], sites[:, 1:] // stride]), axis=0)
    levels = [SiteLevel(sites[:, 0], sites[:, 1:]), SiteLevel(coarse[:, 0], coarse[:, 1:], stride)]
    loads = [SiteLoad(place, np.ones(len(level.samples), np.int64), 1.0) for place, level in enumerate(levels)]
    owned = cut(arrange(block_work(levels, loads), [1.0] * num_ranks), [1.0] * num_ranks)
    by_coarse = owned.owner(coarse[:, 0], coarse[:, 1:], stride)
    assert by_coarse.tolist() == owned.owner(coarse[:, 0], coarse[:, 1:] * stride).tolist()
    assert by_coarse.dtype == np.int32
    assert 0 <= by_coarse.min() <= by_coarse.max() < num_ranks


def test_owner_is_a_function_of_the_block_alone_and_nobody_can_write_into_it() -> None:
    owned = scattered()
    random = np.random.default_rng(1)
    samples = random.integers(4, size=300)
    sites = random.integers(-99, 99, size=(300, 3))
    ranks = owned.owner(samples, sites)
    assert ranks.tolist() == owned.owner(samples, sites // 4 * 4).tolist()
    assert ranks.tolist() == [owned.owner(samples[i : i + 1], sites[i : i + 1])[0] for i in range(300)]
    assert owned.owner_of_blocks(owned.keys).tolist() == owned.ranks.tolist()
    shuffled = np.random.default_rng(0).permutation(len(owned.keys))
    again = ownership_of(5, owned.keys[shuffled], owned.ranks[shuffled])
    assert (again.keys.tolist(), again.ranks.tolist()) == (owned.keys.tolist(), owned.ranks.tolist())
    with pytest.raises(ValueError, match="read-only"):
        owned.ranks[0] = 1


def test_a_block_that_is_not_listed_goes_with_a_neighbour_of_its_own_sample() -> None:
    row = np.array([[-1, 0, 0], [5, 0, 0], [0, 0, 0]])
    owned = ownership_of(3, pack(np.array([1, 1, 2]), row), np.array([0, 1, 2]))
    asked = np.array([[-9, 0, 0], [3, 0, 0], [9, 0, 0]]) * 4
    assert owned.owner(np.array([1, 1, 1]), asked).tolist() == [0, 0, 1]
    assert owned.owner(np.array([2, 2, 2]), asked).tolist() == [2, 2, 2]
    for sample in (0, 3, 511):
        assert set(owned.owner(np.full(3, sample), asked).tolist()) <= {0, 1, 2}


@pytest.mark.parametrize(
    ("work", "speeds", "value"),
    [
        ([2.0, 2.0], None, 1.0),
        ([3.0, 1.0], None, 1.5),
        ([1.0, 1.0, 2.0, 2.0], [1, 1, 2, 2], 1.0),
        ([1.0, 1.0, 1.0, 1.0], [1, 1, 2, 2], 1.5),
        ([0.0, 4.0], [0, 1], 1.0),
        ([0.0, 0.0], None, 1.0),
    ],
)
def test_imbalance_is_the_slowest_over_the_mean(work: list[float], speeds: list[float] | None, value: float) -> None:
    assert imbalance(np.array(work), speeds) == pytest.approx(value)


def test_work_of_ranks_is_all_work_and_bytes_are_those_of_all_maps() -> None:
    work = blocks([1.0, 2.0, 4.0], [8.0])
    assert rank_work(random_blocks(work.keys, 3, seed=1), work).sum() == 15.0
    sites = np.zeros((8, 3), np.int64)
    sites[:, 0] = np.arange(8)
    level = SiteLevel(np.zeros(8, np.int64), sites)
    work = block_work([level], [SiteLoad(0, np.ones(8, np.int64), 1.0)])
    owned = cut(arrange(work), [1.0, 1.0])
    found = halo(owned, [level], [SiteMap(0, 0, ROW, 4.0), SiteMap(0, 0, ROW, 6.0)])
    assert [table.tolist() for table in found.sites] == [[[0, 1], [1, 0]]] * 2
    assert found.received_bytes.tolist() == [10.0, 10.0]
    assert (found.input_bytes, found.share) == (80.0, 0.25)
    assert halo(cut(arrange(work), [1.0]), [level], [SiteMap(0, 0, ROW)]).share == 0.0


def test_tables_that_do_not_fit_are_refused_and_there_may_be_nothing_to_read() -> None:
    level = SiteLevel(np.zeros(2, np.int64), np.array([[0, 0, 0], [9, 0, 0]]))
    owned = random_blocks(block_work([level], []).keys, 2)
    for table in (ROW, ROW[:, :2] + 1, ROW[0, :2]):
        with pytest.raises(UsageError, match="a map does not fit its levels"):
            halo(owned, [level], [SiteMap(0, 0, table)])
    with pytest.raises(UsageError, match="speeds do not fit"):
        imbalance(np.ones(3), [1.0, 1.0])
    empty = SiteLevel(NOTHING, np.zeros((0, 3), np.int64))
    found = halo(random_blocks(NOTHING, 3), [empty], [SiteMap(0, 0, np.zeros((27, 0), np.int32), 4.0)])
    assert (found.share, found.received_bytes.tolist()) == (0.0, [0.0, 0.0, 0.0])
    for owned in (equal_counts(NOTHING, 0, 3), equal_slabs(NOTHING, 3)):
        assert (owned.num_ranks, len(owned.ranks)) == (3, 0)


def test_slabs_are_of_equal_width_wherever_the_blocks_are_and_lots_are_the_same_every_time() -> None:
    keys = blocks([1.0] * 8).keys
    assert equal_slabs(keys, 4).ranks.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert equal_slabs(keys[[0, 1, 2, 7]], 2).ranks.tolist() == [0, 0, 0, 1]
    assert equal_slabs(blocks([1.0] * 2, [1.0] * 4).keys, 2).ranks.tolist() == [0, 1, 0, 0, 1, 1]
    one, two, other = (random_blocks(blocks([1.0] * 100).keys, 4, seed).ranks.tolist() for seed in (0, 0, 1))
    assert one == two != other
    assert set(one) == {0, 1, 2, 3}


def shapes(*radii: int) -> Case:
    return case_of([shape(number, radius) for number, radius in enumerate(radii)])


def test_pairs_are_those_of_a_dense_search_and_maps_between_levels_go_both_ways() -> None:
    case = shapes(4, 5)
    levels = [
        {(int(sample), *site) for sample, site in zip(level.samples, level.coordinates.tolist(), strict=True)}
        for level in case.levels
    ]
    for table in case.maps:
        source = levels[table.source]
        target = levels[table.target]
        pairs = int((table.neighbours >= 0).sum())
        if table.source == table.target:
            near = list(product((-1, 0, 1), repeat=3))
            assert pairs == sum((b, x + i, y + j, z + k) in source for b, x, y, z in target for i, j, k in near)
            continue
        finer = max(source, target, key=len)
        assert pairs == len(finer)
        assert {(b, x // 2, y // 2, z // 2) for b, x, y, z in finer} == min(source, target, key=len)
        if table.source < table.target:
            there_and_back = reverse(reverse(table.neighbours, pairs), table.neighbours.shape[1])
            np.testing.assert_array_equal(there_and_back, table.neighbours)


def test_goals_hold_on_shapes_and_twice_the_same() -> None:
    rows, again = (list(batch_rows(shapes(4, 6, 8, 10, 12, 14, 9, 7))) for _ in range(2))
    assert rows == again
    assert [row.name for row in rows if not row.holds] == []
    values = {row.name: row.value for row in rows}
    for ranks in ("4 ranks", "8 ranks"):
        assert values[f"batch of 8, {ranks}: by work"] < values[f"batch of 8, {ranks}: equal counts"]
    values = {row.name.split(": ")[1]: row.value for row in scan_rows(case_of([shape(0, 24)]))}
    assert values["whole network"] < values["by voxels"]
    assert values["whole network, halo"] < values["random blocks, halo"]


def test_the_committed_rows_hold() -> None:
    rows = json.loads(RESULTS.read_text(encoding="utf-8"))
    assert [row["name"] for row in rows if not row["holds"]] == []
    assert sum(bool(row["goal"]) for row in rows) == 5
