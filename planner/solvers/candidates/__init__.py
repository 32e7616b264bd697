"""Points of the searched space: what may be chosen, how it becomes a plan, and what the simulator says of it."""

from __future__ import annotations

__all__: list[str] = []
