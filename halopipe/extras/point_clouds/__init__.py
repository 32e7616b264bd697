"""Clouds to train on, for sparse networks; users have them as ``halopipe.data.point_clouds`` and ``.laser_scans``.

Modules:

    laser_scans   Tiles of a laser scan, voxel by voxel, with labels that follow from its geometry: ground, or above it
    solids        Surfaces of solids, each voxelised, to train on
"""

from __future__ import annotations

_HERE = "halopipe.extras.point_clouds"
HOOKS = {
    "halopipe.data": {name: f"{_HERE}.solids:{name}" for name in ("held_out_shapes", "shapes")},
    "halopipe.data.laser_scans": {"*": f"{_HERE}.laser_scans"},
    "halopipe.data.point_clouds": {"*": f"{_HERE}.solids"},
}
