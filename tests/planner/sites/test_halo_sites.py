from __future__ import annotations

import numpy as np

from planner.sites.arrangement import halo_sites

ROW = np.array([[-1, 0, 1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6, 7, -1]])
"""Neighbours of eight sites in a row."""


def test_the_halo_of_a_row_is_one_site_each_way() -> None:
    owners = np.repeat(np.arange(4), 2).astype(np.int32)
    expected = np.diag([1] * 3, 1) + np.diag([1] * 3, -1)
    np.testing.assert_array_equal(halo_sites(owners, owners, ROW, 4), expected)


def test_halo_against_sets() -> None:
    random = np.random.default_rng(0)
    source, target = random.integers(5, size=40).astype(np.int32), random.integers(5, size=30).astype(np.int32)
    neighbours = random.integers(-1, 40, size=(9, 30)).astype(np.int32)
    found = halo_sites(source, target, neighbours, 5)
    for src in range(5):
        for dst in range(5):
            read = {int(row) for row in neighbours[:, target == dst].ravel() if row >= 0 and source[row] == src}
            assert found[src, dst] == (len(read) if src != dst else 0)
