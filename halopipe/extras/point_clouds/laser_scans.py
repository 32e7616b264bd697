"""Tiles of a laser scan, voxel by voxel, with labels that follow from its geometry: ground, or above it.

The ground under a point is the lowest point of the cells of a grid around it (a minimum filter over 3 x 3 cells of
``cell_m``); a voxel that is at most ``step_m`` above it is ground.  That is no survey: it needs no labelled data, says
for a wall or a tree what one would say, and on steep slopes calls ground what lies higher than the next cell.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from cuda_ops.sparse.preparation import padded
from cuda_ops.sparse.quantize import sparse_quantize
from halopipe.data.sources import mixed
from planner.ir.errors import CorruptFileError, MissingFileError, UsageError

GROUND = 0
ABOVE = 1
IGNORED = -100
"""Targets; the last one of rows that hold no voxel."""

ScanPart = Literal["all", "train", "validation"]
ScanValues = np.ndarray[Any, np.dtype[np.float64]]
Rows = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, slots=True)
class Tile:
    """A part of a scan.

    Attributes:
        coordinates: int32 (voxels, 3), from the tile's lower corner on.
        features: (voxels, 1 or 2): height above the tile's lowest point in metres, and intensity over its largest.
        targets: int64 (voxels,), ``GROUND`` or ``ABOVE``.
    """

    coordinates: Tensor
    features: Tensor
    targets: Tensor


class ScanTiles(Dataset[tuple[tuple[Tensor, Tensor, Tensor], Tensor]]):
    """The tiles of a LAS or LAZ file, as samples of :class:`.solids.Shapes` are; the target is one a voxel.

    Of the points in a voxel the first in the file stands for all.  Which tiles are for validation follows from their
    place and ``seed`` alone.

    Args:
        voxel_m, tile_m: edges of a voxel, and of a tile along x and y.
        part: ``train`` and ``validation`` have no tile in common.
        validation_share: of the tiles, rounded; at least one.
        points: rows that samples are padded to; 0: voxels of the largest tile of all parts.  Of a tile with more
            voxels a random choice is left.
        least_voxels: tiles with fewer are left out.
        cell_m, step_m: of the labels, see the module.

    Raises:
        UsageError: laspy is not installed, or no tile is left.
        MissingFileError, CorruptFileError: there is no such file, or it is no scan.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        voxel_m: float = 0.143,
        tile_m: float = 8.0,
        part: ScanPart = "all",
        validation_share: float = 0.2,
        points: int = 0,
        least_voxels: int = 100,
        cell_m: float = 1.0,
        step_m: float = 0.3,
        seed: int = 0,
    ) -> None:
        for name, value in (("voxel_m", voxel_m), ("tile_m", tile_m), ("cell_m", cell_m)):
            if not value > 0:
                raise UsageError(f"{name} is {value}, the edge of something has to be above 0")
        places, intensity = read_scan(path)
        above = height_above_ground(places, cell_m)
        tiles: dict[tuple[int, int], Tile] = {}
        for place, rows in _rows_by_tile(places, tile_m):
            values = None if intensity is None else intensity[rows]
            tile = _tile(places[rows], values, above[rows], voxel_m, step_m)
            if len(tile.targets) >= least_voxels:
                tiles[place] = tile
        chosen = _part(list(tiles), part, validation_share, seed)
        if not chosen:
            raise UsageError(
                f"{path} has no tile for {part}",
                [f"{len(tiles)} tiles of {tile_m} m have {least_voxels} voxels or more"],
                ["smaller tiles (tile_m)", "fewer voxels a tile (least_voxels)"],
            )
        self._points = points or max(len(tile.targets) for tile in tiles.values())
        self._tiles = [_thinned(tiles[place], self._points, mixed(seed, *place)) for place in chosen]
        self.channels = 1 if intensity is None else 2

    @property
    def points(self) -> int:
        """Rows that samples are padded to."""
        return self._points

    def __len__(self) -> int:
        return len(self._tiles)

    def __getitem__(self, index: int) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
        tile = self._tiles[index]
        cloud, values, counts = padded([tile.coordinates], [tile.features], self._points)
        targets = torch.full((self._points,), IGNORED)
        targets[: len(tile.targets)] = tile.targets
        return (cloud[0], values[0], counts[0]), targets


def read_scan(path: str | Path) -> tuple[ScanValues, ScanValues | None]:
    """Places (points, 3) in metres from the scan's lowest corner on, and intensities over the largest, if there are.

    Raises:
        UsageError: laspy, or what it needs for LAZ, is not installed.
        MissingFileError, CorruptFileError: there is no such file, or it is no scan.
    """
    try:
        import laspy
        import lazrs  # noqa: F401  # what laspy reads LAZ with
    except ImportError as error:
        raise UsageError(
            f"scans need laspy and lazrs: {error}", [f"to read {path}"], ["pip install 'halopipe[scans]'"]
        ) from None
    if not Path(path).is_file():
        raise MissingFileError(f"cannot read {path}", ["there is no such file"])
    try:
        scan = laspy.read(path)
        places = np.stack([np.asarray(scan[axis], dtype=np.float64) for axis in "xyz"], 1)
    except Exception as error:  # noqa: BLE001  # laspy and lazrs raise many kinds
        raise CorruptFileError(f"{path} is no LAS or LAZ file", [f"{type(error).__name__}: {error}"]) from None
    if not len(places):
        raise CorruptFileError(f"{path} has no points")
    intensity = np.asarray(scan.intensity, dtype=np.float64)  # every point format has it; 0 where it was not measured
    return places - places.min(0), intensity / intensity.max() if intensity.any() else None


def height_above_ground(places: ScanValues, cell_m: float) -> ScanValues:
    """Metres of each point above the lowest one in its cell of a grid and the eight around it."""
    cells = np.floor((places[:, :2] - places[:, :2].min(0)) / cell_m).astype(np.int64) + 1
    lowest = np.full(cells.max(0) + 2, np.inf)  # with a rim of empty cells
    np.minimum.at(lowest, (cells[:, 0], cells[:, 1]), places[:, 2])
    x, y = lowest.shape
    around = [lowest[i : x - 2 + i, j : y - 2 + j] for i in range(3) for j in range(3)]
    ground = np.minimum.reduce(around)
    above: ScanValues = places[:, 2] - ground[cells[:, 0] - 1, cells[:, 1] - 1]
    return above


def _rows_by_tile(places: ScanValues, tile_m: float) -> Iterator[tuple[tuple[int, int], Rows]]:
    x, y = np.floor(places[:, :2] / tile_m).astype(np.int64).T
    number = x * (y.max() + 1) + y
    order = np.argsort(number, kind="stable")
    for rows in np.split(order, np.flatnonzero(np.diff(number[order])) + 1):
        yield (int(x[rows[0]]), int(y[rows[0]])), rows


def _tile(places: ScanValues, intensity: ScanValues | None, above: ScanValues, voxel_m: float, step_m: float) -> Tile:
    origin = np.floor(places.min(0) / voxel_m) * voxel_m
    coordinates, first = sparse_quantize(places - origin, voxel_m, return_index=True)
    columns = [places[first, 2] - places[:, 2].min(), *([] if intensity is None else [intensity[first]])]
    targets = np.where(above[first] <= step_m, GROUND, ABOVE)
    features = torch.from_numpy(np.stack(columns, 1)).float()
    return Tile(torch.from_numpy(coordinates), features, torch.from_numpy(targets))


def _thinned(tile: Tile, points: int, seed: int) -> Tile:
    if len(tile.targets) <= points:
        return tile
    generator = torch.Generator().manual_seed(seed)
    kept = torch.randperm(len(tile.targets), generator=generator)[:points].sort().values
    return Tile(tile.coordinates[kept], tile.features[kept], tile.targets[kept])


def _part(places: Sequence[tuple[int, int]], part: ScanPart, share: float, seed: int) -> list[tuple[int, int]]:
    """The places of a part, in their order."""
    shuffled = sorted(places, key=lambda place: mixed(seed, *place))
    held_out = set(shuffled[: max(1, round(share * len(places)))])
    return [place for place in places if part == "all" or (place in held_out) == (part == "validation")]
