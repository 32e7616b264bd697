"""Clouds to train on, for sparse networks; users have them as ``halopipe.data.point_clouds`` and ``.laser_scans``.

Modules:

    laser_scans   Tiles of a laser scan, voxel by voxel, with labels that follow from its geometry: ground, or above it
    solids        Surfaces of solids, each voxelised, to train on
"""

from __future__ import annotations

from typing import ClassVar

from halopipe.extra import FaceExtra

_SOLIDS = "halopipe.extras.point_clouds.solids"


class PointClouds(FaceExtra):
    """Clouds to train on."""

    public: ClassVar = {
        "halopipe.data": {
            name: f"halopipe.extras.point_clouds.solids:{name}" for name in ("held_out_shapes", "shapes")
        },
        "halopipe.data.laser_scans": {"*": "halopipe.extras.point_clouds.laser_scans"},
        "halopipe.data.point_clouds": {"*": "halopipe.extras.point_clouds.solids"},
    }


EXTRA = PointClouds()
