"""Stages whose layers are divided along any dims: what moves between ranks inside a stage, and each rank's part.

Names are imported when they are first used: a rank whose plan divides no layer loads nothing of this.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from planner.ir.lazy import lazily

if TYPE_CHECKING:
    from runtime.spatial.blocks import in_blocks
    from runtime.spatial.compiling.collective import CollectivePeerGroup, Collectives, open_collectives
    from runtime.spatial.compiling.compiled import Compiler, compiled, refuse_draws, refuse_user_code
    from runtime.spatial.decompose import DividedStage, DrawnPlaces
    from runtime.spatial.deferred import DeferredGradients
    from runtime.spatial.empties import connected
    from runtime.spatial.exchange import PeerGroup
    from runtime.spatial.layer_shard import groups_in
    from runtime.spatial.parameters import ParameterPart, Parts, groups_of_parameters, parts_of, sliced
    from runtime.spatial.slices import SlicePeers, of_micro_batches

__all__ = [
    "CollectivePeerGroup",
    "Collectives",
    "Compiler",
    "DeferredGradients",
    "DividedStage",
    "DrawnPlaces",
    "ParameterPart",
    "Parts",
    "PeerGroup",
    "SlicePeers",
    "compiled",
    "connected",
    "groups_in",
    "groups_of_parameters",
    "in_blocks",
    "of_micro_batches",
    "open_collectives",
    "parts_of",
    "refuse_draws",
    "refuse_user_code",
    "sliced",
]

_HOMES = {
    "CollectivePeerGroup": "compiling.collective",
    "Collectives": "compiling.collective",
    "Compiler": "compiling.compiled",
    "DeferredGradients": "deferred",
    "DividedStage": "decompose",
    "DrawnPlaces": "decompose",
    "ParameterPart": "parameters",
    "Parts": "parameters",
    "PeerGroup": "exchange",
    "SlicePeers": "slices",
    "compiled": "compiling.compiled",
    "connected": "empties",
    "groups_in": "layer_shard",
    "groups_of_parameters": "parameters",
    "in_blocks": "blocks",
    "of_micro_batches": "slices",
    "open_collectives": "compiling.collective",
    "parts_of": "parameters",
    "refuse_draws": "compiling.compiled",
    "refuse_user_code": "compiling.compiled",
    "sliced": "parameters",
}

__getattr__ = lazily(__name__, _HOMES)
