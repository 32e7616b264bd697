"""Token slices (TeraPipe; Li et al., ICML 2021): sequences cut along time, an axis with an order, in training steps.

The plan's field is ``token_slices``; the axis is ``time`` of ``--allow``.

Modules:

    axes        Where tokens lie in a graph, and how slices divide its layers
    order       The order of token slices: that of micro-batches, a longer warm-up, backwards turned round
    prices      What layers cost slice by slice
    refusals    What token slices cannot be combined with
    search      Plans with token slices: stages, micro-batches and lengths of slices, after the best plan without
"""

from __future__ import annotations

HOOKS = {
    "ordered axes": {"time": "planner.extras.token_slices.axes:along_time"},
    "part orders": {"time": "planner.extras.token_slices.order:in_slices"},
    "part prices": {"time": "planner.extras.token_slices.prices:SlicePrices"},
    "part shapes": {"time": "planner.extras.token_slices.prices:part_shapes"},
    "searches": {"time": "planner.extras.token_slices.search:SEARCH"},
    "refusals": {"time": "planner.extras.token_slices.refusals:of_request"},
    "faults": {"time": "planner.extras.token_slices.refusals:faults"},
    "unmet": {"time": "planner.extras.token_slices.refusals:unmet"},
}
