from __future__ import annotations

import numpy as np
import pytest

from benchmarks.site_balance import SiteMap, cut, halo, imbalance, random_blocks, rank_work
from planner.ir.errors import UsageError
from planner.sites.arrangement import arrange
from planner.sites.partition import SiteLevel, SiteLoad, block_work
from tests.planner.sites.clouds import blocks

ROW = np.array([[-1, 0, 1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6, 7, -1]])


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


def test_work_of_ranks_is_all_work() -> None:
    work = blocks([1.0, 2.0, 4.0], [8.0])
    owned = random_blocks(work.keys, 3, seed=1)
    assert rank_work(owned, work).sum() == 15.0
    assert rank_work(random_blocks(work.keys, 1), work).tolist() == [15.0]


def test_bytes_are_those_of_all_maps() -> None:
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


def test_nothing_to_read() -> None:
    empty = SiteLevel(np.zeros(0, np.int64), np.zeros((0, 3), np.int64))
    owned = random_blocks(np.zeros(0, np.int64), 3)
    found = halo(owned, [empty], [SiteMap(0, 0, np.zeros((27, 0), np.int32), 4.0)])
    assert (found.share, found.received_bytes.tolist()) == (0.0, [0.0, 0.0, 0.0])


def test_tables_that_do_not_fit_are_refused() -> None:
    level = SiteLevel(np.zeros(2, np.int64), np.array([[0, 0, 0], [9, 0, 0]]))
    owned = random_blocks(block_work([level], []).keys, 2)
    for table in (ROW, ROW[:, :2] + 1, ROW[0, :2]):
        with pytest.raises(UsageError, match="a map does not fit its levels"):
            halo(owned, [level], [SiteMap(0, 0, table)])
    with pytest.raises(UsageError, match="speeds do not fit"):
        imbalance(np.ones(3), [1.0, 1.0])
