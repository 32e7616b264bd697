"""From gradients to new parameters: sums over ranks, ties, clipping, optimisers whole and divided, and their state."""

from __future__ import annotations

__all__: list[str] = []
