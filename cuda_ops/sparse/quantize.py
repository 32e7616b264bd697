"""Points to voxels: one whole coordinate a voxel, and which point stands for it (`torchsparse/utils/quantize.py`).

Samples to a batch: the sample's number becomes the first column of the coordinates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from cuda_ops.sparse.errors import SparseInputError
from cuda_ops.sparse.keys import HIGHEST, LOWEST, MAX_BATCHES, check_coordinates, check_rows, pack, unpack
from cuda_ops.sparse.nn.tensor import SparseTensor

PointArray = TypeVar("PointArray", Tensor, "np.ndarray[Any, Any]")
_QUANTIZE = "sparse_quantize"


def sparse_quantize(
    coords: PointArray,
    voxel_size: float | Sequence[float] = 1,
    *,
    return_index: bool = False,
    return_inverse: bool = False,
) -> PointArray | tuple[PointArray, ...]:
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
    check_rows(points.shape[0], _QUANTIZE)
    keys = pack(torch.nn.functional.pad(_voxels(points, _sizes(voxel_size)), (1, 0)))
    ordered, order = torch.sort(keys, stable=True)
    is_first = torch.ones_like(ordered, dtype=torch.bool)
    is_first[1:] = ordered[1:] != ordered[:-1]
    arrays = [unpack(ordered[is_first])[:, 1:].contiguous()]
    if return_index:
        arrays.append(order[is_first])
    if return_inverse:
        arrays.append(torch.empty_like(order).scatter_(0, order, is_first.cumsum(0) - 1))
    results: Any = tuple(each.numpy() for each in arrays) if isinstance(coords, np.ndarray) else tuple(arrays)
    asked: PointArray | tuple[PointArray, ...] = results if len(results) > 1 else results[0]
    return asked


def _sizes(voxel_size: float | Sequence[float]) -> tuple[float, ...]:
    sizes = np.asarray(voxel_size, dtype=np.float64)
    if sizes.shape not in ((), (3,)) or not (np.isfinite(sizes) & (sizes > 0)).all():
        _refuse("voxel size", voxel_size, "one number above 0, or three", "give the edge of a voxel in units of coords")
    return tuple(np.broadcast_to(sizes, 3).tolist())


def _voxels(points: Tensor, sizes: tuple[float, ...]) -> Tensor:
    if points.is_complex() or points.dtype == torch.bool:
        _refuse("dtype of points", points.dtype, "whole or floating-point numbers", "convert them with .float()")
    wide = points.to(torch.float64)
    refuse_infinite(wide, _QUANTIZE, "coordinates")
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
            actual=f"{len(bad)} of {len(values)} rows",
            expected=0,
            remedy="drop those points",
        )


def _refuse(what: str, actual: object, expected: object, remedy: str, where: str = _QUANTIZE) -> None:
    raise SparseInputError(what, where=where, actual=actual, expected=expected, remedy=remedy)


_COLLATE = "sparse_collate"
_refuse_batch = partial(_refuse, where=_COLLATE)


def sparse_collate(coords: Sequence[Any], feats: Sequence[Any] | None = None) -> Any:
    """One batch of several clouds, those without a point included.

    Args:
        coords: whole coordinates [N_i, 3] of every sample, of numpy or torch; or, without ``feats``, SparseTensors.
        feats: features [N_i, C] of every sample.

    Returns:
        int32 [sum of N_i, 4] (batch, x, y, z) and [sum of N_i, C]; of SparseTensors, one SparseTensor, with the rows'
        ``order`` counted through the rows that the samples were made of.

    Raises:
        SparseInputError: lengths, shapes, dtypes or strides that do not fit, coordinates out of range, features that
            are NaN or infinite, no or too many samples.
    """
    if not 1 <= len(coords) <= MAX_BATCHES:
        _refuse_batch(
            "number of samples",
            len(coords),
            f"1..{MAX_BATCHES}",
            "split the batch, or leave it out where it has no sample",
        )
    if feats is None:
        return _joined(coords)
    if len(feats) != len(coords):
        _refuse_batch("lists of features", len(feats), f"{len(coords)}, one per cloud", "give one of each a sample")
    clouds = [_cloud(number, *pair) for number, pair in enumerate(zip(coords, feats, strict=True))]
    channels = [rows.shape[1] for _, rows in clouds]
    if len(set(channels)) > 1:
        _refuse_batch(
            "channels that differ", channels, "one number for all samples", "give all samples the same features"
        )
    return torch.cat([sites for sites, _ in clouds]), torch.cat([rows for _, rows in clouds])


def sparse_collate_fn(inputs: Sequence[Any]) -> Any:
    """Samples that are mappings, entry by entry, as torchsparse does: SparseTensors to one, arrays and tensors stacked.

    Mappings within are collated likewise, all else becomes a list; samples that are no mappings are given back.  Give
    it to a DataLoader as ``collate_fn``.
    """
    if not inputs or not isinstance(inputs[0], Mapping):
        return inputs
    return {name: _collated(name, [sample[name] for sample in inputs]) for name in inputs[0]}


def _collated(name: str, values: list[Any]) -> Any:
    first = values[0]
    if isinstance(first, Mapping):
        return sparse_collate_fn(values)
    if isinstance(first, SparseTensor):
        return sparse_collate(values)
    if not isinstance(first, Tensor | np.ndarray):
        return values
    shapes = sorted({tuple(value.shape) for value in values})
    if len(shapes) > 1:
        remedy = "make values per point the features of a SparseTensor, or lists"
        _refuse_batch(f"shapes of {name!r} that differ", shapes[1], shapes[0], remedy)
    return torch.stack([torch.as_tensor(value) for value in values])


def _cloud(number: int, coords: Any, feats: Any) -> tuple[Tensor, Tensor]:
    sites = torch.as_tensor(coords)
    rows = torch.as_tensor(feats)
    where = f"{_COLLATE}, sample {number}"
    if sites.ndim != 2 or sites.shape[1] != 3:
        _refuse_batch("shape of coordinates", list(sites.shape), "[N, 3]", "the batch index is added here", where=where)
    if rows.ndim != 2 or rows.shape[0] != sites.shape[0]:
        _refuse_batch(
            "shape of features", list(rows.shape), f"[{sites.shape[0]}, C]", "give one row per coordinate", where=where
        )
    batched = torch.nn.functional.pad(sites, (1, 0))
    check_coordinates(batched, where)
    if rows.is_floating_point():
        refuse_infinite(rows, where, "features")
    batched = batched.to(torch.int32)
    batched[:, 0] = number
    return batched, rows


def _joined(samples: Sequence[SparseTensor]) -> SparseTensor:
    stride = samples[0].stride
    clouds = []
    first = 0
    for number, sample in enumerate(samples):
        if sample.stride != stride:
            remedy = "collate the tensors that the network reads"
            _refuse_batch(f"stride of sample {number}", sample.stride, stride, remedy)
        clouds.append(sample.coords + torch.tensor([first, 0, 0, 0], dtype=torch.int32, device=sample.device))
        first += sample.num_samples
    if first > MAX_BATCHES:
        _refuse_batch("number of samples", first, f"at most {MAX_BATCHES}", "make smaller batches")
    feats = torch.cat([sample.feats for sample in samples])
    batch = SparseTensor(feats, torch.cat(clouds), stride, num_samples=first)
    batch.order = _order(samples)
    return batch


def _order(samples: Sequence[SparseTensor]) -> Tensor | None:
    """Sorted samples one after another are sorted: their own orders, counted on."""
    orders = []
    first = 0
    for sample in samples:
        if sample.order is None:
            return None
        orders.append(sample.order + first)
        first += len(sample)
    return torch.cat(orders)
