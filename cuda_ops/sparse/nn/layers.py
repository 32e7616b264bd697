"""The modules, named and shaped as torchsparse's (`torchsparse/nn/modules/` of 2.1).

The convolution; pooling over windows of sites, and over whole samples (torchsparse has the latter alone).

Modules that treat every site alike: torch's own, applied to the features. They take a plain tensor as well, so that one
activation serves the sparse part of a network and what follows it.

Normalisation over sites, of the whole batch or of each sample; from sites to a dense grid; and losses.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

from cuda_ops.dense.running_statistics import MOMENTUM, averaged, is_averaging
from cuda_ops.sparse.errors import SparseInputError
from cuda_ops.sparse.geometry import Triple
from cuda_ops.sparse.nn import functional
from cuda_ops.sparse.nn.functional import KernelSize
from cuda_ops.sparse.nn.tensor import SparseTensor, require_channels, triple, volume

SparseOrDense = TypeVar("SparseOrDense", SparseTensor, Tensor)


class Conv3d(nn.Module):
    """A sparse convolution: submanifold at stride 1, strided, transposed, or generative.

    The parameter ``kernel`` is (offsets, in channels, out channels), and (in, out) for a single offset at stride 1, as
    torchsparse has it, so that state dicts have the same names and shapes. The order of the offsets is ours, x slowest
    and z fastest; torchsparse's is that only where the number of offsets is even: load its checkpoints through
    :mod:`cuda_ops.sparse.adapters.torchsparse`.

    Args:
        in_channels, out_channels: of the features.
        kernel_size, stride, dilation: one number, or three for x, y and z.
        bias: add one number per output channel.
        transposed: go back to the sites that the strided layer before came from.
        generative: with ``transposed``: make every site that is reached.
        padding: torchsparse's, and checked only: an odd kernel is centred here and an even one starts at its site,
            which is padding (kernel - 1) / 2 and 0.

    Raises:
        SparseInputError: numbers that fit no convolution, and, in use, another number of channels.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: KernelSize = 3,
        stride: KernelSize = 1,
        *,
        dilation: KernelSize = 1,
        bias: bool = False,
        transposed: bool = False,
        generative: bool = False,
        padding: KernelSize | None = None,
    ) -> None:
        super().__init__()
        self.in_channels = in_channels
        self.out_channels = out_channels
        self.kernel_size = triple(kernel_size, "kernel_size", "Conv3d")
        self.stride = triple(stride, "stride", "Conv3d")
        self.dilation = triple(dilation, "dilation", "Conv3d")
        self.transposed = transposed
        self.generative = generative
        self.kernel_volume = volume(self.kernel_size)
        _require_channels(in_channels, out_channels)
        _require_transposed(transposed, generative)
        _require_padding(padding, self.kernel_size, self.stride, self.dilation)
        single = self.kernel_volume == 1 and self.stride == (1, 1, 1)
        shape = (in_channels, out_channels) if single else (self.kernel_volume, in_channels, out_channels)
        self.kernel = nn.Parameter(torch.empty(shape))
        self.bias = nn.Parameter(torch.empty(out_channels)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Uniform in one over the root of the numbers that an output sums, as torchsparse draws them."""
        summed = (self.out_channels if self.transposed else self.in_channels) * self.kernel_volume
        bound = 1 / math.sqrt(summed)
        nn.init.uniform_(self.kernel, -bound, bound)
        if self.bias is not None:
            nn.init.uniform_(self.bias, -bound, bound)

    def forward(self, input: SparseTensor) -> SparseTensor:
        """See the class."""
        return functional.conv3d(
            input,
            self.kernel,
            self.kernel_size,
            bias=self.bias,
            stride=self.stride,
            dilation=self.dilation,
            transposed=self.transposed,
            generative=self.generative,
        )

    def extra_repr(self) -> str:
        """Channels and kernel, and what differs from the defaults."""
        parts = [f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}"]
        parts += [f"{name}={value}" for name in ("stride", "dilation") if (value := getattr(self, name)) != (1, 1, 1)]
        parts += [f"{name}=True" for name in ("transposed", "generative") if getattr(self, name)]
        return ", ".join(parts if self.bias is None else [*parts, "bias=True"])


def _require_channels(in_channels: int, out_channels: int) -> None:
    if min(in_channels, out_channels) < 1:
        raise SparseInputError(
            "number of channels",
            where="Conv3d",
            actual=(in_channels, out_channels),
            expected="at least 1 in and 1 out",
            remedy="give the channels of the features that come in and go out",
        )


def _require_transposed(transposed: bool, generative: bool) -> None:
    if generative and not transposed:
        raise SparseInputError(
            "a generative convolution that is not transposed",
            where="Conv3d",
            actual="transposed=False",
            expected="transposed=True",
            remedy="strided convolutions make new sites by themselves",
        )


def _require_padding(padding: KernelSize | None, kernel: Triple, stride: Triple, dilation: Triple) -> None:
    """Refuse what would move the kernel; at stride 1 torchsparse centres an odd one whatever it is given."""
    if padding is None:
        return
    paddings = (padding,) * 3 if isinstance(padding, int) else tuple(padding)
    built_in = tuple((n - 1) // 2 * d if n % 2 else 0 for n, d in zip(kernel, dilation, strict=True))
    free = tuple(n % 2 == 1 and s == 1 for n, s in zip(kernel, stride, strict=True))
    if len(paddings) != 3 or any(not ok and a != b for ok, a, b in zip(free, paddings, built_in, strict=True)):
        raise SparseInputError(
            "padding",
            where="Conv3d",
            actual=padding,
            expected=f"{built_in} for a kernel of {kernel}",
            remedy="leave padding out: odd kernels are centred and even ones start at their site",
        )


class _Pool3d(nn.Module):
    """Holds a window: kernel, stride (the kernel's unless given) and dilation."""

    def __init__(self, kernel_size: KernelSize, stride: KernelSize | None = None, dilation: KernelSize = 1) -> None:
        super().__init__()
        name = type(self).__name__
        self.kernel_size = triple(kernel_size, "kernel_size", name)
        self.stride = self.kernel_size if stride is None else triple(stride, "stride", name)
        self.dilation = triple(dilation, "dilation", name)

    def extra_repr(self) -> str:
        """The window."""
        return f"kernel_size={self.kernel_size}, stride={self.stride}, dilation={self.dilation}"


class MaxPool3d(_Pool3d):
    """The largest of the sites in each window that are there."""

    def forward(self, input: SparseTensor) -> SparseTensor:
        """See the class."""
        return functional.max_pool3d(input, self.kernel_size, self.stride, self.dilation)


class AvgPool3d(_Pool3d):
    """The mean of the sites in each window that are there."""

    def forward(self, input: SparseTensor) -> SparseTensor:
        """See the class."""
        return functional.avg_pool3d(input, self.kernel_size, self.stride, self.dilation)


class GlobalAvgPool(nn.Module):
    """(samples, channels): each sample's mean over its sites; 0 for an empty sample."""

    def forward(self, input: SparseTensor) -> Tensor:
        """See the class."""
        return functional.global_avg_pool(input)


class GlobalMaxPool(nn.Module):
    """(samples, channels): each sample's largest over its sites; 0 for an empty sample."""

    def forward(self, input: SparseTensor) -> Tensor:
        """See the class."""
        return functional.global_max_pool(input)


class Pointwise:
    """Put before a module of torch's: calls it with the features and puts the result on the same sites."""

    def forward(self, input: SparseOrDense) -> SparseOrDense:
        """See the class."""
        if isinstance(input, SparseTensor):
            return input.with_feats(super().forward(input.feats))  # type: ignore[misc]  # torch's module, the next base
        plain: Tensor = super().forward(input)  # type: ignore[misc]  # torch's module, the next base
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

    def forward(self, input: SparseOrDense) -> SparseOrDense:
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
        mean, var = (self.running_mean, self.running_var) if tracked else (None, None)
        weight = self.weight
        bias = self.bias
        batches = self.num_batches_tracked
        if is_averaging(self) and mean is not None and var is not None and batches is not None:
            with averaged(batches, mean, var) as (mean, var):
                return functional.batch_norm(input, mean, var, weight, bias, training, MOMENTUM, self.eps)
        if self.training and self.track_running_stats and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        return functional.batch_norm(input, mean, var, weight, bias, training, self.momentum or 0.0, self.eps)


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
                actual=f"{num_channels} channels in {num_groups} groups",
                expected="a multiple",
                remedy="choose a number of groups that divides the channels",
            )
        self.num_groups = num_groups
        self.num_channels = num_channels
        self.eps = eps
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
        return functional.to_dense(input, self.shape, self.origin)

    def extra_repr(self) -> str:
        """The grid."""
        return f"shape={self.shape}, origin={self.origin}"


class SampleMean(nn.Module):
    """The mean over samples of each sample's mean over its sites and channels."""

    def forward(self, input: SparseTensor) -> Tensor:
        """A scalar."""
        return functional.sample_mean(input.feats.mean(1), input.segments)


class SiteCrossEntropy(nn.Module):
    """Cross-entropy of each site, mean over a sample's sites, mean over samples: the loss of a segmentation.

    Args:
        ignore_index: a site with this target counts for nothing.
    """

    def __init__(self, ignore_index: int = -100) -> None:
        super().__init__()
        self.ignore_index = ignore_index

    def forward(self, input: SparseTensor, targets: Tensor) -> Tensor:
        """A scalar; ``targets`` int64 (sites,), in the order of the sorted sites.

        Raises:
            SparseInputError: targets are not one per site.
        """
        return functional.site_cross_entropy(input.feats, targets, input.segments, self.ignore_index)

    def extra_repr(self) -> str:
        """What is ignored."""
        return f"ignore_index={self.ignore_index}"
