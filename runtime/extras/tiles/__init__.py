"""Fused tiles (:mod:`planner.extras.tiles`) on a rank.

Modules:

    stage    Runs layers of a divided stage in blocks: each rank through a whole block, tile by tile, without exchanges
             inside
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from runtime.extra import RuntimeExtra

if TYPE_CHECKING:
    from collections.abc import Sequence

    from planner.ir.graph import Graph
    from planner.ir.plan import Block
    from runtime.extras.tiles.stage import MakeFunction
    from runtime.spatial import DividedStage
    from runtime.stage.cut import StageFunction


class TiledStages(RuntimeExtra):
    """Stages in blocks."""

    def stage_in_blocks(
        self,
        make: MakeFunction,
        training: StageFunction,
        outputs: tuple[str, ...],
        graph: Graph,
        layers: Sequence[str],
        blocks: Sequence[Block],
        divided: DividedStage,
    ) -> StageFunction:
        from runtime.extras.tiles.stage import in_blocks

        return in_blocks(make, training, outputs, graph, layers, blocks, divided)


EXTRA = TiledStages()
