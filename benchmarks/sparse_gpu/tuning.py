"""Block sizes measured on this GPU, and written to the table that is read at run time."""

from __future__ import annotations

import datetime
import itertools
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.sparse_gpu.limits import Cloud, median_s
from cuda_ops.sparse.gpu import tiling
from cuda_ops.sparse.gpu.tiling import CONVOLUTION, WEIGHT, Arrangements, Configuration, chosen, stored, written

CLASSES = ((16, 32), (16, 64), (16, 128), (16, 256), (32, 32), (32, 256))
"""Widths and channels of the table's rows."""
TYPES = {16: torch.bfloat16, 32: torch.float32}
MOST_SUMS = 128  # in float32 that a thread keeps; more do not leave registers for addresses


def candidates(op: str, bits: int, channels: int) -> Iterator[Configuration]:
    """Sizes worth a try; those that need too much shared memory fall out when they are launched."""
    columns = [size for size in (32, 64, 128, 256) if size <= channels][-2:]
    rows, steps = ((64, 128), (32, 64)) if op == CONVOLUTION else ((32, 64, 128), columns)
    stages = (5, 7) if bits == 16 else (3, 4)  # odd ones: of two successive numbers the larger adds no buffer
    for row, column, step, warps, stage in itertools.product(rows, columns, steps, (4, 8), stages):
        sums = (row if op == CONVOLUTION else step) * column // (32 * warps)
        if step <= channels and 8 <= sums <= MOST_SUMS:
            yield Configuration(op, bits, channels, row, column, step, warps, stage, False, "", "")


def measured_s(found: Configuration, at: Cloud) -> float:
    """Median time of forward and input gradient, or of the weight gradient; infinity if it cannot be launched."""
    from triton.runtime.errors import OutOfResources

    from cuda_ops.sparse.gpu.conv import convolved, weight_gradient

    kept, options = Arrangements(), {"device": "cuda", "dtype": TYPES[found.bits]}
    x = torch.randn(at.num_rows, found.channels, **options)
    weight = torch.randn(27, found.channels, found.channels, **options)
    back = weight.transpose(1, 2)
    try:
        if found.op == WEIGHT:
            return median_s(lambda: weight_gradient(found, kept, x, x, at.neighbours), quick=True)
        forward_s = median_s(lambda: convolved(found, kept, x, weight, at.neighbours), quick=True)
        return forward_s + median_s(lambda: convolved(found, kept, x, back, at.neighbours), quick=True)
    except OutOfResources:
        return math.inf


def fastest(op: str, bits: int, channels: int, at: Cloud) -> tuple[float, Configuration]:
    """The fastest candidate and its time; whether rows are grouped is tried on that of the best sizes."""
    tried = [(measured_s(found, at), found) for found in candidates(op, bits, channels)]
    best = min(tried, key=lambda pair: pair[0])
    if op == WEIGHT:
        return best
    other = replace(best[1], grouped=True)
    return min(best, (measured_s(other, at), other), key=lambda pair: pair[0])


def tune(at: Cloud, quick: bool, path: Path = tiling.TABLE) -> None:
    """Replaces this device's rows by the fastest candidates; quick: of the narrow types alone."""
    import triton

    major, minor = torch.cuda.get_device_capability()
    device = f"sm_{major}{minor}"
    label = f"{torch.cuda.get_device_name()}, triton {triton.__version__}, {datetime.date.today()}"
    best = []
    classes = [each for each in CLASSES if each[0] == 16 or not quick]
    for op, (bits, channels) in itertools.product((CONVOLUTION, WEIGHT), classes):
        seconds, found = fastest(op, bits, channels, at)
        before = measured_s(chosen(stored(), op, bits, channels, device), at)
        source = f"measured: {1e6 * seconds:.0f} us against {1e6 * before:.0f} us before, {at.num_rows} rows, {label}"
        sys.stderr.write(f"{op}, {bits} bits, {channels} channels: {source}\n")
        best.append(replace(found, device=device, source=source))
    path.write_text(written(merged(stored(), best)), encoding="utf-8")
    tiling.stored.cache_clear()
    tiling.configuration.cache_clear()


def merged(table: Sequence[Configuration], rows: Sequence[Configuration]) -> list[Configuration]:
    """The table with rows of the same operator, class and device replaced."""

    def place(row: Configuration) -> tuple[str, int, int, str]:
        return row.op, row.bits, row.channels, row.device

    replaced = {place(row) for row in rows}
    return [*(row for row in table if place(row) not in replaced), *rows]
