from __future__ import annotations

from dataclasses import replace

import pytest

from cuda_ops.sparse.gpu.tiling import (
    CONVOLUTION,
    TABLE,
    WEIGHT,
    Configuration,
    chosen,
    configuration,
    read,
    stored,
    written,
)

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
    own, wider = replace(ROW, device="sm_90", rows=64), replace(ROW, channels=128)
    table = [ROW, own, wider]
    assert chosen(table, CONVOLUTION, 16, 64, "sm_90") == own
    assert chosen(table, CONVOLUTION, 16, 64, "sm_80") == ROW
    assert chosen(table, CONVOLUTION, 16, 100, "sm_90") == wider
