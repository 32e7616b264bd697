from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.site_balance import Ownership, cut, ownership_of, random_blocks
from planner.sites.arrangement import arrange
from planner.sites.keys import pack
from planner.sites.partition import SiteLevel, SiteLoad, block_work


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


def test_owner_is_a_function_of_the_block_alone() -> None:
    owned, random = scattered(), np.random.default_rng(1)
    samples, sites = random.integers(4, size=300), random.integers(-99, 99, size=(300, 3))
    ranks = owned.owner(samples, sites)
    assert ranks.tolist() == owned.owner(samples, sites // 4 * 4).tolist()
    one_by_one = [owned.owner(samples[i : i + 1], sites[i : i + 1])[0] for i in range(300)]
    assert ranks.tolist() == one_by_one


def test_listed_blocks_have_the_rank_they_were_given() -> None:
    owned = scattered()
    assert owned.owner_of_blocks(owned.keys).tolist() == owned.ranks.tolist()
    shuffled = np.random.default_rng(0).permutation(len(owned.keys))
    again = ownership_of(5, owned.keys[shuffled], owned.ranks[shuffled])
    assert (again.keys.tolist(), again.ranks.tolist()) == (owned.keys.tolist(), owned.ranks.tolist())


def test_a_block_that_is_not_listed_goes_with_a_neighbour_of_its_own_sample() -> None:
    row = np.array([[-1, 0, 0], [5, 0, 0], [0, 0, 0]])
    owned = ownership_of(3, pack(np.array([1, 1, 2]), row), np.array([0, 1, 2]))
    asked = np.array([[-9, 0, 0], [3, 0, 0], [9, 0, 0]]) * 4
    assert owned.owner(np.array([1, 1, 1]), asked).tolist() == [0, 0, 1]
    assert owned.owner(np.array([2, 2, 2]), asked).tolist() == [2, 2, 2]
    for sample in (0, 3, 511):
        assert set(owned.owner(np.full(3, sample), asked).tolist()) <= {0, 1, 2}


def test_nobody_can_write_into_an_ownership() -> None:
    with pytest.raises(ValueError, match="read-only"):
        scattered().ranks[0] = 1
