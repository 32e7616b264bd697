"""Points to voxels: one whole coordinate a voxel, and which point stands for it (`torchsparse/utils/quantize.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from cuda_ops.sparse.errors import SparseInputError
from cuda_ops.sparse.keys import HIGHEST, LOWEST, check_rows, pack, unpack

Array = TypeVar("Array", Tensor, "np.ndarray[Any, Any]")
_WHERE = "sparse_quantize"


def sparse_quantize(
    coords: Array,
    voxel_size: float | Sequence[float] = 1,
    *,
    return_index: bool = False,
    return_inverse: bool = False,
) -> Array | tuple[Array, ...]:
    """Voxels of points: floor(coords / voxel_size), each once, sorted by x, then y, then z.

    Args:
        coords: [N, 3] numbers, of numpy or torch; the results are of the same kind.
        voxel_size: one number for x, y and z, or three.
        return_index: also int64 [M], the first point of every voxel.
        return_inverse: also int64 [N], the voxel of every point.

    Returns:
        int32 [M, 3], or a tuple of it and what was asked for.

    Raises:
        SparseInputError: shapes or voxel sizes that do not fit, NaN or infinite coordinates, voxels out of range.
    """
    points = torch.from_numpy(np.ascontiguousarray(coords)) if isinstance(coords, np.ndarray) else coords.detach()
    if points.ndim != 2 or points.shape[1] != 3:
        _refuse("shape of points", list(points.shape), "[N, 3]", "give x, y and z per row, without a batch index")
    check_rows(points.shape[0], _WHERE)
    keys = pack(torch.nn.functional.pad(_voxels(points, _sizes(voxel_size)), (1, 0)))
    ordered, order = torch.sort(keys, stable=True)
    is_first = torch.ones_like(ordered, dtype=torch.bool)
    is_first[1:] = ordered[1:] != ordered[:-1]
    found = [unpack(ordered[is_first])[:, 1:].contiguous()]
    if return_index:
        found.append(order[is_first])
    if return_inverse:
        found.append(torch.empty_like(order).scatter_(0, order, is_first.cumsum(0) - 1))
    results: Any = tuple(each.numpy() for each in found) if isinstance(coords, np.ndarray) else tuple(found)
    return results if len(results) > 1 else results[0]


def _sizes(voxel_size: float | Sequence[float]) -> tuple[float, ...]:
    sizes = np.asarray(voxel_size, dtype=np.float64)
    if sizes.shape not in ((), (3,)) or not (np.isfinite(sizes) & (sizes > 0)).all():
        _refuse("voxel size", voxel_size, "one number above 0, or three", "give the edge of a voxel in units of coords")
    return tuple(np.broadcast_to(sizes, 3).tolist())


def _voxels(points: Tensor, sizes: tuple[float, ...]) -> Tensor:
    if points.is_complex() or points.dtype == torch.bool:
        _refuse("dtype of points", points.dtype, "whole or floating-point numbers", "convert them with .float()")
    wide = points.to(torch.float64)
    refuse_infinite(wide, _WHERE, "coordinates")
    voxels = torch.floor(wide / torch.tensor(sizes, dtype=torch.float64, device=points.device))
    outside = ((voxels < LOWEST) | (voxels > HIGHEST)).any(1).nonzero()
    if len(outside):
        row = int(outside[0])
        _refuse(
            f"{len(outside)} points out of range, the first in row {row}",
            f"voxel {[f'{each:.0f}' for each in voxels[row].tolist()]}".replace("'", ""),
            f"{LOWEST}..{HIGHEST} along x, y and z",
            "move the cloud towards the origin or take larger voxels",
        )
    return voxels.to(torch.int64)


def refuse_infinite(values: Tensor, where: str, name: str) -> None:
    """Raises SparseInputError for rows [N, C] with NaN or infinite values: how many, and the first."""
    bad = (~values.isfinite()).any(1).nonzero()
    if len(bad):
        row = int(bad[0])
        raise SparseInputError(
            f"{name} that are NaN or infinite, the first in row {row}: {values[row].tolist()}",
            where=where,
            found=f"{len(bad)} of {len(values)} rows",
            expected=0,
            remedy="drop those points",
        )


def _refuse(what: str, found: object, expected: object, remedy: str) -> None:
    raise SparseInputError(what, where=_WHERE, found=found, expected=expected, remedy=remedy)
