"""GraphSAGE and GAT on sampled neighbours, for users: ``profiler.models.graphs:sage`` and ``gat``, and their layers.

They are an extra's (``profiler.extras.sampled_graphs``).
"""

from __future__ import annotations

from planner.ir.extras import public

__getattr__, __dir__ = public(__name__)
