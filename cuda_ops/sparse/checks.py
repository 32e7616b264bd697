"""What every operator asks of its tensors before one of its implementations runs.

Shapes, dtypes and devices agree, and every number that an implementation uses as an address lies within what it
addresses: nothing is read or written elsewhere, whoever made the maps.  A look at all indices costs a small part of the
operator, which reads a row of features for each.  On an accelerator, where an answer would have to be waited for,
indices that were looked at and not written to since are not looked at again.

Indices on accelerators that were looked at, so that an operator need not wait for the device to look again.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import combinations
from math import prod
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from cuda_ops._torch import storage_id, times_written
from cuda_ops.sparse.errors import SparseInputError
from cuda_ops.sparse.keys import COORDINATE_BITS, AxisInts, check_coordinates, check_rows, check_triple

_MOST = 4096


class _Reference(Protocol):
    """Memory held weakly; torch's own class has no types."""

    def expired(self) -> bool:
        """Whether it is gone."""


_reference: Callable[[torch.UntypedStorage], _Reference] = StorageWeakRef


class CheckedTensors:
    """What was found right of tensors that nobody has written to since.

    A tensor is known by its memory, which is held weakly: an address that is used again is another one.  torch counts
    writes by its own operators; on the processor, where others write too (numpy, other processes), nothing is kept.
    """

    def __init__(self) -> None:
        self._noted: dict[tuple[Hashable, ...], _Reference] = {}

    def has(self, tensor: Tensor, what: Hashable) -> bool:
        """Whether ``what`` was noted of these very numbers."""
        if not _is_counted(tensor):
            return False
        noted = self._noted.get(_key(tensor, what))
        return noted is not None and not noted.expired()

    def note(self, tensor: Tensor, what: Hashable) -> None:
        """``what`` is right of the tensor as it is now."""
        if not _is_counted(tensor) or torch.compiler.is_compiling():
            return
        if len(self._noted) >= _MOST:
            self._noted = {key: each for key, each in self._noted.items() if not each.expired()}
            if len(self._noted) >= _MOST:
                self._noted.clear()
        self._noted[_key(tensor, what)] = _reference(tensor.untyped_storage())


def _is_counted(tensor: Tensor) -> bool:
    """Whether torch counts all that is written to it; in inference mode it counts nothing."""
    return tensor.device.type != "cpu" and not tensor.is_inference()


def _key(tensor: Tensor, what: Hashable) -> tuple[Hashable, ...]:
    place = tensor.storage_offset(), tuple(tensor.shape), tensor.stride()
    return storage_id(tensor), times_written(tensor), *place, tensor.dtype, what


_ENTRIES = "entries of a map (offsets times rows)"
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_WIDEST = 1 << COORDINATE_BITS
"""Of a kernel, stride or dilation: beyond it no two coordinates are apart."""
_SEEN = CheckedTensors()


def _agree(what: str, where: str, actual: object, expected: object, remedy: str) -> None:
    if actual != expected:
        raise SparseInputError(what, where=where, actual=actual, expected=expected, remedy=remedy)


def _floats(where: str, *tensors: Tensor) -> None:
    first = tensors[0]
    _strided(where, *tensors)
    if first.dtype not in FLOATS:
        raise SparseInputError(
            "dtype of features",
            where=where,
            actual=first.dtype,
            expected=" or ".join(map(str, FLOATS)),
            remedy="convert the features with .float()",
        )
    for other in tensors[1:]:
        _agree("dtypes that differ", where, other.dtype, first.dtype, "convert one of them with .to")
        _agree("devices that differ", where, other.device, first.device, "move one of them with .to")


def _strided(where: str, *tensors: Tensor) -> None:
    for tensor in tensors:
        _agree("layout of a tensor", where, tensor.layout, torch.strided, "convert it with .to_dense()")


def _dims(where: str, count: int, *tensors: Tensor) -> None:
    for tensor in tensors:
        _agree("number of dimensions", where, tensor.ndim, count, f"the tensor has shape {list(tensor.shape)}")


def _indices(where: str, like: Tensor, dtypes: Sequence[torch.dtype], dims: int, *tensors: Tensor) -> None:
    _strided(where, *tensors)
    _dims(where, dims, *tensors)
    for tensor in tensors:
        if tensor.dtype not in dtypes:
            raise SparseInputError(
                "dtype of indices",
                where=where,
                actual=tensor.dtype,
                expected=" or ".join(map(str, dtypes)),
                remedy="convert them with .to",
            )
        _agree("devices that differ", where, tensor.device, like.device, "move one of them with .to")


def _within(where: str, name: str, indices: Tensor, lowest: int, rows: int) -> None:
    """Raises SparseInputError unless all indices lie from ``lowest`` to below ``rows``."""
    if not indices.numel() or _SEEN.has(indices, (lowest, rows)):
        return
    least, most = (int(bound) for bound in torch.stack(indices.aminmax()).tolist())
    if least < lowest or most >= rows:
        raise SparseInputError(
            f"index out of range in {name}",
            where=where,
            actual=f"{least}..{most}",
            expected=f"{lowest}..{rows - 1}",
            remedy="take the map of these very tensors" + ("; -1 stands for an absent row" if lowest else ""),
        )
    _SEEN.note(indices, (lowest, rows))


def _ascending(where: str, name: str, keys: Tensor) -> None:
    """Raises SparseInputError unless these are the keys of sites: not negative, each above the one before."""
    if not keys.shape[0] or _SEEN.has(keys, "keys"):
        return
    wrong = keys.new_zeros(keys.shape[0], dtype=torch.bool)
    torch.le(keys[1:], keys[:-1], out=wrong[1:])
    wrong[0] = keys[0] < 0
    if bool(wrong.any()):
        row = int(wrong.nonzero()[0])
        raise SparseInputError(
            f"key in row {row} of {name}",
            where=where,
            actual=int(keys[row]),
            expected=f"above {int(keys[row - 1]) if row else -1}",
            remedy="make site sets with sorted_sites",
        )
    _SEEN.note(keys, "keys")


def _map(where: str, x: Tensor, neighbours: Tensor, reverse: Tensor) -> None:
    _indices(where, x, (torch.int32,), 2, neighbours, reverse)
    _agree("offsets of reverse", where, reverse.shape[0], neighbours.shape[0], "make it with reversed_map")
    _agree("rows of features against the map's inputs", where, x.shape[0], reverse.shape[1], "take this level's map")


def _sorted_sites(coordinates: Tensor) -> None:
    check_coordinates(coordinates, "sorted_sites")


def _sites(where: str) -> Callable[..., None]:
    def check(keys: Tensor, kernel: AxisInts, stride: AxisInts, dilation: AxisInts) -> None:
        _step(where, keys, kernel, stride, dilation)
        check_rows(prod(kernel) * keys.shape[0], where, _ENTRIES)
        _ascending(where, "keys", keys)

    return check


def _step(where: str, keys: Tensor, kernel: AxisInts, stride: AxisInts, dilation: AxisInts) -> None:
    _indices(where, keys, (torch.int64,), 1, keys)
    check_rows(keys.shape[0], where)
    for name, values in (("kernel", kernel), ("stride", stride), ("dilation", dilation)):
        check_triple(values, name, where)
        if max(values) > _WIDEST:
            raise SparseInputError(
                name, where=where, actual=list(values), expected=f"at most {_WIDEST}", remedy="coordinates lie closer"
            )
    check_rows(prod(kernel), where, "offsets of the kernel")


def _kernel_map(
    in_keys: Tensor, out_keys: Tensor, kernel: AxisInts, stride: AxisInts, dilation: AxisInts, transposed: bool
) -> None:
    where = "kernel_map"
    _step(where, in_keys, kernel, stride, dilation)
    _indices(where, in_keys, (torch.int64,), 1, out_keys)
    check_rows(prod(kernel) * max(in_keys.shape[0], out_keys.shape[0]), where, _ENTRIES)
    _ascending(where, "in_keys", in_keys)
    _ascending(where, "out_keys", out_keys)


def _reversed_map(neighbours: Tensor, num_inputs: int) -> None:
    _indices("reversed_map", neighbours, (torch.int32,), 2, neighbours)
    check_rows(num_inputs, "reversed_map", "inputs")
    check_rows(neighbours.shape[0] * max(num_inputs, neighbours.shape[1]), "reversed_map", _ENTRIES)
    _within("reversed_map", "neighbours", neighbours, -1, num_inputs)


def _sparse_conv(x: Tensor, weight: Tensor, neighbours: Tensor, reverse: Tensor) -> None:
    where = "sparse_conv"
    _floats(where, x, weight)
    _dims(where, 2, x)
    _dims(where, 3, weight)
    _map(where, x, neighbours, reverse)
    _agree("offsets of the weight", where, weight.shape[0], neighbours.shape[0], "take the map of this kernel size")
    _agree("channels of the features", where, x.shape[1], weight.shape[1], "the weight is [offsets, in, out]")
    _within(where, "neighbours", neighbours, -1, x.shape[0])


def _sparse_conv_weight(x: Tensor, dy: Tensor, neighbours: Tensor) -> None:
    where = "sparse_conv_weight"
    _floats(where, x, dy)
    _dims(where, 2, x, dy)
    _indices(where, x, (torch.int32,), 2, neighbours)
    _agree("rows of the gradient", where, dy.shape[0], neighbours.shape[1], "take this level's map")
    _within(where, "neighbours", neighbours, -1, x.shape[0])


def _pool(where: str) -> Callable[..., None]:
    def check(x: Tensor, neighbours: Tensor, reverse: Tensor) -> None:
        _floats(where, x)
        _dims(where, 2, x)
        _map(where, x, neighbours, reverse)
        _within(where, "neighbours", neighbours, -1, x.shape[0])

    return check


def _max_pool_backward(dy: Tensor, argmax: Tensor, reverse: Tensor) -> None:
    where = "sparse_max_pool_backward"
    _floats(where, dy)
    _indices(where, dy, (torch.int32,), 2, argmax, reverse)
    _agree("shape of the gradient", where, list(dy.shape), list(argmax.shape), "one number a maximum")
    _within(where, "argmax", argmax, -1, reverse.shape[1])
    _within(where, "reverse", reverse, -1, dy.shape[0])


def _segments(where: str) -> Callable[..., None]:
    def check(x: Tensor, starts: Tensor, lengths: Tensor) -> None:
        _runs(where, x, starts, lengths)
        _require_runs(where, starts, lengths, x.shape[0])

    return check


def _runs(where: str, x: Tensor, starts: Tensor, lengths: Tensor) -> None:
    _floats(where, x)
    _dims(where, 2, x)
    check_rows(x.shape[0], where)
    _indices(where, x, (torch.int64,), 1, starts, lengths)
    _agree("starts and lengths", where, starts.shape[0], lengths.shape[0], "give one of each a segment")


def _require_runs(where: str, starts: Tensor, lengths: Tensor, rows: int) -> None:
    """Raises SparseInputError unless the segments lie within ``rows``, and no two of them share one."""
    runs = "runs", rows, storage_id(lengths), times_written(lengths), lengths.storage_offset()
    if _SEEN.has(starts, runs) and _SEEN.has(lengths, runs):
        return
    _within(where, "starts", starts, 0, rows + 1)  # an empty segment may start after the last row
    _within(where, "lengths", lengths, 0, rows + 1)
    firsts = starts
    ends = starts + lengths  # no overflow: both are numbers of rows
    if not bool((ends[:-1] <= firsts[1:]).all()):  # else one after another, as those who make them do
        there = lengths > 0
        firsts, order = starts[there].sort()
        ends = ends[there][order]
    if not ends.shape[0]:
        return
    if int(ends.max()) > rows:
        raise SparseInputError(
            "last row of a segment",
            where=where,
            actual=int(ends.max()) - 1,
            expected=f"at most {rows - 1}",
            remedy="starts and lengths count the rows of these very features",
        )
    shared = (ends[:-1] > firsts[1:]).nonzero()
    if shared.shape[0]:
        place = int(shared[0])
        raise SparseInputError(
            "segments that share rows",
            where=where,
            actual=f"rows {int(firsts[place])}..{int(ends[place]) - 1} and from {int(firsts[place + 1])} on",
            expected="disjoint segments",
            remedy="give each row to one segment",
        )
    _SEEN.note(starts, runs)
    _SEEN.note(lengths, runs)


def _segment_grid(x: Tensor, cells: Tensor, starts: Tensor, lengths: Tensor, num_cells: int) -> None:
    where = "segment_grid"
    _runs(where, x, starts, lengths)
    _indices(where, x, (torch.int64,), 1, cells)
    _agree("cells against rows", where, cells.shape[0], x.shape[0], "give one cell a row")
    check_rows(num_cells * starts.shape[0], where, _ENTRIES)
    _require_runs(where, starts, lengths, x.shape[0])
    _within(where, "cells", cells, 0, num_cells)


def _segment_expand(y: Tensor, starts: Tensor, lengths: Tensor, num_rows: int) -> None:
    where = "segment_expand"
    _runs(where, y, starts, lengths)
    check_rows(num_rows, where)
    _agree("rows against segments", where, y.shape[0], starts.shape[0], "give one row a segment")
    _require_runs(where, starts, lengths, num_rows)


def _weighted(where: str, x: Tensor, index: Tensor, weight: Tensor) -> None:
    _floats(where, x, weight)
    _dims(where, 2, x)
    _indices(where, x, (torch.int32,), 2, index)
    _agree("shape of the weights", where, list(weight.shape), list(index.shape), "give one weight a row that is read")


def _interpolate(x: Tensor, index: Tensor, weight: Tensor) -> None:
    _weighted("interpolate", x, index, weight)
    _within("interpolate", "index", index, -1, x.shape[0])


def _interpolate_backward(dy: Tensor, index: Tensor, weight: Tensor, num_rows: int) -> None:
    where = "interpolate_backward"
    _weighted(where, dy, index, weight)
    check_rows(num_rows, where)
    _agree("rows of the gradient", where, dy.shape[0], index.shape[0], "one row a point")
    _within(where, "index", index, -1, num_rows)


def _interpolate_weight(x: Tensor, dy: Tensor, index: Tensor) -> None:
    where = "interpolate_weight"
    _floats(where, x, dy)
    _dims(where, 2, x, dy)
    _indices(where, x, (torch.int32,), 2, index)
    _agree("channels of the gradient", where, dy.shape[1], x.shape[1], "those of the features")
    _agree("rows of the gradient", where, dy.shape[0], index.shape[0], "one row a point")
    _within(where, "index", index, -1, x.shape[0])


def _pack_rows(x: Tensor, index: Tensor) -> None:
    _rows_of("pack_rows", x, index)


def _rows_of(where: str, x: Tensor, index: Tensor) -> None:
    _strided(where, x)
    if not x.ndim:
        raise SparseInputError(
            "number of dimensions", where=where, actual=0, expected="at least 1", remedy="give a tensor with rows"
        )
    _indices(where, x, (torch.int32, torch.int64), 1, index)
    _within(where, "index", index, 0, x.shape[0])


def _unpack_add(base: Tensor, index: Tensor, rows: Tensor) -> None:
    where = "unpack_add"
    _floats(where, base, rows)
    _rows_of(where, base, index)
    expected = [index.shape[0], *base.shape[1:]]
    _agree("shape of the rows", where, list(rows.shape), expected, "one row an index, as long as the base's")


def _boxes(where: str, x: Tensor, boxes: Sequence[int]) -> int:
    """Elements of all boxes."""
    _strided(where, x)
    per_box = 2 * x.ndim
    if not per_box or len(boxes) % per_box:
        remedy = "give start and stop of every dimension, box after box"
        raise SparseInputError(
            "numbers of boxes", where=where, actual=len(boxes), expected=f"a multiple of {per_box}", remedy=remedy
        )
    elements = 0
    for first in range(0, len(boxes), per_box):
        volume = 1
        for dim, extent in enumerate(x.shape):
            start, stop = boxes[first + 2 * dim : first + 2 * dim + 2]
            if not 0 <= start <= stop <= extent:
                raise SparseInputError(
                    f"box {first // per_box} along dimension {dim}",
                    where=where,
                    actual=f"{start}..{stop}",
                    expected=f"within 0..{extent}",
                    remedy="cut the box to the tensor",
                )
            volume *= stop - start
        elements += volume
    return elements


def _pack_boxes(x: Tensor, boxes: Sequence[int]) -> None:
    _boxes("pack_boxes", x, boxes)


def _unpack_boxes(buffer: Tensor, x: Tensor, boxes: Sequence[int], add: bool) -> None:
    where = "unpack_boxes"
    _strided(where, buffer)
    _agree("dtypes that differ", where, buffer.dtype, x.dtype, "convert one of them with .to")
    _agree("devices that differ", where, buffer.device, x.device, "move one of them with .to")
    _agree("shape of the buffer", where, list(buffer.shape), [_boxes(where, x, boxes)], "fill it by pack_boxes")
    if not add:
        _require_disjoint(boxes, x.ndim)


def _require_disjoint(boxes: Sequence[int], dims: int) -> None:
    """Elements of two boxes would get the later one's value, and the earlier one no gradient."""
    bounds = list(zip(boxes[::2], boxes[1::2], strict=True))
    split = [bounds[first : first + dims] for first in range(0, len(bounds), dims)]
    for (i, one), (j, other) in combinations(enumerate(split), 2):
        if all(max(a, c) < min(b, d) for (a, b), (c, d) in zip(one, other, strict=True)):
            raise SparseInputError(
                f"boxes {i} and {j} overlap",
                where="unpack_boxes",
                actual=f"{one} and {other}",
                expected="disjoint boxes",
                remedy="cut one of them, or add",
            )


CHECKS: Mapping[str, Callable[..., Any]] = {
    "sorted_sites": _sorted_sites,
    "strided_sites": _sites("strided_sites"),
    "generated_sites": _sites("generated_sites"),
    "kernel_map": _kernel_map,
    "reversed_map": _reversed_map,
    "sparse_conv": _sparse_conv,
    "sparse_conv_weight": _sparse_conv_weight,
    "sparse_max_pool": _pool("sparse_max_pool"),
    "sparse_max_pool_backward": _max_pool_backward,
    "sparse_sum_pool": _pool("sparse_sum_pool"),
    "segment_sum": _segments("segment_sum"),
    "segment_max": _segments("segment_max"),
    "segment_grid": _segment_grid,
    "segment_expand": _segment_expand,
    "interpolate": _interpolate,
    "interpolate_backward": _interpolate_backward,
    "interpolate_weight": _interpolate_weight,
    "pack_rows": _pack_rows,
    "unpack_add": _unpack_add,
    "pack_boxes": _pack_boxes,
    "unpack_boxes": _unpack_boxes,
}
"""By operator, with its arguments."""
