"""Sites of point clouds (active voxels), which the ranks of a stage share out by owner, as each batch has them.

Which layers are over sites, and who may share them, is in :mod:`planner.layers`; who owns which, :mod:`planner.sites`.
Here is what that costs a plan.

Modules:

    exchanges      What ranks that share sites exchange inside a stage: rows beside their own, and what is known of
                   whole samples
    preparations   What hosts find and make of coordinates, before the program and in it
"""

from __future__ import annotations

__all__: list[str] = []

HOOKS = {
    "exchanges in a stage": {"sites": "planner.extras.sites.exchanges:exchanges_of"},
    "inputs prepared ahead": {"sites": "planner.extras.sites.preparations:SitePreparations"},
}
