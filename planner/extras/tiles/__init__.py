"""Fused tiles: blocks of layers that each rank of a forward plan runs through without exchanges, part by part.

Halos are fused over several layers, and an image that is too large for a device's memory fits tile by tile (Alwani et
al., "Fused-layer CNN accelerators", MICRO 2016).  The plan's field is ``stages[].blocks``
(:class:`planner.ir.plan.Block`).

Modules:

    division     What a stage does whose layers are run in blocks: the tiles of a rank
    prices       What a stage of a forward plan costs whose layers are run in blocks
    refusals     Which layers may be run in tiles, and in blocks at all; what is refused, and why
    search       Forward plans in blocks, after the search without
    workspace    What a layer of a forward pass needs while it runs: of a block, for one tile
"""

from __future__ import annotations

HOOKS = {
    "divisions": {"blocks": "planner.extras.tiles.division:in_blocks"},
    "stage costs": {"blocks": "planner.extras.tiles.prices:stage_cost_in_blocks"},
    "faults": {"blocks": "planner.extras.tiles.refusals:form_faults"},
    "layer faults": {"blocks": "planner.extras.tiles.refusals:layer_faults"},
    "searches": {"blocks": "planner.extras.tiles.search:SEARCH"},
}
