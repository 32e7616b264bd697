"""What few models need: a folder each, which the profiler does without (:mod:`planner.ir.extras`).

Modules:

    sampled_graphs   Graph networks on sampled neighbours: seeds are their samples
"""

from __future__ import annotations

__all__: list[str] = []
