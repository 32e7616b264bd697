"""Corrections of a profile's costs: fitted to runs of plans, and applied."""

from __future__ import annotations

__all__: list[str] = []
