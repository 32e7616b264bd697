"""Tensors and weights of torchsparse 2.1.

Coordinates there are int32 (batch, x, y, z) in units of the tensor's stride, as ours. Names and shapes of a state dict
are ours as well, but not the order of a kernel's offsets (`torchsparse/backend/hashmap/hashmap_cuda.cuh`): x fastest
where their number is odd, z fastest (ours) where it is even. An even size starts at -(n - 1) / 2 rounded towards 0,
which is our 0 for n = 2 only. Dilation does not reach its kernel maps: a dilated layer of a checkpoint was none.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from torch import Tensor, nn

from cuda_ops.extras.adapters import weights
from cuda_ops.extras.adapters.weights import WeightLayout
from cuda_ops.sparse.errors import SparseInputError
from cuda_ops.sparse.geometry import Triple
from cuda_ops.sparse.nn import Conv3d, SparseTensor


def from_torchsparse(tensor: Any, *, num_samples: int | None = None) -> SparseTensor:
    """Ours of a ``torchsparse.SparseTensor``; rows are sorted, row ``i`` was row ``order[i]``."""
    return SparseTensor(tensor.feats, tensor.coords, tensor.stride, num_samples=num_samples)


def to_torchsparse(x: SparseTensor) -> Any:
    """A ``torchsparse.SparseTensor`` of ours; it starts with no maps."""
    return import_module("torchsparse").SparseTensor(feats=x.feats, coords=x.coords, stride=x.stride)


def load_torchsparse_state_dict(module: nn.Module, state: Mapping[str, Tensor], *, strict: bool = True) -> None:
    """Loads a torchsparse network's state dict into the same network of ours.

    Raises:
        SparseInputError: entries do not fit, or a kernel has an even size above 2.
    """
    weights.load(module, state, _LAYOUT, strict=strict)


def to_torchsparse_state_dict(module: nn.Module) -> dict[str, Tensor]:
    """The state dict of a network of ours for the same network of torchsparse."""
    return weights.dump(module, _LAYOUT)


def _to_ours(value: Tensor, convolution: Conv3d, name: str) -> Tensor:
    return _reordered(value, convolution, name, convolution.kernel_size[::-1])


def _to_theirs(value: Tensor, convolution: Conv3d, name: str) -> Tensor:
    return _reordered(value, convolution, name, convolution.kernel_size)


def _reordered(value: Tensor, convolution: Conv3d, name: str, slow_to_fast: Triple) -> Tensor:
    """A kernel whose axes lie as ``slow_to_fast`` in the library's order, or the other way round."""
    if name != "kernel" or value.ndim == 2 or value.shape[0] != convolution.kernel_volume:
        return value
    if any(size % 2 == 0 and size > 2 for size in convolution.kernel_size):
        raise SparseInputError(
            "an even kernel size above 2",
            where="state dict of torchsparse",
            actual=convolution.kernel_size,
            expected="odd sizes and 2",
            remedy="its offsets start below the site in torchsparse and at it here; use an odd size",
        )
    return weights.turned(value, slow_to_fast) if convolution.kernel_volume % 2 else value


_LAYOUT = WeightLayout("torchsparse", lambda _, name: name, _to_ours, _to_theirs)
