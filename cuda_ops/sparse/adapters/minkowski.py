"""Tensors and weights of MinkowskiEngine 0.5.

Its coordinates are (batch, x, y, z) in units of the input, multiples of the tensor's stride; its kernels are (offsets,
in, out) with x fastest for every size (`src/kernel_region.hpp`), odd sizes centred and even ones from their site on; a
bias is (1, out), and batch norms and linear layers hold torch's own under ``bn`` and ``linear``. A strided convolution
there has the sites of floor division for outputs, ours every site whose field holds an input: the same where kernel and
stride are equal, and the same values on theirs where they are not.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from cuda_ops.sparse.adapters import weights
from cuda_ops.sparse.adapters.weights import Layout
from cuda_ops.sparse.nn import BatchNorm, Conv3d, Linear, SparseTensor


def from_minkowski(tensor: Any, *, num_samples: int | None = None) -> SparseTensor:
    """Ours of a ``MinkowskiEngine.SparseTensor``; rows are sorted, row ``i`` was row ``order[i]``."""
    stride = list(tensor.tensor_stride)
    steps = torch.tensor([1, *stride], dtype=tensor.C.dtype, device=tensor.C.device)
    coords = torch.div(tensor.C, steps, rounding_mode="floor")
    return SparseTensor(tensor.F, coords, stride, num_samples=num_samples)


def to_minkowski(x: SparseTensor) -> Any:
    """A ``MinkowskiEngine.SparseTensor`` of ours; it starts with a coordinate manager of its own."""
    stride = list(x.stride)
    coordinates = x.coords * x.coords.new_tensor([1, *stride])
    engine = import_module("MinkowskiEngine")
    return engine.SparseTensor(features=x.feats, coordinates=coordinates, tensor_stride=stride)


def load_minkowski_state_dict(module: nn.Module, state: Mapping[str, Tensor], *, strict: bool = True) -> None:
    """Loads a MinkowskiEngine network's state dict into the same network of ours.

    Raises:
        SparseInputError: entries do not fit.
    """
    weights.load(module, state, _LAYOUT, strict=strict)


def to_minkowski_state_dict(module: nn.Module) -> dict[str, Tensor]:
    """The state dict of a network of ours for the same network of MinkowskiEngine."""
    return weights.dump(module, _LAYOUT)


def _rename(module: nn.Module, name: str) -> str:
    if isinstance(module, BatchNorm):
        return f"bn.{name}"
    return f"linear.{name}" if isinstance(module, Linear) else name


def _to_ours(value: Tensor, convolution: Conv3d, name: str) -> Tensor:
    if name == "bias":
        return value.reshape(-1)
    if value.ndim == 2 or value.shape[0] != convolution.kernel_volume:
        return value
    return weights.turned(value, convolution.kernel_size[::-1]).reshape(convolution.kernel.shape)


def _to_theirs(value: Tensor, convolution: Conv3d, name: str) -> Tensor:
    if name == "bias":
        return value.reshape(1, -1)
    return value if value.ndim == 2 else weights.turned(value, convolution.kernel_size)


_LAYOUT = Layout("MinkowskiEngine", _rename, _to_ours, _to_theirs)
