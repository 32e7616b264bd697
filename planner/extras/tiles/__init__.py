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

from typing import TYPE_CHECKING

from planner.ir.planner_extra import PlannerExtra

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from planner.costs.shards.sharding_spec import ShardingSpec
    from planner.costs.stages.layouts import LayoutPrices
    from planner.costs.stages.stage_cost import StageCost
    from planner.ir.graph import Graph
    from planner.ir.plan import Block, Decision
    from planner.layers.division import Division
    from planner.solvers.best_first.continued import ContinuedSearch


class TilePlans(PlannerExtra):
    """Forward plans of layers in blocks."""

    def division_in_blocks(self, graph: Graph, plain: Division, blocks: Sequence[Block]) -> Division:
        from planner.extras.tiles.division import in_blocks

        return in_blocks(graph, plain, blocks)

    def cost_in_blocks(
        self, prices: LayoutPrices, chosen: Mapping[int, ShardingSpec], blocks: Sequence[Block]
    ) -> StageCost:
        from planner.extras.tiles.prices import stage_cost_in_blocks

        return stage_cost_in_blocks(prices, chosen, blocks)

    def faults(self, decision: Decision, graph: Graph | None) -> Iterable[str]:
        from planner.extras.tiles.refusals import form_faults

        return form_faults(decision, graph)

    def layer_faults(self, decision: Decision, graph: Graph) -> Iterable[tuple[str, str]]:
        from planner.extras.tiles.refusals import layer_faults

        return layer_faults(decision, graph)

    def searches(self) -> Sequence[ContinuedSearch]:
        from planner.extras.tiles.search import SEARCH

        return (SEARCH,)


EXTRA = TilePlans()
