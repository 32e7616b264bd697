"""How large the code is, what its names mean, and how far a reader walks through it."""

from __future__ import annotations

__all__: list[str] = []
