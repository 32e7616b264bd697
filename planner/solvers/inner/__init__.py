"""The inner search: the best of a few options (layouts, recompute) for every layer of a stage, exactly."""

from __future__ import annotations

__all__: list[str] = []
