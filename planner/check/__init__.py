"""The independent checker: is a plan whole, legal, and what it says it is?  Shares no code with solvers or costs."""

from __future__ import annotations

from planner.check.verdict import check

__all__ = ["check"]
