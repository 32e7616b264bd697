"""Sites of point clouds (active voxels), which the ranks of a stage share out by owner, as each batch has them.

Which layers are over sites, and who may share them, is in :mod:`planner.layers`; who owns which, :mod:`planner.sites`.
Here is what that costs a plan.

Modules:

    exchanges      What ranks that share sites exchange inside a stage: rows beside their own, and what is known of
                   whole samples
    preparations   What hosts find and make of coordinates, before the program and in it
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from planner.ir.planner_extra import PlannerExtra

if TYPE_CHECKING:
    from planner.costs.stages.input_pipeline import Preparations
    from planner.ir.planner_extra import StageExchanges
    from planner.ir.profile import Profile


class Sites(PlannerExtra):
    """What it costs to share out sites."""

    def stage_exchanges(self, profile: Profile) -> StageExchanges | None:
        from planner.extras.sites.exchanges import exchanges_of

        return exchanges_of(profile)

    def preparations(self, profile: Profile) -> Preparations:
        from planner.extras.sites.preparations import SitePreparations

        return SitePreparations(profile)


EXTRA = Sites()
