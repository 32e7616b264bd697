"""From a batch of clouds as users have it to what a prepared network is given.

Users' tensors have samples first, each cloud padded to the longest:

    coordinates  int32 (samples, points, 3)     features  (samples, points, channels)     counts  int64 (samples,)
    targets      (samples, ...) a sample, or (samples, points, ...) a point

and become, for whatever samples are taken together in a micro-batch, rows of sites in the order of their keys:

    lengths (samples,)     features (sites, channels)     the recipe's maps and segments
    targets (samples, ...) or (sites, ...)

Nothing is made before it is asked for: a stage of a pipeline makes the maps that its layers read, and no others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from cuda_ops.preparation import InputPreparation
from cuda_ops.sparse.errors import SparseInputError
from cuda_ops.sparse.geometry import (
    BuiltGeometry,
    CellGrid,
    KernelMap,
    MapSpec,
    Segments,
    SiteRoute,
    Triple,
    geometry_of,
    stride_of,
)
from cuda_ops.sparse.recipe import Recipe

SITES = "sites"


@dataclass(frozen=True, slots=True)
class Preparation(InputPreparation):
    """How a network's inputs are made of a batch of clouds.

    Attributes:
        recipe: what the network reads of the geometry.
        per_site: of each target, whether it has a value a point.
    """

    raw_names: ClassVar = ("coordinates", "features", "counts")
    without_samples: ClassVar = ("neighbours_", "reverse_", "features")

    recipe: Recipe
    per_site: tuple[bool, ...] = ()

    @property
    def size_of(self) -> dict[SiteRoute, str]:
        """The name of the number of sites of each site set: ``sites``, ``sites_1``, ..."""
        return {route: SITES if not index else f"{SITES}_{index}" for index, route in enumerate(self.recipe.routes)}

    @property
    def input_names(self) -> tuple[str, ...]:
        return ("lengths", "features", *self.recipe.names)

    @property
    def varying(self) -> dict[str, list[tuple[str, int]]]:
        size_of = self.size_of
        by_size: dict[str, list[tuple[str, int]]] = {word: [] for word in size_of.values()}
        by_size[SITES].append(("features", 0))
        for name, dims in self.recipe.sites.items():
            for dim, route in dims.items():
                by_size[size_of[route]].append((name, dim))
        by_size[SITES] += [(f"target_{index}", 0) for index, is_per_site in enumerate(self.per_site) if is_per_site]
        return {word: places for word, places in by_size.items() if places}

    def prepared(self, raw: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return tuple(self.clouds(raw).tensors().values())

    def of_fewer(self, raw: tuple[Tensor, ...], divisor: int) -> tuple[Preparation, tuple[Tensor, ...]]:
        points = -(-raw[0].shape[1] // divisor)
        is_cut = (True, True, False, *self.per_site)
        cut = [each[:, :points] if is_so else each for each, is_so in zip(raw, is_cut, strict=True)]
        return self, (*cut[:2], cut[2].clamp(max=points), *cut[3:])

    def clouds(self, raw: Sequence[Tensor]) -> Clouds:
        """The samples of ``raw`` as one batch.

        Args:
            raw: coordinates, features, counts, and targets; see the module.

        Raises:
            SparseInputError: the tensors do not belong together, or coordinates are out of range or occur twice.
        """
        if len(raw) != len(self.raw_names) + len(self.per_site):
            raise SparseInputError(
                "number of tensors",
                where="a batch of clouds",
                actual=len(raw),
                expected=len(self.raw_names) + len(self.per_site),
                remedy="give coordinates, features, counts, and the targets",
            )
        coordinates, features, counts, *targets = raw
        return Clouds(self, coordinates, features, counts, tuple(targets))


class Clouds:
    """A batch of clouds, and what is prepared of it.

    Attributes:
        preparation: of the network.
        geometry: of the batch; rows are in the order of its keys.
        num_samples: clouds, empty ones counted.
    """

    def __init__(
        self,
        preparation: Preparation,
        coordinates: Tensor,
        features: Tensor,
        counts: Tensor,
        targets: tuple[Tensor, ...],
    ) -> None:
        rows = _rows(coordinates, features, counts)
        _require_targets(targets, preparation.per_site, *coordinates.shape[:2])
        self.preparation = preparation
        self.num_samples = len(counts)
        self.geometry: BuiltGeometry
        self.geometry, order = geometry_of(_with_samples(coordinates, rows), self.num_samples)
        self._rows = rows[order]
        self._features = features
        self._targets = targets

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Sites of each set, by the name of the number."""
        return {word: self.geometry.num_sites(route) for route, word in self.preparation.size_of.items()}

    def map(self, spec: MapSpec) -> KernelMap:
        """A kernel map of the recipe's."""
        return self.geometry.map(spec)

    def segments(self, route: SiteRoute) -> Segments:
        """Where each sample's rows are."""
        return self.geometry.segments(route)

    def cells(self, grid: CellGrid) -> Tensor:
        """The cell of each row."""
        return self.geometry.cells(grid)

    def level(self, route: SiteRoute) -> tuple[Any, Any, Triple]:
        """A site set as arrays: the sample of each site, its coordinates (sites, 3), and their stride."""
        coordinates = self.geometry.coordinates(route).long().numpy()
        return coordinates[:, 0], coordinates[:, 1:], stride_of(route)

    def tensor(self, name: str) -> Tensor:
        """A tensor of ``preparation.names``."""
        what, _, number = name.rpartition("_")
        if name == "lengths":
            return self.segments(()).lengths
        if name == "features":
            return self._finite(_taken(self._features, self._rows))
        if what == "target":
            target = self._targets[int(number)]
            return _taken(target, self._rows) if self.preparation.per_site[int(number)] else target
        return self.preparation.recipe.tensor(self, name)

    def _finite(self, features: Tensor) -> Tensor:
        bad = (~features.isfinite()).any(1).nonzero()
        if len(bad):
            sample, point = divmod(int(self._rows[bad[0, 0]]), self._features.shape[1])
            raise SparseInputError(
                f"features that are NaN or infinite, the first of sample {sample}, point {point}",
                where="a batch of clouds",
                actual=f"{len(bad)} of {len(features)} points",
                expected=0,
                remedy="drop those points before they are voxelised",
            )
        return features

    def tensors(self) -> dict[str, Tensor]:
        """All of them."""
        return {name: self.tensor(name) for name in self.preparation.names}


def padded(clouds: Sequence[Tensor], features: Sequence[Tensor], points: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Clouds of different sizes as tensors with samples first: coordinates, features and counts.

    Args:
        clouds: (points, 3) integers each.
        features: (points, channels) each.
        points: rows to pad to; 0: those of the largest cloud.

    Raises:
        SparseInputError: no cloud, one of more than ``points``, or features of another number of points.
    """
    if not len(clouds) or [len(cloud) for cloud in clouds] != [len(value) for value in features]:
        raise SparseInputError(
            "points of each cloud and rows of its features",
            where="padded",
            actual=[len(value) for value in features],
            expected=[len(cloud) for cloud in clouds] or "at least one cloud",
            remedy="give one row of features for each point",
        )
    longest = max(map(len, clouds))
    if points and points < longest:
        raise SparseInputError(
            "points of a cloud",
            where="padded",
            actual=longest,
            expected=f"{points} at most",
            remedy="pad to more points, or leave some out",
        )
    rows = points or longest
    coordinates = torch.zeros(len(clouds), rows, 3, dtype=clouds[0].dtype)
    values = torch.zeros(len(clouds), rows, features[0].shape[1], dtype=features[0].dtype)
    for index, (cloud, value) in enumerate(zip(clouds, features, strict=True)):
        coordinates[index, : len(cloud)] = cloud
        values[index, : len(cloud)] = value
    return _whole_numbers(coordinates), values, torch.tensor([len(cloud) for cloud in clouds])


def _rows(coordinates: Tensor, features: Tensor, counts: Tensor) -> Tensor:
    """Which rows of the flattened, padded tensors hold points."""
    shapes = tuple(coordinates.shape), tuple(features.shape), tuple(counts.shape)
    are_alike = coordinates.ndim == features.ndim == 3 and shapes[0][:2] == shapes[1][:2] and shapes[0][2] == 3
    if not are_alike or shapes[2] != shapes[0][:1]:
        raise SparseInputError(
            "shapes of coordinates, features and counts",
            where="a batch of clouds",
            actual=shapes,
            expected="(samples, points, 3), (samples, points, channels) and (samples,)",
            remedy="pad the clouds to the largest and give the number of points of each",
        )
    points = coordinates.shape[1]
    if len(counts) and not 0 <= int(counts.min()) <= int(counts.max()) <= points:
        raise SparseInputError(
            "number of points of a cloud",
            where="a batch of clouds",
            actual=f"{int(counts.min())} to {int(counts.max())}",
            expected=f"0 to {points}",
            remedy="give the number of points of each cloud, as far as the tensors hold them",
        )
    return (torch.arange(points) < counts[:, None]).flatten().nonzero().squeeze(1)


def _require_targets(targets: Sequence[Tensor], per_site: Sequence[bool], samples: int, points: int) -> None:
    for index, (target, is_per_site) in enumerate(zip(targets, per_site, strict=True)):
        expected = (samples, points) if is_per_site else (samples,)
        if tuple(target.shape[: len(expected)]) != expected:
            raise SparseInputError(
                f"shape of target {index}",
                where="a batch of clouds",
                actual=tuple(target.shape),
                expected=f"({', '.join(map(str, expected))}, ...)",
                remedy="pad the targets of points as the clouds are padded" if is_per_site else "give one a sample",
            )


def _with_samples(coordinates: Tensor, rows: Tensor) -> Tensor:
    points = coordinates.shape[1]
    sample = (rows // points if points else rows).to(torch.int32)
    return torch.cat([sample[:, None], _whole_numbers(coordinates.flatten(0, 1)[rows])], 1)


def _whole_numbers(coordinates: Tensor) -> Tensor:
    """As int32; what that cannot hold stays out of the range of coordinates."""
    if coordinates.is_floating_point() or coordinates.is_complex() or coordinates.dtype == torch.bool:
        raise SparseInputError(
            "dtype of coordinates",
            where="a batch of clouds",
            actual=coordinates.dtype,
            expected=torch.int32,
            remedy="voxelise the points first",
        )
    bounds = torch.iinfo(torch.int32)
    return (
        coordinates.clamp(bounds.min, bounds.max).to(torch.int32)
        if coordinates.dtype == torch.int64
        else (coordinates.to(torch.int32))
    )


def _taken(padded: Tensor, rows: Tensor) -> Tensor:
    return padded.flatten(0, 1)[rows]
