"""Our plans beside those of published planners, all under one simulator; and how long planning takes."""

from __future__ import annotations

__all__: list[str] = []
