from __future__ import annotations

import numpy as np
import pytest

from benchmarks.site_balance import equal_counts, equal_slabs, random_blocks
from planner.sites.keys import samples_of
from tests.planner.sites.clouds import blocks

NOTHING = np.zeros(0, np.int64)


@pytest.mark.parametrize(("num_samples", "num_ranks"), [(8, 4), (7, 4), (2, 4), (5, 1)])
def test_equal_counts_differ_by_one_sample_at_most(num_samples: int, num_ranks: int) -> None:
    keys = blocks(*[[1.0, 1.0]] * num_samples).keys
    owned = equal_counts(keys, num_samples, num_ranks)
    ranks = [set(owned.ranks[samples_of(owned.keys) == sample].tolist()) for sample in range(num_samples)]
    assert all(len(of_sample) == 1 for of_sample in ranks)
    counts = np.bincount([min(of_sample) for of_sample in ranks], minlength=num_ranks)
    assert counts.max() - counts.min() <= 1
    assert [min(of_sample) for of_sample in ranks] == sorted(min(of_sample) for of_sample in ranks)


def test_slabs_are_of_equal_width_wherever_the_blocks_are() -> None:
    keys = blocks([1.0] * 8).keys
    assert equal_slabs(keys, 4).ranks.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert equal_slabs(keys[[0, 1, 2, 7]], 2).ranks.tolist() == [0, 0, 0, 1]
    assert equal_slabs(blocks([1.0] * 2, [1.0] * 4).keys, 2).ranks.tolist() == [0, 1, 0, 0, 1, 1]


def test_lots_are_the_same_every_time() -> None:
    keys = blocks([1.0] * 100).keys
    one, two, other = (random_blocks(keys, 4, seed).ranks.tolist() for seed in (0, 0, 1))
    assert one == two != other
    assert set(one) == {0, 1, 2, 3}


def test_no_blocks() -> None:
    for owned in (equal_counts(NOTHING, 0, 3), equal_slabs(NOTHING, 3), random_blocks(NOTHING, 3)):
        assert (owned.num_ranks, len(owned.ranks)) == (3, 0)
