"""The independent checker: is a plan whole, legal, and what it says it is?  Shares no code with solvers and simulator.

Read ``verdict``, which asks the others; ``coverage`` says what is checked of each field.  Without a profile:
``structure``, ``statements``, ``request`` and ``order``.  With one, ``recompute`` goes through the step (``events``)
and the ``memory``, at ``prices`` that are given; ``drawn`` is what only the simulator itself can say again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from planner.check.coverage import needs_profile, not_checked
    from planner.check.verdict import check

__all__ = ["check", "needs_profile", "not_checked"]


def __getattr__(name: str) -> Any:
    """Imported when first used: a rank asks ``layouts`` alone, and needs no cost model."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from planner.check import coverage, verdict

    return getattr(verdict if name == "check" else coverage, name)
