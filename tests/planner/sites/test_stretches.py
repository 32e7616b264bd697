from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.sites.partition import Stretch, best_stretches


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
    st.lists(st.integers(0, 20), min_size=1, max_size=6),
    st.lists(st.sampled_from([0.0, 1.0, 2.0]), min_size=1, max_size=4).filter(any),
    st.sampled_from([1.0, 1.05, 1.3, 2.0]),
)
def test_no_other_row_has_fewer_cuts_or_is_faster(work: list[int], speeds: list[float], slack: float) -> None:
    before = np.concatenate([[0], np.cumsum(work)])
    most = slack * sum(work) / sum(speeds)
    found = best_stretches(before, speeds, most)
    best = min(value(row, work, speeds) for row in rows(work, speeds, most))
    assert (found.num_cuts, found.time) == pytest.approx(best)
    assert value(list(found.row), work, speeds) == pytest.approx(best)
    assert found.row[0].first_sample == found.row[0].first_rank == 0
    assert (found.row[-1].last_sample, found.row[-1].last_rank) == (len(work), len(speeds))
    for one, two in zip(found.row, found.row[1:], strict=False):
        assert (one.last_sample, one.last_rank) == (two.first_sample, two.first_rank)


def test_a_large_sample_takes_the_ranks_it_needs_and_the_others_stay_whole() -> None:
    found = best_stretches(np.array([0, 20, 30, 40]), [1.0] * 4, 10.0)
    assert found.row == (Stretch(0, 1, 0, 2), Stretch(1, 2, 2, 3), Stretch(2, 3, 3, 4))
    assert (found.num_cuts, found.time) == (1, 10.0)


def test_no_samples_at_all() -> None:
    assert best_stretches(np.zeros(1, np.int64), [1.0, 1.0], 0.0).num_cuts == 0


def test_hundreds_of_samples_on_dozens_of_ranks_stay_whole() -> None:
    work = np.random.default_rng(0).integers(50, 100, size=512)
    before = np.concatenate([[0], np.cumsum(work)])
    found = best_stretches(before, [1.0] * 32, 1.06 * work.sum() / 32)
    assert found.num_cuts == 0
