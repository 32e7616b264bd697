"""The layers and losses as functions of sparse tensors; :mod:`cuda_ops.sparse.nn` wraps them in modules.

A convolution reads its map off the geometry of its input:

    stride 1            submanifold: the outputs are the inputs' sites
    strided             every site whose field holds an input
    transposed          back to the sites that a strided layer came from: the input's last step, undone
    generative          every site that an input reaches; transposed only

A loss is a mean over samples, so that the loss of a batch is the size-weighted mean of those of its parts. Clouds have
different numbers of sites. A plain mean over sites weighs a sample by its sites, and then a batch that is split into
micro-batches, or over ranks, has another gradient; a mean over samples does not. A sample without sites (or with all
its targets ignored) counts as a sample of loss 0.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import guard_or_true
from torch.nn import functional

from cuda_ops._torch import check
from cuda_ops.sparse.errors import SparseInputError
from cuda_ops.sparse.geometry import CellGrid, KernelMap, MapSpec, RouteStep, Segments, SiteRoute, Triple, stride_of
from cuda_ops.sparse.nn.tensor import SparseTensor, require_channels, triple, volume

KernelSize = int | Sequence[int]
_ONES = (1, 1, 1)


def conv3d(
    input: SparseTensor,
    weight: Tensor,
    kernel_size: KernelSize,
    bias: Tensor | None = None,
    stride: KernelSize = 1,
    dilation: KernelSize = 1,
    transposed: bool = False,
    generative: bool = False,
) -> SparseTensor:
    """A sparse convolution.

    Args:
        weight: (offsets, in channels, out channels), x slowest and z fastest; (in, out) for a single offset.
        bias: (out channels,).
        generative: with ``transposed``: make every site that is reached, instead of going back to those known.

    Raises:
        SparseInputError: channels do not fit, the weight has another number of offsets, or a transposed convolution
            finds no strided step to undo.
    """
    kernel, strides, dilations = (
        triple(value, name, "conv3d")
        for value, name in ((kernel_size, "kernel_size"), (stride, "stride"), (dilation, "dilation"))
    )
    _require_weight(weight, kernel)
    require_channels(input.feats, weight.shape[-2], "conv3d")
    if volume(kernel) == 1 and strides == _ONES:
        feats = input.feats @ (weight[0] if weight.ndim == 3 else weight)
        route = input.route
    else:
        route, kernel_map = conv_map(input, kernel, strides, dilations, transposed, generative)
        offsets = weight if weight.ndim == 3 else weight.unsqueeze(0)
        feats = torch.ops.halopipe.sparse_conv(input.feats, offsets, kernel_map.neighbours, kernel_map.reverse)
    return input.with_feats(feats if bias is None else feats + bias, route)


def conv_map(
    x: SparseTensor, kernel: Triple, stride: Triple, dilation: Triple, transposed: bool, generative: bool
) -> tuple[SiteRoute, KernelMap]:
    """Where a convolution leads from ``x``, and by which map."""
    if generative:
        if not transposed:
            raise SparseInputError(
                "a generative convolution that is not transposed",
                where="conv3d",
                actual="transposed=False",
                expected="transposed=True",
                remedy="strided convolutions make new sites by themselves",
            )
        route = (*x.route, RouteStep("generated", kernel, stride, dilation))
        return route, x.geometry.map(MapSpec(x.route, route, kernel, stride, dilation, True))
    if not transposed:
        return window_map(x, kernel, stride, dilation)
    if stride == _ONES:
        return x.route, x.geometry.map(MapSpec(x.route, x.route, kernel, stride, dilation)).inverse()
    _require_step_back(x, stride)
    finer = x.route[:-1]
    return finer, x.geometry.map(MapSpec(finer, x.route, kernel, stride, dilation)).inverse()


def window_map(x: SparseTensor, kernel: Triple, stride: Triple, dilation: Triple) -> tuple[SiteRoute, KernelMap]:
    """Where a convolution or a pooling leads from ``x``, and by which map: the same sites where nothing is strided."""
    route = x.route if stride == _ONES else (*x.route, RouteStep("strided", kernel, stride, dilation))
    return route, x.geometry.map(MapSpec(x.route, route, kernel, stride, dilation))


def max_pool3d(
    input: SparseTensor, kernel_size: KernelSize, stride: KernelSize | None = None, dilation: KernelSize = 1
) -> SparseTensor:
    """The largest of the sites in each window that are there; ``stride`` None: the kernel's."""
    route, kernel_map = _pool_map(input, kernel_size, stride, dilation, "max_pool3d")
    feats, _ = torch.ops.halopipe.sparse_max_pool(input.feats, kernel_map.neighbours, kernel_map.reverse)
    return input.with_feats(feats, route)


def avg_pool3d(
    input: SparseTensor, kernel_size: KernelSize, stride: KernelSize | None = None, dilation: KernelSize = 1
) -> SparseTensor:
    """The mean of the sites in each window that are there; ``stride`` None: the kernel's."""
    route, kernel_map = _pool_map(input, kernel_size, stride, dilation, "avg_pool3d")
    sums = torch.ops.halopipe.sparse_sum_pool(input.feats, kernel_map.neighbours, kernel_map.reverse)
    count = (kernel_map.neighbours >= 0).sum(0).clamp(min=1)
    return input.with_feats(sums / count.unsqueeze(1), route)


def global_avg_pool(input: SparseTensor) -> Tensor:
    """(samples, channels): each sample's mean over its sites, 0 for an empty one."""
    segments = input.segments
    sums: Tensor = torch.ops.halopipe.segment_sum(input.feats, segments.starts, segments.lengths)
    return sums / segments.lengths.clamp(min=1).unsqueeze(1)


def global_max_pool(input: SparseTensor) -> Tensor:
    """(samples, channels): each sample's largest over its sites, 0 for an empty one."""
    segments = input.segments
    largest: Tensor
    largest, _ = torch.ops.halopipe.segment_max(input.feats, segments.starts, segments.lengths)
    return largest


def group_norm(
    input: SparseTensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> SparseTensor:
    """Each sample's groups of channels to mean 0 and variance 1 over its sites and the channels of the group."""
    rows, channels = input.feats.shape
    segments = input.segments
    size = channels // num_groups
    count = (segments.lengths * size).clamp(min=1).view(-1, 1, 1)

    def sample_means(values: Tensor) -> Tensor:
        """(rows, channels) to the means over a sample's sites and a group's channels, (rows, channels) again."""
        sums = torch.ops.halopipe.segment_sum(values, segments.starts, segments.lengths)
        means = sums.view(-1, num_groups, size).sum(2, keepdim=True) / count
        spread = means.expand(-1, -1, size).reshape(-1, channels)
        expanded: Tensor = torch.ops.halopipe.segment_expand(spread, segments.starts, segments.lengths, rows)
        return expanded

    centred = input.feats - sample_means(input.feats)
    feats = centred * torch.rsqrt(sample_means(centred * centred) + eps)
    feats = feats if weight is None else feats * weight
    return input.with_feats(feats if bias is None else feats + bias)


def batch_norm(
    input: SparseTensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> SparseTensor:
    """Batch normalisation over all sites of all samples; no sites: nothing to normalise, and no statistics of it.

    Raises:
        SparseInputError: one site alone has no variance to train with.
    """
    feats = input.feats
    if torch.compiler.is_compiling():
        if guard_or_true(feats.shape[0] > 1):
            # aten asks whether there are none, which a traced graph cannot know
            check(feats.shape[0] > 1)
    elif training:
        if feats.shape[0] == 0:
            return input
        if feats.shape[0] == 1:
            raise SparseInputError(
                "batch normalisation of one site in training",
                where="batch_norm",
                actual=1,
                expected="at least 2 sites",
                remedy="give larger clouds or fewer strided layers, or call eval()",
            )
    normalised = torch.batch_norm(
        feats, weight, bias, running_mean, running_var, training, momentum, eps, torch.backends.cudnn.enabled
    )
    return input.with_feats(normalised)


def relu(input: SparseTensor, inplace: bool = False) -> SparseTensor:
    """The positive part."""
    return input.with_feats(functional.relu(input.feats, inplace))


def leaky_relu(input: SparseTensor, negative_slope: float = 0.01, inplace: bool = False) -> SparseTensor:
    """The positive part, and the negative part times ``negative_slope``."""
    return input.with_feats(functional.leaky_relu(input.feats, negative_slope, inplace))


def silu(input: SparseTensor, inplace: bool = False) -> SparseTensor:
    """Each feature times its sigmoid."""
    return input.with_feats(functional.silu(input.feats, inplace))


def to_dense(input: SparseTensor, shape: Sequence[int], origin: Sequence[int] = (0, 0, 0)) -> Tensor:
    """(samples, channels, x, y, z): the features on a grid; see :class:`~cuda_ops.sparse.nn.ToDense`."""
    extents = triple(shape, "shape", "to_dense")
    x, y, z = origin
    return on_grid(input, CellGrid(input.route, extents, (int(x), int(y), int(z))))


def on_grid(input: SparseTensor, grid: CellGrid) -> Tensor:
    """(samples, channels, x, y, z): the features of a tensor on a grid over its sites, those of one cell summed."""
    segments = input.segments
    cells = input.geometry.cells(grid)
    sums: Tensor = torch.ops.halopipe.segment_grid(
        input.feats, cells, segments.starts, segments.lengths, grid.num_cells
    )
    return sums.view(*sums.shape[:2], *grid.shape)


def sample_mean(values: Tensor, segments: Segments, weights: Tensor | None = None) -> Tensor:
    """The mean over samples of each sample's mean over its sites.

    Args:
        values: (sites,).
        segments: where each sample's rows lie.
        weights: (sites,) of the mean over sites; None: 1 each.
    """
    columns = values.unsqueeze(1) if weights is None else torch.stack((values * weights, weights), 1)
    sums: Tensor = torch.ops.halopipe.segment_sum(columns, segments.starts, segments.lengths)
    totals = segments.lengths.clamp(min=1) if weights is None else sums[:, 1]
    means = sums[:, 0] / (totals if weights is None else torch.where(totals > 0, totals, torch.ones_like(totals)))
    return means.mean()


def site_cross_entropy(logits: Tensor, targets: Tensor, segments: Segments, ignore_index: int = -100) -> Tensor:
    """Cross-entropy of each site, its mean over each sample's sites that are not ignored, its mean over samples.

    Args:
        logits: (sites, classes).
        targets: int64 (sites,), in the order of the sorted sites.
    """
    if targets.ndim != 1 or targets.shape[0] != logits.shape[0]:
        raise SparseInputError(
            "shape of targets",
            where="site_cross_entropy",
            actual=list(targets.shape),
            expected=f"[{logits.shape[0]}], one per site",
            remedy="bring targets into the order of the sites: targets[x.order]",
        )
    each = functional.cross_entropy(logits, targets, ignore_index=ignore_index, reduction="none")
    return sample_mean(each, segments, (targets != ignore_index).to(each.dtype))


def _pool_map(
    x: SparseTensor, kernel_size: KernelSize, stride: KernelSize | None, dilation: KernelSize, where: str
) -> tuple[SiteRoute, KernelMap]:
    kernel = triple(kernel_size, "kernel_size", where)
    strides = kernel if stride is None else triple(stride, "stride", where)
    return window_map(x, kernel, strides, triple(dilation, "dilation", where))


def _require_weight(weight: Tensor, kernel: Triple) -> None:
    offsets = weight.shape[0] if weight.ndim == 3 else 1
    if weight.ndim not in (2, 3) or offsets != volume(kernel):
        raise SparseInputError(
            "shape of the weight",
            where="conv3d",
            actual=list(weight.shape),
            expected=f"[{volume(kernel)}, in, out] for a kernel of {kernel}",
            remedy="give one matrix of channels per offset of the kernel",
        )


def _require_step_back(x: SparseTensor, stride: Triple) -> None:
    last = x.route[-1] if x.route else None
    if last is None or last.kind != "strided" or last.stride != stride:
        last_layer = "no strided layer" if last is None else f"a {last.kind} layer of stride {last.stride}"
        raise SparseInputError(
            f"a transposed convolution of stride {stride} at stride {stride_of(x.route)} has no step to undo",
            where="conv3d",
            actual=f"{last_layer} that led here",
            expected=f"a strided layer of stride {stride}",
            remedy="match the strides of the way down, or make new sites with generative=True",
        )
