"""Parts of tensors by boxes in global coordinates.

Flat places in space, as pooling with indices gives them: from those in a part to those in the whole tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from planner.ir.box import Box, Interval
from planner.ir.errors import StageFailedError
from runtime.pipeline.messages import cuts_of, narrowed


def shape_of(box: Box) -> tuple[int, ...]:
    """The shape of a tensor that covers ``box``."""
    return tuple(len(interval) for interval in box)


def within(x: Tensor, covered: Box, wanted: Box) -> Tensor:
    """The part ``wanted`` of ``x``, which covers ``covered``; a view."""
    return narrowed(x, cuts_of(wanted, covered))


def broadcast_part(x: Tensor, shape: tuple[int, ...], box: Box) -> Tensor:
    """What the part ``box`` of a result of ``shape`` reads of a constant that is broadcast to it.

    Along a dim the constant may be whole, be this rank's part already (a parameter is), or have extent 1.

    Raises:
        StageFailedError: it is none of that.
    """
    first = len(shape) - x.ndim
    if first < 0:
        raise _unlike(x, shape, box)
    for dim, extent in enumerate(x.shape):
        interval = box[first + dim]
        if extent in (1, len(interval)):
            continue
        if extent != shape[first + dim]:
            raise _unlike(x, shape, box)
        x = x.narrow(dim, interval.start, len(interval))
    return x


def along(x: Tensor, dim: int, extent: int, interval: Interval) -> Tensor:
    """The part ``interval`` along ``dim`` of a constant, which has all of ``extent`` there or is the part already."""
    if x.shape[dim] == len(interval):
        return x
    if x.shape[dim] != extent:
        raise _unlike(x, (extent,), (interval,))
    return x.narrow(dim, interval.start, len(interval))


def picked(x: Tensor, dim: int, places: Iterable[int]) -> Tensor:
    """The rows of ``x`` along ``dim`` at ``places``, which may repeat; a view where they follow one another."""
    rows = list(places)
    if rows == list(range(rows[0], rows[0] + len(rows))):
        return x if len(rows) == x.shape[dim] else x.narrow(dim, rows[0], len(rows))
    return x.index_select(dim, torch.tensor(rows, device=x.device))


def _unlike(x: Tensor, shape: tuple[int, ...], box: Box) -> StageFailedError:
    where = ", ".join(map(str, box))
    return StageFailedError(f"a constant of shape {tuple(x.shape)} does not belong to the part {where} of {shape}", [])


def global_places(places: Tensor, local: Sequence[int], starts: Sequence[int], extents: Sequence[int]) -> Tensor:
    """Places in a tensor with dims ``extents``, of ``places`` in a part of it.

    Args:
        places: counted along the last dims together, the last one fastest.
        local: extents of the part.
        starts: where the part begins.
    """
    found = torch.zeros_like(places)
    step = 1
    for length, start, extent in reversed(list(zip(local, starts, extents, strict=True))):
        found += (places % length + start) * step
        places = places // length
        step *= extent
    return found
