"""What each rank of a group has of a layer: device meshes, boxes, options, partial sums and shapes."""

from __future__ import annotations

__all__: list[str] = []
