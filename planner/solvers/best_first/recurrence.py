"""What the step of a pipeline takes at least: a fold over its stages, from the last to the first.

    f_s, b_s   the shortest F and B of stage s;  w_s all its work;  u_s its reduction and update
    c_s        a message to the next stage, and C_s all M of them, on the channel or network card where most goes
    W_s        the most micro-batches that memory lets it keep
    x_s        what its sum of gradients keeps a network card busy

An F of stage s + 1 follows an F of s, a B of s follows one of s + 1, a channel carries one message at a time, and
micro-batch m + W_s enters when m has left, the last one after M - 1 others, and the first one comes back before
M - 1 others, so

    E(s) = f_s + c_s + E(s + 1) + c_s + b_s                                      one micro-batch there and back
    H(s) = max(c_s + G(s + 1) + c_s, C_s + E(s + 1) + c_s, c_s + E(s + 1) + C_s)
    G(s) = max(w_s, f_s + H(s) + b_s,                                            from the first F of s to its last B
               ceil(M / W_s) E(s), E(s) + (M - 1) max(f_s, b_s))
    S(s) = x_s + max(G(s), f_s + c_s + S(s + 1))                                 ... until cards have carried the sums
    V(s) = max(G(s) + u_s, S(s), f_s + c_s + V(s + 1))                           from the first F of s to the end

hold for every synchronous schedule (with backwards in two halves, b is the first and w without the second), the last
term of G where each rank has samples of all M micro-batches.  (For
u = 0, c alike and no limits V(0) is max_s [R_s + M (f_s + b_s)], R_s the f, b and 2 c of the stages before.)  Where
stage s + 1 need not read from s, the step as a whole is bounded alone                             ``Labels.free``

All is elementwise, on arrays that broadcast: a table fills one entry for each stage that may come first and whatever it
tells apart behind it.  What a table tells apart, and which numbers it puts in, is its own matter: exact ones, or the
least over groups of devices, over shares of samples, over hosts, over layouts (``bound``, ``share_bound``,
``counts_table``, ``layout_chains``); or those under a given schedule, which has stages wait (``waits_of``): to
rank pipelines by (``first_answers``), or to bound those of 1F1B alone.
``leaf_bound`` is no second recurrence: it replays complete pipelines, action by action.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from planner.costs.layers.cost_table import Array
from planner.costs.stages.stage_bound import BoundedStages
from planner.solvers.best_first.counts_columns import ColumnStages
from planner.solvers.best_first.graph_cuts import Flags, Numbers
from planner.solvers.best_first.message_bound import HandoverBound


@dataclass(frozen=True, slots=True, eq=False)
class LaidOutStages:
    """Stages whatever the layouts of their layers, in seconds; see ``BoundedStages``.

    Attributes:
        back: what is left of the least F and B together.
        all_work: with the sum of gradients and the update.
    """

    head: Array
    back: Array
    work: Array
    all_work: Array
    tail: float = 0.0


AnyStages = BoundedStages | ColumnStages | LaidOutStages


@dataclass(frozen=True, slots=True, eq=False)
class Labels:
    """Bounds of pipelines, elementwise, in seconds; infinite where there is none.

    Attributes:
        trip: E: one micro-batch, from its F on the first stage to its B there.
        end: G: from the first F of the first stage to its last B.
        total: V: from the first F of the first stage to the end of the step.
        free: the step, whenever the first stage starts: stages that read nothing from it need not wait for it.
        sums: S: from the first F of the first stage until network cards have carried the sums of gradients, of stages
            that have to wait for one another.
    """

    trip: Array
    end: Array
    total: Array
    free: Array
    sums: Array


def rounds_of(num_microbatches: int, window: Numbers) -> Array:
    """How often a micro-batch has to go there and back, one after another, if a stage holds so many: ceil(M / W)."""
    return np.asarray(-(-num_microbatches // np.maximum(window, 1)))


def alone(stage: AnyStages, rounds: Array, card_s: Array | float) -> Labels:
    """The last stage of a pipeline.

    Args:
        rounds: :func:`rounds_of` its window.
        card_s: x: what its sum of gradients keeps a network card busy.
    """
    trip = stage.head + stage.back
    end = np.maximum(stage.work, rounds * trip)
    total = np.maximum(end, stage.all_work) + stage.tail
    return Labels(trip, end, total, total, end + card_s)


def across(labels: Labels, message: HandoverBound) -> Labels:
    """Pipelines as the stage before sees them: from the end of its F to the start of its B."""
    trip = message.path + labels.trip + message.back
    one_way = np.maximum(message.load_there + message.back, message.there + message.load_back)
    end = np.maximum(message.there + (labels.end + message.back), labels.trip + one_way)
    end = np.maximum(end, np.where(np.isfinite(labels.trip), message.load_both, np.inf))
    return Labels(trip, end, message.there + labels.total, labels.free, message.there + labels.sums)


def others_of(num_microbatches: int, forward_s: Array, backward_s: Array) -> Array:
    """What a stage does beside one micro-batch there and back: the other F before it leaves, or the other B behind.

    Of micro-batches that each of its ranks has samples of: a smaller last one may leave out some.

    Args:
        forward_s, backward_s: the shortest F and B.
    """
    return (num_microbatches - 1) * np.maximum(forward_s, backward_s)


def waits_of(stage: AnyStages, trip_s: Array, ahead: int, on_last_s: Array) -> Array:
    """How long a stage waits for its first gradient, and for the last one behind its last F, beside its work.

    What 1F1B adds where micro-batches are more than the window:  max(0, D - (W - 1) f) + max(0, D - (W - 1) b)

    Args:
        trip_s: D: of a micro-batch, from the end of its F to the start of its B.
        ahead: W - 1: micro-batches that it keeps beside one.
        on_last_s: of more F, for which the last stage has that of its first B wait.
    """
    first_s = np.maximum(0.0, trip_s + on_last_s - ahead * stage.head)
    last_s = np.maximum(0.0, trip_s - ahead * stage.back)
    return np.asarray(first_s + last_s)


def prepend(
    stage: AnyStages,
    behind: Labels,
    rounds: Array,
    card_s: Array | float,
    reads: Flags,
    returns: Flags,
    others_s: Array | float = 0.0,
) -> Labels:
    """A stage and the pipelines behind it, as it sees them (:func:`across`).

    Args:
        rounds, card_s: as of :func:`alone`.
        reads: whether the stage behind certainly reads from this one; returns: and a gradient comes back.
        others_s: :func:`others_of` it, or less.
    """
    trip = stage.head + _where(returns, behind.trip) + stage.back
    waits = _where(returns, stage.head + behind.end + stage.back)
    end = np.maximum(np.maximum(stage.work, waits), np.maximum(rounds * trip, trip + others_s))
    total = np.maximum(end, stage.all_work) + stage.tail
    total = np.maximum(total, _where(reads, stage.head + behind.total))
    sums = np.maximum(end, _where(returns, stage.head + behind.sums)) + card_s
    total = np.maximum(total, sums)
    return Labels(trip, end, total, np.maximum(total, behind.free), sums)


def _where(flags: Flags, seconds: Array) -> Array:
    """Seconds where flags are set, else none."""
    return seconds if flags.all() else np.where(flags, seconds, 0.0)


@dataclass(frozen=True, slots=True, eq=False)
class Before:
    """The first stages of a pipeline, as the stage behind them sees them, in seconds.

    Attributes:
        start: before its first F; all_there: until its last input can be there.
        back: behind its last B, the rest of the way back; all_back: behind its first.
        both: the whole step, where inputs and gradients share a wire.
        sums: that cards are busy with sums of gradients which wait for it.
    """

    start: Array
    all_there: Array
    back: Array
    all_back: Array
    both: Array
    sums: Array


def joined(before: Before, stage: AnyStages, labels: Labels, rounds: Array) -> Array:
    """What pipelines take whose stages are ``before``, a stage, and those behind it with it: ``labels``.

    Args:
        rounds: of the windows that those before leave it.
    """
    end = np.maximum(labels.end, rounds * labels.trip)
    tail = np.maximum(stage.tail, before.back)
    bounds: Array = np.maximum.reduce(
        [
            before.start + np.maximum(end + tail, labels.total),
            labels.free,
            before.all_there + labels.trip + before.back,
            before.start + labels.trip + before.all_back,
            before.both,
            before.start + labels.sums + before.sums,
        ]
    )
    return bounds
