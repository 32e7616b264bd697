"""Operators of dense networks: kernels, halves of a backward, evaluation mode, recurrent ones."""

from __future__ import annotations

__all__: list[str] = []
