"""What a stage costs.

``stage_sums`` says what computing takes, once for all: ``action_costs`` reads it exactly, for the actions of a plan,
and ``stage_bound`` as a lower bound, for any layers on any group.  The same for layers with layouts of their own is in
``layouts`` and ``stage_cost``; around them ``placement`` (where stages lie), ``gradient_overlap`` (sums of gradients),
``input_pipeline``, and ``coverage`` (what was not measured).
"""

from __future__ import annotations

__all__: list[str] = []
