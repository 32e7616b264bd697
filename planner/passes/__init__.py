"""Passes over action lists: list in, list out.

``lower`` makes a schedule into a program with every message, reduction and update explicit; ``validate`` proves that a
program is complete, in order and free of deadlock.
"""

from __future__ import annotations

from planner.passes.lowering import lower
from planner.passes.validation import validate

__all__ = ["lower", "validate"]
