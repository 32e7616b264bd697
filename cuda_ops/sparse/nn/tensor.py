"""A sparse tensor: features on the sites of one set, and the geometry that all tensors of one input share.

Names follow torchsparse 2.1 (`torchsparse/tensor.py`): ``feats``, ``coords``, ``stride`` and their short forms F, C, s;
coordinates are int32 (batch, x, y, z) in units of the tensor's stride. Here rows are sorted by coordinate, and ``to``,
``half`` and the rest return a new tensor; features can be set, coordinates cannot.

Below it: what tensors and layers ask of what they are given, and how they say that it does not fit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NoReturn

import numpy.typing as npt
import torch
from torch import Tensor

from cuda_ops.sparse import operators
from cuda_ops.sparse.errors import SparseInputError
from cuda_ops.sparse.geometry import BuiltGeometry, Geometry, Segments, SiteRoute, Triple, geometry_of, stride_of

_WHOLE_NUMBERS = (torch.int32, torch.int64, torch.int16, torch.int8, torch.uint8)


class SparseTensor:
    """Features (sites, channels) on the sites of ``geometry`` at ``route``.

    Args:
        feats: (sites, channels), in the order of ``coords``, of torch or numpy; what no layer is given (labels) may
            also be whole numbers, and (sites,).
        coords: whole numbers (sites, 4), batch first, in any order, each once; int32, or converted to it. (sites, 3):
            one sample.
        stride: of the input's coordinates; the strides of layers multiply it.
        num_samples: clouds in the batch, empty ones counted; None: the largest batch index and one.
        check_finite: refuse NaN and infinite features (reads them all once).

    Attributes:
        feats: (sites, channels), in the order of the sorted sites.
        geometry, route: the site sets of all tensors of this input, and which of them this one lies on.
        base_stride: the input's stride.
        order: int64 (sites,): row ``i`` here is row ``order[i]`` of what was given, so that targets of points are
            ``targets[x.order]``; None where a layer made the tensor.

    Raises:
        SparseInputError: shapes, dtypes or ranges that do not fit, or a coordinate that occurs twice.
    """

    __slots__ = ("base_stride", "feats", "geometry", "order", "route")

    def __init__(
        self,
        feats: Tensor | npt.NDArray[Any],
        coords: Tensor | npt.NDArray[Any],
        stride: int | Sequence[int] = 1,
        *,
        num_samples: int | None = None,
        check_finite: bool = False,
    ) -> None:
        feats = torch.as_tensor(feats)
        coords = whole_coordinates(torch.as_tensor(coords))
        require_rows(feats, coords.shape[0])
        if check_finite:
            require_finite(feats, "SparseTensor")
        self.geometry: Geometry
        self.geometry, order = _sorted(coords, num_samples)
        self.order: Tensor | None = order
        self.feats = feats.index_select(0, order)
        self.route: SiteRoute = ()
        self.base_stride = triple(stride, "stride", "SparseTensor")

    @classmethod
    def on(
        cls, geometry: Geometry, feats: Tensor, route: SiteRoute = (), base_stride: Triple = (1, 1, 1)
    ) -> SparseTensor:
        """Features (sites, channels) that already lie in the order of the sites of ``geometry`` at ``route``."""
        made = cls.__new__(cls)
        made.feats = feats
        made.geometry = geometry
        made.route = route
        made.base_stride = base_stride
        made.order = None
        return made

    @property
    def coords(self) -> Tensor:
        """int32 (sites, 4): batch, x, y, z in units of ``stride``, ascending."""
        return self.geometry.coordinates(self.route)

    @property
    def stride(self) -> Triple:
        """Of the coordinates, in the units of the world: ``base_stride`` times the strides that led here."""
        x, y, z = (base * step for base, step in zip(self.base_stride, stride_of(self.route), strict=True))
        return x, y, z

    @property
    def F(self) -> Tensor:  # noqa: N802  (torchsparse's name)
        """``feats``."""
        return self.feats

    @F.setter
    def F(self, feats: Tensor) -> None:  # noqa: N802  (torchsparse's name)
        require_rows(feats, len(self))
        self.feats = feats

    @property
    def C(self) -> Tensor:  # noqa: N802  (torchsparse's name)
        """``coords``."""
        return self.coords

    @property
    def s(self) -> Triple:
        """``stride``."""
        return self.stride

    @property
    def num_samples(self) -> int:
        """Clouds in the batch, empty ones counted."""
        return self.geometry.num_samples

    @property
    def segments(self) -> Segments:
        """Where each sample's rows lie."""
        return self.geometry.segments(self.route)

    @property
    def dtype(self) -> torch.dtype:
        """Of the features."""
        return self.feats.dtype

    @property
    def device(self) -> torch.device:
        """Of the features and the coordinates."""
        return self.feats.device

    def __len__(self) -> int:
        return self.feats.shape[0]

    def __repr__(self) -> str:
        rows = self.feats.shape[0]
        channels = math.prod(self.feats.shape[1:])
        return f"SparseTensor({rows} sites, {channels} channels, stride {self.stride}, {self.dtype}, {self.device})"

    def with_feats(self, feats: Tensor, route: SiteRoute | None = None) -> SparseTensor:
        """Other features on the same sites, or on those of another route of the same geometry."""
        same = route is None or route == self.route
        made = SparseTensor.on(self.geometry, feats, self.route if route is None else route, self.base_stride)
        made.order = self.order if same else None
        return made

    def to(
        self,
        *to: torch.device | str | torch.dtype | None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        non_blocking: bool = False,
    ) -> SparseTensor:
        """On another device, of another dtype, or both.

        On another device the site sets are found anew. Move a network's input, not what its layers made of it: two
        tensors that were moved one by one share no maps.
        """
        feats = self.feats
        for each in (*to, device, dtype):
            feats = feats if each is None else feats.to(each, non_blocking=non_blocking)
        if feats.device == self.device:
            return self.with_feats(feats)
        geometry, _ = geometry_of(self.geometry.coordinates(()).to(feats.device), self.num_samples)
        made = SparseTensor.on(geometry, feats, self.route, self.base_stride)
        made.order = None if self.order is None else self.order.to(feats.device)
        return made

    def cpu(self) -> SparseTensor:
        """On the CPU."""
        return self.to("cpu")

    def cuda(self, device: int | str | torch.device = "cuda") -> SparseTensor:
        """On a GPU."""
        return self.to(f"cuda:{device}" if isinstance(device, int) else device)

    def half(self) -> SparseTensor:
        """In float16."""
        return self.to(torch.float16)

    def float(self) -> SparseTensor:
        """In float32."""
        return self.to(torch.float32)

    def double(self) -> SparseTensor:
        """In float64."""
        return self.to(torch.float64)

    def bfloat16(self) -> SparseTensor:
        """In bfloat16."""
        return self.to(torch.bfloat16)

    def detach(self) -> SparseTensor:
        """Cut off from what made its features."""
        return self.with_feats(self.feats.detach())

    def __add__(self, other: SparseTensor | Tensor | complex) -> SparseTensor:
        return self.with_feats(self.feats + _operand(self, other, "+"))

    def __sub__(self, other: SparseTensor | Tensor | complex) -> SparseTensor:
        return self.with_feats(self.feats - _operand(self, other, "-"))

    def __mul__(self, other: SparseTensor | Tensor | complex) -> SparseTensor:
        return self.with_feats(self.feats * _operand(self, other, "*"))

    def __truediv__(self, other: SparseTensor | Tensor | complex) -> SparseTensor:
        return self.with_feats(self.feats / _operand(self, other, "/"))

    def __neg__(self) -> SparseTensor:
        return self.with_feats(-self.feats)

    __radd__ = __add__
    __rmul__ = __mul__


def cat(tensors: Sequence[SparseTensor]) -> SparseTensor:
    """The channels of tensors on one site set, side by side (`torchsparse/operators.py`).

    Raises:
        SparseInputError: no tensors, or tensors on different sites.
    """
    if not tensors:
        raise SparseInputError(
            "no tensors", where="cat", actual=0, expected="at least 1", remedy="give the tensors to join in one list"
        )
    first = tensors[0]
    for other in tensors[1:]:
        require_same_sites(first, other, "cat")
    return first.with_feats(torch.cat([each.feats for each in tensors], 1))


def require_same_sites(one: SparseTensor, other: SparseTensor, where: str) -> None:
    """Raises SparseInputError unless both tensors lie on the same sites; coordinates are read only where they must."""
    if one.geometry is other.geometry and one.route == other.route and one.base_stride == other.base_stride:
        return
    if one.stride != other.stride:
        raise SparseInputError(
            "tensors of different strides",
            where=where,
            actual=other.stride,
            expected=one.stride,
            remedy="bring them to one stride by a strided or a transposed convolution",
        )
    if len(one) != len(other) or not torch.equal(one.coords, other.coords):
        raise SparseInputError(
            "tensors on different sites",
            where=where,
            actual=f"{len(other)} sites by {_path(other.route)}",
            expected=f"{len(one)} sites by {_path(one.route)}",
            remedy="reach one stride by layers of the same kernel, stride and dilation",
        )


def _sorted(coords: Tensor, num_samples: int | None) -> tuple[Geometry, Tensor]:
    """The geometry of coordinates and the order that sorts them; nothing is looked at while a graph is traced."""
    if num_samples is None or not torch.compiler.is_compiling():
        return geometry_of(coords, num_samples)
    keys, order = operators.sorted_sites(coords)
    return BuiltGeometry(keys, num_samples), order


def _operand(x: SparseTensor, other: SparseTensor | Tensor | complex, sign: str) -> Tensor | complex:
    if isinstance(other, SparseTensor):
        require_same_sites(x, other, sign)
        if 1 not in (x.feats.shape[1], other.feats.shape[1]):
            require_channels(other.feats, x.feats.shape[1], sign)
        return other.feats
    return other


def _path(route: SiteRoute) -> str:
    return " > ".join(map(str, route)) or "the input"


def triple(value: int | Sequence[int], name: str, where: str) -> Triple:
    """One number for x, y and z, or three of them; each at least 1."""
    values = (value,) * 3 if isinstance(value, int) else tuple(value)
    if len(values) != 3 or not all(isinstance(each, int) and each >= 1 for each in values):
        raise SparseInputError(
            name,
            where=where,
            actual=value,
            expected="one whole number of at least 1, or three",
            remedy="give x, y and z",
        )
    x, y, z = values
    return x, y, z


def volume(kernel: Triple) -> int:
    """Offsets of a kernel."""
    return math.prod(kernel)


def require_channels(feats: Tensor, channels: int, where: str) -> None:
    """Raises SparseInputError unless ``feats`` is ``(sites, channels)``, of as many ``channels``."""
    if feats.ndim != 2 or not feats.dtype.is_floating_point:
        _refuse(
            "features",
            f"{feats.dtype} {list(feats.shape)}",
            "floating-point numbers [sites, channels]",
            "give the layer features, not labels: one row of channels per site, with .float()",
            where,
        )
    if feats.shape[1] != channels:
        raise SparseInputError(
            "number of channels",
            where=where,
            actual=feats.shape[1],
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
            actual=f"{int(bad)} of {feats.numel()}",
            expected=0,
            remedy="drop those points before they are voxelised",
        )


def whole_coordinates(coords: Tensor) -> Tensor:
    """As int32, batch first; what int32 cannot hold stays out of their range, and is refused with it."""
    if coords.ndim != 2 or coords.shape[1] not in (3, 4):
        remedy = "give batch, x, y, z per row, batch first"
        _refuse("shape of coordinates", list(coords.shape), "[sites, 4], or [sites, 3] of one sample", remedy)
    if coords.dtype not in _WHOLE_NUMBERS:
        _refuse("dtype of coordinates", coords.dtype, torch.int32, "voxelise points first (sparse_quantize, voxelise)")
    if coords.dtype == torch.int64:
        bounds = torch.iinfo(torch.int32)
        coords = coords.clamp(bounds.min, bounds.max)
    coords = coords.to(torch.int32)
    return torch.nn.functional.pad(coords, (1, 0)) if coords.shape[1] == 3 else coords


def require_rows(feats: Tensor, rows: int) -> None:
    """Raises SparseInputError unless these are features or labels, one row for each of ``rows`` sites."""
    if feats.ndim not in (1, 2):
        _refuse("shape of features", list(feats.shape), "[sites, channels]", "give one row of channels per site")
    if feats.shape[0] != rows:
        _refuse("rows of features", feats.shape[0], f"{rows}, one per coordinate", "give one row per site")


def _refuse(what: str, actual: object, expected: object, remedy: str, where: str = "SparseTensor") -> NoReturn:
    raise SparseInputError(what, where=where, actual=actual, expected=expected, remedy=remedy)
