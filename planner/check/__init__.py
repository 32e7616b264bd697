"""The checker: whether a plan is legal, as it was asked for, and what the cost model forecasts of its decision.

Read ``verdict``, which asks the others; ``coverage`` says what is checked of each field.  Legal: ``structure`` and
``order``; as asked: ``request``; of one mind: ``statements``; with a profile, equal to a new forecast: ``prediction``.
It shares no code with solvers.  That the cost model is right is what ``tests/oracles`` are for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from planner.ir.lazy import lazily

if TYPE_CHECKING:
    from planner.check.coverage import needs_profile, not_checked

__all__ = ["needs_profile", "not_checked"]

_HOMES = {"needs_profile": "coverage", "not_checked": "coverage"}
"""Imported when first used: a rank asks ``structure`` alone, and needs no cost model."""

__getattr__ = lazily(__name__, _HOMES)
