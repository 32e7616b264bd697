"""Modules that treat every site alike: torch's own, applied to the features.

They take a plain tensor as well, so that one activation serves the sparse part of a network and what follows it.

Normalisation over sites: of the whole batch, or of each sample.

From sites to a dense grid.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

from cuda_ops.sparse.errors import SparseInputError
from cuda_ops.sparse.nn import functional
from cuda_ops.sparse.nn.checks import require_channels, triple
from cuda_ops.sparse.nn.tensor import SparseTensor

Value = TypeVar("Value", SparseTensor, Tensor)


class Pointwise:
    """Put before a module of torch's: calls it with the features and puts the result on the same sites."""

    def forward(self, input: Value) -> Value:
        """See the class."""
        if isinstance(input, SparseTensor):
            return input.with_feats(super().forward(input.feats))  # type: ignore[misc]  # torch's module, behind it
        plain: Tensor = super().forward(input)  # type: ignore[misc]  # torch's module, behind it
        return plain


class ReLU(Pointwise, nn.ReLU):
    """The positive part."""


class LeakyReLU(Pointwise, nn.LeakyReLU):
    """The positive part, and a fraction of the negative one."""


class SiLU(Pointwise, nn.SiLU):
    """Each feature times its sigmoid."""


class GELU(Pointwise, nn.GELU):
    """Each feature times the Gaussian's distribution function."""


class ELU(Pointwise, nn.ELU):
    """The exponential linear unit."""


class Sigmoid(Pointwise, nn.Sigmoid):
    """The logistic function."""


class Tanh(Pointwise, nn.Tanh):
    """The hyperbolic tangent."""


class Dropout(Pointwise, nn.Dropout):
    """Zeroes features at random in training."""


class LayerNorm(Pointwise, nn.LayerNorm):
    """Each site's channels to mean 0 and variance 1."""


class Linear(Pointwise, nn.Linear):
    """One matrix for every site; its parameters are torch's ``weight`` (out, in) and ``bias``."""

    def forward(self, input: Value) -> Value:
        """Raises SparseInputError where a sparse tensor has other channels."""
        if isinstance(input, SparseTensor):
            require_channels(input.feats, self.in_features, "Linear")
        return super().forward(input)


class BatchNorm(nn.BatchNorm1d):
    """Batch normalisation over all sites of all samples, with the parameters and buffers of torch's BatchNorm1d."""

    def forward(  # type: ignore[override]  # every module of torch's may take what it likes; its stub says tensors
        self, input: SparseTensor
    ) -> SparseTensor:
        """See the class.

        Raises:
            SparseInputError: another number of channels, or one site alone in training.
        """
        require_channels(input.feats, self.num_features, "BatchNorm")
        training = self.training or self.running_mean is None
        tracked = not self.training or self.track_running_stats
        momentum = 0.0 if self.momentum is None else self.momentum
        if self.training and self.track_running_stats and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                momentum = 1.0 / float(self.num_batches_tracked)
        return functional.batch_norm(
            input,
            self.running_mean if tracked else None,
            self.running_var if tracked else None,
            self.weight,
            self.bias,
            training,
            momentum,
            self.eps,
        )


class GroupNorm(nn.Module):
    """Normalisation of each sample's groups of channels over its sites.

    Args:
        num_groups: how many groups the channels fall into.
        num_channels: of the features; a multiple of ``num_groups``.
        eps: added to the variance.
        affine: scale and shift each channel.
    """

    def __init__(self, num_groups: int, num_channels: int, eps: float = 1e-5, affine: bool = True) -> None:
        super().__init__()
        if num_groups < 1 or num_channels % num_groups:
            raise SparseInputError(
                "channels in equal groups",
                where=type(self).__name__,
                found=f"{num_channels} channels in {num_groups} groups",
                expected="a multiple",
                remedy="choose a number of groups that divides the channels",
            )
        self.num_groups, self.num_channels, self.eps = num_groups, num_channels, eps
        self.weight = nn.Parameter(torch.ones(num_channels)) if affine else None
        self.bias = nn.Parameter(torch.zeros(num_channels)) if affine else None

    def forward(self, input: SparseTensor) -> SparseTensor:
        """See the class."""
        require_channels(input.feats, self.num_channels, type(self).__name__)
        return functional.group_norm(input, self.num_groups, self.weight, self.bias, self.eps)

    def extra_repr(self) -> str:
        """Groups and channels."""
        return f"{self.num_groups}, {self.num_channels}, eps={self.eps}, affine={self.weight is not None}"


class InstanceNorm(GroupNorm):
    """Normalisation of each sample's channels, one by one, over its sites; it keeps no running statistics.

    Args:
        num_features: channels.
        eps: added to the variance.
        affine: scale and shift each channel; off unless asked for, as in torch.
    """

    def __init__(self, num_features: int, eps: float = 1e-5, affine: bool = False) -> None:
        super().__init__(num_features, num_features, eps, affine)


class ToDense(nn.Module):
    """The features on a dense grid, 0 where there is no site.

    Args:
        shape: sites along x, y and z, in units of the tensor's stride.
        origin: the coordinates of the grid's first site.

    Raises:
        SparseInputError: in use, where a site lies outside the grid.
    """

    def __init__(self, shape: Sequence[int], origin: Sequence[int] = (0, 0, 0)) -> None:
        super().__init__()
        self.shape = triple(shape, "shape", "ToDense")
        self.origin = tuple(origin)

    def forward(self, input: SparseTensor) -> Tensor:
        """(samples, channels, x, y, z)."""
        return to_dense(input, self.shape, self.origin)

    def extra_repr(self) -> str:
        """The grid."""
        return f"shape={self.shape}, origin={self.origin}"


def to_dense(input: SparseTensor, shape: Sequence[int], origin: Sequence[int] = (0, 0, 0)) -> Tensor:
    """(samples, channels, x, y, z): the features on a grid; see :class:`ToDense`."""
    extents = triple(shape, "shape", "to_dense")
    coordinates = input.coords.to(torch.int64)
    batch, places = coordinates[:, 0], coordinates[:, 1:] - coordinates.new_tensor(list(origin))
    if not torch.compiler.is_compiling():
        _require_inside(places, extents)
    x, y, z = places.unbind(1)
    rows = ((batch * extents[0] + x) * extents[1] + y) * extents[2] + z
    channels = input.feats.shape[1]
    flat = input.feats.new_zeros((input.num_samples * extents[0] * extents[1] * extents[2], channels))
    grid = flat.index_put((rows,), input.feats).view(input.num_samples, *extents, channels)
    return grid.permute(0, 4, 1, 2, 3).contiguous()


def _require_inside(places: Tensor, extents: Sequence[int]) -> None:
    outside = ((places < 0) | (places >= places.new_tensor(list(extents)))).any(1)
    if bool(outside.any()):
        raise SparseInputError(
            f"{int(outside.sum())} sites outside the grid",
            where="to_dense",
            found=places[outside][0].tolist(),
            expected=f"below {list(extents)} and not negative, from the origin on",
            remedy="give a larger shape or another origin",
        )
