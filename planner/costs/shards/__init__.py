"""What each rank of a group has of a layer: device meshes, boxes, sharding specs and partial sums.

Modules:

    boxes          Boxes as arrays: ``[..., dims, 2]``, start and stop in the last axis
    contraction    Convolutions and linear layers over channels and filters: who contracts what (Dryden et al., SC 2019)
    device_mesh    How the ranks of a group may be laid out as a grid over the dims of a layer, and how much each rank
                   takes
    partial_sums   Sums over ranks that boxes do not show
    sharding_spec  The boxes of a layer under each of many sharding specs: what every rank makes, holds, reads and uses
    tiles          Layers of a block under each of its tiles, and what a layer of a forward pass needs while it runs
"""

from __future__ import annotations

__all__: list[str] = []
