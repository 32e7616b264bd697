"""Parts of clouds, sums of clouds, and clouds seen from above: what detectors do between a sparse and a dense network.

    crop              the sites within bounds
    generative_add    the sites of either of two tensors, features added
    bird's-eye view   one site, or one dense cell, for each column of sites

Each asks the geometry for site sets, maps and cells of grids alone, so that planned networks may have them.  Columns
lie along ``dim``, which counts x, y and z from 0; torchsparse's default is 1, the height of KITTI's cameras.  Numbers
of cells, heights and bounds count in units of the tensor's stride; only ``offset`` is in units of the network's input.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from cuda_ops.sparse.errors import SparseInputError
from cuda_ops.sparse.geometry import Bound, CellGrid, KernelMap, MapSpec, RouteStep, SiteRoute, Triple
from cuda_ops.sparse.keys import HIGHEST, LOWEST
from cuda_ops.sparse.nn.functional import on_grid
from cuda_ops.sparse.nn.tensor import SparseTensor, require_channels, require_same_sites, triple

_AXES = 3


def spcrop(
    input: SparseTensor, coords_min: Sequence[int] | None = None, coords_max: Sequence[int] | None = None
) -> SparseTensor:
    """The sites from ``coords_min`` on and below ``coords_max`` (x, y, z); None: no bound.

    Raises:
        SparseInputError: bounds that are not three whole numbers, or that hold nothing.
    """
    lowest = _corner(coords_min, LOWEST, "coords_min")
    above = _corner(coords_max, HIGHEST + 1, "coords_max")
    if any(first >= end for first, end in zip(lowest, above, strict=True)):
        raise SparseInputError(
            "bounds of a crop",
            where="SparseCrop",
            actual=f"from {lowest} on and below {above}",
            expected="room for a site along each axis",
            remedy="give coords_min below coords_max",
        )
    x, y, z = (_bound(*pair) for pair in zip(lowest, above, strict=True))
    if x is y is z is None:
        return input
    route = (*input.route, RouteStep("cropped", bounds=(x, y, z)))
    return _gathered(input, route)


def generative_add(a: SparseTensor, b: SparseTensor) -> SparseTensor:
    """The sites of ``a`` and those of ``b``: the sum of their features, 0 for one that has not the site.

    Raises:
        SparseInputError: other strides or channels.
    """
    require_channels(b.feats, a.feats.shape[1], "generative_add")
    if a.stride != b.stride:
        require_same_sites(a, b, "generative_add")  # which says so
    if a.geometry is not b.geometry:
        coords, rows = torch.unique(torch.cat((a.coords, b.coords)), dim=0, return_inverse=True)
        sums = a.feats.new_zeros((len(coords), a.feats.shape[1]))
        summed = torch.ops.halopipe.unpack_add(sums, rows, torch.cat((a.feats, b.feats)))
        return SparseTensor(summed, coords, a.stride, num_samples=max(a.num_samples, b.num_samples))
    if a.route == b.route:
        return a.with_feats(a.feats + b.feats)
    route = (*a.route, RouteStep("joined", other=b.route))
    return _gathered(a, route) + _gathered(b, route)


class SparseCrop(nn.Module):
    """The sites from ``coords_min`` on and below ``coords_max`` (x, y, z); None: no bound."""

    def __init__(self, coords_min: Sequence[int] | None = None, coords_max: Sequence[int] | None = None) -> None:
        super().__init__()
        self.coords_min = coords_min
        self.coords_max = coords_max

    def forward(self, input: SparseTensor) -> SparseTensor:
        """See the class."""
        return spcrop(input, self.coords_min, self.coords_max)

    def extra_repr(self) -> str:
        """The bounds."""
        return f"coords_min={self.coords_min}, coords_max={self.coords_max}"


class ToBEVReduction(nn.Module):
    """One site for each column, at 0 along ``dim``, with the mean of its sites.

    Args:
        dim: the axis of the columns.
        extent: sites of the longest column, from 0 on.  torchsparse has no such argument; without it the columns are
            as long as the clouds at hand ask for, which a planned network cannot follow.

    Raises:
        SparseInputError: in use, a site outside its column.
    """

    def __init__(self, dim: int = 1, extent: int | None = None) -> None:
        super().__init__()
        self.dim = _axis(dim, "ToBEVReduction")
        self.extent = extent

    def forward(self, input: SparseTensor) -> SparseTensor:
        """See the class."""
        bound = _whole_column(input, self.dim) if self.extent is None else (0, self.extent)
        route, kernel_map = _columns(input, self.dim, bound)
        sums = torch.ops.halopipe.sparse_sum_pool(input.feats, kernel_map.neighbours, kernel_map.reverse)
        return input.with_feats(sums / _counts(kernel_map), route)

    def extra_repr(self) -> str:
        """The axis."""
        return f"dim={self.dim}, extent={self.extent}"


class ToBEVConvolution(nn.Module):
    """One site for each column, at 0 along ``dim``: the sum of its sites, each times the matrix of its height.

    The parameter ``kernel`` is (n_kernels, in channels, out channels), ``bias`` (1, out channels), added once a site.

    Args:
        in_channels, out_channels: of the features.
        n_kernels: heights, from 0 on.
        stride: 1; for others put a strided layer behind.
        dim: the axis of the columns.
        bias: add one number per output channel.

    Raises:
        SparseInputError: numbers that do not fit, and, in use, a site outside its column or other channels.
    """

    def __init__(
        self, in_channels: int, out_channels: int, n_kernels: int, stride: int = 1, dim: int = 1, bias: bool = False
    ) -> None:
        super().__init__()
        if stride != 1 or min(in_channels, out_channels, n_kernels) < 1:
            raise SparseInputError(
                "channels, kernels and stride",
                where=type(self).__name__,
                actual=(in_channels, out_channels, n_kernels, stride),
                expected="at least 1, and a stride of 1",
                remedy="put a strided layer behind: Conv3d or AvgPool3d",
            )
        self.in_channels = in_channels
        self.out_channels = out_channels
        self.n_kernels = n_kernels
        self.stride = stride
        self.dim = _axis(dim, type(self).__name__)
        self.kernel = nn.Parameter(torch.empty(n_kernels, in_channels, out_channels))
        self.bias = nn.Parameter(torch.zeros(1, out_channels)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Uniform in one over the root of the input channels, as torchsparse draws them."""
        bound = 1 / math.sqrt(self.in_channels)
        nn.init.uniform_(self.kernel, -bound, bound)

    def forward(self, input: SparseTensor) -> SparseTensor:
        """See the class."""
        require_channels(input.feats, self.in_channels, type(self).__name__)
        route, kernel_map = _columns(input, self.dim, (0, self.n_kernels))
        feats = torch.ops.halopipe.sparse_conv(input.feats, self.kernel, kernel_map.neighbours, kernel_map.reverse)
        return input.with_feats(feats if self.bias is None else feats + self.bias * _counts(kernel_map), route)

    def extra_repr(self) -> str:
        """Channels and heights."""
        return f"{self.in_channels}, {self.out_channels}, n_kernels={self.n_kernels}, dim={self.dim}"


class ToDenseBEVConvolution(ToBEVConvolution):
    """A :class:`ToBEVConvolution` on a dense map, (samples, out channels, ...) with the two axes that are left.

    Args:
        in_channels, out_channels: of the features.
        shape: cells along x, y and z; that along ``dim`` is the number of heights.
        offset: coordinates of the first cell along the other two axes, in units of the network's input; a multiple of
            the stride.
        dim: the axis of the columns.
        bias: add one number per output channel, once a site.

    Raises:
        SparseInputError: numbers that do not fit, and, in use, a site outside the map.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        shape: Sequence[int] | Tensor,
        offset: Sequence[int] = (0, 0, 0),
        dim: int = 1,
        bias: bool = False,
    ) -> None:
        extents = _shape(shape, "ToDenseBEVConvolution")
        axis = _axis(dim, "ToDenseBEVConvolution")
        super().__init__(in_channels, out_channels, extents[axis], dim=axis, bias=bias)
        self.shape = extents
        self.offset = _corner(offset, 0, "offset")

    def forward(self, input: SparseTensor) -> Tensor:  # type: ignore[override]  # dense, where its base is sparse
        """See the class."""
        flat = super().forward(input)
        origin = _replaced(_origin(input, self.offset, type(self).__name__), self.dim, 0)
        grid = CellGrid(flat.route, _replaced(self.shape, self.dim, 1), origin)
        return on_grid(flat, grid).squeeze(2 + self.dim)

    def extra_repr(self) -> str:
        """Channels and cells."""
        return f"{self.in_channels}, {self.out_channels}, shape={self.shape}, offset={self.offset}, dim={self.dim}"


class ToBEVHeightCompression(nn.Module):
    """The features on a dense map, heights side by side as channels.

    (samples, shape[dim] * channels, ...) with the two axes that are left; channel ``h * channels + c`` is channel ``c``
    of the site at height ``h``.  Sites above or below count to the highest or lowest; those of one cell are added.

    Args:
        channels: of the features.
        shape: cells along x, y and z.
        offset: coordinates of the first cell, in units of the network's input; a multiple of the stride.
        dim: the axis of the columns.

    Raises:
        SparseInputError: numbers that do not fit, and, in use, a site outside the map, or other channels.
    """

    def __init__(
        self, channels: int, shape: Sequence[int] | Tensor, offset: Sequence[int] = (0, 0, 0), dim: int = 1
    ) -> None:
        super().__init__()
        name = type(self).__name__
        self.channels = channels
        self.shape = _shape(shape, name)
        self.dim = _axis(dim, name)
        self.offset = _corner(offset, 0, "offset")

    def forward(self, input: SparseTensor) -> Tensor:
        """See the class."""
        name = type(self).__name__
        require_channels(input.feats, self.channels, name)
        grid = CellGrid(input.route, self.shape, _origin(input, self.offset, name), clamped=self.dim)
        return on_grid(input, grid).movedim(2 + self.dim, 1).flatten(1, 2)

    def extra_repr(self) -> str:
        """Channels and cells."""
        return f"{self.channels}, shape={self.shape}, offset={self.offset}, dim={self.dim}"


def _gathered(x: SparseTensor, route: SiteRoute) -> SparseTensor:
    """The features of ``x`` at the sites of another set of the same stride; 0 where ``x`` has no site."""
    kernel_map = x.geometry.map(MapSpec(x.route, route, (1, 1, 1)))
    return x.with_feats(torch.ops.halopipe.sparse_sum_pool(x.feats, kernel_map.neighbours, kernel_map.reverse), route)


def _columns(x: SparseTensor, axis: int, bound: tuple[int, int]) -> tuple[SiteRoute, KernelMap]:
    """The site set of the columns of ``x``, and the map that has a column's sites, lowest first, as its offsets."""
    nowhere: tuple[Bound, Bound, Bound] = (None, None, None)
    route = (*x.route, RouteStep("flattened", bounds=(*nowhere[:axis], bound, *nowhere[axis + 1 :])))  # type: ignore[arg-type]  # of three
    return route, x.geometry.map(MapSpec(x.route, route, _replaced((1, 1, 1), axis, bound[1] - bound[0])))


def _counts(kernel_map: KernelMap) -> Tensor:
    """(outputs, 1): the inputs that each reads."""
    return (kernel_map.neighbours >= 0).sum(0).clamp(min=1).unsqueeze(1)


def _whole_column(x: SparseTensor, axis: int) -> tuple[int, int]:
    try:
        places = x.coords[:, 1 + axis]
    except SparseInputError as error:
        raise SparseInputError(
            error.what,
            where="ToBEVReduction",
            actual="no extent",
            expected="the length of the longest column",
            remedy="give ToBEVReduction the number of sites of its columns, extent=...",
        ) from error
    return (int(places.min()), int(places.max()) + 1) if len(places) else (0, 1)


def _origin(x: SparseTensor, offset: Triple, where: str) -> Triple:
    """``offset`` in units of the stride of ``x``."""
    if any(value % step for value, step in zip(offset, x.stride, strict=True)):
        raise SparseInputError(
            "offset of the map",
            where=where,
            actual=offset,
            expected=f"multiples of the stride {x.stride}",
            remedy="let the map begin where a cell begins",
        )
    a, b, c = (value // step for value, step in zip(offset, x.stride, strict=True))
    return a, b, c


def _replaced(values: Triple, axis: int, value: int) -> Triple:
    x, y, z = (value if place == axis else each for place, each in enumerate(values))
    return x, y, z


def _bound(first: int, end: int) -> Bound:
    return None if first <= LOWEST and end > HIGHEST else (first, end)


def _corner(values: Sequence[int] | None, default: int, name: str) -> Triple:
    numbers = (default,) * _AXES if values is None else tuple(values)
    if len(numbers) != _AXES or not all(isinstance(each, int) for each in numbers):
        raise SparseInputError(
            name, where="a corner", actual=values, expected="three whole numbers", remedy="give x, y and z"
        )
    x, y, z = numbers
    return x, y, z


def _shape(shape: Sequence[int] | Tensor, where: str) -> Triple:
    return triple(shape.tolist() if isinstance(shape, Tensor) else shape, "shape", where)


def _axis(dim: int, where: str) -> int:
    if dim not in range(_AXES):
        raise SparseInputError(
            "dim", where=where, actual=dim, expected="0, 1 or 2", remedy="count x, y and z from 0, without the batch"
        )
    return dim
