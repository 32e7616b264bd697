"""Layouts as torch's DTensor says them, and back.

    Layout({"height": (0, 4, 8), "width": (0, 3, 6)})       mesh 2 x 2, axes height and width
    of (sample, channel, height, width)                     placements Shard(2), Shard(3)

Both are grids of ranks whose last axis runs fastest.  An axis of the grid that the tensor is cut along is a ``Shard``;
one that it is whole along is a ``Replicate``, or a ``Partial`` where its ranks hold terms of a sum.

A layout has cut points of its own.  DTensor knows even chunks only, as ``torch.chunk`` makes them: of 10 rows for 4
ranks 3, 3, 3, 1; of 5 rows 2, 2, 1, 0.  Layouts that cut elsewhere are refused, never moved.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import count, pairwise
from math import prod

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from planner.ir.box import Interval
from planner.ir.errors import UnsupportedModelError, UsageError
from planner.ir.graph import SAMPLE, TensorSpec
from planner.ir.layout import Layout

_WHOLE = "replica"
"""The axis along which ranks hold the same, where no dim gave it a name."""


@dataclass(frozen=True, slots=True)
class Placements:
    """How DTensor says a layout.

    Attributes:
        mesh_shape: the grid of ranks; at least one axis.
        mesh_dim_names: of its axes.
        placements: of each axis.
    """

    mesh_shape: tuple[int, ...]
    mesh_dim_names: tuple[str, ...]
    placements: tuple[Placement, ...]

    @classmethod
    def of(cls, tensor: DTensor) -> Placements:
        """Those of a DTensor; axes without a name are called ``axis0`` and so on."""
        mesh = tensor.device_mesh
        names = mesh.mesh_dim_names or tuple(f"axis{index}" for index in range(mesh.ndim))
        return cls(tuple(mesh.shape), tuple(names), tuple(tensor.placements))

    def mesh(self, ranks: Sequence[int], device_type: str = "cpu") -> DeviceMesh:
        """The grid of the global ``ranks`` of a stage, by position; every process of the job makes it together.

        Raises:
            UsageError: they are fewer, or more, than the grid has.
        """
        if len(ranks) != prod(self.mesh_shape):
            raise UsageError(
                "the ranks of a stage do not fill the grid of the layout",
                [f"{len(ranks)} ranks, a grid of {by(self.mesh_shape)} = {prod(self.mesh_shape)}"],
            )
        grid = torch.tensor(ranks, dtype=torch.int).view(self.mesh_shape)
        return DeviceMesh(device_type, grid, mesh_dim_names=self.mesh_dim_names)


def to_placements(layout: Layout, spec: TensorSpec, samples: int, sums: Collection[str] = ()) -> Placements:
    """What DTensor calls ``layout`` of a tensor.

    Args:
        spec: of the tensor, for ``samples`` samples.
        sums: dims of ``layout`` along which the tensor is not cut and ranks hold terms of a sum.

    Raises:
        UnsupportedModelError: a dim is cut elsewhere than DTensor would, or the tensor has it twice.
        UsageError: ``sums`` names a dim that the layout does not have, or that the tensor is cut along.
    """
    unknown = [dim for dim in sums if dim not in layout.cuts]
    if unknown:
        raise UsageError(
            f"a sum is pending along {', '.join(unknown)}, which the layout does not cut",
            [f"it cuts {', '.join(layout.cuts) or 'nothing'}"],
        )
    placements = tuple(_placement(layout, dim, spec, samples, dim in sums) for dim in layout.cuts)
    if not placements:
        return Placements((1,), (_WHOLE,), (Replicate(),))
    return Placements(tuple(len(points) - 1 for points in layout.cuts.values()), tuple(layout.cuts), placements)


def from_placements(placed: Placements, spec: TensorSpec, samples: int) -> Layout:
    """The layout of a tensor that DTensor calls ``placed``; see :func:`axis_names` for axes that do not cut it.

    Several neighbouring axes may cut one dim: first the one, then each part by the next, as DTensor does.

    Args:
        spec: of the tensor, for ``samples`` samples.

    Raises:
        UnsupportedModelError: the axes that cut a dim are not neighbours, samples are cut within one, or a placement is
            none of ``Shard``, ``Replicate`` and ``Partial``.
    """
    cuts: dict[str, tuple[int, ...]] = {}
    ways: dict[str, list[int]] = {}
    last: str | None = None
    for name, size, placement in zip(axis_names(placed, spec), placed.mesh_shape, placed.placements, strict=True):
        if type(placement) not in (Shard, Replicate, Partial):
            raise UnsupportedModelError(f"placement {placement} of axis {name} is no part of a layout")
        if not isinstance(placement, Shard):
            cuts[name] = tuple(range(size + 1))
        elif name in cuts and name != last:
            raise UnsupportedModelError(
                f"dim {name} is cut by axes of the mesh that are not neighbours",
                [f"mesh {by(placed.mesh_shape)}, placements {placed.placements}"],
                ["order the axes of the mesh so that those that cut one dim follow each other"],
            )
        else:
            ways.setdefault(name, []).append(size)
            cuts[name] = _points(name, spec, samples, ways[name])
        last = name
    return Layout(cuts)


def axis_names(placed: Placements, spec: TensorSpec) -> tuple[str, ...]:
    """The dim of the layout that each axis of the mesh becomes: the dim that it cuts, or one that the tensor lacks.

    Axes that are named by a dim of the tensor and do not cut it get another name.
    """
    found: list[str] = []
    cut = {spec.dims[_dim(each, spec)] for each in placed.placements if isinstance(each, Shard)}
    for index, (name, placement) in enumerate(zip(placed.mesh_dim_names, placed.placements, strict=True)):
        if isinstance(placement, Shard):
            found.append(spec.dims[_dim(placement, spec)])
        elif name not in cut and (name not in spec.dims or _is_never_cut(name, spec)):
            found.append(name)
        else:
            taken = {*found, *spec.dims, *placed.mesh_dim_names}
            found.append(next(other for number in count(index) if (other := f"{_WHOLE}{number}") not in taken))
    return tuple(found)


def pending_sums(placed: Placements, spec: TensorSpec) -> tuple[str, ...]:
    """The dims of the layout of ``placed`` along which ranks hold terms of a sum.

    Raises:
        UnsupportedModelError: they are terms of something else.
    """
    found = []
    for name, placement in zip(axis_names(placed, spec), placed.placements, strict=True):
        if isinstance(placement, Partial):
            if placement.reduce_op != "sum":
                raise UnsupportedModelError(f"axis {name} awaits {placement.reduce_op}", ["a layout awaits sums only"])
            found.append(name)
    return tuple(found)


def chunk_points(extent: int, ways: Sequence[int]) -> tuple[int, ...]:
    """Where DTensor cuts ``extent`` elements into ``ways[0]`` chunks, each of them into ``ways[1]``, and so on."""
    points = [0, extent]
    for number in ways:
        parts = list(pairwise(points))
        points = [0]
        for start, stop in parts:
            each = -(-(stop - start) // number)
            points += [min(stop, start + each * index) for index in range(1, number + 1)]
    return tuple(points)


def _placement(layout: Layout, dim: str, spec: TensorSpec, samples: int, is_term: bool) -> Placement:
    where = [position for position, name in enumerate(spec.dims) if name == dim]
    if not where or _is_never_cut(dim, spec):
        return Partial() if is_term else Replicate()
    parts = [box[where[0]] for box in Layout({dim: layout.cuts[dim]}).boxes(spec, samples)]
    if is_term:
        raise UsageError(f"a sum is pending along {dim}, which the tensor is cut along", [f"at {_at(parts)}"])
    if len(where) > 1:
        raise UnsupportedModelError(
            f"an axis of DTensor's mesh cuts one dim of a tensor; this one has {dim} {len(where)} times",
            [f"dims {', '.join(spec.dims)}"],
        )
    extent = spec.shape[where[0]]
    theirs = [Interval(start, stop) for start, stop in pairwise(chunk_points(extent, [len(parts)]))]
    if [_rows(part) for part in parts] != [_rows(part) for part in theirs]:
        raise UnsupportedModelError(
            f"DTensor cannot cut {dim} of extent {extent} where the layout does",
            [f"the layout cuts at {_at(parts)}", f"DTensor would cut at {_at(theirs)}"],
            [f"plan with even shares of {dim}, or redistribute to such a layout first"],
        )
    return Shard(where[0])


def _points(dim: str, spec: TensorSpec, samples: int, ways: Sequence[int]) -> tuple[int, ...]:
    extent = spec.shape[spec.dims.index(dim)]
    if not extent:
        return tuple(range(prod(ways) + 1))
    points, each = chunk_points(extent, ways), extent // samples if dim == SAMPLE else 1
    if any(point % each for point in points):
        raise UnsupportedModelError(
            f"DTensor cuts within a sample: {each} rows of dim {dim} are one",
            [f"cut points {points}, samples end at multiples of {each}"],
            ["shard another dim, or so that samples stay whole"],
        )
    return tuple(point // each for point in points)


def _dim(shard: Shard, spec: TensorSpec) -> int:
    return shard.dim % len(spec.dims)


def _is_never_cut(dim: str, spec: TensorSpec) -> bool:
    """Whether a layout leaves ``dim`` whole: dims of extent 1, the samples' apart."""
    return dim != SAMPLE and all(extent == 1 for name, extent in zip(spec.dims, spec.shape, strict=True) if name == dim)


def _rows(part: Interval) -> tuple[int, int] | None:
    """An interval, where it lies having no meaning if it is empty."""
    return (part.start, part.stop) if len(part) else None


def _at(parts: Sequence[Interval]) -> str:
    return ", ".join(map(str, [parts[0].start, *(part.stop for part in parts)]))


def by(shape: tuple[int, ...]) -> str:
    """A shape as an error says it."""
    return " x ".join(map(str, shape)) or "a scalar"
