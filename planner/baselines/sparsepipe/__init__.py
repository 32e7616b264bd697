"""SparsePipe: PipeDream's pipeline on devices of several types."""

from __future__ import annotations

__all__: list[str] = []
