"""Parts of layers, measured at their own shapes."""

from __future__ import annotations

__all__: list[str] = []
