"""Surfaces of solids, each voxelised, to train on; :mod:`halopipe.extras.point_clouds.laser_scans` has a scan's tiles.

A sample is ((coordinates, features, count), target), padded so that all samples have one shape and batches stack:

    coordinates  int32 (points, 3), each voxel once, zeros after the first ``count``
    features     (points, channels)                     count  voxels that are there

They stand for scanned objects where none are to be had: about as many voxels a sample as the voxelised shapes that
SparsePipe's authors measured (3,224), and a number that differs from sample to sample.
"""

from __future__ import annotations

from collections.abc import Callable
from math import pi, sqrt
from typing import cast

import torch
from torch import Tensor
from torch.utils.data import Dataset

from cuda_ops.sparse.preparation import padded
from cuda_ops.sparse.quantize import sparse_quantize
from halopipe.data.sources import mixed
from planner.ir.errors import UsageError

CloudSample = tuple[tuple[Tensor, Tensor, Tensor], Tensor]

VOXELS = 3200
"""Voxels a sample, by default and on average."""

SPREAD = 0.25
"""By how much of it samples differ from one another, at most."""

_POINTS_A_VOXEL = 12
"""Points on the surface for each voxel wanted, so that hardly any is missed."""

_VOXELS_AN_AREA = 1.5
"""Voxels that a surface meets for each square of a voxel's edge, about; corrected by counting."""

_NUM_CORRECTIONS = 3


class Shapes(Dataset[CloudSample]):
    """Solids in random poses and sizes; the target is the kind of solid, whose number is that of the sample modulo.

    A sample follows from its number and the seed alone.

    Args:
        num_samples: of the Dataset.
        points: rows that samples are padded to; 0: as many as the largest can have.
        voxels: of a sample, on average; each has up to a quarter more or less.
        channels: 1 to 4: a one, then the place of the voxel in the solid (x, y, z over its radius).
        num_classes: kinds of solids, at most those of ``SOLIDS``.
        first: number of the first sample, so that Datasets of one seed can be told apart.

    Raises:
        UsageError: there are not so many kinds of solids or features, or no room for the voxels.
    """

    def __init__(
        self,
        num_samples: int,
        *,
        points: int = 0,
        voxels: int = VOXELS,
        channels: int = 4,
        num_classes: int = 0,
        seed: int = 0,
        first: int = 0,
    ) -> None:
        most = int(voxels * (1 + SPREAD))
        self._points = points or most
        self._voxels = voxels
        self._channels = channels
        self._num_samples = num_samples
        self._seed = seed
        self._first = first
        self._num_classes = num_classes or len(SOLIDS)
        if not 1 <= channels <= 4:
            raise UsageError(f"shapes have 1 to 4 features a voxel, {channels} are asked for")
        if self._num_classes > len(SOLIDS):
            raise UsageError(f"{num_classes} kinds of shapes are asked for, there are {', '.join(SOLIDS)}")
        if voxels < 1 or self._points < most:
            raise UsageError(
                f"shapes of about {voxels} voxels do not fit {self._points} points", [f"they have up to {most}"]
            )

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> CloudSample:
        if not 0 <= index < self._num_samples:
            raise IndexError(index)
        number = self._first + index
        generator = torch.Generator().manual_seed(mixed(self._seed, number))
        label = number % self._num_classes
        coordinates, places = self._voxelised(tuple(SOLIDS.values())[label], generator)
        features = torch.cat([torch.ones(len(places), 1), places], 1)[:, : self._channels]
        cloud, values, counts = padded([coordinates], [features], self._points)
        return (cloud[0], values[0], counts[0]), torch.tensor(label)

    def _voxelised(self, solid: Solid, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Coordinates int32 (voxels, 3) from 0 on, and their places, with the solid's radius as 1."""
        wanted = self._voxels * (1 + SPREAD * (2 * torch.rand((), generator=generator).item() - 1))
        surface = _posed(solid(int(_POINTS_A_VOXEL * wanted) + 1, generator), generator)
        edge = sqrt(_VOXELS_AN_AREA * 4 * pi / wanted)
        for _ in range(_NUM_CORRECTIONS):
            occupied = _voxels(surface, edge)
            edge *= sqrt(len(occupied) / wanted)
        coordinates = _voxels(surface, edge)
        if len(coordinates) > self._points:  # rare: counting did not settle
            kept = torch.randperm(len(coordinates), generator=generator)[: self._points].sort().values
            coordinates = coordinates[kept]
        places = (coordinates + 0.5) * edge
        return coordinates - coordinates.amin(0), places / surface.norm(dim=1).max()


def _voxels(points: Tensor, edge: float) -> Tensor:
    return cast("Tensor", sparse_quantize(points, edge))  # it gives several tensors only where it is asked for them


Solid = Callable[[int, torch.Generator], Tensor]
"""So many points (points, 3) all over a surface of about unit radius around the origin."""


def _posed(points: Tensor, generator: torch.Generator) -> Tensor:
    """Stretched along each axis by its own factor, then turned at random (QR of a normal matrix: Stewart 1980)."""
    stretched = points * (0.7 + 0.6 * torch.rand(3, generator=generator))
    turn, upper = torch.linalg.qr(torch.randn(3, 3, generator=generator))
    posed: Tensor = stretched @ (turn * upper.diagonal().sign())
    return posed


def _sphere(count: int, generator: torch.Generator) -> Tensor:
    normal = torch.randn(count, 3, generator=generator)
    on_sphere: Tensor = normal / normal.norm(dim=1, keepdim=True)
    return on_sphere


def _circle(angle: Tensor) -> Tensor:
    return torch.stack([(2 * pi * angle).cos(), (2 * pi * angle).sin()], 1)


def _cylinder(count: int, generator: torch.Generator) -> Tensor:
    """Radius 0.7, from -1 to 1: of its surface 1 / (1 + 0.7 / 2) is the side."""
    which, angle, along, inward = torch.rand(4, count, generator=generator)
    is_side = which < 1 / 1.35
    radius = torch.where(is_side, 1.0, inward.sqrt())
    z = torch.where(is_side, 2 * along - 1, (2 * along - 1).sign())
    return torch.cat([0.7 * radius[:, None] * _circle(angle), z[:, None]], 1)


def _cone(count: int, generator: torch.Generator) -> Tensor:
    """Radius 0.8, from -1 to 1: its side has an area of 0.8 pi x slant, its base 0.8^2 pi."""
    which, angle, inward = torch.rand(3, count, generator=generator)
    slant = sqrt(0.8**2 + 2**2)
    radius = inward.sqrt()
    z = torch.where(which < slant / (slant + 0.8), 1 - 2 * radius, -1.0)
    return torch.cat([0.8 * radius[:, None] * _circle(angle), z[:, None]], 1)


def _torus(count: int, generator: torch.Generator) -> Tensor:
    """Radii 0.75 and 0.25; points are as dense outside as inside (rejection by the distance from the axis)."""
    around, across, chance = torch.rand(3, 2 * count + 64, generator=generator)
    ring = 0.75 + 0.25 * (2 * pi * across).cos()
    kept = (chance < ring).nonzero().squeeze(1)[:count]
    z = 0.25 * (2 * pi * across).sin()
    return torch.cat([ring[:, None] * _circle(around), z[:, None]], 1)[kept]


def _helix(count: int, generator: torch.Generator) -> Tensor:
    """A tube of radius 0.15 around a screw line of two turns."""
    along, across = torch.rand(2, count, generator=generator)
    outward = 0.8 + 0.15 * (2 * pi * across).cos()
    z = 1.6 * along - 0.8 + 0.15 * (2 * pi * across).sin()
    return torch.cat([outward[:, None] * _circle(2 * along), z[:, None]], 1)


def _polyhedron(corners: list[tuple[float, float, float]], faces: list[tuple[int, int, int]]) -> Solid:
    """Of triangles, each as dense with points as the others."""
    triangles = torch.tensor(corners)[torch.tensor(faces)]
    first = triangles[:, 1] - triangles[:, 0]
    second = triangles[:, 2] - triangles[:, 0]
    areas = torch.linalg.cross(first, second).norm(dim=1)

    def points(count: int, generator: torch.Generator) -> Tensor:
        face = torch.multinomial(areas, count, replacement=True, generator=generator)
        u, v = torch.rand(2, count, 1, generator=generator)
        is_outside = u + v > 1
        u = torch.where(is_outside, 1 - u, u)
        v = torch.where(is_outside, 1 - v, v)
        return triangles[face, 0] + u * first[face] + v * second[face]

    return points


_SQUARE = [(-0.7, -0.7, -0.7), (0.7, -0.7, -0.7), (0.7, 0.7, -0.7), (-0.7, 0.7, -0.7)]
_CUBE = _polyhedron(
    [*_SQUARE, *((x, y, 0.7) for x, y, _ in _SQUARE)],
    [
        *((0, 1, 2), (0, 2, 3), (4, 5, 6), (4, 6, 7), (0, 1, 5), (0, 5, 4)),
        *((1, 2, 6), (1, 6, 5), (2, 3, 7), (2, 7, 6), (3, 0, 4), (3, 4, 7)),
    ],
)
_PYRAMID = _polyhedron([*_SQUARE, (0.0, 0.0, 1.0)], [(0, 1, 2), (0, 2, 3), (0, 1, 4), (1, 2, 4), (2, 3, 4), (3, 0, 4)])
_TETRAHEDRON = _polyhedron(
    [(0.8, 0.8, 0.8), (0.8, -0.8, -0.8), (-0.8, 0.8, -0.8), (-0.8, -0.8, 0.8)],
    [(0, 1, 2), (0, 1, 3), (0, 2, 3), (1, 2, 3)],
)

SOLIDS: dict[str, Solid] = {
    "sphere": _sphere,
    "cube": _CUBE,
    "cylinder": _cylinder,
    "cone": _cone,
    "torus": _torus,
    "pyramid": _PYRAMID,
    "tetrahedron": _TETRAHEDRON,
    "helix": _helix,
}
"""By name; a solid's place is its class."""


NUM_SHAPES = 2048
NUM_HELD_OUT = 256


def shapes(global_batch: int, input_shape: tuple[int, ...], seed: int) -> Shapes:
    """A Dataset of voxelised solids to classify, for sparse networks of ``input_shape`` (sample, point, channel).

    A sample has four fifths of the points on average, and never more; 4000 make 3,200 voxels.  See
    :class:`Shapes`.

    Raises:
        UsageError: ``input_shape`` has other dims, or more than 4 channels.
    """
    return _shapes(input_shape, seed, 0, NUM_SHAPES)


def held_out_shapes(global_batch: int, input_shape: tuple[int, ...], seed: int) -> Shapes:
    """Others of the same kind, to evaluate on."""
    return _shapes(input_shape, seed, NUM_SHAPES, NUM_HELD_OUT)


def _shapes(input_shape: tuple[int, ...], seed: int, first: int, count: int) -> Shapes:
    if len(input_shape) != 3:
        raise UsageError(
            f"shapes are clouds, input_shape {input_shape} has {len(input_shape)} dims",
            ["3 dims are needed: sample, point, channel"],
            ["halopipe profile MODEL --input 8,4000,4"],
        )
    points, channels = input_shape[1:]
    voxels = max(1, int(points / (1 + SPREAD)))
    return Shapes(count, points=points, voxels=voxels, channels=channels, seed=seed, first=first)
