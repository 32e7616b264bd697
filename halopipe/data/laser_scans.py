"""Tiles of a laser scan, for users; they are an extra's (``halopipe.extras.point_clouds``)."""

from __future__ import annotations

from planner.ir.extras import public

__getattr__, __dir__ = public(__name__)
