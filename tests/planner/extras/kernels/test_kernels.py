"""Kernel models against the tables that they were fitted to, what was held back, and what must hold of any device."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from planner.extras.kernels.estimates import NOTHING, Estimate, weakest
from planner.extras.kernels.fit import BATCHED, as_json, fit_rows, stored_fits
from planner.extras.kernels.models import AttentionKernel, AttentionShape, kernels
from planner.extras.kernels.tables import GEMM, MEMORY_BOUND, KernelRow, read_table, shipped
from planner.ir.errors import CorruptFileError, MissingMeasurementError, UnknownNameError

SLICE = Path(__file__).parents[3] / "data" / "kernels" / "a40.csv"
WITH_TABLES = ("A100-80GB", "H100-SXM", "A40")


@pytest.mark.parametrize("device", WITH_TABLES)
def test_products_of_networks_that_were_held_back_are_within_ten_percent(device: str) -> None:
    (fit,) = (fit for fit in stored_fits() if (fit.device, fit.dtype, fit.kind) == (device, "float16", GEMM))
    assert fit.held_back.median < 0.1
    assert fit.held_back.num_rows > 1900
    assert fit.held_back.median <= fit.curve_error  # neighbours are kept only where they help


def test_what_is_stored_is_what_the_tables_give() -> None:
    rows = [row for row in shipped() if (row.device, row.dtype, row.kind) == ("V100-16GB", "float16", GEMM)]
    for fresh, node in zip(fit_rows(rows), as_json(fit_rows(rows)), strict=True):
        (stored,) = (f for f in stored_fits() if (f.device, f.dtype, f.kind) == (fresh.device, fresh.dtype, fresh.kind))
        assert as_json([stored]) == [node]


def test_a_shape_of_a_network_that_no_fit_has_seen_is_predicted() -> None:
    """Fitted to one network's kernels alone, the other network's are within the range of eight in ten, and 10 %."""
    rows = [row for row in read_table(SLICE) if row.kind == GEMM]
    groups = sorted({row.group for row in rows})
    assert len(groups) == 2
    (fit,) = fit_rows(rows)
    assert fit.held_back.num_rows == len(rows)
    seconds, logs = fit.checked.T
    assert sorted(seconds) == sorted(row.seconds for row in rows)
    assert np.median(np.abs(logs)) == pytest.approx(fit.held_back.median, abs=1e-4)
    assert fit.held_back.median < 0.1
    within = (np.exp(-logs) >= fit.held_back.low) & (np.exp(-logs) <= fit.held_back.high)
    assert 0.75 < within.mean() < 0.9


def test_a_measured_shape_is_read_off_its_table() -> None:
    row = next(row for row in shipped() if row.device == "A100-80GB" and row.kind == GEMM and row.extents[0] == 4096)
    m, n, k, _ = row.extents
    found = kernels("A100-80GB", "bfloat16").gemm(m, n, k)
    assert found.evidence == "measured table"
    assert found.low <= row.seconds <= found.high
    other = kernels("A100-80GB", "bfloat16").gemm(m + 333, n + 777, k + 555)
    assert other.evidence.startswith("fitted, held-back error ")


def test_the_gradients_of_a_layer_are_products_of_their_own_shapes() -> None:
    known = kernels("A100-80GB", "float16")
    thin = [known.gemm(*shape).seconds for shape in ((64, 8192, 8192), (64, 8192, 8192), (8192, 8192, 64))]
    assert thin[2] != pytest.approx(thin[0], rel=0.05)
    flops = 2 * 2048 * 8192 * 8192
    for shape in ((2048, 8192, 8192), (8192, 8192, 2048)):
        assert 0.4 < flops / known.gemm(*shape).seconds / 312e12 < 0.9


@pytest.mark.parametrize("device", [*WITH_TABLES, "V100-32GB", "T4", "MI300X", "H200", "B200"])
def test_nothing_is_faster_than_its_data_sheet_and_more_takes_longer(device: str) -> None:
    known = kernels(device, "float16")
    for m, n, k in ((16, 4096, 4096), (4096, 4096, 4096), (8192, 28672, 8192)):
        one = known.gemm(m, n, k)
        assert one.seconds >= 2 * m * n * k / known.device.peak_flop_per_s
        assert one.low <= one.seconds <= one.high
        assert known.gemm(4 * m, n, k).seconds > (3 if m > 64 else 0.9) * one.seconds
        assert known.gemm(m, n, k, 8).seconds > one.seconds
    for kind in MEMORY_BOUND:
        assert known.memory_bound(2**30, kind=kind).seconds > 3 * known.memory_bound(2**27, kind=kind).seconds
    assert known.gemm(0, 5, 5) == known.memory_bound(0) == NOTHING


def test_a_device_without_tables_says_so_and_has_the_wider_range() -> None:
    near, far = (kernels(name, "float16").gemm(4096, 4096, 4096) for name in ("A40", "T4"))
    assert far.evidence.startswith("datasheet")
    assert far.high / far.low > 1.4 * near.high / near.low
    chip = kernels("V100-32GB", "float16").gemm(4096, 4096, 4096)
    assert "on V100-16GB" in chip.evidence


def test_attention_that_is_not_fused_is_its_products_and_softmax() -> None:
    known = kernels("A100-80GB", "float16")
    shape = AttentionShape(2, 16, 16, 1024, 1024, 64, True)
    scores = 2 * 2 * 16 * 1024 * 1024
    parts = (
        known.gemm(1024, 1024, 64, 32) + known.memory_bound(2 * scores, kind="softmax") + known.gemm(1024, 64, 1024, 32)
    )
    assert known.attention(shape, fused=False) == parts
    assert known.attention(shape, fused=True).seconds < parts.seconds
    for fused in (True, False):
        forward = known.attention(shape, fused=fused)
        backward = known.attention_backward(shape, fused=fused)
        assert forward.seconds < backward.seconds < 4 * forward.seconds


def test_a_table_of_ones_own_comes_first(tmp_path: Path) -> None:
    shapes = [(batch, length) for batch in (1, 2, 4, 8) for length in (512, 1024, 2048, 4096)]
    lines = [
        f"A40,bf16,attention,{b},16,16,{s},{s},64,1,{1e3 * (1e-5 + 2 * b * 16 * s * s * 64 / 5e13)}" for b, s in shapes
    ]
    path = tmp_path / "own.csv"
    path.write_text(
        "device,dtype,op,batch,heads,kv_heads,queries,keys,head_size,causal,median_ms\n" + "\n".join(lines) + "\n"
    )
    shape = AttentionShape(3, 16, 16, 1536, 1536, 64, True)
    found = kernels("A40", "bfloat16", path).attention(shape, fused=True)
    assert found.seconds == pytest.approx(1e-5 + 2 * 3 * 16 * 1536**2 * 64 / 5e13, rel=0.05)
    assert found.evidence.startswith("fitted, held-back error")
    assert "FlashAttention" in kernels("A40", "bfloat16").attention(shape, fused=True).evidence


def test_estimates_add_up_with_the_weakest_evidence() -> None:
    table = Estimate(1.0, 0.9, 1.1, "measured table")
    fit = Estimate(2.0, 1.5, 3.0, "fitted, held-back error 3 %")
    assert table + fit == Estimate(3.0, 2.4, 4.1, "fitted, held-back error 3 %")
    assert 2 * table == Estimate(2.0, 1.8, 2.2, "measured table")
    texts = ["measured table", "fitted on A40, held-back error 12 %", "fitted, held-back error 3 %"]
    assert weakest(texts) == texts[1]
    assert weakest([*texts, "datasheet, held-back error 2 %"]).startswith("datasheet")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("device,dtype,op,m,n,k,median_ms\nA40,bf16,gemm,1,x,3,1\n", "line 2"),
        ("device,dtype,op,m,n,k,median_ms\nA40,bf16,gemm,1,-4,3,1\n", "n is -4"),
        ("device,dtype,op,m,n,k,median_ms\nA40,bf16,gemn,1,4,3,1\n", "'gemn' is none of gemm"),
        ("device,dtype,op,m,n,k,median_ms\n", "it has no rows"),
        ("a,b\n1,2\n", "its columns: a, b"),
    ],
)
def test_a_table_that_is_wrong_is_refused_by_its_line(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "wrong.csv"
    path.write_text(text)
    with pytest.raises(CorruptFileError) as caught:
        read_table(path)
    assert said in str(caught.value)


def test_a_device_or_a_figure_that_is_not_known_is_named() -> None:
    with pytest.raises(UnknownNameError, match="no device 'A10000'"):
        kernels("A10000")
    with pytest.raises(MissingMeasurementError, match="V100-32GB computes in tfloat32"):
        kernels("V100-32GB", "tfloat32")
    with pytest.raises(UnknownNameError, match="no kind of operator 'norms'"):
        kernels("T4", "float16").memory_bound(1, kind="norms")


def test_products_in_one_kernel_are_fitted_apart() -> None:
    rows = [KernelRow("A40", "float16", GEMM, (64, 64, 64 * (1 + i), 1 + i % 2), 1e-5, "one") for i in range(32)]
    assert {fit.kind for fit in fit_rows(replace(row, seconds=row.seconds * row.extents[2] / 64) for row in rows)} == {
        GEMM,
        BATCHED,
    }


@pytest.mark.parametrize(
    ("device", "most"),
    [("B200", 2.6), *((device, 2.05) for device in ("H100-SXM", "H200", "L40S", "GB200", "B300", "GB300"))],
)
def test_products_of_a_byte_are_read_off_their_table_and_at_most_twice_as_fast(device: str, most: float) -> None:
    """But on B200, whose power holds products in half precision at half of its peak."""
    narrow = kernels(device, "fp8")
    assert narrow is kernels(device, "float8")
    (fit,) = (fit for fit in stored_fits() if (fit.device, fit.dtype, fit.kind) == (device, "float8", GEMM))
    assert fit.held_back.median < 0.1
    wide = kernels(device, "bfloat16")
    for m, n, k in ((8192, 8192, 8192), (16384, 28672, 4096)):
        assert 1.4 < wide.gemm(m, n, k).seconds / narrow.gemm(m, n, k).seconds < most


def test_attention_of_the_makers_library_is_faster_where_the_chip_has_new_instructions() -> None:
    shape = AttentionShape(1, 32, 8, 8192, 8192, 128, True)
    newer = (("H100-SXM", True), ("H200", True), ("B200", True), ("GB300", True), ("A100-80GB", False))
    for device, is_newer in newer:
        known = kernels(device, "bfloat16")
        for attention in (known.attention, known.attention_backward):
            plain = attention(shape, fused=True)
            tuned = attention(shape, fused=True, by=AttentionKernel.TUNED)
            assert (tuned.seconds < 0.8 * plain.seconds) is is_newer
            assert "FlashAttention" in plain.evidence


def test_products_in_a_step_take_longer_than_alone_where_power_is_the_limit() -> None:
    """At 2,048 and 16,384 rows: by 1.41 at any length of the table's on B200, where H100's longest have it in them."""
    for device, short, long in (("B200", 1.41, 1.41), ("H100-SXM", 1.11, 1.0), ("T4", 1.0, 1.0)):
        known = kernels(device, "float16")
        for rows, factor in ((512, short), (65536, long)):
            shape = (rows, 16384, 16384)
            alone_s = known._estimate(GEMM, (*shape, 1)).seconds
            assert known.gemm(*shape).seconds == pytest.approx(factor * alone_s, rel=0.01)


@pytest.mark.parametrize(
    ("length", "forward", "backward"),
    [(1024, 84.3, 48.7), (2048, 102.1, 62.1), (4096, 112.9, 71.7), (8192, 119.1, 77.5), (16384, 122.2, 80.6)],
)
def test_attention_before_the_second_flash_attention_is_as_fast_as_triton_s(
    length: int, forward: float, backward: float
) -> None:
    """TFLOP/s on A100, of 48 heads of 64 in 4 samples, causal (github.com/triton-lang/triton/pull/1917)."""
    known = kernels("A100-80GB", "float16")
    shape = AttentionShape(4, 48, 48, length, length, 64, True)
    flop = 2 * 4 * 48 * length**2 * 64
    first = known.attention(shape, True, AttentionKernel.FLASH)
    assert flop / first.seconds / 1e12 == pytest.approx(forward, rel=0.15)
    assert 2.5 * flop / known.attention_backward(shape, True, AttentionKernel.FLASH).seconds / 1e12 == pytest.approx(
        backward, rel=0.15
    )
    assert known.attention(shape, True).seconds < first.seconds
    assert first.evidence.endswith("shares of FlashAttention")


@pytest.mark.parametrize(
    ("size", "forward", "backward"),
    [(48, 101, 97), (80, 135, 109), (96, 181, 134), (112, 131, 111), (160, 187, 123), (208, 139, 102), (256, 168, 116)],
)
def test_heads_that_are_no_size_of_a_kernel_s_take_the_time_of_the_next(
    size: int, forward: float, backward: float
) -> None:
    """TFLOP/s on A100, medians of estimate-train-time, 1,024 to 5,120 tokens, all seen."""
    known = kernels("A100-80GB", "float16")
    shape = AttentionShape(8, 16, 16, 4096, 4096, size, False)
    flop = 4 * 8 * 16 * 4096**2 * size
    assert flop / known.attention(shape, True).seconds / 1e12 == pytest.approx(forward, rel=0.2)
    assert 2.5 * flop / known.attention_backward(shape, True).seconds / 1e12 == pytest.approx(backward, rel=0.2)


def test_products_of_heads_that_are_no_whole_16_bytes_are_slow() -> None:
    known = kernels("A100-80GB", "float16")
    for heads in ((2048, 2048, 108), (2048, 150, 2048)):
        aligned = known.gemm(heads[0], -8 * (-heads[1] // 8), -8 * (-heads[2] // 8), 32)
        assert known.gemm(*heads, 32).seconds > 1.5 * aligned.seconds
    assert known.gemm(2048, 4095, 2048).evidence == known.gemm(2048, 4096, 2048).evidence  # of one matrix: by its table


def test_products_are_slower_on_a_card_of_a_lower_limit_of_power() -> None:
    limited, usual = (kernels(name, "bfloat16") for name in ("H100-96GB", "H100-SXM"))
    assert limited.gemm(8192, 8192, 8192).seconds == pytest.approx(
        1.25 * usual.gemm(8192, 8192, 8192).seconds, rel=1e-3
    )
    num_bytes = 10**9
    ratio = limited.memory_bound(num_bytes).seconds / usual.memory_bound(num_bytes).seconds
    assert ratio == pytest.approx(3350 / 2410, rel=0.05)


@pytest.mark.parametrize("device", ["A100-80GB", "GH200-96GB", "H100-SXM"])
def test_a_norm_of_separate_kernels_moves_many_times_the_bytes(device: str) -> None:
    known = kernels(device, "bfloat16")
    for kind, least in (("norm", 3), ("norm_backward", 5)):
        fused = known.memory_bound(2**28, kind="elementwise").seconds
        assert known.memory_bound(2**28, kind=f"eager_{kind}").seconds > least * fused
