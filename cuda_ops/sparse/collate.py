"""Samples to a batch: the sample's number becomes the first column of the coordinates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cuda_ops.sparse.errors import SparseInputError
from cuda_ops.sparse.keys import MAX_BATCHES, check_coordinates
from cuda_ops.sparse.nn.tensor import SparseTensor
from cuda_ops.sparse.quantize import refuse_infinite

_WHERE = "sparse_collate"


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
        _refuse(
            "number of samples",
            len(coords),
            f"1..{MAX_BATCHES}",
            "split the batch, or leave it out where it has no sample",
        )
    if feats is None:
        return _joined(coords)
    if len(feats) != len(coords):
        _refuse("lists of features", len(feats), f"{len(coords)}, one per cloud", "give one of each a sample")
    clouds = [_cloud(number, *pair) for number, pair in enumerate(zip(coords, feats, strict=True))]
    channels = [rows.shape[1] for _, rows in clouds]
    if len(set(channels)) > 1:
        _refuse("channels that differ", channels, "one number for all samples", "give all samples the same features")
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
        _refuse(f"shapes of {name!r} that differ", shapes[1], shapes[0], remedy)
    return torch.stack([torch.as_tensor(value) for value in values])


def _cloud(number: int, coords: Any, feats: Any) -> tuple[Tensor, Tensor]:
    sites, rows = torch.as_tensor(coords), torch.as_tensor(feats)
    where = f"{_WHERE}, sample {number}"
    if sites.ndim != 2 or sites.shape[1] != 3:
        _refuse("shape of coordinates", list(sites.shape), "[N, 3]", "the batch index is added here", where)
    if rows.ndim != 2 or rows.shape[0] != sites.shape[0]:
        _refuse("shape of features", list(rows.shape), f"[{sites.shape[0]}, C]", "give one row per coordinate", where)
    batched = torch.nn.functional.pad(sites, (1, 0))
    check_coordinates(batched, where)
    if rows.is_floating_point():
        refuse_infinite(rows, where, "features")
    batched = batched.to(torch.int32)
    batched[:, 0] = number
    return batched, rows


def _joined(samples: Sequence[SparseTensor]) -> SparseTensor:
    stride, clouds, first = samples[0].stride, [], 0
    for number, sample in enumerate(samples):
        if sample.stride != stride:
            remedy = "collate the tensors that the network reads"
            _refuse(f"stride of sample {number}", sample.stride, stride, remedy)
        clouds.append(sample.coords + torch.tensor([first, 0, 0, 0], dtype=torch.int32, device=sample.device))
        first += sample.num_samples
    if first > MAX_BATCHES:
        _refuse("number of samples", first, f"at most {MAX_BATCHES}", "make smaller batches")
    feats = torch.cat([sample.feats for sample in samples])
    batch = SparseTensor(feats, torch.cat(clouds), stride, num_samples=first)
    batch.order = _order(samples)
    return batch


def _order(samples: Sequence[SparseTensor]) -> Tensor | None:
    """Sorted samples one after another are sorted: their own orders, counted on."""
    orders, first = [], 0
    for sample in samples:
        if sample.order is None:
            return None
        orders.append(sample.order + first)
        first += len(sample)
    return torch.cat(orders)


def _refuse(what: str, found: object, expected: object, remedy: str, where: str = _WHERE) -> None:
    raise SparseInputError(what, where=where, found=found, expected=expected, remedy=remedy)
