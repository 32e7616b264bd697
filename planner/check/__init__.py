"""The independent checker: is a plan whole, legal, and what it says it is?  Shares no code with solvers.

Read ``verdict``, which asks the others; ``coverage`` says what is checked of each field.  Without a profile:
``structure``, ``statements``, ``request`` and ``order``.  With one, ``recompute`` goes through the step and the memory.
"""

from __future__ import annotations

from planner.check.coverage import needs_profile, not_checked
from planner.check.verdict import check

__all__ = ["check", "needs_profile", "not_checked"]
