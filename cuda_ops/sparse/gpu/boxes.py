"""Boxes of a dense tensor that travel: one launch a box, straight from the tensor's strides into the buffer."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from cuda_ops.sparse.gpu.launch import accumulator, jit, launch

DIMS = 5  # batch, channels, and up to three of space
MOST = 2**31 - 1  # elements of a box, counted in int32
ELEMENTS = 1024  # of a program
PACK, PUT, ADD = 0, 1, 2


@jit
def move_box(
    x: tl.tensor, buffer: tl.tensor, num_elements: tl.tensor, extent_1: tl.tensor, extent_2: tl.tensor,
    extent_3: tl.tensor, extent_4: tl.tensor, stride_0: tl.tensor, stride_1: tl.tensor, stride_2: tl.tensor,
    stride_3: tl.tensor, stride_4: tl.tensor, MODE: tl.constexpr, WIDE: tl.constexpr, ELEMENTS: tl.constexpr,
) -> None:  # fmt: skip
    """One box, read into the buffer (mode 0), put from it (1) or added (2)."""
    element = tl.program_id(0) * ELEMENTS + tl.arange(0, ELEMENTS)
    here = element < num_elements
    rest = element
    at = (rest % extent_4).to(tl.int64) * stride_4
    rest = rest // extent_4
    at += (rest % extent_3).to(tl.int64) * stride_3
    rest = rest // extent_3
    at += (rest % extent_2).to(tl.int64) * stride_2
    rest = rest // extent_2
    at += (rest % extent_1).to(tl.int64) * stride_1
    at += (rest // extent_1).to(tl.int64) * stride_0
    if MODE == 0:
        tl.store(buffer + element, tl.load(x + at, mask=here), mask=here)
    elif MODE == 1:
        tl.store(x + at, tl.load(buffer + element, mask=here), mask=here)
    else:
        total = tl.load(x + at, mask=here).to(WIDE) + tl.load(buffer + element, mask=here).to(WIDE)
        tl.store(x + at, total.to(x.dtype.element_ty), mask=here)


def pack_boxes(x: torch.Tensor, boxes: Sequence[int]) -> torch.Tensor:
    """The elements of boxes of x one box after another, 1-D; boxes are flat: start, stop a dim, box by box."""
    found = list(parts(x, boxes))
    if not fits(x, found):
        packed: torch.Tensor = reference().pack_boxes(x, boxes)
        return packed
    buffer = x.new_empty(sum(part.numel() for part in found))
    _move(found, buffer, PACK)
    return buffer


def unpack_boxes(buffer: torch.Tensor, x: torch.Tensor, boxes: Sequence[int], add: bool) -> torch.Tensor:
    """A copy of x with the elements of buffer put into its boxes, or added to them."""
    filled = x.clone(memory_format=torch.contiguous_format)
    found = list(parts(filled, boxes))
    if not fits(x, found):
        unpacked: torch.Tensor = reference().unpack_boxes(buffer, x, boxes, add)
        return unpacked
    _move(found, buffer.contiguous(), ADD if add else PUT)
    return filled


def parts(x: torch.Tensor, boxes: Sequence[int]) -> Iterator[torch.Tensor]:
    """The boxes as views of x."""
    for first in range(0, len(boxes), 2 * x.ndim):
        bounds = boxes[first : first + 2 * x.ndim]
        yield x[tuple(slice(*pair) for pair in zip(bounds[::2], bounds[1::2], strict=True))]


def fits(x: torch.Tensor, found: Sequence[torch.Tensor]) -> bool:
    """Whether the kernel counts so many dims and elements."""
    return 0 < x.ndim <= DIMS and all(part.numel() <= MOST for part in found)


def reference() -> Any:
    """The plain implementation, for what does not fit."""
    from cuda_ops.sparse import reference as rows

    return rows


def _move(found: Sequence[torch.Tensor], buffer: torch.Tensor, mode: int) -> None:
    first = 0
    for part in found:
        padding = DIMS - part.ndim
        extents, strides = (*[1] * padding, *part.shape), (*[0] * padding, *part.stride())
        size = math.prod(extents)
        launch(
            move_box, (triton.cdiv(size, ELEMENTS),), part,
            part, buffer[first : first + size], size, *extents[1:], *strides,
            MODE=mode, WIDE=accumulator(part.dtype), ELEMENTS=ELEMENTS,
        )  # fmt: skip
        first += size
