"""Stages of a captured model as functions: cut out, run forward and backward in halves, on versions, with draws."""

from __future__ import annotations

__all__: list[str] = []
