"""What the step of a pipeline takes at least: a fold over its stages, from the last to the first.

    f_s, b_s   the shortest F and B of stage s;  w_s all its work;  u_s its reduction and update
    c_s        a message to the next stage, and C_s all M of them, on the channel or network card where most goes
    W_s        the most micro-batches that memory lets it keep
    x_s        what its sum of gradients keeps a network card busy

An F of stage s + 1 follows an F of s, a B of s follows one of s + 1, a channel carries one message at a time, and
micro-batch m + W_s enters when m has left, the last one after M - 1 others, and the first one comes back before
M - 1 others, so

    E(s) = f_s + c_s + E(s + 1) + c_s + b_s                                  ``round_trip_s``: of one micro-batch
    H(s) = max(c_s + G(s + 1) + c_s, C_s + E(s + 1) + c_s, c_s + E(s + 1) + C_s,              what :func:`across`
               C_s + C_s where both directions share a wire or a card)                        makes of the next G
    G(s) = max(w_s, f_s + H(s) + b_s,                  ``last_backward_s``: from the first F of s to its last B
               ceil(M / W_s) E(s), E(s) + (M - 1) max(f_s, b_s))
    S(s) = x_s + max(G(s), f_s + c_s + S(s + 1))                    ``sums_s``: ... until cards have carried the sums
    V(s) = max(G(s) + u_s, S(s), f_s + c_s + V(s + 1))                 ``end_s``: from the first F of s to the end

hold for every synchronous schedule (with backwards in two halves, b is the first and w without the second), the last
term of G where each rank has samples of all M micro-batches.  (For
u = 0, c alike and no limits V(0) is max_s [R_s + M (f_s + b_s)], R_s the f, b and 2 c of the stages before.)  Where
stage s + 1 need not read from s, the step as a whole is bounded alone                                     ``step_s``

Network cards.  No card ever carries more than r bytes a second, the most of what cards can and of what any message or
sum does alone (``NetworkPrices.most_card_bytes_per_s``), however flows share it (``costs.simulator.traffic``).  So what
begins at t or later is on a card until t + its bytes / r at least:
    C_s is also the bytes of all M messages on the fullest card / r.  The first begins after an F of s, and the last of
        them, whichever it is, is followed by an F of s + 1, its B and the gradient      ``HandoverBounds._on_cards``
    x_s is what s, on n_s of n hosts, puts on a card of each in its sum / r, times n_s / n.  Where gradients come back
        the last B of stage k precedes those of all stages before it, and their sums: after it come the bytes of
        these on each host, and so their mean over hosts                                        ``Suffixes.card_s``
    of a complete pipeline the hosts are known: each flow is followed by all on a card that begin no sooner than it
                                                                                        ``leaf_bound.CardLoads``

All is elementwise, on arrays that broadcast: a table fills one entry for each stage that may come first and whatever it
tells apart after it.  What a table tells apart, and which numbers it puts in, is its own matter: exact ones, or the
least over groups of devices, over shares of samples, over hosts, over layouts (``bound``, ``share_bound``,
``counts_table``, ``layout_chains``); or those under a given schedule, which has stages wait (``waits_of``): to
rank pipelines by (``first_answers``), or to bound those of 1F1B alone.
``leaf_bound`` is no second recurrence: it replays complete pipelines, action by action.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from planner.costs.layers.cost_table import Array
from planner.costs.stages.stage_bound import BoundedStages
from planner.solvers.best_first.counts_columns import ColumnStages
from planner.solvers.best_first.graph_cuts import Flags, Numbers
from planner.solvers.best_first.message_bound import HandoverBound


@dataclass(frozen=True, slots=True, eq=False)
class LaidOutStages:
    """Stages whatever the layouts of their layers; arrays of one shape, see ``BoundedStages``."""

    forward_s: Array  # seconds of the shortest F
    backward_s: Array  # seconds that are left of the least F and B together
    work_s: Array  # seconds from its first F to its last B
    all_work_s: Array  # seconds of ``work_s``, the sum of gradients and the update
    tail_s: float = 0.0  # in ``all_work_s`` already


AnyStages = BoundedStages | ColumnStages | LaidOutStages


@dataclass(frozen=True, slots=True, eq=False)
class Labels:
    """Bounds of pipelines, arrays of one shape, in seconds; infinite where there is none."""

    round_trip_s: Array  # one micro-batch, from its F on the first stage to its B there
    last_backward_s: Array  # from the first F of the first stage to its last B
    end_s: Array  # from the first F of the first stage to the end of the step
    step_s: Array  # the step, whenever the first stage starts: stages that read nothing from it need not wait for it
    sums_s: Array  # from the first F of the first stage until cards have carried the sums of gradients that must wait


SORTS = tuple(one.name for one in fields(Labels))
END = SORTS.index("end_s")
STEP = SORTS.index("step_s")


def stacked(labels: Labels, sorts: tuple[str, ...] = SORTS[:-1]) -> Array:
    """``[sorts, ...]``: as one array, by default without sums, which only wait for one another across hosts."""
    return np.stack(np.broadcast_arrays(*(getattr(labels, sort) for sort in sorts)))


def labels_of(sorts: Array) -> Labels:
    """The other way round."""
    labels = dict(zip(SORTS, sorts, strict=False))
    return Labels(**{"sums_s": labels["last_backward_s"], **labels})


def rounds_of(num_microbatches: int, window: Numbers) -> Array:
    """How often a micro-batch has to make the round trip, one after another, by what a stage holds: ceil(M / W)."""
    return np.asarray(-(-num_microbatches // np.maximum(window, 1)))


def alone(stage: AnyStages, rounds: Array, card_s: Array | float) -> Labels:
    """The last stage of a pipeline.

    Args:
        rounds: :func:`rounds_of` its window.
        card_s: what its sum of gradients keeps a network card busy.
    """
    round_trip_s = stage.forward_s + stage.backward_s
    last_backward_s = np.maximum(stage.work_s, rounds * round_trip_s)
    end_s = np.maximum(last_backward_s, stage.all_work_s) + stage.tail_s
    return Labels(round_trip_s, last_backward_s, end_s, end_s, last_backward_s + card_s)


def across(labels: Labels, message: HandoverBound) -> Labels:
    """Pipelines as the stage before sees them: from the end of its F to the start of its B."""
    round_trip_s = message.least_forward_s + labels.round_trip_s + message.least_backward_s
    last_backward_s = np.maximum(
        message.forward_s + (labels.last_backward_s + message.least_backward_s),
        labels.round_trip_s + message.one_way_s,
    )
    both_ways_s = np.where(np.isfinite(labels.round_trip_s), message.load_both_s, np.inf)
    return Labels(
        round_trip_s,
        np.maximum(last_backward_s, both_ways_s),
        message.forward_s + labels.end_s,
        labels.step_s,
        message.forward_s + labels.sums_s,
    )


def others_of(num_microbatches: int, forward_s: Array, backward_s: Array) -> Array:
    """What a stage does beside one round trip: the other F before that leaves, or the other B after it is back.

    Of micro-batches that each of its ranks has samples of: a smaller last one may leave out some.

    Args:
        forward_s, backward_s: the shortest F and B.
    """
    return (num_microbatches - 1) * np.maximum(forward_s, backward_s)


def waits_of(stage: AnyStages, trip_s: Array, ahead: int, on_last_s: Array) -> Array:
    """How long a stage waits for its first gradient, and for the last one after its last F, beside its work.

    What 1F1B adds where micro-batches are more than the window:  max(0, D - (W - 1) f) + max(0, D - (W - 1) b)

    Args:
        trip_s: D: of a micro-batch, from the end of its F to the start of its B.
        ahead: W - 1: micro-batches that it keeps beside one.
        on_last_s: of more F, for which the last stage has that of its first B wait.
    """
    first_s = np.maximum(0.0, trip_s + on_last_s - ahead * stage.forward_s)
    last_s = np.maximum(0.0, trip_s - ahead * stage.backward_s)
    return np.asarray(first_s + last_s)


def prepend(
    stage: AnyStages,
    after: Labels,
    rounds: Array,
    card_s: Array | float,
    reads: Flags,
    returns: Flags,
    others_s: Array | float = 0.0,
) -> Labels:
    """A stage and the pipelines after it, as it sees them (:func:`across`).

    Args:
        rounds, card_s: as of :func:`alone`.
        reads: whether the next stage certainly reads from this one; returns: and a gradient comes back.
        others_s: :func:`others_of` it, or less.
    """
    round_trip_s = stage.forward_s + _where(returns, after.round_trip_s) + stage.backward_s
    waits_s = _where(returns, stage.forward_s + after.last_backward_s + stage.backward_s)
    last_backward_s = np.maximum(
        np.maximum(stage.work_s, waits_s), np.maximum(rounds * round_trip_s, round_trip_s + others_s)
    )
    sums_s = np.maximum(last_backward_s, _where(returns, stage.forward_s + after.sums_s)) + card_s
    end_s = np.maximum(last_backward_s, stage.all_work_s) + stage.tail_s
    end_s = np.maximum(np.maximum(end_s, _where(reads, stage.forward_s + after.end_s)), sums_s)
    return Labels(round_trip_s, last_backward_s, end_s, np.maximum(end_s, after.step_s), sums_s)


def _where(flags: Flags, seconds: Array) -> Array:
    """Seconds where flags are set, else none."""
    return seconds if flags.all() else np.where(flags, seconds, 0.0)


@dataclass(frozen=True, slots=True, eq=False)
class Before:
    """The first stages of a pipeline, as the next stage sees them: arrays of one shape, in seconds."""

    start_s: Array  # before its first F
    last_input_s: Array  # until its last input can be there
    after_last_s: Array  # after its last B, the rest of the way back
    after_first_s: Array  # after its first B, the rest of the way back
    both_ways_s: Array  # the whole step, where inputs and gradients share a wire
    sums_s: Array  # that cards are busy with sums of gradients which wait for it


def joined(before: Before, stage: AnyStages, labels: Labels, rounds: Array) -> Array:
    """What pipelines take whose stages are ``before``, a stage, and those after it with it: ``labels``.

    Args:
        rounds: of the windows that those before leave it.
    """
    last_backward_s = np.maximum(labels.last_backward_s, rounds * labels.round_trip_s)
    tail_s = np.maximum(stage.tail_s, before.after_last_s)
    bounds: Array = np.maximum.reduce(
        [
            before.start_s + np.maximum(last_backward_s + tail_s, labels.end_s),
            labels.step_s,
            before.last_input_s + labels.round_trip_s + before.after_last_s,
            before.start_s + labels.round_trip_s + before.after_first_s,
            before.both_ways_s,
            before.start_s + labels.sums_s + before.sums_s,
        ]
    )
    return bounds
