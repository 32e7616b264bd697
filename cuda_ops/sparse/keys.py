"""Packed coordinates: a site is one int64, so that sites sort, search and travel as plain numbers.

    bit   62 ... 54 | 53 ... 36 | 35 ... 18 | 17 ... 0
          batch       x           y           z            x, y, z biased by 2^17

Keys are not negative and sort by batch, then x, y, z.  Arithmetic goes through coordinates that are checked against
their range, axis by axis: a coordinate that leaves it makes a site absent and never touches the next field.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import cast

import torch
from torch import Tensor

from cuda_ops.sparse.errors import SparseInputError

COORDINATE_BITS = 18
BATCH_BITS = 9
LOWEST = -(1 << (COORDINATE_BITS - 1))
HIGHEST = (1 << (COORDINATE_BITS - 1)) - 1
MAX_BATCHES = 1 << BATCH_BITS
MAX_ROWS = 2**31 - 1
"""Rows are counted in int32: in maps, in the rows that a maximum came from."""

SHIFTS = (2 * COORDINATE_BITS, COORDINATE_BITS, 0)
"""Of x, y, z in a key."""
BATCH_SHIFT = 3 * COORDINATE_BITS
_MASK = (1 << COORDINATE_BITS) - 1

AxisInts = Sequence[int]
"""Of x, y and z."""


def pack(coordinates: Tensor) -> Tensor:
    """int64 [N] keys of integer coordinates [N, 4] (batch, x, y, z) that are in range; does not look."""
    batch, x, y, z = coordinates.to(torch.int64).unbind(-1)
    return (batch << BATCH_SHIFT) + ((x - LOWEST) << SHIFTS[0]) + ((y - LOWEST) << SHIFTS[1]) + (z - LOWEST)


def unpack(keys: Tensor) -> Tensor:
    """int32 [N, 4] coordinates (batch, x, y, z) of keys [N]."""
    fields = [keys >> BATCH_SHIFT, *(coordinate(keys, axis) for axis in range(3))]
    return torch.stack(fields, -1).to(torch.int32)


def coordinate(keys: Tensor, axis: int) -> Tensor:
    """int64 [N]: x, y or z (axis 0, 1, 2) of keys [N]."""
    return ((keys >> SHIFTS[axis]) & _MASK) + LOWEST


def with_coordinate(keys: Tensor, axis: int, values: Tensor) -> Tensor:
    """Keys [N] with x, y or z (axis 0, 1, 2) replaced by values [N], which must be in range."""
    return (keys & ~(_MASK << SHIFTS[axis])) | ((values - LOWEST) << SHIFTS[axis])


def in_range(values: Tensor) -> Tensor:
    """Where x, y or z fits its field."""
    return (values >= LOWEST) & (values <= HIGHEST)


def axis_offsets(size: int, dilation: int) -> range:
    """Offsets of a kernel along one axis: centred where the size is odd, from 0 where it is even."""
    first = -(size - 1) // 2 if size % 2 else 0
    return range(first * dilation, (first + size) * dilation, dilation)


def kernel_offsets(kernel: AxisInts, dilation: AxisInts = (1, 1, 1)) -> list[tuple[int, int, int]]:
    """Offsets (x, y, z) of a kernel in the order of its weights: x slowest, z fastest; dilation included."""
    offsets = list(product(*(axis_offsets(size, step) for size, step in zip(kernel, dilation, strict=True))))
    return cast("list[tuple[int, int, int]]", offsets)


def check_coordinates(coordinates: Tensor, where: str) -> None:
    """Raises SparseInputError unless these are integer coordinates [N, 4], batch first, all in range.

    Duplicates are not looked for here.
    """
    if coordinates.layout != torch.strided:
        raise SparseInputError(
            "layout of coordinates",
            where=where,
            actual=coordinates.layout,
            expected=torch.strided,
            remedy="convert them with .to_dense()",
        )
    if coordinates.ndim != 2 or coordinates.shape[1] != 4:
        raise SparseInputError(
            "shape of coordinates",
            where=where,
            actual=list(coordinates.shape),
            expected="[N, 4]",
            remedy="give batch, x, y, z per row, batch first",
        )
    if coordinates.dtype not in (torch.int32, torch.int64, torch.int16, torch.int8, torch.uint8):
        raise SparseInputError(
            "dtype of coordinates",
            where=where,
            actual=coordinates.dtype,
            expected=torch.int32,
            remedy="voxelise points with sparse_quantize, or convert whole numbers with .int()",
        )
    check_rows(coordinates.shape[0], where)
    if not coordinates.shape[0]:
        return
    lowest, highest = (bound.tolist() for bound in torch.aminmax(coordinates.to(torch.int64), dim=0))
    if lowest[0] < 0 or highest[0] >= MAX_BATCHES:
        raise SparseInputError(
            "batch index out of range",
            where=where,
            actual=lowest[0] if lowest[0] < 0 else highest[0],
            expected=f"0..{MAX_BATCHES - 1}",
            remedy="the batch index is the first column; split batches of more than 512 samples",
        )
    for axis, name in enumerate("xyz", start=1):
        if lowest[axis] < LOWEST or highest[axis] > HIGHEST:
            raise SparseInputError(
                f"coordinate {name} out of range",
                where=where,
                actual=lowest[axis] if lowest[axis] < LOWEST else highest[axis],
                expected=f"{LOWEST}..{HIGHEST}",
                remedy="move the cloud towards the origin or take larger voxels",
            )


def check_rows(rows: int, where: str, what: str = "rows") -> None:
    """Raises SparseInputError where int32 cannot count these rows, or there are fewer than none."""
    if not 0 <= rows <= MAX_ROWS:
        raise SparseInputError(
            f"too many {what}" if rows > 0 else f"number of {what}",
            where=where,
            actual=rows,
            expected=f"at most {MAX_ROWS}" if rows > 0 else "at least 0",
            remedy="split the batch or the cloud" if rows > 0 else "give the number of rows that there are",
        )


def check_triple(values: AxisInts, name: str, where: str) -> None:
    """Raises SparseInputError unless these are three numbers of at least 1."""
    if len(values) != 3 or any(value < 1 for value in values):
        raise SparseInputError(
            name, where=where, actual=list(values), expected="three numbers of at least 1", remedy="give x, y and z"
        )
