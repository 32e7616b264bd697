"""How the ranks of a group may divide a layer, and what they sum; the boxes are in ``planner.layers.shards``.

Modules:

    device_mesh    How the ranks of a group may be laid out as a grid over the dims of a layer, and how much each rank
                   takes
    partial_sums   Sums over ranks that boxes do not show
    sharding_spec  How a layer may be run on a group of ranks, and what a rank's part of it reads
    tiles          What a layer of a forward pass needs while it runs: of a block, for one tile
"""

from __future__ import annotations

__all__: list[str] = []
