"""The outdoor scan of the tests as voxels."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

SCAN = Path(__file__).parents[1] / "tests" / "data" / "scans" / "lone-star.laz"
VOXEL_M = 0.143


def scan_coordinates(voxel_m: float = VOXEL_M, every: int = 1) -> Tensor:
    """int32 [N, 4]: sample 0 and the distinct voxels, ascending, of every so-many-th point of the scan.

    Coordinates start at 0.  Needs laspy and lazrs.
    """
    import laspy

    file = laspy.read(SCAN)
    points = np.stack([file.x, file.y, file.z], axis=1)[::every]
    places = np.unique(np.floor((points - points.min(axis=0)) / voxel_m).astype(np.int32), axis=0)
    coordinates = np.zeros((len(places), 4), dtype=np.int32)
    coordinates[:, 1:] = places
    return torch.from_numpy(coordinates)
