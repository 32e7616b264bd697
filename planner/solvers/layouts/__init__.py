"""The best option (layout, recompute) of every layer of a stage, exactly.

A factor graph, eliminated or handed to a MILP solver.
"""

from __future__ import annotations

__all__: list[str] = []
