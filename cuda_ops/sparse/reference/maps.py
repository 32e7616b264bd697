"""Site sets and maps between them, by sorting and binary search."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from cuda_ops.sparse.errors import SparseInputError
from cuda_ops.sparse.keys import (
    BATCH_SHIFT,
    HIGHEST,
    LOWEST,
    SHIFTS,
    Triple,
    axis_offsets,
    check_coordinates,
    coordinate,
    in_range,
    pack,
    with_coordinate,
)


def sorted_sites(coordinates: Tensor) -> tuple[Tensor, Tensor]:
    """Sorted keys int64 [N] of coordinates [N, 4] and the order int64 [N] that sorts them.

    Raises:
        SparseInputError: out of range, or a coordinate that occurs twice.
    """
    check_coordinates(coordinates, "sorted_sites")
    keys, order = torch.sort(pack(coordinates), stable=True)
    twice = (keys[1:] == keys[:-1]).nonzero().flatten()
    if len(twice):
        first = coordinates[order[twice[0]]].tolist()
        raise SparseInputError(
            f"{len(twice)} duplicate coordinates, the first {first}",
            where="sorted_sites",
            found=f"{len(keys) - len(twice)} different coordinates",
            expected=len(keys),
            remedy="keep one point a voxel: sparse_quantize(..., return_index=True)",
        )
    return keys, order


def strided_sites(keys: Tensor, kernel: Triple, stride: Triple, dilation: Triple) -> Tensor:
    """Every site whose field of a strided kernel holds a site: o with o * stride + offset * dilation in keys."""

    def reached(values: Tensor, offset: int, step: int) -> tuple[Tensor, Tensor]:
        steps = torch.div(values - offset, step, rounding_mode="floor")
        return steps, (steps * step == values - offset) & in_range(steps)

    return _spread(keys, kernel, stride, dilation, reached)


def generated_sites(keys: Tensor, kernel: Triple, stride: Triple, dilation: Triple) -> Tensor:
    """Every site that a transposed kernel writes to: in * stride + offset * dilation."""

    def reached(values: Tensor, offset: int, step: int) -> tuple[Tensor, Tensor]:
        found = values * step + offset
        return found, in_range(found)

    return _spread(keys, kernel, stride, dilation, reached)


Reach = Callable[[Tensor, int, int], tuple[Tensor, Tensor]]
"""(coordinates, offset, stride) -> coordinates reached and where there are such."""


def _spread(keys: Tensor, kernel: Triple, stride: Triple, dilation: Triple, reached: Reach) -> Tensor:
    """Axis by axis, since a field is a product of intervals: kx + ky + kz passes instead of kx * ky * kz."""
    for axis in (2, 1, 0):
        values = coordinate(keys, axis)
        parts = []
        for offset in axis_offsets(kernel[axis], dilation[axis]):
            found, there = reached(values, offset, stride[axis])
            parts.append(with_coordinate(keys[there], axis, found[there]))
        keys = parts[0] if len(parts) == 1 else torch.unique(torch.cat(parts))
    sites: Tensor = torch.unique(keys)
    return sites


def kernel_map(
    in_keys: Tensor, out_keys: Tensor, kernel: Triple, stride: Triple, dilation: Triple, transposed: bool
) -> Tensor:
    """int32 [K, M]: the input row that output row o reads through offset k, or -1."""
    volume = kernel[0] * kernel[1] * kernel[2]
    neighbours = torch.empty((volume, len(out_keys)), dtype=torch.int32, device=in_keys.device)
    if not len(in_keys):
        return neighbours.fill_(-1)
    is_plain = tuple(stride) == (1, 1, 1) and not transposed
    if volume % 2 and is_plain and torch.equal(in_keys, out_keys):
        half = volume // 2  # who reads whom through an offset is read by it through the opposite one
        _search_offsets(in_keys, out_keys, kernel, stride, dilation, transposed, neighbours[:half])
        neighbours[half] = torch.arange(len(in_keys), device=in_keys.device)
        neighbours[half + 1 :] = reversed_map(neighbours[:half], len(in_keys)).flip(0)
    else:
        _search_offsets(in_keys, out_keys, kernel, stride, dilation, transposed, neighbours)
    return neighbours


def _search_offsets(
    in_keys: Tensor,
    out_keys: Tensor,
    kernel: Triple,
    stride: Triple,
    dilation: Triple,
    transposed: bool,
    neighbours: Tensor,
) -> None:
    """Fills ``neighbours``, which may be the first rows of a map alone."""
    asked = []
    for axis in range(3):
        offsets = axis_offsets(kernel[axis], dilation[axis])
        asked.append([_asked(out_keys, axis, offset, stride[axis], transposed) for offset in offsets])
    batch = (out_keys >> BATCH_SHIFT) << BATCH_SHIFT
    ended = torch.cat([in_keys, in_keys.new_full((1,), -1)])  # what is greater than all keys finds no equal
    absent = neighbours.new_full((), -1)
    are_consecutive = dilation[2] == 1 and not transposed
    planes = [(x, y) for x in asked[0] for y in asked[1]][: -(-len(neighbours) // kernel[2])]
    for number, ((x, x_there), (y, y_there)) in enumerate(planes):
        plane, plane_there = batch + x + y, _both(x_there, y_there)
        places = None
        for (z, z_there), rows in zip(asked[2], neighbours[number * kernel[2] :], strict=False):
            keys = plane + z
            if places is None or not are_consecutive:
                places = torch.searchsorted(in_keys, keys, out_int32=True)
            hit = ended.index_select(0, places) == keys
            there = _both(plane_there, z_there)
            torch.where(hit if there is None else hit & there, places, absent, out=rows)
            if are_consecutive:
                places = places + hit  # the place of the next key: one further, where this one was there


def _asked(out_keys: Tensor, axis: int, offset: int, step: int, transposed: bool) -> tuple[Tensor, Tensor | None]:
    """The field of the key asked for, shifted to its place, and where it is to be had (None: everywhere)."""
    values = coordinate(out_keys, axis)
    there = None
    if transposed:
        moved = values - offset
        values = torch.div(moved, step, rounding_mode="floor") if step > 1 else moved
        there = values * step == moved if step > 1 else None
    else:
        values = values * step + offset
    if len(values):
        lowest, highest = torch.aminmax(values)
        if int(lowest) < LOWEST or int(highest) > HIGHEST:
            there = _both(there, in_range(values))
    return (values - LOWEST) << SHIFTS[axis], there


def _both(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    if one is None or other is None:
        return other if one is None else one
    return one & other


def reversed_map(neighbours: Tensor, num_inputs: int) -> Tensor:
    """int32 [K, N]: the output row that reads input row j through offset k, or -1."""
    volume, outputs = neighbours.shape
    reverse = torch.full((volume, num_inputs + 1), -1, dtype=torch.int32, device=neighbours.device)
    rows = torch.arange(outputs, dtype=torch.int32, device=neighbours.device).expand(volume, outputs)
    targets = torch.where(neighbours < 0, num_inputs, neighbours).to(torch.int64)  # the last column takes the absent
    reverse.scatter_(1, targets, rows)
    return reverse[:, :num_inputs].contiguous()
