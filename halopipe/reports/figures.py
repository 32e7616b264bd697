"""Figures of plans and runs, for users; they are an extra's (``halopipe.extras.figures``)."""

from __future__ import annotations

from planner.ir.extras import public

__getattr__ = public(__name__)
