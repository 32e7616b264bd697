"""The integer program over spans behind :mod:`planner.solvers.ilp.solver`: its tables, its rows, its objective."""

from __future__ import annotations

__all__: list[str] = []
