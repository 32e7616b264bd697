"""Every operator in plain torch: the definition that the faster ones are held against, and what runs without them.

Runs on every device.  The tensors are contiguous and fit together: ``kernels`` has looked.

Site sets and maps between them are made by sorting and binary search.

Sparse convolution takes rows in blocks that stay in cache, and in a block offset by offset: gather, multiply, add.

Blocks depend on shapes alone, never on threads, and a row's offsets are added in one order: centre first (which an odd
kernel on its own sites reads and writes in place), then ascending.

Behind it: rows and boxes that travel, from voxels back to points, pooling over the neighbours that are there, and
reductions over runs of rows (samples of a batch, points of a voxel).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import prod

import torch
from torch import Tensor

from cuda_ops.sparse.errors import SparseInputError
from cuda_ops.sparse.keys import (
    BATCH_SHIFT,
    HIGHEST,
    LOWEST,
    SHIFTS,
    AxisInts,
    axis_offsets,
    check_coordinates,
    coordinate,
    in_range,
    pack,
    with_coordinate,
)

__all__ = [
    "generated_sites",
    "interpolate",
    "interpolate_backward",
    "interpolate_weight",
    "kernel_map",
    "pack_boxes",
    "pack_rows",
    "reversed_map",
    "segment_expand",
    "segment_grid",
    "segment_max",
    "segment_sum",
    "sorted_sites",
    "sparse_conv",
    "sparse_conv_weight",
    "sparse_max_pool",
    "sparse_max_pool_backward",
    "sparse_sum_pool",
    "strided_sites",
    "unpack_add",
    "unpack_boxes",
]


BLOCK_BYTES = 1 << 20
"""Of the rows that a block gathers or adds to: half of a common level-2 cache, with the map's part beside it."""


def sparse_conv(x: Tensor, weight: Tensor, neighbours: Tensor, reverse: Tensor) -> Tensor:
    """[M, Cout]: the sum over offsets k of x [N, Cin] at neighbours[k], times weight [K, Cin, Cout]."""
    dtype = x.dtype
    wide = accumulator(x.dtype)
    x = x.to(wide)
    weights = weight.to(wide).unbind(0)
    outputs = neighbours.shape[1]
    centre = identity(neighbours, x.shape[0])
    sums = x.new_zeros((outputs, weight.shape[2])) if centre is None else x @ weights[centre]
    for rows in blocks(outputs, weight.shape[1:], x):
        part = sums[rows]
        for k, to_rows, from_rows in offsets(neighbours[:, rows], centre):
            part.index_add_(0, to_rows, x.index_select(0, from_rows) @ weights[k])
    return sums.to(dtype)


def sparse_conv_weight(x: Tensor, dy: Tensor, neighbours: Tensor) -> Tensor:
    """[K, Cin, Cout]: for every offset the sum over its pairs of x [N, Cin] outer dy [M, Cout]."""
    dtype = x.dtype
    wide = accumulator(x.dtype)
    centre = identity(neighbours, x.shape[0])
    x = x.to(wide)
    dy = dy.to(wide)
    sums = x.new_zeros((neighbours.shape[0], x.shape[1], dy.shape[1]))
    of_offset = sums.unbind(0)
    for rows in blocks(neighbours.shape[1], sums.shape[1:], x):
        part = dy[rows]
        if centre is not None:
            of_offset[centre].addmm_(x[rows].T, part)
        for k, to_rows, from_rows in offsets(neighbours[:, rows], centre):
            of_offset[k].addmm_(x.index_select(0, from_rows).T, part.index_select(0, to_rows))
    return sums.to(dtype)


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """What sums are kept in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def identity(neighbours: Tensor, inputs: int) -> int | None:
    """The offset through which every output reads the input of its own row; None: there is none in the middle."""
    volume, outputs = neighbours.shape
    middle = volume // 2
    if outputs != inputs:
        return None
    own = torch.arange(outputs, dtype=neighbours.dtype, device=neighbours.device)
    return middle if torch.equal(neighbours[middle], own) else None


def blocks(rows: int, channels: torch.Size, like: Tensor) -> Iterator[slice]:
    """Blocks of rows; on a GPU, where calls are what costs, all are one."""
    size = rows if like.device.type != "cpu" else max(512, BLOCK_BYTES // (like.element_size() * max(*channels, 16)))
    for first in range(0, rows, max(size, 1)):
        yield slice(first, min(first + size, rows))


def offsets(neighbours: Tensor, without: int | None = None) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Offset, output rows and input rows (see :func:`pairs`) of every offset with pairs, except one."""
    for k, rows in enumerate(neighbours.unbind(0)):
        if k != without:
            to_rows, from_rows = pairs(rows)
            if to_rows.shape[0]:
                yield k, to_rows, from_rows


def pairs(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Output and input rows (int64, int32) of one offset's row of a map."""
    to_rows = (rows >= 0).nonzero().squeeze(1)
    return to_rows, rows.index_select(0, to_rows)


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
            actual=f"{len(keys) - len(twice)} different coordinates",
            expected=len(keys),
            remedy="keep one point a voxel: sparse_quantize(..., return_index=True)",
        )
    return keys, order


def strided_sites(keys: Tensor, kernel: AxisInts, stride: AxisInts, dilation: AxisInts) -> Tensor:
    """Every site whose field of a strided kernel holds a site: o with o * stride + offset * dilation in keys."""

    def reached(values: Tensor, offset: int, step: int) -> tuple[Tensor, Tensor]:
        steps = torch.div(values - offset, step, rounding_mode="floor")
        return steps, (steps * step == values - offset) & in_range(steps)

    return _spread(keys, kernel, stride, dilation, reached)


def generated_sites(keys: Tensor, kernel: AxisInts, stride: AxisInts, dilation: AxisInts) -> Tensor:
    """Every site that a transposed kernel writes to: in * stride + offset * dilation."""

    def reached(values: Tensor, offset: int, step: int) -> tuple[Tensor, Tensor]:
        moved = values * step + offset
        return moved, in_range(moved)

    return _spread(keys, kernel, stride, dilation, reached)


Reach = Callable[[Tensor, int, int], tuple[Tensor, Tensor]]
"""(coordinates, offset, stride) -> coordinates reached and where there are such."""


def _spread(keys: Tensor, kernel: AxisInts, stride: AxisInts, dilation: AxisInts, reached: Reach) -> Tensor:
    """Axis by axis, since a field is a product of intervals: kx + ky + kz passes instead of kx * ky * kz."""
    for axis in (2, 1, 0):
        values = coordinate(keys, axis)
        parts = []
        for offset in axis_offsets(kernel[axis], dilation[axis]):
            moved, there = reached(values, offset, stride[axis])
            parts.append(with_coordinate(keys[there], axis, moved[there]))
        keys = parts[0] if len(parts) == 1 else torch.unique(torch.cat(parts))
    sites: Tensor = torch.unique(keys)
    return sites


def kernel_map(
    in_keys: Tensor, out_keys: Tensor, kernel: AxisInts, stride: AxisInts, dilation: AxisInts, transposed: bool
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
    kernel: AxisInts,
    stride: AxisInts,
    dilation: AxisInts,
    transposed: bool,
    neighbours: Tensor,
) -> None:
    """Fills ``neighbours``, which may be the first rows of a map alone."""
    asked = [
        [_asked(out_keys, axis, offset, stride[axis], transposed) for offset in axis_offsets(extent, dilation[axis])]
        for axis, extent in enumerate(kernel)
    ]
    batch = (out_keys >> BATCH_SHIFT) << BATCH_SHIFT
    ended = torch.cat([in_keys, in_keys.new_full((1,), -1)])  # what is greater than all keys finds no equal
    are_consecutive = dilation[2] == 1 and not transposed
    planes = [(x, y) for x in asked[0] for y in asked[1]][: -(-len(neighbours) // kernel[2])]
    for number, ((x, x_there), (y, y_there)) in enumerate(planes):
        rows = neighbours[number * kernel[2] : (number + 1) * kernel[2]]
        _search_line(ended, batch + x + y, _both(x_there, y_there), asked[2], are_consecutive, rows)


def _search_line(
    ended: Tensor,
    plane: Tensor,
    plane_there: Tensor | None,
    asked: Sequence[tuple[Tensor, Tensor | None]],
    are_consecutive: bool,
    neighbours: Tensor,
) -> None:
    """The offsets along z.

    Args:
        ended: sorted keys [N + 1] of the inputs, and an end.
        plane: [M] of the keys asked for all but z, and where they are to be had.
        asked: the same of z, by offset; ``are_consecutive`` if each asks for the key after that of the one before.
        neighbours: int32 [offsets, M], filled.
    """
    in_keys = ended[:-1]
    absent = neighbours.new_full((), -1)
    places = None
    for (z, z_there), rows in zip(asked, neighbours, strict=False):
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


def pack_rows(x: Tensor, index: Tensor) -> Tensor:
    """Rows index [R] of x [N, ...]."""
    return x.index_select(0, index)


def unpack_add(base: Tensor, index: Tensor, rows: Tensor) -> Tensor:
    """Base [N, ...] with rows [R, ...] added at index [R]; those of one row one after another."""
    sums = base.clone(memory_format=torch.contiguous_format)
    add_rows(sums, index, rows)
    return sums


def add_rows(sums: Tensor, index: Tensor, rows: Tensor) -> None:
    """Adds rows at index, in place and in order; on a GPU by sorting, since atomic additions come in any order."""
    if not len(index):
        return
    if sums.device.type == "cpu":
        sums.index_add_(0, index, rows.to(sums.dtype))
        return
    order = torch.sort(index, stable=True)
    targets, lengths = torch.unique_consecutive(order.values, return_counts=True)
    addends = torch.segment_reduce(rows[order.indices].to(sums.dtype).flatten(1), "sum", lengths=lengths)
    sums[targets] += addends.view(len(targets), *sums.shape[1:])


def pack_boxes(x: Tensor, boxes: Sequence[int]) -> Tensor:
    """The elements of boxes of x one box after another, 1-D; boxes are flat: start, stop a dim, box by box."""
    parts = [x[box].reshape(-1) for box in slices(boxes, x.ndim)]
    return torch.cat(parts) if parts else x.new_empty(0)


def unpack_boxes(buffer: Tensor, x: Tensor, boxes: Sequence[int], add: bool) -> Tensor:
    """A copy of x with the elements of buffer put into its boxes, or added to them."""
    filled = x.clone(memory_format=torch.contiguous_format)
    first = 0
    for box in slices(boxes, x.ndim):
        target = filled[box]
        part = buffer[first : first + target.numel()].view(target.shape)
        if add:
            target += part
        else:
            target.copy_(part)
        first += target.numel()
    return filled


def slices(boxes: Sequence[int], dims: int) -> list[tuple[slice, ...]]:
    """Boxes as indices."""
    bounds = list(zip(boxes[::2], boxes[1::2], strict=True))
    return [tuple(slice(*bound) for bound in bounds[i : i + dims]) for i in range(0, len(bounds), dims)]


def elements(boxes: Sequence[int], dims: int) -> int:
    """Of all boxes together."""
    return sum(prod(part.stop - part.start for part in box) for box in slices(boxes, dims))


def interpolate(x: Tensor, index: Tensor, weight: Tensor) -> Tensor:
    """[P, C]: for every point the sum of rows index [P, E] of x [N, C] times weight [P, E]; -1 is an absent row."""
    sums = x.new_zeros((index.shape[0], x.shape[1]), dtype=accumulator(x.dtype))
    for corner, points, rows in offsets(index.T.contiguous()):
        sums.index_add_(0, points, x.index_select(0, rows) * _column(weight, corner, points, sums.dtype))
    return sums.to(x.dtype)


def interpolate_backward(dy: Tensor, index: Tensor, weight: Tensor, num_rows: int) -> Tensor:
    """[num_rows, C]: every row gets dy [P, C] of the points that read it, times their weight."""
    sums = dy.new_zeros((num_rows, dy.shape[1]), dtype=accumulator(dy.dtype))
    for corner, points, rows in offsets(index.T.contiguous()):
        add_rows(sums, rows, dy.index_select(0, points) * _column(weight, corner, points, sums.dtype))
    return sums.to(dy.dtype)


def interpolate_weight(x: Tensor, dy: Tensor, index: Tensor) -> Tensor:
    """[P, E]: the product of dy [P, C] and the row of x [N, C] that a point reads; 0 where it is absent."""
    wide = accumulator(x.dtype)
    products = x.new_zeros(index.shape, dtype=wide)
    for corner, points, rows in offsets(index.T.contiguous()):
        products[points, corner] = (x.index_select(0, rows).to(wide) * dy.index_select(0, points)).sum(1)
    return products.to(x.dtype)


def _column(weight: Tensor, corner: int, points: Tensor, dtype: torch.dtype) -> Tensor:
    return weight[:, corner].index_select(0, points).to(dtype)[:, None]


def sparse_max_pool(x: Tensor, neighbours: Tensor, reverse: Tensor) -> tuple[Tensor, Tensor]:
    """Largest value [M, C] of the neighbours that are there and the input row int32 [M, C] that it came from.

    Ties go to the smallest k; without any neighbour 0 and -1; the first NaN wins.
    """
    outputs = neighbours.shape[1]
    channels = x.shape[1]
    largest = x.new_zeros((outputs, channels))
    argmax = neighbours.new_full((outputs, channels), -1)
    for _, to_rows, from_rows in offsets(neighbours):
        candidate = x.index_select(0, from_rows)
        best = largest.index_select(0, to_rows)
        best_row = argmax.index_select(0, to_rows)
        takes = (best_row < 0) | (candidate > best) | (candidate.isnan() & ~best.isnan())
        largest.index_copy_(0, to_rows, torch.where(takes, candidate, best))
        argmax.index_copy_(0, to_rows, torch.where(takes, from_rows[:, None], best_row))
    return largest, argmax


def sparse_max_pool_backward(dy: Tensor, argmax: Tensor, reverse: Tensor) -> Tensor:
    """[N, C]: every input row gets the gradients dy [M, C] of the outputs that took it."""
    sums = dy.new_zeros((reverse.shape[1], dy.shape[1]), dtype=accumulator(dy.dtype))
    for _, rows, from_rows in offsets(reverse):
        takes = argmax.index_select(0, from_rows) == rows[:, None]
        sums.index_add_(0, rows, torch.where(takes, dy.index_select(0, from_rows), 0).to(sums.dtype))
    return sums.to(dy.dtype)


def sparse_sum_pool(x: Tensor, neighbours: Tensor, reverse: Tensor) -> Tensor:
    """[M, C]: the sum of the neighbours that are there."""
    sums = x.new_zeros((neighbours.shape[1], x.shape[1]), dtype=accumulator(x.dtype))
    for _, to_rows, from_rows in offsets(neighbours):
        sums.index_add_(0, to_rows, x.index_select(0, from_rows).to(sums.dtype))
    return sums.to(x.dtype)


def segment_sum(x: Tensor, starts: Tensor, lengths: Tensor) -> Tensor:
    """[B, C]: sums of rows starts[b] .. starts[b] + lengths[b] of x [N, C]; 0 for an empty segment."""
    rows, segments = segment_rows(starts, lengths)
    sums = x.new_zeros((len(starts), x.shape[1]), dtype=accumulator(x.dtype))
    add_rows(sums, segments, x.index_select(0, rows))
    return sums.to(x.dtype)


def segment_max(x: Tensor, starts: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Largest value [B, C] of every segment and its row int32 [B, C]; 0 and -1 for an empty segment.

    Ties go to the smallest row; the first NaN wins.
    """
    rows, segments = segment_rows(starts, lengths)
    values = x.index_select(0, rows)
    shape = (len(starts), x.shape[1])
    spread = segments[:, None].expand(-1, shape[1])
    largest = torch.full(shape, -torch.inf, dtype=x.dtype, device=x.device).scatter_reduce_(0, spread, values, "amax")
    takes = (values == largest[segments]) | values.isnan()
    absent = x.shape[0]
    argmax = torch.full(shape, absent, dtype=torch.int64, device=x.device)
    argmax.scatter_reduce_(0, spread, torch.where(takes, rows[:, None], absent), "amin")
    there = argmax < absent
    return torch.where(there, largest, 0), torch.where(there, argmax, -1).to(torch.int32)


def segment_grid(x: Tensor, cells: Tensor, starts: Tensor, lengths: Tensor, num_cells: int) -> Tensor:
    """[B, C, num_cells]: the rows of every segment in its own cells, those of one cell summed; 0 elsewhere."""
    rows, segments = segment_rows(starts, lengths)
    grid = x.new_zeros((len(starts) * num_cells, x.shape[1]), dtype=accumulator(x.dtype))
    add_rows(grid, segments * num_cells + cells.index_select(0, rows), x.index_select(0, rows))
    return grid.to(x.dtype).view(len(starts), num_cells, x.shape[1]).transpose(1, 2).contiguous()


def segment_expand(y: Tensor, starts: Tensor, lengths: Tensor, num_rows: int) -> Tensor:
    """[num_rows, C]: every row gets its segment's row of y [B, C]; rows of no segment get 0."""
    rows, segments = segment_rows(starts, lengths)
    spread = torch.zeros((num_rows, y.shape[1]), dtype=y.dtype, device=y.device)
    return spread.index_copy_(0, rows, y.index_select(0, segments))


def segment_rows(starts: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Rows and their segments, int64, segment after segment."""
    segments = torch.repeat_interleave(lengths)
    firsts = starts - (lengths.cumsum(0) - lengths)
    return torch.arange(len(segments), device=starts.device) + firsts[segments], segments
