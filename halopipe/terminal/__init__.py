"""What a person sees: tables, progress, units, suggestions; and how a verb ends."""

from __future__ import annotations

__all__: list[str] = []
