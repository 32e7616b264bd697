"""What a stage costs.

``stage_sums`` says what computing takes, once for all: ``action_costs`` reads it exactly, for the actions of a plan,
and ``stage_bound`` as a lower bound, for any layers on any group.  The same for layers with layouts of their own is in
``layouts`` and ``stage_cost``; around them ``placement`` (where stages lie), ``gradient_overlap`` (sums of gradients),
``input_pipeline``, and ``coverage`` (what was not measured).

Besides:

    blocks         What a stage of a forward plan costs whose layers are run in blocks (:class:`planner.ir.plan.Block`)
    shared_bound   What a stage costs at least on a group of devices, whatever the shares of its members are
    shared_times   What members of a group take for any number of samples, and the shares with the least largest time of
                   a member
"""

from __future__ import annotations

__all__: list[str] = []
