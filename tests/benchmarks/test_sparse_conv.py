from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import sparse_conv
from benchmarks.report import Row
from benchmarks.sparse_conv import (
    OURS,
    SCAN,
    SPCONV,
    TORCH,
    agreement,
    layer_of,
    medians_ms,
    ours,
    plain,
    rows_of,
    scan_coordinates,
)

RESULTS = Path(sparse_conv.__file__).parent / "results" / "sparse_conv.json"
SPENT = {
    (OURS, "map"): 10.0,
    (OURS, "map of sorted sites, one direction"): 7.0,
    (OURS, "forward"): 30.0,
    (OURS, "backward"): 60.0,
    (TORCH, "map"): 50.0,
    (TORCH, "forward"): 150.0,
    (TORCH, "backward"): 200.0,
    (SPCONV, "map"): 39.0,
    (SPCONV, "forward"): 61.0,
    (SPCONV, "backward"): 200.0,
}


def small() -> torch.Tensor:
    return torch.cartesian_prod(torch.tensor([0]), *(torch.arange(5),) * 3)[::2].int().contiguous()


def test_a_ratio_that_misses_its_goal_is_a_miss() -> None:
    missed = {row.name for row in rows_of(32, SPENT, with_map=True) if not row.holds}
    assert missed == {"map: spconv / ours", "forward, C=32: torch / spconv"}


def test_the_map_is_told_once() -> None:
    assert not [row for row in rows_of(64, SPENT, with_map=False) if row.name.startswith("map")]


def test_without_spconv_plain_torch_is_compared_without_goals() -> None:
    alone = {name: ms for name, ms in SPENT.items() if name[0] != SPCONV}
    rows = list(rows_of(32, alone, with_map=True))
    assert {row.goal for row in rows} == {""}
    assert Row("forward, C=32: torch / ours", 5.0, "ratio") in rows


def test_all_sides_agree_and_a_wrong_one_is_seen() -> None:
    layer = layer_of(small(), 32)
    sides = {OURS: ours(layer), TORCH: plain(layer)}
    assert set(medians_ms(sides, 1)) >= {(OURS, "map"), (TORCH, "forward"), (TORCH, "backward")}
    assert [row.holds for row in agreement(32, sides)] == [True]
    wrong = plain(layer_of(small(), 32))
    y, dx, gradient = wrong.outcome()
    off = type(wrong)(wrong.works, lambda: (y, dx.roll(1, 0), gradient))
    assert [row.holds for row in agreement(32, {OURS: sides[OURS], TORCH: off})] == [False]


def test_spconv_computes_the_same_with_its_own_backward() -> None:
    pytest.importorskip("spconv")
    layer = layer_of(small(), 32)
    with sparse_conv.without_streams():
        sides = {OURS: ours(layer), SPCONV: sparse_conv.spconv_side(layer)}
        assert [row.holds for row in agreement(32, sides)] == [True]


def test_the_scan_has_the_voxels_of_the_goals() -> None:
    pytest.importorskip("laspy")
    assert SCAN.exists()
    assert len(scan_coordinates()) == 101_364
    assert len(scan_coordinates(every=100)) < 6000


def test_the_committed_results_hold() -> None:
    rows = json.loads(RESULTS.read_text())
    assert {row["name"] for row in rows} >= {"map: spconv / ours", "backward, C=64: spconv / ours"}
    assert all(row["holds"] for row in rows)
    assert rows[0]["value"] == 101_364
