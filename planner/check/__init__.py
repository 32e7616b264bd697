"""The checker: whether a plan is legal, as it was asked for, and what the cost model forecasts of its decision.

    faults = illegal + not as asked + not of one mind + unequal to a new forecast     ``verdict.faults_of``

    illegal        stages, shares and layouts that do not cover the network            ``structure``
                   a program that skips something, or does not end                     ``order``
    not as asked   batch, schedules, dims, limits, side constraints                    ``request``
    of one mind    figures of the file that follow from others of it                   ``statements``
    forecast       |stated - forecast| beyond rounding, of steps, memory, rivals       ``prediction``

``coverage`` says of each field what is checked.  It shares no code with solvers.  That the cost model is right is what
``tests/oracles`` are for.
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
