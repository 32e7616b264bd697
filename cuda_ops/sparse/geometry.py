"""Which sites a sparse network's tensors live on, and the maps between them: found once, shared by all its layers.

A *route* names a site set by the steps that lead to it from the network's input, so that two layers that ask for the
same set or the same map get the same object, whoever asks first:

    ()                                     the input's sites
    (strided 2^3 / 2,)                     what a convolution of kernel 2 and stride 2 makes of them
    (strided 2^3 / 2, strided 3^3 / 2)     and one of kernel 3 and stride 2 of those

What a network asks for is the same for every cloud, and depends on no feature: :mod:`cuda_ops.sparse.recipe` notes it
once and prepares it on the host ahead of the features.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from cuda_ops.sparse import keys, operators  # the latter registers torch.ops.halopipe
from cuda_ops.sparse.errors import SparseInputError

Triple = tuple[int, int, int]
Bound = tuple[int, int] | None
AxisBounds = tuple[Bound, Bound, Bound]


@dataclass(frozen=True, slots=True)
class RouteStep:
    """From one site set to the next.

    Attributes:
        kind: ``strided``: every site whose field holds one of the old; ``generated``: every site that an old one
            reaches by a transposed convolution; ``cropped``: those within ``bounds``; ``flattened``: one for all that
            differ along the bounded axis alone, at 0 there; ``joined``: the old ones and those of ``other``.
        kernel, stride, dilation: along x, y and z; of the first two kinds.
        bounds: (lowest, first above) along x, y and z, or None: of a crop, and of the axis that is flattened.
        other: the site set that joins in.
    """

    kind: Literal["strided", "generated", "cropped", "flattened", "joined"]
    kernel: Triple = (1, 1, 1)
    stride: Triple = (1, 1, 1)
    dilation: Triple = (1, 1, 1)
    bounds: AxisBounds = (None, None, None)
    other: SiteRoute = ()

    @property
    def axis(self) -> int:
        """The first bounded one: of a flattened set, the one that it was flattened along."""
        return next(axis for axis, bound in enumerate(self.bounds) if bound is not None)

    def _bounded(self) -> list[tuple[str, tuple[int, int]]]:
        return [(name, bound) for name, bound in zip("xyz", self.bounds, strict=True) if bound is not None]

    def __str__(self) -> str:
        if self.kind not in ("strided", "generated"):
            bounds = [f" {name} {bound[0]}..{bound[1] - 1}" for name, bound in self._bounded()]
            return self.kind + ",".join(bounds)
        return f"{self.kind} {_text(self.kernel)}/{_text(self.stride)}" + (
            f" dilation {_text(self.dilation)}" if self.dilation != (1, 1, 1) else ""
        )


SiteRoute = tuple[RouteStep, ...]
"""The steps from the input's site set to another; () is the input's own."""


@dataclass(frozen=True, slots=True)
class MapSpec:
    """A kernel map that a layer asks for.

    Attributes:
        source, target: the site sets that are read and made.
        kernel, stride, dilation: of the convolution or pooling.
        transposed: see :func:`torch.ops.halopipe.kernel_map`.
    """

    source: SiteRoute
    target: SiteRoute
    kernel: Triple
    stride: Triple = (1, 1, 1)
    dilation: Triple = (1, 1, 1)
    transposed: bool = False


@dataclass(frozen=True, slots=True)
class KernelMap:
    """Who reads whom.

    Attributes:
        neighbours: int32 (offsets, outputs): the input row that an output reads through an offset, or -1.
        reverse: int32 (offsets, inputs): the output row that reads an input through an offset, or -1.
    """

    neighbours: Tensor
    reverse: Tensor

    @property
    def num_inputs(self) -> int:
        """Rows of the input."""
        return self.reverse.shape[1]

    @property
    def num_outputs(self) -> int:
        """Rows of the output."""
        return self.neighbours.shape[1]

    def inverse(self) -> KernelMap:
        """From the outputs back to the inputs, through the same offsets: the map of an inverse convolution."""
        return KernelMap(self.reverse, self.neighbours)

    def num_pairs(self) -> int:
        """Pairs of an input and an output: multiply-adds over input channels times output channels."""
        return int((self.neighbours >= 0).sum())

    def to(self, device: torch.device | str) -> KernelMap:
        """The same map on a device."""
        return KernelMap(self.neighbours.to(device), self.reverse.to(device))

    def pairs_of_inputs(self) -> Tensor:
        """int32 (inputs,): how many outputs read each input."""
        return _counted(self.reverse)

    def pairs_of_outputs(self) -> Tensor:
        """int32 (outputs,): how many inputs each output reads."""
        return _counted(self.neighbours)


def _counted(half: Tensor) -> Tensor:
    """int32 (rows,): the offsets through which each row has a pair."""
    if half.device.type != "cpu":
        return (half >= 0).sum(0, dtype=torch.int32)
    return torch.from_numpy(np.add.reduce(half.numpy() >= 0, axis=0, dtype=np.int32))  # torch takes four times as long


@dataclass(frozen=True, slots=True)
class Segments:
    """Where the rows of each sample lie.

    Attributes:
        starts, lengths: int64 (samples,); a sample without sites has length 0.
    """

    starts: Tensor
    lengths: Tensor

    def to(self, device: torch.device | str) -> Segments:
        """The same on a device."""
        return Segments(self.starts.to(device), self.lengths.to(device))


@dataclass(frozen=True, slots=True)
class CellGrid:
    """A dense grid over a site set.

    Attributes:
        route: the site set.
        shape: cells along x, y and z.
        origin: the coordinates of the first.
        clamped: the axis along which sites outside count to the nearest cell; None: they are refused.
    """

    route: SiteRoute
    shape: Triple
    origin: Triple = (0, 0, 0)
    clamped: int | None = None

    @property
    def num_cells(self) -> int:
        """Of a sample."""
        return math.prod(self.shape)


class Geometry(Protocol):
    """The site sets and maps of one batch of clouds, shared by all tensors that descend from it."""

    @property
    def num_samples(self) -> int:
        """Clouds in the batch, empty ones counted."""

    def num_sites(self, route: SiteRoute) -> int:
        """Sites of a set."""

    def coordinates(self, route: SiteRoute) -> Tensor:
        """int32 (sites, 4), batch first, in units of the set's stride."""

    def map(self, spec: MapSpec) -> KernelMap:
        """The map ``spec``."""

    def segments(self, route: SiteRoute) -> Segments:
        """Where each sample's rows are in a site set."""

    def cells(self, grid: CellGrid) -> Tensor:
        """int64 (sites,): the cell of each site in its sample's grid, x slowest and z fastest."""


class BuiltGeometry:
    """A geometry that finds what it is asked for, and keeps it.

    Args:
        keys: sorted packed keys of the input's sites.
        num_samples: clouds in the batch.
    """

    def __init__(self, keys: Tensor, num_samples: int) -> None:
        self._num_samples = num_samples
        self._keys: dict[SiteRoute, Tensor] = {(): keys}
        self._maps: dict[MapSpec, KernelMap] = {}
        self._segments: dict[SiteRoute, Segments] = {}
        self._cells: dict[CellGrid, Tensor] = {}

    @property
    def num_samples(self) -> int:
        return self._num_samples

    def keys(self, route: SiteRoute) -> Tensor:
        """int64 (sites,), ascending."""
        cached = self._keys.get(route)
        if cached is None:
            cached = self._keys[route] = self._after(self.keys(route[:-1]), route[-1])
        return cached

    def _after(self, before: Tensor, step: RouteStep) -> Tensor:
        if step.kind == "strided":
            return operators.strided_sites(before, step.kernel, step.stride, step.dilation)
        if step.kind == "generated":
            return operators.generated_sites(before, step.kernel, step.stride, step.dilation)
        if step.kind == "joined":
            both: Tensor = torch.unique(torch.cat((before, self.keys(step.other))))
            return both
        if step.kind == "cropped":
            return before[_within(before, step.bounds)]
        if not torch.compiler.is_compiling():
            _require_within(before, step)
        flat: Tensor = torch.unique(keys.with_coordinate(before, step.axis, torch.zeros_like(before)))
        return flat

    def num_sites(self, route: SiteRoute) -> int:
        return self.keys(route).shape[0]

    def coordinates(self, route: SiteRoute) -> Tensor:
        return keys.unpack(self.keys(route))

    def map(self, spec: MapSpec) -> KernelMap:
        cached = self._maps.get(spec)
        if cached is None:
            source = self.keys(spec.source)
            target = _anchored(self.keys(spec.target), spec)
            how = spec.kernel, spec.stride, spec.dilation, spec.transposed
            neighbours = operators.kernel_map(source, target, *how)
            reverse = neighbours.flip(0) if _is_mirrored(spec) else operators.reversed_map(neighbours, source.shape[0])
            cached = self._maps[spec] = KernelMap(neighbours, reverse)
        return cached

    def segments(self, route: SiteRoute) -> Segments:
        cached = self._segments.get(route)
        if cached is None:
            cached = self._segments[route] = _segments(self.keys(route), self._num_samples)
        return cached

    def cells(self, grid: CellGrid) -> Tensor:
        cached = self._cells.get(grid)
        if cached is None:
            cached = self._cells[grid] = _cells(self.keys(grid.route), grid)
        return cached


def geometry_of(coordinates: Tensor, num_samples: int | None = None) -> tuple[BuiltGeometry, Tensor]:
    """The geometry of a batch of clouds, and the order that sorts its features.

    Args:
        coordinates: int32 (sites, 4), batch first, in any order.
        num_samples: clouds in the batch; None: the largest batch index and one.

    Returns:
        The geometry, and int64 (sites,): row ``i`` of the sorted tensor is row ``order[i]`` of what was given.

    Raises:
        SparseInputError: coordinates are out of range or occur twice, or a batch index is not below ``num_samples``.
    """
    keys, order = operators.sorted_sites(coordinates)
    if num_samples is None:
        num_samples = int(coordinates[:, 0].max()) + 1 if len(coordinates) else 1
    elif not torch.compiler.is_compiling():  # a number of samples that is a symbol is not looked at
        _require_samples(keys, num_samples)
    return BuiltGeometry(keys, num_samples), order


def stride_of(route: SiteRoute) -> Triple:
    """The stride of a site set's coordinates, in sites of the input.

    A generated set can be finer than the input: where the product of its strides does not divide, coordinates are in
    units of a fraction, and the stride is rounded down to 1.
    """
    up = [1, 1, 1]
    down = [1, 1, 1]
    for step in route:
        for axis, extent in enumerate(step.stride):
            if step.kind == "strided":
                up[axis] *= extent
            else:
                down[axis] *= extent
    x, y, z = (max(1, u // d) for u, d in zip(up, down, strict=True))
    return x, y, z


def _is_mirrored(spec: MapSpec) -> bool:
    """Whether one site reads another through offset k where that reads the one through offset K - 1 - k."""
    odd = all(extent % 2 == 1 for extent in spec.kernel)
    return odd and spec.source == spec.target and spec.stride == (1, 1, 1) and not spec.transposed


def _within(sorted_keys: Tensor, bounds: AxisBounds) -> Tensor:
    inside = torch.ones_like(sorted_keys, dtype=torch.bool)
    for axis, bound in enumerate(bounds):
        if bound is not None:
            values = keys.coordinate(sorted_keys, axis)
            inside &= (values >= bound[0]) & (values < bound[1])
    return inside


def _require_within(sorted_keys: Tensor, step: RouteStep) -> None:
    outside = sorted_keys[~_within(sorted_keys, step.bounds)]
    if len(outside):
        first, end = step.bounds[step.axis] or (0, 0)
        raise SparseInputError(
            f"{len(outside)} sites outside the column that is flattened",
            where=f"along {'xyz'[step.axis]}",
            actual=keys.unpack(outside[:1])[0, 1:].tolist(),
            expected=f"{first}..{end - 1} along {'xyz'[step.axis]}",
            remedy="crop the cloud (SparseCrop), or give a larger extent",
        )


def _anchored(sorted_keys: Tensor, spec: MapSpec) -> Tensor:
    """A flattened set read through a kernel as long as its column: moved to where that starts at the column's first."""
    step = spec.target[-1] if len(spec.target) == len(spec.source) + 1 else None
    if step is None or step.kind != "flattened":
        return sorted_keys
    first, end = step.bounds[step.axis] or (0, 0)
    place = first + (end - first) // 2 if (end - first) % 2 else first  # an odd kernel is centred
    return keys.with_coordinate(sorted_keys, step.axis, torch.full_like(sorted_keys, place))


def _cells(sorted_keys: Tensor, grid: CellGrid) -> Tensor:
    places = keys.unpack(sorted_keys)[:, 1:].to(torch.int64) - torch.tensor(grid.origin, device=sorted_keys.device)
    extents = torch.tensor(grid.shape, device=sorted_keys.device)
    if grid.clamped is not None:
        places[:, grid.clamped].clamp_(0, grid.shape[grid.clamped] - 1)
    if not torch.compiler.is_compiling():
        outside = ((places < 0) | (places >= extents)).any(1)
        if bool(outside.any()):
            raise SparseInputError(
                f"{int(outside.sum())} sites outside the grid",
                where="to_dense",
                actual=places[outside][0].tolist(),
                expected=f"below {list(grid.shape)} and not negative, from the origin on",
                remedy="give a larger shape or another origin, or crop the cloud (SparseCrop)",
            )
    x, y, z = places.unbind(1)
    return (x * grid.shape[1] + y) * grid.shape[2] + z


def _segments(sorted_keys: Tensor, num_samples: int) -> Segments:
    bounds = torch.arange(num_samples + 1, device=sorted_keys.device) << keys.BATCH_SHIFT
    places = torch.searchsorted(sorted_keys, bounds)
    return Segments(places[:-1], places.diff())


def _require_samples(sorted_keys: Tensor, num_samples: int) -> None:
    last = int(sorted_keys[-1] >> keys.BATCH_SHIFT) if len(sorted_keys) else -1
    if last >= num_samples or num_samples > keys.MAX_BATCHES:
        raise SparseInputError(
            "number of samples",
            where="SparseTensor",
            actual=num_samples,
            expected=f"{last + 1} to {keys.MAX_BATCHES}",
            remedy="give as many samples as the batch has clouds, empty ones counted",
        )


def _text(triple: Triple) -> str:
    return str(triple[0]) if len(set(triple)) == 1 else "x".join(map(str, triple))
