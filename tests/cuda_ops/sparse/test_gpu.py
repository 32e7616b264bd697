"""Triton kernels on a GPU; their tables, groups of rows and pairs, which need none."""

from __future__ import annotations

import gc
import importlib.util
import itertools
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from cuda_ops.sparse import reference
from cuda_ops.sparse.gpu import load
from cuda_ops.sparse.gpu.tiling import (
    CONVOLUTION,
    TABLE,
    WEIGHT,
    Arrangements,
    Configuration,
    chosen,
    configuration,
    grouped,
    pairs,
    read,
    stored,
    written,
)
from tests.cuda_ops.sparse.conformance import cases, errors, world

on_a_gpu = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


@pytest.fixture
def gpu() -> SimpleNamespace:
    kernels = load()
    if kernels is None:
        pytest.skip("Triton is not installed")
    return kernels


def on_gpu(test):
    for mark in on_a_gpu:
        test = mark(test)
    return test


@on_gpu
@pytest.mark.parametrize("case", cases(torch.bfloat16), ids=lambda case: case.name)
def test_kernels_agree_with_the_plain_operators(case, gpu):
    found = errors(gpu, case.calls(), "cuda")
    assert [(operator, error) for operator, error in found if not error <= case.tolerance] == []


@on_gpu
@pytest.mark.parametrize("case", cases(torch.bfloat16), ids=lambda case: case.name)
def test_two_runs_give_the_same_bits(case, gpu):
    for operator, arguments in case.calls():
        moved = [value.cuda() if isinstance(value, torch.Tensor) else value for value in arguments]
        first, second = (getattr(gpu, operator)(*moved) for _ in range(2))
        for one, other in zip(
            *((each if isinstance(each, tuple) else (each,)) for each in (first, second)), strict=True
        ):
            assert torch.equal(one.nan_to_num(), other.nan_to_num())


@on_gpu
@pytest.mark.parametrize("channels", [16, 64, 128, 256])
def test_grouped_rows_give_the_same_bits(channels, gpu):
    from dataclasses import replace

    from cuda_ops.sparse.gpu.conv import convolved
    from cuda_ops.sparse.gpu.tiling import CONVOLUTION, configuration

    w = world(torch.bfloat16, channels, channels)
    row = configuration(CONVOLUTION, 16, channels)
    x = w.x.cuda()
    weight = w.weight.cuda()
    neighbours = w.same.cuda()
    results = [convolved(replace(row, grouped=way), Arrangements(), x, weight, neighbours) for way in (False, True)]
    assert torch.equal(*results)


@on_gpu
def test_a_captured_convolution_follows_its_map(gpu):
    w = world(torch.bfloat16, 128, 128)
    x = w.x.cuda()
    weight = w.weight.cuda()
    neighbours = w.same.cuda()
    gpu.sparse_conv(x, weight, neighbours, neighbours)
    gpu.sparse_conv_weight(x, x, neighbours)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = gpu.sparse_conv(x, weight, neighbours, neighbours)
        dw = gpu.sparse_conv_weight(x, x, neighbours)
    other = torch.where(torch.rand(w.same.shape) < 0.5, w.same, -1)
    neighbours.copy_(other)
    graph.replay()
    expected = reference.sparse_conv(w.x, w.weight, other, other), reference.sparse_conv_weight(w.x, w.x, other)
    for got, wanted in zip((y, dw), expected, strict=True):
        assert float((got.cpu().double() - wanted.double()).norm() / wanted.double().norm()) < 1e-2


@needs_triton
def test_float64_is_multiplied_by_torch(gpu):
    w = world(torch.float64, 3, 5, 100)
    assert torch.equal(
        gpu.sparse_conv(w.x, w.weight, w.same, w.same_reverse),
        reference.sparse_conv(w.x, w.weight, w.same, w.same_reverse),
    )
    assert torch.equal(gpu.sparse_conv_weight(w.x, w.dy, w.same), reference.sparse_conv_weight(w.x, w.dy, w.same))


def test_triton_is_not_imported_before_it_is_asked_for():
    code = "import sys, cuda_ops.sparse.gpu; sys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_without_triton_there_are_no_kernels(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert load.__wrapped__() is None


PLAIN = {"sorted_sites", "strided_sites", "generated_sites", "segment_grid"}
"""Operators that have no kernel of their own: they run as torch's on any device."""


@needs_triton
def test_kernels_are_named_as_the_plain_operators():
    assert set(vars(load())) == set(reference.__all__) - PLAIN


def test_grouping_permutes_rows_and_puts_equal_sets_together():
    neighbours = world(torch.float32, 1, 1).same
    order = grouped(neighbours).long()
    assert torch.equal(order.sort().values, torch.arange(neighbours.shape[1]))
    sets = [tuple(column) for column in (neighbours[:, order] >= 0).T.tolist()]
    changes = sum(one != other for one, other in itertools.pairwise(sets))
    assert changes == len(set(sets)) - 1


def test_grouped_tiles_multiply_less_in_vain():
    neighbours = world(torch.float32, 1, 1).same

    def multiplied(order):
        present = (neighbours[:, order] >= 0)[:, : len(order) // 16 * 16]
        return int(present.reshape(len(present), -1, 16).any(2).sum())

    assert multiplied(grouped(neighbours).long()) < 0.7 * multiplied(torch.arange(neighbours.shape[1]))


def test_pairs_are_those_of_the_map_in_the_order_of_output_rows():
    neighbours = world(torch.float32, 1, 1).down
    found = pairs(neighbours)
    for offset, row in enumerate(neighbours):
        outputs = (row >= 0).nonzero().flatten()
        count = int(found.counts[offset])
        assert torch.equal(found.outputs[offset, :count].long(), outputs)
        assert torch.equal(found.inputs[offset, :count], row[outputs])


def test_arrangements_are_made_once_and_live_as_long_as_their_map():
    kept = Arrangements()
    neighbours = world(torch.float32, 1, 1, 100).same
    assert kept.grouped(neighbours) is kept.grouped(neighbours)
    assert kept.pairs(neighbours) is kept.pairs(neighbours)
    before = kept.pairs(neighbours)
    neighbours[3] = -1
    assert kept.pairs(neighbours).counts[3] == 0 != before.counts[3]
    del neighbours
    gc.collect()
    assert len(kept._grouped) == len(kept._pairs) == 0


def test_pairs_of_a_map_made_in_inference_mode():
    with torch.inference_mode():
        neighbours = torch.tensor([[0, -1]], dtype=torch.int32)
    assert Arrangements().pairs(neighbours).counts.tolist() == [1]


ROW = Configuration(CONVOLUTION, 16, 64, 128, 64, 64, 4, 5, False, "", "by hand")


def test_the_table_is_written_as_it_is_read():
    assert read(written(stored())) == stored()
    assert TABLE.read_text(encoding="utf-8") == written(stored())


@pytest.mark.parametrize("row", stored(), ids=lambda row: f"{row.op}-{row.bits}-{row.channels}-{row.device}")
def test_every_row_says_where_it_comes_from_and_has_sizes_that_kernels_take(row):
    assert row.source.startswith(("untuned: ", "measured: "))
    assert all(size >= 16 and size & (size - 1) == 0 for size in (row.rows, row.columns, row.step))
    assert row.warps in (4, 8)


@pytest.mark.parametrize("op", [CONVOLUTION, WEIGHT])
@pytest.mark.parametrize(("bits", "channels", "expected"), [(16, 1, 32), (16, 64, 64), (16, 65, 128), (16, 512, 256)])
def test_the_smallest_class_that_holds_the_channels_is_taken(op, bits, channels, expected):
    assert configuration(op, bits, channels).channels == expected
    assert configuration(op, bits, channels, "sm_00").channels == expected


def test_a_row_of_the_device_goes_before_one_of_any():
    own = replace(ROW, device="sm_90", rows=64)
    wider = replace(ROW, channels=128)
    table = [ROW, own, wider]
    assert chosen(table, CONVOLUTION, 16, 64, "sm_90") == own
    assert chosen(table, CONVOLUTION, 16, 64, "sm_80") == ROW
    assert chosen(table, CONVOLUTION, 16, 100, "sm_90") == wider
