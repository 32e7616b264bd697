"""The nouns that flow between profiler, planner and runtime: plain frozen dataclasses and two rules.

The rules are :func:`planner.ir.box.transfers` (what must move) and :func:`planner.ir.schedule.dependencies` (what must
come first).  Import from the module that defines a name: ``from planner.ir.box import transfers``.
"""

from __future__ import annotations

__all__: list[str] = []
