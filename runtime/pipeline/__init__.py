"""The pipeline: one rank's row of the program, its messages, its micro-batches."""

from __future__ import annotations

__all__: list[str] = []
