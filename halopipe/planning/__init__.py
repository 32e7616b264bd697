"""From a model and a cluster to a plan, and questions about it."""

from __future__ import annotations

__all__: list[str] = []
