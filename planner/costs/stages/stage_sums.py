"""What computing takes on one rank of a stage: running sums over layers, read exactly or as a lower bound.

    F     forward
    B     backward; where activations are computed again, F once more
    I, W  the halves of a backward, for inputs and for weights; I has what B has to compute again
    adds  what a B or a W takes longer that finds gradients to add to

Exactly (``action_s``): the layers of a stage and the action are known.  At least: whatever halves the schedule makes,
``path_back_s`` is what a gradient passes through on its way to the stage before, ``whole_back_s`` all of a backward.
What corrections add to layers that ranks share is in the sums (``PriceBook.sums``); the executor's overhead and what
ranks exchange are added where an action (``action_costs``) or a bound (``stage_bound``) is put together.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from planner.costs.layers.cost_table import Array, Run, SizeTable, running, span
from planner.ir.schedule import Op


@dataclass(frozen=True, slots=True, eq=False)
class StageSums:
    """Running sums over the layers of a graph, on one kind of device at one number of samples."""

    forward_s: Array
    backward_s: Array
    backward_input_s: Array
    backward_weight_s: Array
    accumulate_s: Array

    @classmethod
    def of(cls, table: SizeTable, accumulate_s: Array, recompute: bool) -> StageSums:
        """Of a stage that computes its activations again or not."""
        again = table.forward_s if recompute else np.zeros_like(table.forward_s)
        return cls(
            table.forward_s,
            table.backward_s + again,
            table.backward_input_s + again,
            table.backward_weight_s,
            accumulate_s,
        )

    def action_s(self, op: Op, runs: Iterable[Run], accumulates: bool) -> float:
        """An action of a stage with the layers of ``runs``, on gradients that are there already or not."""
        sums = {
            Op.FORWARD: self.forward_s,
            Op.BACKWARD: self.backward_s,
            Op.BACKWARD_INPUT: self.backward_input_s,
            Op.BACKWARD_WEIGHT: self.backward_weight_s,
        }
        adds = accumulates and op in (Op.BACKWARD, Op.BACKWARD_WEIGHT)
        return span(sums[op], runs) + (span(self.accumulate_s, runs) if adds else 0.0)

    def path_back_s(self, splits: bool, accumulates: bool = False) -> Array:
        """The least B, or I where backwards may be split: layer by layer the lesser, as a running sum."""
        whole_s = self.backward_s + self.accumulate_s if accumulates else self.backward_s
        return _lesser(whole_s, self.backward_input_s) if splits else whole_s

    def whole_back_s(self, splits: bool) -> Array:
        """The least B, or I and W where backwards may be split; on gradients that are not there yet."""
        halves_s = self.backward_input_s + self.backward_weight_s
        return _lesser(self.backward_s, halves_s) if splits else self.backward_s


def _lesser(one: Array, two: Array) -> Array:
    return running(np.minimum(np.diff(one), np.diff(two)))
