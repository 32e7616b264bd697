"""What a stage costs slice by slice: the sums of its layers' prices (``costs.layers.token_slices``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from planner.costs.cost_model import PriceBook
from planner.costs.layers.confidence import weakest
from planner.costs.layers.token_slices import SAVED, WORKSPACE
from planner.costs.stages.layouts import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD
from planner.costs.stages.stage_cost import LayerBytes, StageCost
from planner.costs.stages.stage_sums import with_recompute
from planner.ir.cluster import INTERPOLATED
from planner.ir.plan import Size, TokenSlice


def slice_cost(book: PriceBook, kind: str, layers: Sequence[int], size: TokenSlice, recompute: bool) -> StageCost:
    """A stage of one rank with the layers of these indices, for one slice of every micro-batch.

    Raises:
        MissingMeasurementError: the profile says nothing about so many samples.
    """
    chosen = list(layers)
    table = book.slices.table(kind, size)
    costs, received = table.costs[:, chosen], table.received[chosen]
    seconds = costs[:SAVED].sum(axis=1)
    backward, of_input = with_recompute(seconds[BACKWARD], seconds[BACKWARD_INPUT], seconds[FORWARD] * recompute)
    parameters = np.diff(book.tables.graph.parameter_bytes)[chosen]
    update = float(np.diff(book.tables.parameters(kind).update_s)[chosen].sum())
    accumulate = float(np.diff(book.accumulate_s(kind, shared=False))[chosen].sum())
    kept = float(costs[SAVED].sum() + received.sum())
    one = np.array([1.0])
    return StageCost(
        forward_s=seconds[FORWARD] * one,
        backward_s=backward * one,
        backward_input_s=of_input * one,
        backward_weight_s=seconds[BACKWARD_WEIGHT] * one,
        paced_forward_s=float(seconds[FORWARD]),
        paced_backward_s=float(backward),
        paced_backward_input_s=float(of_input),
        paced_backward_weight_s=float(seconds[BACKWARD_WEIGHT]),
        paced_update_s=update,
        paced_accumulate_s=accumulate,
        exchange_forward_s=0.0,
        exchange_backward_s=0.0,
        reduction_s=0.0,
        update_s=update * one,
        accumulate_s=accumulate * one,
        saved_bytes=(float(received.sum()) if recompute else kept) * one,
        transient_bytes=(float(costs[SAVED].sum()) if recompute else 0.0) * one,
        workspace_bytes=float(costs[WORKSPACE].max(initial=0.0)) * one,
        parameter_bytes=float(parameters.sum()) * one,
        by_layer=LayerBytes(
            tuple(chosen),
            costs[SAVED][:, None],
            costs[WORKSPACE][:, None],
            received[:, None],
            parameters[:, None],
            np.full((len(chosen), 1), size.samples),
            table.share[chosen][:, None],
            np.zeros((len(chosen), 1)),
        ),
        standing_bytes=np.zeros(1),
        moved_bytes=0.0,
        evidence=weakest((INTERPOLATED, *(book.tables.at(kind, size.samples).evidence[at] for at in chosen))),
    )


def slice_costs(
    book: PriceBook, kind: str, layers: Sequence[int], sizes: Sequence[TokenSlice], recompute: bool
) -> Mapping[Size, StageCost]:
    """The same for each of ``sizes``."""
    return {size: slice_cost(book, kind, layers, size, recompute) for size in dict.fromkeys(sizes)}
