"""What each rank of a group has of a layer: device meshes, boxes, options and partial sums."""

from __future__ import annotations

__all__: list[str] = []
