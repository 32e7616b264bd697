"""What the actions of a stage take: the one place where that is written, read exactly or as a lower bound.

    F     forward
    B     backward; where activations are computed again, F of those layers once more
    I, W  the halves of a backward, for inputs and for weights; I has what B has to compute again
    adds  what a B or a W takes longer that finds gradients to add to
    exchange   of statistics, halos and other parts of tensors inside a stage: in F, in B and in I, not in W

Exactly (``PassTimes``): the layers of a stage and the action are known.  At least (``LeastPasses``): whatever halves
the schedule makes, of every stretch of layers; all bounds are made of these.  What corrections add to layers that ranks
share is in both (``CostModel.sums``).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from operator import add
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import ArrayLike

from planner.costs.layers.cost_table import Array, Run, SizeTable, running
from planner.ir.schedule import ADDS_GRADIENTS, Op

PASSES = (Op.FORWARD, Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)
_PLACE = {op: place for place, op in enumerate(PASSES)}

RecomputeMask = bool | tuple[int, ...]
"""Which layers' activations are computed again: those of all, of none, or of these by index in the graph."""

T = TypeVar("T", float, Array)


def least_backward_s(whole_s: ArrayLike, input_s: ArrayLike, weight_s: ArrayLike, splits: bool) -> Array:
    """The least that all of a backward takes, elementwise: B, or I and W where backwards may be split."""
    return np.asarray(
        np.minimum(whole_s, np.asarray(input_s) + np.asarray(weight_s)) if splits else whole_s, dtype=np.float64
    )


@dataclass(frozen=True, slots=True, eq=False)
class PassTimes:
    """What F, B, I and W of a stage take for one micro-batch, in seconds.

    Attributes:
        compute_s: of each of the four, by member of the stage; one for all where ranks go at one pace, layer by layer.
        accumulate_s: by member, what a B or W takes longer that finds gradients to add to.
        exchange_forward_s, exchange_backward_s: in which ranks exchange; they end together.
    """

    compute_s: tuple[tuple[float, ...], ...]
    accumulate_s: tuple[float, ...]
    exchange_forward_s: float
    exchange_backward_s: float

    def action_s(self, op: Op, member: int, accumulates: bool) -> float:
        """An action on the stage's rank number ``member``: after an exchange, of the slowest one."""
        seconds = self.compute_s[_PLACE[op]]
        if accumulates and op in ADDS_GRADIENTS:
            seconds = tuple(map(add, seconds, self.accumulate_s))
        waits_s = self.exchange_s(op)
        return max(seconds) + waits_s if waits_s or len(seconds) == 1 else seconds[member]

    def exchange_s(self, op: Op) -> float:
        """The part of an action in which ranks exchange: of F, of B and of I."""
        if op is Op.FORWARD:
            return self.exchange_forward_s
        return self.exchange_backward_s if op in (Op.BACKWARD, Op.BACKWARD_INPUT) else 0.0


class LeastPasses(NamedTuple):
    """What passes take at least, whatever halves of backwards a schedule makes: running sums over layers, or by layer.

    Attributes:
        forward_s: F.
        back_s, later_back_s: what a gradient passes through on its way to the stage before: layer by layer the lesser
            of B, and of I where backwards may be split; the same where gradients are there to add to.
        whole_s, later_whole_s: all of a backward, alike.
    """

    forward_s: Array
    back_s: Array
    later_back_s: Array
    whole_s: Array
    later_whole_s: Array

    def works_s(self, count: int, smaller: LeastPasses | None = None) -> tuple[Array, Array]:
        """Of ``count`` micro-batches, and of a ``smaller`` last one: from the first F to the last B or I; all."""
        back_s = count * self.forward_s + self.back_s + (count - 1) * self.later_back_s
        whole_s = count * self.forward_s + self.whole_s + (count - 1) * self.later_whole_s
        if smaller is None:
            return back_s, whole_s
        last_s = smaller.forward_s + smaller.later_back_s
        whole_last_s = smaller.forward_s + smaller.later_whole_s
        return back_s + last_s, whole_s + whole_last_s


@dataclass(frozen=True, slots=True, eq=False)
class StageSums:
    """What passes take on one kind of device at one number of samples: running sums over the layers of a graph.

    Attributes:
        passes: ``[4, layers + 1]``, seconds of :data:`PASSES`.
        accumulate_s: ``[layers + 1]``, of adding gradients.
    """

    passes: Array
    accumulate_s: Array

    @classmethod
    def of(cls, table: SizeTable, accumulate_s: Array, recompute: RecomputeMask) -> StageSums:
        """Of a stage that recomputes the activations of ``recompute``."""
        whole, of_input = with_recompute(table.backward_s, table.backward_input_s, of_those(table.forward_s, recompute))
        return cls(np.array([table.forward_s, whole, of_input, table.backward_weight_s]), accumulate_s)

    def passes_s(self, runs: Iterable[Run]) -> tuple[float, ...]:
        """Of each of :data:`PASSES`, of a stage with the layers of ``runs``, on gradients that are not there yet."""
        stretches = (self.passes[:, last] - self.passes[:, first] for first, last in runs)
        return tuple(sum(stretches, np.zeros(len(PASSES))).tolist())

    def least(self, trains: bool, splits: bool) -> LeastPasses:
        """Of a stage that has backwards, and may have them in halves; running sums."""
        forward, back, *halves = self.passes
        whole = back
        adds = self.accumulate_s
        later = back + self.accumulate_s
        if splits:
            of_whole, with_adds, of_input, of_weight = map(np.diff, (back, later, *halves))
            back, later = (running(np.minimum(each, of_input)) for each in (of_whole, with_adds))
            whole = running(least_backward_s(of_whole, of_input, of_weight, splits))
        return LeastPasses(forward, *(trains * sums for sums in (back, later, whole, whole + adds)))


def of_those(sums: Array, recompute: RecomputeMask) -> Array:
    """Of a running sum over layers, what is of those that are computed again."""
    if isinstance(recompute, bool):
        return sums if recompute else np.zeros_like(sums)
    by_layer = np.diff(sums)
    places = list(recompute)
    counted = np.zeros_like(by_layer)
    counted[places] = by_layer[places]
    return running(counted)


def with_recompute(backward: T, backward_input: T, repeated: T) -> tuple[T, T]:
    """B and I where what takes ``repeated`` is computed once more before them."""
    return backward + repeated, backward_input + repeated
