"""What the layers ask of what they are given, and how they say that it does not fit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NoReturn

import torch
from torch import Tensor

from cuda_ops.sparse.errors import SparseInputError
from cuda_ops.sparse.geometry import Triple

_WHOLE_NUMBERS = (torch.int32, torch.int64, torch.int16, torch.int8, torch.uint8)


def triple(value: int | Sequence[int], name: str, where: str) -> Triple:
    """One number for x, y and z, or three of them; each at least 1."""
    values = (value,) * 3 if isinstance(value, int) else tuple(value)
    if len(values) != 3 or not all(isinstance(each, int) and each >= 1 for each in values):
        raise SparseInputError(
            name,
            where=where,
            found=value,
            expected="one whole number of at least 1, or three",
            remedy="give x, y and z",
        )
    x, y, z = values
    return x, y, z


def volume(kernel: Triple) -> int:
    """Offsets of a kernel."""
    return math.prod(kernel)


def require_channels(feats: Tensor, channels: int, where: str) -> None:
    """Raises SparseInputError unless ``feats`` (sites, channels) has so many channels."""
    if feats.shape[1] != channels:
        raise SparseInputError(
            "number of channels",
            where=where,
            found=feats.shape[1],
            expected=channels,
            remedy="give the layer the channels of its input as in_channels",
        )


def require_finite(feats: Tensor, where: str) -> None:
    """Raises SparseInputError where a feature is NaN or infinite; reads the values."""
    bad = (~feats.isfinite()).sum()
    if int(bad):
        raise SparseInputError(
            "features that are NaN or infinite",
            where=where,
            found=f"{int(bad)} of {feats.numel()}",
            expected=0,
            remedy="drop those points before they are voxelised",
        )


def whole_coordinates(coords: Tensor) -> Tensor:
    """As int32; what int32 cannot hold stays out of the range of coordinates, and is refused with them."""
    if coords.ndim != 2 or coords.shape[1] != 4:
        _refuse("shape of coordinates", list(coords.shape), "[sites, 4]", "give batch, x, y, z per row, batch first")
    if coords.dtype not in _WHOLE_NUMBERS:
        _refuse("dtype of coordinates", coords.dtype, torch.int32, "voxelise points first (sparse_quantize, voxelise)")
    if coords.dtype == torch.int64:
        bounds = torch.iinfo(torch.int32)
        coords = coords.clamp(bounds.min, bounds.max)
    return coords.to(torch.int32)


def require_rows(feats: Tensor, rows: int, where: str) -> None:
    """Raises SparseInputError unless these are floating-point features, one row for each of ``rows`` sites."""
    if feats.ndim != 2:
        _refuse("shape of features", list(feats.shape), "[sites, channels]", "give one row of channels per site", where)
    if not feats.dtype.is_floating_point:
        _refuse("dtype of features", feats.dtype, "a floating-point dtype", "convert them with .float()", where)
    if feats.shape[0] != rows:
        _refuse("rows of features", feats.shape[0], f"{rows}, one per coordinate", "give one row per site", where)


def _refuse(what: str, found: object, expected: object, remedy: str, where: str = "SparseTensor") -> NoReturn:
    raise SparseInputError(what, where=where, found=found, expected=expected, remedy=remedy)
