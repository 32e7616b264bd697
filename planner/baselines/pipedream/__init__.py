"""PipeDream (Narayanan et al., SOSP 2019): the shortest slowest stage of a pipeline with replicated stages.

Modules:

    format    PipeDream's ``graph.txt``: layers with their measured costs for one mini-batch, and edges; and the states
              to cut at
    planner   PipeDream's planner: the shortest slowest stage of a pipeline with replicated stages, flat or level by
              level
    solver    PipeDream's planner (Narayanan et al., SOSP 2019): the shortest slowest stage of a replicated pipeline
"""

from __future__ import annotations

__all__: list[str] = []
