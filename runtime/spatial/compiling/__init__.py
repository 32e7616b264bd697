"""Divided stages under torch.compile: collectives that the compiler sees."""

from __future__ import annotations

__all__: list[str] = []
