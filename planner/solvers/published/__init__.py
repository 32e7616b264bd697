"""Between our problems and the published planners: a problem as their instance, their answer as a candidate."""

from __future__ import annotations

__all__: list[str] = []
