"""From points to voxels and back.

A point is (batch, x, y, z) in units of a voxel, whole or not: voxel (i, j, k) holds the points with i <= x < i + 1, and
its own place is (i, j, k), as in torchsparse's SPVNAS.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from cuda_ops.sparse.errors import SparseInputError
from cuda_ops.sparse.keys import MAX_BATCHES, in_range, pack
from cuda_ops.sparse.nn.checks import require_finite
from cuda_ops.sparse.nn.tensor import SparseTensor

_CORNERS = tuple((x, y, z) for x in (0, 1) for y in (0, 1) for z in (0, 1))


def voxelise(
    feats: Tensor,
    points: Tensor,
    *,
    reduce: Literal["mean", "sum", "max"] = "mean",
    num_samples: int | None = None,
) -> tuple[SparseTensor, Tensor]:
    """Points to voxels: the features of the points in one voxel become its own.

    Args:
        feats: (points, channels).
        points: (points, 4): batch, x, y, z in voxels.
        reduce: how the features of a voxel's points become one.
        num_samples: clouds in the batch; None: the largest batch index and one.

    Returns:
        The tensor, and int64 (points,): the row of each point's voxel.

    Raises:
        SparseInputError: shapes that do not fit, coordinates that are not finite or out of range.
    """
    _require_points(points, feats.shape[0], "voxelise")
    places = torch.floor(points).to(torch.int64) if points.dtype.is_floating_point else points.to(torch.int64)
    voxels, rows, counts = torch.unique(places, dim=0, return_inverse=True, return_counts=True)
    by_voxel = torch.sort(rows, stable=True)[1]
    starts = counts.cumsum(0) - counts
    gathered = feats.index_select(0, by_voxel)
    if reduce == "max":
        pooled, _ = torch.ops.halopipe.segment_max(gathered, starts, counts)
    else:
        pooled = torch.ops.halopipe.segment_sum(gathered, starts, counts)
        pooled = pooled / counts.unsqueeze(1) if reduce == "mean" else pooled
    return SparseTensor(pooled, voxels, num_samples=num_samples), rows


def devoxelise(input: SparseTensor, points: Tensor, *, mode: Literal["trilinear", "nearest"] = "trilinear") -> Tensor:
    """Voxels to points.

    Args:
        input: at any stride.
        points: (points, 4): batch, x, y, z in voxels of the network's input.
        mode: ``nearest``: the features of the voxel that holds the point; ``trilinear``: of the eight voxels around it,
            weighted by distance along each axis, those that are there sharing the whole weight.

    Returns:
        (points, channels); 0 for a point with no voxel.

    Raises:
        SparseInputError: shapes that do not fit, or coordinates that are not finite.
    """
    _require_points(points, points.shape[0], "devoxelise")
    stride = points.new_tensor(list(input.stride)).to(torch.float64)
    places = points[:, 1:].to(torch.float64) / stride
    lowest = torch.floor(places)
    index, weight = [], []
    for corner in _CORNERS if mode == "trilinear" else _CORNERS[:1]:
        offset = lowest.new_tensor(corner)
        index.append(rows_of(input, points[:, 0], lowest + offset))
        near = 1 - (places - lowest - offset).abs() if mode == "trilinear" else torch.ones_like(places)
        weight.append(near.prod(1))
    rows = torch.stack(index, 1)
    weights = torch.where(rows >= 0, torch.stack(weight, 1), 0.0)
    total = weights.sum(1, keepdim=True)
    weights = weights / torch.where(total > 0, total, torch.ones_like(total))
    padding = 8 - rows.shape[1]
    rows = torch.nn.functional.pad(rows, (0, padding), value=-1)
    weights = torch.nn.functional.pad(weights, (0, padding))
    feats: Tensor = torch.ops.halopipe.interpolate(input.feats, rows, weights.to(input.feats.dtype))
    return feats


def rows_of(input: SparseTensor, batch: Tensor, places: Tensor) -> Tensor:
    """int32 (points,): the row of the site at ``places`` (points, 3), in units of the tensor's stride, or -1."""
    keys = pack(input.coords)
    found = torch.full(batch.shape, -1, dtype=torch.int32, device=places.device)
    if not len(keys):
        return found
    whole = places.to(torch.int64)
    there = in_range(whole).all(1)
    asked = pack(torch.cat((batch.to(torch.int64).unsqueeze(1), torch.where(there.unsqueeze(1), whole, 0)), 1))
    row = torch.searchsorted(keys, asked).clamp(max=len(keys) - 1)
    return torch.where(there & (keys[row] == asked), row.to(torch.int32), found)


def _require_points(points: Tensor, rows: int, where: str) -> None:
    if points.ndim != 2 or points.shape[1] != 4 or points.shape[0] != rows:
        raise SparseInputError(
            "shape of points",
            where=where,
            found=list(points.shape),
            expected=f"[{rows}, 4]",
            remedy="give batch, x, y, z per point, batch first, and one row of features each",
        )
    if points.dtype.is_floating_point:
        require_finite(points, where)
    if points.shape[0]:
        least, most = (float(bound) for bound in points[:, 0].aminmax())
        if least < 0 or most >= MAX_BATCHES:
            raise SparseInputError(
                "batch index out of range",
                where=where,
                found=least if least < 0 else most,
                expected=f"0..{MAX_BATCHES - 1}",
                remedy="the batch index is the first column; split batches of more than 512 samples",
            )
