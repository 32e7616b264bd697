"""Sparse convolutions on the CPU and kernels on a GPU: sides agree, ratios are judged, floors are the design's."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import sparse_conv
from benchmarks.report import Row
from benchmarks.sparse_conv import OURS, SPCONV, TORCH, agreement, layer_of, medians_ms, ours, plain, rows_of
from benchmarks.sparse_gpu import Ceilings, Cloud, cloud, merged
from cuda_ops.sparse.gpu.tiling import stored

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
H200 = Ceilings(4.8e12, 790e12)


def small() -> torch.Tensor:
    return torch.cartesian_prod(torch.tensor([0]), *(torch.arange(5),) * 3)[::2].int().contiguous()


def test_a_ratio_that_misses_its_goal_is_a_miss_and_the_map_is_told_once() -> None:
    missed = {row.name for row in rows_of(32, SPENT, with_map=True) if not row.holds}
    assert missed == {"map: spconv / ours", "forward, C=32: torch / spconv"}
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


def test_the_committed_results_hold_and_are_of_the_scan() -> None:
    rows = json.loads(RESULTS.read_text())
    assert {row["name"] for row in rows} >= {"map: spconv / ours", "backward, C=64: spconv / ours"}
    assert all(row["holds"] for row in rows)
    assert rows[0]["value"] == 101_364
    pytest.importorskip("laspy")
    assert len(sparse_conv.scan_coordinates()) == 101_364
    assert len(sparse_conv.scan_coordinates(every=100)) < 6000


@pytest.fixture(scope="module")
def sheet() -> Cloud:
    torch.set_num_threads(1)
    return cloud(5000, "cpu")


def test_the_cloud_has_as_many_pairs_as_a_scan(sheet: Cloud) -> None:
    assert sheet.num_rows == pytest.approx(5000, rel=0.05)
    assert sheet.num_pairs / sheet.num_rows == pytest.approx(11.8, rel=0.05)


@pytest.mark.parametrize(("channels", "floor_s"), [(64, 37e-6), (256, 0.2e-3)])
def test_floors_on_an_h200(sheet: Cloud, channels: int, floor_s: float) -> None:
    large = {"neighbours": torch.empty(27, 100_000), "keys": torch.empty(100_000)}
    full = replace(sheet, num_pairs=20 * sheet.num_pairs, **large)
    assert H200.floor_s(full.convolution(channels, channels)) == pytest.approx(floor_s, rel=0.05)


def test_rows_of_a_device_replace_its_own_alone() -> None:
    new = [replace(row, device="sm_90", rows=16) for row in stored()]
    once = merged(stored(), new)
    assert [row for row in once if row.device != "sm_90"] == [row for row in stored() if row.device != "sm_90"]
    assert [row for row in once if row.device == "sm_90"] == new
    assert merged(once, new) == once
