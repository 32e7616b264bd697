"""What the search for layouts takes a stage to hold: the oracle of its memory limits."""

from __future__ import annotations

from planner.costs.layers.cost_table import Array
from planner.costs.stages.stage_cost import StageCost


def stage_bytes(cost: StageCost, in_flight: int, state_per_parameter_byte: float) -> Array:
    """By rank: parameters, gradients, optimiser state, activations of ``in_flight`` micro-batches, workspace."""
    resident = cost.parameter_bytes * (2.0 + state_per_parameter_byte)
    return resident + in_flight * cost.saved_bytes + cost.transient_bytes + cost.workspace_bytes
