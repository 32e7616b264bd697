"""From a MODEL string to a module with example inputs and a loss."""

from __future__ import annotations

__all__: list[str] = []
