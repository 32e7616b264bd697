"""Fused tiles (:mod:`planner.extras.tiles`) on a rank.

Modules:

    stage    Runs layers of a divided stage in blocks: each rank through a whole block, tile by tile, without exchanges
             inside
"""

from __future__ import annotations

HOOKS = {"stage functions": {"blocks": "runtime.extras.tiles.stage:in_blocks"}}
