from __future__ import annotations

import numpy as np
import pytest

from planner.sites.balance import SiteMap, estimate
from planner.sites.partition import Level, Load


@pytest.mark.parametrize(
    ("speeds", "work_s", "received"),
    [([1.0], [24.0], [0.0]), ([1.0, 1.0], [12.0, 12.0], [8.0, 8.0]), ([2.0, 1.0], [16.0, 8.0], [8.0, 8.0])],
)
def test_a_row_of_sites_divided(speeds: list[float], work_s: list[float], received: list[float]) -> None:
    sites = np.zeros((24, 3), np.int64)
    sites[:, 2] = np.arange(24) - 12
    row = np.arange(24)
    neighbours = np.stack([row - 1, row, np.append(row[1:], -1)])
    found = estimate(
        [Level(np.zeros(24, np.int64), sites)],
        [Load(0, np.ones(24, np.int64), 1.0)],
        [SiteMap(0, 0, neighbours, 8.0)],
        speeds,
    )
    assert found.work_s.tolist() == work_s
    assert found.imbalance == 1.0
    assert found.halo.received_bytes.tolist() == received
