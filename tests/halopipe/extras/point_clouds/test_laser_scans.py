from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from halopipe.extras.point_clouds import laser_scans
from halopipe.extras.point_clouds.laser_scans import ABOVE, GROUND, ScanTiles, height_above_ground
from planner.ir.errors import CorruptFileError, MissingFileError, UsageError

laspy = pytest.importorskip("laspy")
torch.set_num_threads(1)

SCAN = Path(__file__).resolve().parents[3] / "data" / "scans" / "lone-star.laz"


@pytest.fixture
def scan(tmp_path: Path) -> Path:
    """A slope of 8 x 4 m with a wall of 2 m on it, two points a voxel of 0.5 m."""
    x, y = np.meshgrid(np.arange(0, 8, 0.25), np.arange(0, 4, 0.25))
    x = x.ravel()
    y = y.ravel()
    z = 0.1 * x
    at_wall = (x > 3) & (x < 3.5)
    up = np.arange(0.25, 2, 0.25)
    places = [np.stack([x, y, z], 1)]
    places += [np.stack([x[at_wall], y[at_wall], z[at_wall] + height], 1) for height in up]
    return write(tmp_path / "scan.laz", np.concatenate(places) + np.array([1000, 2000, 50]))


def write(path: Path, places: np.ndarray, intensity: bool = True) -> Path:
    made = laspy.create(point_format=0, file_version="1.2")
    made.header.scales = [0.001] * 3
    made.header.offsets = places.min(0)
    made.x, made.y, made.z = places.T
    if intensity:
        made.intensity = (100 * (places[:, 2] - places[:, 2].min())).astype(np.uint16) + 1
    made.write(path)
    return path


def test_tiles_hold_each_voxel_once_with_its_height_intensity_and_label(scan: Path) -> None:
    tiles = ScanTiles(scan, voxel_m=0.5, tile_m=4.0, least_voxels=1)
    assert (len(tiles), tiles.channels) == (2, 2)
    (coordinates, features, count), targets = tiles[0]
    rows = int(count)
    assert (coordinates.shape, features.shape, targets.shape) == (
        (tiles.points, 3),
        (tiles.points, 2),
        (tiles.points,),
    )
    assert len(coordinates[:rows].unique(dim=0)) == rows
    assert (targets[rows:] == -100).all()
    height = features[:rows, 0]
    assert height.min() == 0
    assert features[:rows, 1].max() == 1
    assert torch.equal(targets[:rows] == ABOVE, height > 0.5)  # at the wall the ground is 0.2 m high
    (_, _, count), targets = tiles[1]
    assert (targets[: int(count)] == GROUND).all(), "the far tile has no wall"


def test_the_ground_is_the_lowest_point_around() -> None:
    places = np.array([[0.0, 0.0, 5.0], [1.5, 0.0, 3.0], [2.5, 0.0, 4.0], [9.0, 9.0, 1.0], [0.4, 0.0, 5.5]])
    assert height_above_ground(places, 1.0).tolist() == [2.0, 0.0, 1.0, 0.0, 2.5]


def test_a_scan_without_intensity_has_one_feature(tmp_path: Path) -> None:
    places = np.random.default_rng(0).random((500, 3)) * 4
    tiles = ScanTiles(write(tmp_path / "plain.las", places, intensity=False), voxel_m=0.5, tile_m=4, least_voxels=1)
    assert tiles.channels == 1
    assert tiles[0][0][1].shape[1] == 1


def test_parts_are_disjoint_and_the_seed_chooses() -> None:
    parts = {part: ScanTiles(SCAN, voxel_m=0.5, part=part) for part in ("all", "train", "validation")}
    assert len(parts["train"]) + len(parts["validation"]) == len(parts["all"])
    assert len(parts["validation"]) == round(0.2 * len(parts["all"]))
    assert len({tiles.points for tiles in parts.values()}) == 1
    seen = [tile[0][1].numpy().tobytes() for tiles in (parts["train"], parts["validation"]) for tile in tiles]
    assert sorted(seen) == sorted(tile[0][1].numpy().tobytes() for tile in parts["all"])
    other = ScanTiles(SCAN, voxel_m=0.5, part="validation", seed=1)
    assert not torch.equal(other[0][0][0], parts["validation"][0][0][0])


def test_tiles_of_an_outdoor_scan_differ_much_in_size_and_larger_ones_are_thinned_to_the_points_asked_for() -> None:
    tiles = ScanTiles(SCAN, voxel_m=0.3)
    counts = [int(tile[0][2]) for tile in tiles]
    assert max(counts) > 5 * min(counts)
    assert {int(value) for _, targets in tiles for value in targets.unique()} <= {GROUND, ABOVE, -100}
    thinned, again = (ScanTiles(SCAN, voxel_m=0.5, points=150) for _ in range(2))
    assert max(int(tile[0][2]) for tile in thinned) == thinned.points == 150
    assert all(torch.equal(one[0][0], two[0][0]) for one, two in zip(thinned, again, strict=True))


def test_a_missing_reader_is_named_with_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lazrs", None)
    with pytest.raises(UsageError, match="need laspy and lazrs") as caught:
        laser_scans.read_scan(SCAN)
    assert caught.value.remedies == ("pip install 'halopipe[scans]'",)


def test_files_that_are_no_scans_are_refused(tmp_path: Path, scan: Path) -> None:
    (tmp_path / "text.laz").write_text("no scan at all")
    with pytest.raises(CorruptFileError, match="no LAS or LAZ"):
        ScanTiles(tmp_path / "text.laz")
    with pytest.raises(MissingFileError, match="cannot read"):
        ScanTiles(tmp_path / "nothing.laz")
    with pytest.raises(UsageError, match="no tile for train"):
        ScanTiles(scan, voxel_m=0.5, least_voxels=10_000, part="train")
    with pytest.raises(UsageError, match="voxel_m is 0"):
        ScanTiles(scan, voxel_m=0)
