"""Who owns which sites of a micro-batch of point clouds: blocks, their one order, intervals of it, and their balance.

Import from the module that defines a name: ``from planner.sites.arrangement import arrange``.
"""

from __future__ import annotations

__all__: list[str] = []
