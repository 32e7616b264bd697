"""Calls of every operator on about a thousand voxels, and how far an implementation is from the plain operators."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from cuda_ops.sparse import reference

Call = tuple[str, tuple[Any, ...]]
"""An operator's name and its arguments."""

EXACT = 0.0
WIDE = 2e-6
HALF = 4e-3
"""Largest error, as a share of the norm: bits that must agree, float32 in another order, float16 or bfloat16."""


@dataclass(frozen=True, slots=True)
class Case:
    """Named calls on a `world` of a type and size, which must come within ``tolerance`` of the reference."""

    name: str
    make: Callable[[SimpleNamespace], list[Call]]
    size: tuple[Any, ...]
    tolerance: float

    def calls(self) -> list[Call]:
        """Its calls, made anew from fixed seeds."""
        return self.make(world(*self.size))


def surface(voxels: int = 1000, batches: int = 2, seed: int = 0) -> Tensor:
    """Sorted keys of a rough sheet, which has few neighbours a voxel as scans have."""
    draw = torch.Generator().manual_seed(seed)
    side = int((voxels / batches) ** 0.5)
    parts = []
    for batch in range(batches):
        x, y = torch.meshgrid(torch.arange(side) - 5, torch.arange(side), indexing="ij")
        z = (x // 2 + y // 3 + torch.randint(0, 3, x.shape, generator=draw)) % 17
        parts.append(torch.stack([torch.full_like(x, batch), x, y, z], -1).reshape(-1, 4))
    return reference.sorted_sites(torch.cat(parts).int())[0]


def world(dtype: torch.dtype, in_channels: int, out_channels: int, voxels: int = 1000) -> SimpleNamespace:
    """Sites, maps and features that the calls share."""
    torch.manual_seed(0)
    fine = surface(voxels)
    cube = (3, 3, 3)
    pair = (2, 2, 2)
    one = (1, 1, 1)
    two = (2, 2, 2)
    coarse = reference.strided_sites(fine, cube, two, one)
    w = SimpleNamespace(fine=fine, coarse=coarse, cube=cube, pair=pair, one=one, two=two, dtype=dtype)
    w.same = reference.kernel_map(fine, fine, cube, one, one, False)
    w.same_reverse = reference.reversed_map(w.same, len(fine))
    w.down = reference.kernel_map(fine, coarse, cube, two, one, False)
    w.down_reverse = reference.reversed_map(w.down, len(fine))
    w.x = torch.randn(len(fine), in_channels).to(dtype)
    w.x_coarse = torch.randn(len(coarse), in_channels).to(dtype)
    w.dy = torch.randn(len(fine), out_channels).to(dtype)
    w.dy_coarse = torch.randn(len(coarse), out_channels).to(dtype)
    w.weight = (torch.randn(27, in_channels, out_channels) / (27 * in_channels) ** 0.5).to(dtype)
    part = len(fine) // 10  # the last of ten parts belongs to no segment
    w.lengths = part * torch.tensor([3, 0, 5, 1])
    w.starts = part * torch.tensor([5, 1, 0, 8])
    counts = torch.randint(0, 7, (len(fine),))
    w.point_lengths = counts[: int((counts.cumsum(0) <= len(fine)).sum())]
    w.point_starts = w.point_lengths.cumsum(0) - w.point_lengths
    w.corners = torch.randint(-1, len(fine), (100, 8), dtype=torch.int32)
    w.corner_weights = torch.rand(100, 8).to(dtype)
    w.index = torch.randint(0, len(fine), (400,))
    return w


def conv_calls(w: SimpleNamespace) -> list[Call]:
    """Forward, input gradient (reversed map, weight transposed by strides) and weight gradient."""
    return [
        ("sparse_conv", (w.x, w.weight, w.same, w.same_reverse)),
        ("sparse_conv", (w.dy, w.weight.transpose(1, 2), w.same_reverse, w.same)),
        ("sparse_conv_weight", (w.x, w.dy, w.same)),
    ]


def strided_conv_calls(w: SimpleNamespace) -> list[Call]:
    """The same of a strided convolution."""
    return [
        ("sparse_conv", (w.x, w.weight, w.down, w.down_reverse)),
        ("sparse_conv", (w.dy_coarse, w.weight.transpose(1, 2), w.down_reverse, w.down)),
        ("sparse_conv_weight", (w.x, w.dy_coarse, w.down)),
    ]


def wide_kernel_calls(w: SimpleNamespace) -> list[Call]:
    """125 offsets, more than fit one word."""
    five = reference.kernel_map(w.fine, w.fine, (5, 5, 5), w.one, w.one, False)
    weight = torch.randn(125, w.x.shape[1], w.dy.shape[1]).to(w.dtype) / 30
    return [("sparse_conv", (w.x, weight, five, five)), ("sparse_conv_weight", (w.x, w.dy, five))]


def map_calls(w: SimpleNamespace) -> list[Call]:
    """The commonest maps."""
    return [
        ("kernel_map", (w.fine, w.fine, w.cube, w.one, w.one, False)),
        ("kernel_map", (w.fine, w.coarse, w.pair, w.two, w.one, False)),
        ("kernel_map", (w.coarse, w.fine, w.pair, w.two, w.one, True)),
        ("reversed_map", (w.down, len(w.fine))),
        ("reversed_map", (w.down[:, :0], 5)),
    ]


def other_map_calls(w: SimpleNamespace) -> list[Call]:
    """Axes that differ, sites at the edge of the range, no sites."""
    low = -131072
    high = 131071  # pairs of sites whose keys are those of neighbours, if a field could overflow
    z = ((5, 2, high), (5, 3, low))
    y = ((5, high, 7), (6, low, 7))
    x = ((high, 3, 3), (low, 3, 3))
    edge = [(0, *z[0]), (0, *z[1]), (0, *y[0]), (0, *y[1]), (0, *x[0]), (1, *x[1])]
    far = reference.sorted_sites(torch.tensor(edge, dtype=torch.int32))[0]
    none = far[:0]
    return [
        ("kernel_map", (w.fine, w.coarse, w.cube, w.two, w.one, False)),
        ("kernel_map", (w.coarse, w.fine, (3, 2, 1), (2, 1, 3), (1, 2, 1), True)),
        ("kernel_map", (w.fine, w.fine, w.cube, w.one, (2, 1, 3), False)),
        ("kernel_map", (far, far, w.cube, w.one, w.one, False)),
        ("kernel_map", (far, far, w.cube, w.one, w.one, True)),
        ("kernel_map", (none, far, w.cube, w.one, w.one, False)),
        ("kernel_map", (far, none, w.cube, w.one, w.one, False)),
    ]


def pool_calls(w: SimpleNamespace) -> list[Call]:
    """Pooling; a NaN, ties and an output without neighbours among them."""
    x = w.x.clone()
    x[::3] = x[::3].round()
    x[50, 0] = float("nan")
    lonely = torch.cat([w.down, torch.full((27, 1), -1, dtype=torch.int32)], 1)
    argmax = reference.sparse_max_pool(x, w.down, w.down_reverse)[1]
    dy = torch.randn(len(w.coarse), w.x.shape[1]).to(w.dtype)
    return [
        ("sparse_max_pool", (x, lonely, w.down_reverse)),
        ("sparse_max_pool_backward", (dy, argmax, w.down_reverse)),
        ("sparse_sum_pool", (w.x, lonely, w.down_reverse)),
        ("sparse_sum_pool", (dy, w.down_reverse, w.down)),
    ]


def segment_calls(w: SimpleNamespace) -> list[Call]:
    """Few long segments, many short ones, out of order, some empty; one that is divided into shares; none at all."""
    x = w.x.clone()
    x[::3] = x[::3].round()
    x[50, 0] = float("nan")
    x[w.starts[0] : w.starts[0] + w.lengths[0], 1] = -float("inf")
    calls: list[Call] = []
    whole = (torch.tensor([3]), torch.tensor([len(x) - 9]))
    none = (w.starts[:0], w.lengths[:0])
    for starts, lengths in ((w.starts, w.lengths), (w.point_starts, w.point_lengths), whole, none):
        y = torch.randn(len(starts), w.x.shape[1]).to(w.dtype)
        calls += [
            ("segment_sum", (w.x, starts, lengths)),
            ("segment_max", (x, starts, lengths)),
            ("segment_expand", (y, starts, lengths, len(x))),
        ]
    return calls


def row_calls(w: SimpleNamespace) -> list[Call]:
    """Rows packed and added back, duplicates among them, and points."""
    points = torch.randn(100, w.x.shape[1]).to(w.dtype)
    return [
        ("pack_rows", (w.x, w.index)),
        ("pack_rows", (w.x, w.index[:0])),
        ("unpack_add", (w.x, w.index, w.x[w.index.flip(0)])),
        ("unpack_add", (w.x, w.index[:0], w.x[:0])),
        ("interpolate", (w.x, w.corners, w.corner_weights)),
        ("interpolate_backward", (points, w.corners, w.corner_weights, len(w.x))),
        ("interpolate_weight", (w.x, points, w.corners)),
    ]


def box_calls(w: SimpleNamespace) -> list[Call]:
    """Overlapping and empty boxes of dense tensors of two to five dims."""
    calls: list[Call] = []
    for shape, boxes in (
        ((9, 11), [0, 2, 0, 11, 1, 9, 3, 5]),
        ((2, 3, 5, 6, 7), [0, 2, 0, 3, 0, 1, 0, 6, 0, 7, 0, 2, 1, 3, 0, 5, 4, 6, 2, 7, 1, 1, 0, 3, 0, 5, 0, 6, 0, 7]),
    ):
        x = torch.randn(shape).to(w.dtype).transpose(0, 1).contiguous().transpose(0, 1)
        buffer = torch.randn(reference.pack_boxes(x, boxes).shape).to(w.dtype)
        calls += [
            ("pack_boxes", (x, boxes)),
            ("unpack_boxes", (buffer, x, boxes, False)),
            ("unpack_boxes", (buffer, x, boxes, True)),
        ]
    return calls


def cases(half: torch.dtype) -> tuple[Case, ...]:
    """Every case; ``half`` is the narrow type (the interpreter cannot multiply bfloat16)."""
    single = torch.float32
    double = torch.float64
    found = [
        Case("convolution float32", conv_calls, (single, 4, 24, 300), WIDE),
        Case("strided convolution half", strided_conv_calls, (half, 30, 40), HALF),
        Case("convolution of 125 offsets", wide_kernel_calls, (half, 16, 16, 100), HALF),
        Case("maps", map_calls, (single, 1, 1), EXACT),
        Case("maps of other shapes", other_map_calls, (single, 1, 1, 100), EXACT),
        Case("segments float64", segment_calls, (double, 3, 1), 1e-14),
        Case("boxes", box_calls, (single, 1, 1), WIDE),
    ]
    for name, calls in (("pooling", pool_calls), ("segments", segment_calls), ("rows", row_calls)):
        found += [
            Case(f"{name} float32", calls, (single, 20, 1), WIDE),
            Case(f"{name} half", calls, (half, 70, 1, 100), HALF),
        ]
    return tuple(found)


CHANNELS = ((1, 1), (3, 5), (4, 32), (13, 16), (17, 33), (32, 64), (64, 47))


def cases_of_channels() -> Iterator[Case]:
    """Numbers of channels that fill the registers of a processor, and that do not."""
    for dtype, tolerance in ((torch.float64, 1e-14), (torch.float32, WIDE)):
        for channels in CHANNELS:
            for name, calls in (("convolution", conv_calls), ("strided convolution", strided_conv_calls)):
                words = f"{name} {channels[0]} to {channels[1]} {str(dtype).removeprefix('torch.')}"
                yield Case(words, calls, (dtype, *channels, 300), tolerance)
        yield Case(f"rows {tolerance}", row_calls, (dtype, 5, 1, 100), tolerance)
        yield Case(f"pooling {tolerance}", pool_calls, (dtype, 5, 1, 300), tolerance)


def errors(implementation: object, calls: list[Call], device: str) -> list[tuple[str, float]]:
    """The error of each call of an operator that the implementation has: a share of the norm of the reference on a CPU.

    Infinity for another shape or type.
    """
    found = []
    for name, arguments in calls:
        if not hasattr(implementation, name):
            continue
        expected = results(getattr(reference, name)(*arguments))
        got = results(getattr(implementation, name)(*(moved(argument, device) for argument in arguments)))
        found.append((name, max(error(a.cpu(), b) for a, b in zip(got, expected, strict=True))))
    return found


def results(found: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """As a tuple."""
    return found if isinstance(found, tuple) else (found,)


def moved(argument: Any, device: str) -> Any:
    """On another device, with the same strides."""
    return argument.to(device) if isinstance(argument, Tensor) else argument


def error(got: Tensor, expected: Tensor) -> float:
    """The distance as a share of the norm; whole numbers, NaN and infinities must be equal."""
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return float("inf")
    if not expected.is_floating_point():
        return 0.0 if torch.equal(got, expected) else float("inf")
    got = got.double()
    expected = expected.double()
    usual = expected.isfinite()
    if (
        not torch.equal(got[~usual].nan_to_num(2.0), expected[~usual].nan_to_num(2.0))
        or not got[usual].isfinite().all()
    ):
        return float("inf")
    size = float(expected[usual].norm())
    return float((got[usual] - expected[usual]).norm()) / (size or 1.0)


def main() -> int:
    """Prints each call's case, operator and error under the interpreter (TRITON_INTERPRET=1), a line each."""
    torch.set_num_threads(1)
    from cuda_ops.sparse.gpu import load

    kernels = load()
    if kernels is None:
        return 1
    for case in cases(torch.float16):
        for name, found in errors(kernels, case.calls(), "cpu"):
            sys.stdout.write(f"{case.name}\t{name}\t{found}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
