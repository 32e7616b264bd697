"""Clouds to train on, for sparse networks; users have them as ``halopipe.data.point_clouds`` and ``.laser_scans``.

Modules:

    laser_scans   Tiles of a laser scan, voxel by voxel, with labels that follow from its geometry: ground, or above it
    solids        Surfaces of solids, each voxelised, to train on
"""

from __future__ import annotations

_HERE = "halopipe.extras.point_clouds"
_SCANS = ("ABOVE", "GROUND", "IGNORED", "ScanTiles", "Tile", "height_above_ground", "read_scan")
_SOLIDS = ("SOLIDS", "SPREAD", "VOXELS", "Shapes")
HOOKS = {
    "halopipe.data": {name: f"{_HERE}.solids:{name}" for name in ("held_out_shapes", "shapes")},
    "halopipe.data.laser_scans": {name: f"{_HERE}.laser_scans:{name}" for name in _SCANS},
    "halopipe.data.point_clouds": {name: f"{_HERE}.solids:{name}" for name in _SOLIDS},
}

__all__: list[str] = []
