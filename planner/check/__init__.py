"""The independent checker: is a plan whole, legal, and what it says it is?  Shares no code with solvers and simulator.

Read ``verdict``, which asks the others; ``coverage`` says what is checked of each field.  Without a profile:
``structure``, ``statements``, ``request`` and ``order``.  With one, ``recompute`` goes through the step (what
``action_times`` say, in the order of ``events``) and the ``memory`` (what ``stages`` hold, as high as ``stage_memory``
says), at prices that are given (``prices``, of token slices ``slices``); ``drawn`` is what only the simulator itself
can say again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from planner.ir.lazy import lazily

if TYPE_CHECKING:
    from planner.check.coverage import needs_profile, not_checked
    from planner.check.verdict import check

__all__ = ["check", "needs_profile", "not_checked"]

_HOMES = {"check": "verdict", "needs_profile": "coverage", "not_checked": "coverage"}
"""Imported when first used: a rank asks ``layouts`` alone, and needs no cost model."""

__getattr__ = lazily(__name__, _HOMES)
