"""The floors that the kernels are held against are those of the design, and candidates fit their kernels."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from benchmarks.sparse_gpu import CLASSES, NO_GPU, Ceilings, Cloud, candidates, cloud, main, merged
from cuda_ops.sparse.gpu.tiling import CONVOLUTION, WEIGHT, stored

H200 = Ceilings(4.8e12, 790e12)


@pytest.fixture(scope="module")
def small() -> Cloud:
    torch.set_num_threads(1)
    return cloud(5000, "cpu")


def test_the_cloud_has_as_many_pairs_as_a_scan(small):
    assert small.num_rows == pytest.approx(5000, rel=0.05)
    assert small.num_pairs / small.num_rows == pytest.approx(11.8, rel=0.05)


@pytest.mark.parametrize(("channels", "floor_s"), [(64, 37e-6), (256, 0.2e-3)])
def test_floors_on_an_h200(small, channels, floor_s):
    full = replace(
        small, num_pairs=20 * small.num_pairs, neighbours=torch.empty(27, 100_000), keys=torch.empty(100_000)
    )
    assert H200.floor_s(full.convolution(channels, channels)) == pytest.approx(floor_s, rel=0.05)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_and_has_no_rows(capsys):
    assert main(["--json", "--quick", "--tune"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out) == []
    assert printed.err == NO_GPU


@pytest.mark.parametrize("op", [CONVOLUTION, WEIGHT])
@pytest.mark.parametrize(("bits", "channels"), CLASSES)
def test_every_row_of_the_table_has_candidates(op, bits, channels):
    found = list(candidates(op, bits, channels))
    assert 4 <= len(found) == len(set(found)) <= 100


def test_rows_of_a_device_replace_its_own_alone():
    new = [replace(row, device="sm_90", rows=16) for row in stored()]
    once = merged(stored(), new)
    assert [row for row in once if row.device != "sm_90"] == [row for row in stored() if row.device != "sm_90"]
    assert [row for row in once if row.device == "sm_90"] == new
    assert merged(once, new) == once
