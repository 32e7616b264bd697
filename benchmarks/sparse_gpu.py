"""Triton kernels of the sparse operators, beside what the GPU itself allows and beside spconv where it is installed.

    python -m benchmarks.sparse_gpu [--quick] [--json] [--tune]

Needs an NVIDIA GPU; says so and prints no rows without one.  100,000 voxels of a rough sheet in bfloat16, about 11.8
pairs a voxel as in an outdoor scan at 0.143 m.  The *floor* of a call is the longer of two times: its bytes over the
rate of a large copy, its products over the rate of a large matrix product, both measured in the same run.  Bytes count
a row once for every pair that reads it, since rows come from all over the cloud: on an H200 about 30 us for a forward
convolution of 64 channels and 0.2 ms of 256.  A row is the share of the time that is this floor.  Times are medians
of single calls with a cold second-level cache; the arrangement of a map, made once for all calls, has rows of its own.

``--tune`` measures candidates of block sizes first (some twenty minutes, mostly compilation; with ``--quick`` of narrow
types alone) and writes this GPU's rows into the table that is read at run time (`cuda_ops.sparse.gpu.tiling`).
"""

from __future__ import annotations

import datetime
import itertools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from benchmarks.report import Row, at_least, run
from cuda_ops.sparse import reference
from cuda_ops.sparse.gpu import load, tiling
from cuda_ops.sparse.gpu.tiling import CONVOLUTION, WEIGHT, Arrangements, Configuration, chosen, stored, written
from cuda_ops.sparse.keys import unpack

VOXELS = 100_000
SECOND_LAYER = 0.4
CUBE = (3, 3, 3)
ONE = (1, 1, 1)
CHANNELS = (64, 128, 256)
QUICK_CHANNELS = (64,)
GOALS = {64: 0.4, 128: 0.4, 256: 0.5}
CLASSES = ((16, 32), (16, 64), (16, 128), (16, 256), (32, 32), (32, 256))
"""Widths and channels of the rows of the table of block sizes."""
TYPES = {16: torch.bfloat16, 32: torch.float32}
MOST_SUMS = 128  # in float32 that a thread keeps; more do not leave registers for addresses

NO_GPU = "benchmarks.sparse_gpu: needs an NVIDIA GPU and Triton; nothing measured\n"


def convolutions(at: Cloud, channels: int, best: Ceilings, quick: bool) -> Iterator[Row]:
    """Forward and backward of a convolution that keeps its channels."""
    kernels = load()
    options = {"device": "cuda", "dtype": torch.bfloat16}
    x, dy = (torch.randn(at.num_rows, channels, **options) for _ in range(2))
    weight = torch.randn(27, channels, channels, **options) / (27 * channels) ** 0.5
    reverse = kernels.reversed_map(at.neighbours, at.num_rows)
    forward_s = median_s(lambda: kernels.sparse_conv(x, weight, at.neighbours, reverse), quick)
    input_s = median_s(lambda: kernels.sparse_conv(dy, weight.transpose(1, 2), reverse, at.neighbours), quick)
    weight_s = median_s(lambda: kernels.sparse_conv_weight(x, dy, at.neighbours), quick)
    work = at.convolution(channels, channels)
    goal = GOALS[channels]
    name = f"{channels} channels"
    yield at_least(f"convolution, {name}, forward", best.floor_s(work) / forward_s, "of the roofline", goal)
    yield at_least(f"convolution, {name}, input gradient", best.floor_s(work) / input_s, "of the roofline", goal)
    share = best.floor_s(at.weight_gradient(channels, channels)) / weight_s
    yield at_least(f"convolution, {name}, weight gradient", share, "of the roofline", goal)
    yield Row(f"convolution, {name}, forward: takes", 1e6 * forward_s, "us")
    yield Row(f"convolution, {name}, backward: takes", 1e6 * (input_s + weight_s), "us")
    yield from beside_spconv(at, x, forward_s, input_s + weight_s, quick)


def beside_spconv(at: Cloud, x: torch.Tensor, forward_s: float, backward_s: float, quick: bool) -> Iterator[Row]:
    """How many times our time spconv takes, in float16, as it knows no bfloat16; no rows where it cannot run."""
    try:
        import spconv.pytorch as spconv
    except ImportError:
        return

    channels = x.shape[1]
    coordinates = unpack(at.keys)
    shape = [int(size) + 1 for size in coordinates[:, 1:].amax(0)]
    layer = spconv.SubMConv3d(channels, channels, 3, bias=False, indice_key="map").to("cuda", torch.float16)
    features = x.to(torch.float16).requires_grad_()
    given = spconv.SparseConvTensor(features, coordinates, shape, 1)
    try:
        y = layer(given).features  # makes the map, which later calls find by its key
    except (RuntimeError, AttributeError) as error:
        sys.stderr.write(f"spconv does not run here: {error}\n")
        return
    dy = torch.randn_like(y)
    parts = (features, *layer.parameters())
    with torch.no_grad():
        theirs_s = median_s(lambda: layer(given), quick)
    theirs_back_s = median_s(lambda: torch.autograd.grad(y, parts, dy, retain_graph=True), quick)
    yield Row(f"convolution, {channels} channels, forward: spconv / ours", theirs_s / forward_s, "ratio")
    yield Row(f"convolution, {channels} channels, backward: spconv / ours", theirs_back_s / backward_s, "ratio")


def others(at: Cloud, channels: int, best: Ceilings, quick: bool) -> Iterator[Row]:
    """The operators that multiply nothing, and what a map costs once."""
    kernels = load()
    x = torch.randn(at.num_rows, channels, device="cuda", dtype=torch.bfloat16)
    reverse = kernels.reversed_map(at.neighbours, at.num_rows)
    starts = torch.arange(0, at.num_rows, at.num_rows // 4, device="cuda")[:4]
    lengths = torch.full_like(starts, at.num_rows // 4)
    index = torch.randperm(at.num_rows, device="cuda")[: at.num_rows // 10]
    rows = x[index]
    exchanged = Work(2 * 2 * channels * len(index))
    calls: list[tuple[str, Work, Callable[[], object]]] = [
        ("kernel map", at.mapping(), lambda: kernels.kernel_map(at.keys, at.keys, CUBE, ONE, ONE, False)),
        ("reversed map", Work(8 * reverse.numel()), lambda: kernels.reversed_map(at.neighbours, at.num_rows)),
        ("maximum pooling", at.pooling(channels), lambda: kernels.sparse_max_pool(x, at.neighbours, reverse)),
        ("sum pooling", at.pooling(channels), lambda: kernels.sparse_sum_pool(x, at.neighbours, reverse)),
        ("sum of 4 samples", at.streaming(channels), lambda: kernels.segment_sum(x, starts, lengths)),
        ("maximum of 4 samples", at.streaming(channels), lambda: kernels.segment_max(x, starts, lengths)),
        ("rows of a halo packed", exchanged, lambda: kernels.pack_rows(x, index)),
        ("rows of a halo added", at.streaming(2 * channels), lambda: kernels.unpack_add(x, index, rows)),
    ]
    for name, work, call in calls:
        yield Row(f"{name}, {channels} channels", best.floor_s(work) / median_s(call, quick), "of the roofline")
    yield Row("once a map: rows grouped", 1e6 * median_s(lambda: tiling.grouped(at.neighbours), quick), "us")
    yield Row("once a map: pairs", 1e6 * median_s(lambda: tiling.pairs(at.neighbours), quick), "us")


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

    kept = Arrangements()
    options = {"device": "cuda", "dtype": TYPES[found.bits]}
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


def has_gpu() -> bool:
    """Whether anything can be measured."""
    return torch.cuda.is_available() and torch.version.cuda is not None and load() is not None


def measure(quick: bool, tune_first: bool = False) -> list[Row]:
    """Every figure; none without a GPU."""
    if not has_gpu():
        sys.stderr.write(NO_GPU)
        return []
    if tune_first:
        tune(cloud(VOXELS, "cuda"), quick=quick)
    best = ceilings(quick)
    at = cloud(VOXELS, "cuda")
    rows = [
        Row("copy", 1e-9 * best.bytes_per_s, "GB/s"),
        Row("matrix product", 1e-12 * best.flop_per_s, "TFLOP/s"),
        Row("pairs a voxel", at.num_pairs / at.num_rows, ""),
    ]
    for channels in QUICK_CHANNELS if quick else CHANNELS:
        rows += convolutions(at, channels, best, quick)
    return [*rows, *others(at, 64, best, quick)]


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What the GPU does at best."""

    bytes_per_s: float
    flop_per_s: float

    def floor_s(self, work: Work) -> float:
        """The least time for some work."""
        return max(work.num_bytes / self.bytes_per_s, work.flops / self.flop_per_s)


@dataclass(frozen=True, slots=True)
class Work:
    """What a call must move and multiply."""

    num_bytes: int
    flops: int = 0


@dataclass(frozen=True, slots=True)
class Cloud:
    """Sites and their map onto themselves; on the host or a GPU."""

    keys: torch.Tensor
    neighbours: torch.Tensor
    num_pairs: int

    @property
    def num_rows(self) -> int:
        """Of the features."""
        return len(self.keys)

    def convolution(self, in_channels: int, out_channels: int) -> Work:
        """Forward, or the input gradient with the channels exchanged: bfloat16 and a map of int32."""
        read = self.num_pairs * in_channels
        written = self.num_rows * out_channels + 27 * in_channels * out_channels
        return Work(2 * (read + written) + 4 * self.neighbours.numel(), self._products(in_channels, out_channels))

    def weight_gradient(self, in_channels: int, out_channels: int) -> Work:
        """Both rows of each pair, and the pair itself."""
        num_bytes = self.num_pairs * (2 * (in_channels + out_channels) + 8) + 2 * 27 * in_channels * out_channels
        return Work(num_bytes, self._products(in_channels, out_channels))

    def pooling(self, channels: int) -> Work:
        """As a convolution that multiplies nothing."""
        return Work(2 * channels * (self.num_pairs + self.num_rows) + 4 * self.neighbours.numel())

    def streaming(self, channels: int) -> Work:
        """Every row read once."""
        return Work(2 * channels * self.num_rows)

    def mapping(self) -> Work:
        """Keys read, a map written."""
        return Work(8 * 2 * self.num_rows + 4 * self.neighbours.numel())

    def _products(self, in_channels: int, out_channels: int) -> int:
        return 2 * self.num_pairs * in_channels * out_channels


def cloud(num_voxels: int, device: str) -> Cloud:
    """A rolling sheet, doubled in places; about so many voxels."""
    draw = torch.Generator().manual_seed(0)
    side = int((num_voxels / (1 + SECOND_LAYER)) ** 0.5) + 1
    x, y = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    z = (12 * torch.sin(x / 23.0) + 9 * torch.cos(y / 17.0)).round().long() + 32
    sheet = torch.stack([torch.zeros_like(x), x, y, z], -1).reshape(-1, 4)
    above = sheet[torch.rand(len(sheet), generator=draw) < SECOND_LAYER] + torch.tensor([0, 0, 0, 1])
    keys = reference.sorted_sites(torch.cat([sheet, above]).int())[0]
    neighbours = reference.kernel_map(keys, keys, CUBE, ONE, ONE, False)
    return Cloud(keys.to(device), neighbours.to(device), int((neighbours >= 0).sum()))


def median_s(call: Callable[[], object], quick: bool) -> float:
    """Median time of a call."""
    from triton.testing import do_bench

    return 1e-3 * do_bench(call, warmup=25, rep=50 if quick else 200, return_mode="median")


def ceilings(quick: bool) -> Ceilings:
    """Of this GPU: a copy of 2 GiB, bytes read and written, and a product of 8192 x 8192 matrices in bfloat16."""
    source = torch.empty(2**31, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    matrix = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    copied = median_s(lambda: target.copy_(source), quick)
    return Ceilings(2 * source.numel() / copied, 2 * 8192**3 / median_s(lambda: matrix @ matrix, quick))


OWN = {"--tune": {"action": "store_true", "dest": "tune_first", "help": "find the kernels' settings before"}}
main = partial(run, "Sparse operators on this GPU, beside what it allows", measure, own=OWN)

if __name__ == "__main__":
    raise SystemExit(main())
