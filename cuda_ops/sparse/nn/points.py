"""From points to voxels and back, and the functions of torchsparse that this is made of there.

A point is (batch, x, y, z) in units of a voxel, whole or not: voxel (i, j, k) holds the points with i <= x < i + 1, and
its own place is (i, j, k), as in torchsparse's SPVNAS.

``sphash`` ... ``spdevoxelize`` are torchsparse's (`torchsparse/nn/functional/`) on batch-first coordinates. A hash here
is the packed key, so that no two sites share one. Point-voxel networks go between :class:`PointTensor` and
:class:`SparseTensor` with ``initial_voxelize``, ``point_to_voxel`` and ``voxel_to_point``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from cuda_ops.sparse import operators
from cuda_ops.sparse.errors import SparseInputError
from cuda_ops.sparse.keys import MAX_BATCHES, check_coordinates, in_range, pack, unpack
from cuda_ops.sparse.nn.tensor import SparseTensor, require_finite, triple

_CORNERS = tuple((x, y, z) for x in (0, 1) for y in (0, 1) for z in (0, 1))


class PointTensor:
    """Points that are no voxels: features beside coordinates that need not be whole.

    Args:
        feats: (points, channels).
        coords: (points, 4): batch, x, y, z, in any order, any number of them in a voxel.

    Raises:
        SparseInputError: shapes that do not fit, coordinates that are not finite, a batch index out of range.
    """

    __slots__ = ("C", "F")

    def __init__(self, feats: Tensor, coords: Tensor) -> None:
        _require_points(coords, feats.shape[0], "PointTensor")
        self.F = feats
        self.C = coords

    def to(self, *to: torch.device | str, device: torch.device | str | None = None) -> PointTensor:
        """On another device."""
        feats = self.F
        coords = self.C
        for each in (*to, device):
            feats, coords = (feats, coords) if each is None else (feats.to(each), coords.to(each))
        return PointTensor(feats, coords)

    def cuda(self) -> PointTensor:
        """On a GPU."""
        return self.to("cuda")

    def detach(self) -> PointTensor:
        """Cut off from what made its features."""
        return PointTensor(self.F.detach(), self.C)

    def __len__(self) -> int:
        return self.F.shape[0]

    def __add__(self, other: PointTensor) -> PointTensor:
        return PointTensor(self.F + other.F, self.C)


def initial_voxelize(z: PointTensor, init_res: float, after_res: float) -> SparseTensor:
    """Voxels of points given in units of ``init_res``, of size ``after_res``: the mean of the points in each.

    ``z.C`` is in units of these voxels from then on, as in SPVNAS.
    """
    z.C = torch.cat((z.C[:, :1], z.C[:, 1:] * init_res / after_res), 1)
    return voxelise(z.F, z.C)[0]


def point_to_voxel(x: SparseTensor, z: PointTensor) -> SparseTensor:
    """On the sites of ``x``, the mean of the features of the points of ``z`` in each; 0 where there is none.

    Points in no voxel of ``x`` count nowhere.
    """
    rows = rows_of(x, z.C[:, 0], torch.floor(_in_units_of(x, z.C)))
    return x.with_feats(spvoxelize(z.F, rows, spcount(rows, len(x))))


def voxel_to_point(x: SparseTensor, z: PointTensor, nearest: bool = False) -> PointTensor:
    """The features of ``x`` at the points of ``z``; see :func:`devoxelise`."""
    return PointTensor(devoxelise(x, z.C, mode="nearest" if nearest else "trilinear"), z.C)


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
    places = _in_units_of(input, points)
    if mode == "nearest":
        rows = functional.pad(rows_of(input, points[:, 0], torch.floor(places)).unsqueeze(1), (0, 7), value=-1)
        return spdevoxelize(input.feats, rows, (rows >= 0).to(places.dtype))
    corners = [torch.floor(places) + places.new_tensor(corner) for corner in _CORNERS]
    rows = torch.stack([rows_of(input, points[:, 0], corner) for corner in corners], 1)
    return spdevoxelize(input.feats, rows, _shared_weights(places, rows))


def rows_of(input: SparseTensor, batch: Tensor, places: Tensor) -> Tensor:
    """int32 (points,): the row of the site at ``places`` (points, 3), in units of the tensor's stride, or -1."""
    keys = pack(input.coords)
    rows = torch.full(batch.shape, -1, dtype=torch.int32, device=places.device)
    if not len(keys):
        return rows
    whole = places.to(torch.int64)
    there = in_range(whole).all(1)
    asked = pack(torch.cat((batch.to(torch.int64).unsqueeze(1), torch.where(there.unsqueeze(1), whole, 0)), 1))
    row = torch.searchsorted(keys, asked).clamp(max=len(keys) - 1)
    return torch.where(there & (keys[row] == asked), row.to(torch.int32), rows)


def sphash(coords: Tensor, offsets: Tensor | None = None) -> Tensor:
    """int64 (sites,): a number for each site, no two alike; -1 for a place out of the range of coordinates.

    Args:
        coords: int32 (sites, 4), batch first.
        offsets: int32 (offsets, 3) to add to x, y, z: the result is (offsets, sites).
    """
    check_coordinates(coords, "sphash")
    if offsets is None:
        return pack(coords)
    places = coords[:, 1:].to(torch.int64) + offsets.to(torch.int64).unsqueeze(1)
    there = in_range(places).all(2)
    batch = coords[:, :1].to(torch.int64).expand(len(offsets), -1, -1)
    keys = pack(torch.cat((batch, torch.where(there.unsqueeze(2), places, 0)), 2))
    return torch.where(there, keys, -1)


def sphashquery(queries: Tensor, references: Tensor) -> Tensor:
    """int64, as ``queries``: the place of each among ``references`` (hashes,), the first of equal ones, or -1."""
    if not len(references):
        return torch.full_like(queries, -1)
    ascending, order = torch.sort(references, stable=True)
    place = torch.searchsorted(ascending, queries.contiguous()).clamp(max=len(references) - 1)
    return torch.where((ascending[place] == queries) & (queries >= 0), order[place], -1)


def spcount(indices: Tensor, num: int) -> Tensor:
    """int32 (num,): how often each of 0..num - 1 occurs among ``indices``; negative ones are none."""
    return torch.bincount(indices[indices >= 0].to(torch.int64), minlength=num).to(torch.int32)


def spvoxelize(feats: Tensor, indices: Tensor, counts: Tensor) -> Tensor:
    """(voxels, channels): the sum of the features of each voxel's points over ``counts``; 0 where that is 0.

    Args:
        feats: (points, channels).
        indices: (points,): each point's voxel, or -1.
        counts: (voxels,): what to divide by, as :func:`spcount` gives it.

    Raises:
        SparseInputError: shapes that do not fit, or an index of no voxel.
    """
    if indices.ndim != 1 or len(indices) != len(feats) or (len(indices) and int(indices.max()) >= len(counts)):
        raise SparseInputError(
            "voxels of points",
            where="spvoxelize",
            actual=f"{list(indices.shape)}, up to {int(indices.max()) if indices.numel() else -1}",
            expected=f"[{len(feats)}], below {len(counts)}",
            remedy="give the voxel of each point (sphashquery), and one count a voxel (spcount)",
        )
    ordered, order = torch.sort(indices.to(torch.int64), stable=True)
    inside = order[ordered >= 0]
    lengths = torch.bincount(ordered[ordered >= 0], minlength=len(counts))
    sums: Tensor = operators.segment_sum(feats.index_select(0, inside), lengths.cumsum(0) - lengths, lengths)
    return torch.where(counts.unsqueeze(1) > 0, sums / counts.clamp(min=1).unsqueeze(1), 0)


def calc_ti_weights(coords: Tensor, idx_query: Tensor, scale: float = 1) -> Tensor:
    """(points, 8): trilinear weights of the voxels around each point, those that are there sharing the whole weight.

    Args:
        coords: (points, 3).
        idx_query: (points, 8): their rows, or -1 where there is none; corners with x slowest and z fastest.
        scale: size of a voxel in the units of ``coords``.
    """
    if tuple(idx_query.shape) != (len(coords), len(_CORNERS)) or coords.shape[1:] != (3,):
        raise SparseInputError(
            "shape of the points' voxels",
            where="calc_ti_weights",
            actual=f"{list(idx_query.shape)} for points {list(coords.shape)}",
            expected="[points, 8] for points [points, 3]",
            remedy="give x, y and z of each point, and its eight corners in a row (transpose those of torchsparse 1.4)",
        )
    with torch.no_grad():
        return _shared_weights(coords / scale, idx_query)


def spdevoxelize(feats: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
    """(points, channels): the rows ``indices`` (points, 8) of ``feats``, -1 for none, times ``weights``, summed."""
    return operators.interpolate(feats, indices.to(torch.int32), weights.to(feats.dtype))


def spdownsample(coords: Tensor, stride: int | Sequence[int] = 2, kernel_size: int | Sequence[int] = 2) -> Tensor:
    """int32 (sites, 4): every site whose field holds one of ``coords``, as a strided convolution makes them."""
    kernel = triple(kernel_size, "kernel_size", "spdownsample")
    steps = triple(stride, "stride", "spdownsample")
    return unpack(operators.strided_sites(torch.unique(sphash(coords)), kernel, steps, (1, 1, 1)))


def _in_units_of(x: SparseTensor, points: Tensor) -> Tensor:
    return points[:, 1:].to(torch.float64) / torch.tensor(x.stride, dtype=torch.float64, device=points.device)


def _shared_weights(places: Tensor, rows: Tensor) -> Tensor:
    """(points, 8): of the corners around ``places`` (points, 3), those whose rows are there, normalised."""
    lowest = torch.floor(places)
    near = [(1 - (places - lowest - lowest.new_tensor(corner)).abs()).prod(1) for corner in _CORNERS]
    weights = torch.where(rows >= 0, torch.stack(near, 1), 0.0)
    total = weights.sum(1, keepdim=True)
    return weights / torch.where(total > 0, total, torch.ones_like(total))


def _require_points(points: Tensor, rows: int, where: str) -> None:
    if points.ndim != 2 or points.shape[1] != 4 or points.shape[0] != rows:
        raise SparseInputError(
            "shape of points",
            where=where,
            actual=list(points.shape),
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
                actual=least if least < 0 else most,
                expected=f"0..{MAX_BATCHES - 1}",
                remedy="the batch index is the first column; split batches of more than 512 samples",
            )
