"""How high memory rises while the layers of a stage run.

For a stage whose layers k = 0 .. n - 1 save s(k) bytes and have levels (:class:`planner.ir.profile.Levels`) f, b, i, w,
l and gradients of parameters of g(k) bytes:

    forward                 most over k of  s(<k) + f(k)
    backward, the first     most over k of  s(<=k) + b(k) + g(>=k)          gradients come layer by layer
    backward, later ones    most over k of  s(<=k) + b(k) + g(k)            beside the gradients that are there
    backward for inputs     most over k of  s(<=k) + i(k) + l(>k) + e(>=k), later ones with e(k) alone
    backward for weights    most over k of  l(<=k) + w(k) + (g - e)(>=k), later ones with (g - e)(k) alone

and where sums of gradients run behind the last backward, in that one, when layer k has run that completes a bucket of
c(k) bytes, with u(k) of gradients under way then

    putting a bucket together          s(<k) + u(k) + g(>=k) + c(k)             of weights: l(<k) + (g - e)(>=k) + c(k)

since forward goes up the layers and backward down, and lets go of what a layer saved.  Layers that cannot leave their
weight gradients for later (recurrent ones) make them with those of inputs: e is g there, and 0 elsewhere.

Spans of layers that are computed again keep k(j) of each of their layers, what they read from outside, of which c(j) is
what the layer itself would save (others save a copy), and have s - c of them back one span at a time:

    forward                 k in place of s, and s - c of the layer before j in its span, which j reads
    backward in a span      k of all earlier layers and of the whole span, (s - c)(<=j) within it, b(j) and so on
    its second forward      the same with f(j) - c(j) beside (s - c)(<j), before the first backward of the span

Where ranks wait for statistics in a backward, they make weight gradients meanwhile that layers above have put off
(:class:`DeferredWeights`): with h(j) what those of layer j are made of, the gradients that it was given and what it
saved, and w(j) their level, of all j that wait

    backward                most over k of  s(<=k) + b(k) + h(j) + g(>=k)        b without weight gradients of layer j
    while ranks wait        most over k of  s(<=k) + gradients under way + h(j) + w(the first of j) + g(>=k)

Levels are those of the whole network.  Of the gradients under way in them, a stage has those that its own layers make,
and in place of the others what it received, in its buffers, as long as its backward lasts (:class:`ValueGradients`).

A profile without levels has workspaces: then every action of the stage needs that of the hungriest layer beyond all
that is saved.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

MOST_DEFERRED = 2
"""Layers whose weight gradients wait at once (:mod:`runtime.spatial.deferred`)."""


ActionPeaks = dict[str, int]
"""Bytes of a stage's actions on a rank at one number of samples, what it received apart, by size of the memory table.

``saved`` is there between forward and backward, ``deferred`` between I and W: what deferred weight gradients are made
of.  ``forward`` is the most while it runs, ``forward alone`` where it keeps nothing for a backward; ``B first``, ``B``
and likewise of I and W of first backwards, with the gradients of parameters that they make, and of later ones beside
these; ``early gradients`` are those that I makes.
"""


class HeldInStage(NamedTuple):
    """What the layers of a stage hold of a micro-batch on a rank.

    Attributes:
        peaks: of its actions; ``last``: the same where sums of gradients begin in the last backward, else None.
        unsaved: of the outputs that other stages read, what nobody saves; None: that is not known.
        inputs_left: of the values that other stages made, what its weight gradients need; None: that is not known.
    """

    peaks: ActionPeaks
    last: ActionPeaks | None
    unsaved: int | None = None
    inputs_left: float | None = None


@dataclass(frozen=True, slots=True, eq=False)
class KeptForBackward:
    """Of layers of a stage as they run, in bytes.

    Attributes:
        kept: what stays from forward to backward.
        same: of what a layer saves, what is among that: the rest is there from its second forward on.
    """

    kept: Array
    same: Array


@dataclass(frozen=True, slots=True)
class ValueGradients:
    """Gradients of values under way in a stage, by layer of the stage, in bytes.

    Attributes:
        outside: when its backward begins, those that layers outside the stage made.
        after: when its backward has run, those that layers of the stage made.
        left: of what is left for weight gradients, those that layers outside the stage made.
        begin: when its backward begins, those that layers of the stage made; ``given``: of these what goes with it.
        shared: of ``begin``, what lies in the memory of another: backward of a concatenation gives parts of one tensor,
            of which those that are sent on are copied, and stays as long as any of the rest.

    A gradient from outside that reaches its layer through views that have to copy it is the stage's own from then on.
    """

    outside: Array
    after: Array
    left: Array
    begin: Array
    given: Array
    shared: Array


@dataclass(frozen=True, slots=True)
class DeferredWeights:
    """Weight gradients that are made where ranks wait for statistics, by layer of the stage, in bytes.

    Attributes:
        extra: what those hold that are put off while the layer's backward runs.
        runs: what is held and needed while ranks wait before the layer's own backward, as they are made; 0: none is.
        end: the same when all layers have run.
    """

    extra: Array
    runs: Array
    end: float = 0.0

    @classmethod
    def of(cls, puts_off: Sequence[bool], meets: Sequence[bool], held: Array, needs: Array) -> DeferredWeights:
        """Of the layers in order.

        Args:
            puts_off: whether its weight gradients are put off; two of them wait at most, then the first is made.
            meets: whether those that wait are made before its backward.
            held: what its weight gradients are made of; ``needs``: what making them takes besides.
        """
        extra, runs = np.zeros((2, len(held)))
        waiting = list[int]()

        def made() -> float:
            most = 0.0
            while waiting:
                most = max(most, float(held[waiting].sum() + needs[waiting[0]]))
                waiting.pop(0)
            return most

        for place in reversed(range(len(held))):
            if meets[place]:
                runs[place] = made()
            extra[place] = held[waiting].sum()
            if puts_off[place]:
                if len(waiting) == MOST_DEFERRED:  # while the gradient that it was given and the one it made are there
                    extra[place] += needs[waiting.pop(0)]
                waiting.append(place)
        return cls(extra, runs, made())


@dataclass(frozen=True, slots=True, eq=False)
class RunningLayers:
    """The layers of a stage in the order in which they run on a rank, at one number of samples.

    Attributes:
        saved, gradients: by layer.
        levels: ``[quantity, layer]``.
        output_gradients: what came of the gradients of its outputs: it stays to the end of backward.
        defers: by layer, whether its weight gradients can come later than those of inputs; None: of all layers.
        output_gradients_left: of ``output_gradients``, by layer, what stays for its weight gradients beside what
            ``levels`` have as left.
        flow: None: it is not known; then ``output_gradients`` are beside what all layers but the last are given.
        keeps: what stays from forward to backward, where that is not all of ``saved``; None: it is.
        spans: first and last place, exclusive, of layers that are computed again.
        deferred_weights: weight gradients that are made later in the same backward; ``flow`` says what there is then.
    """

    saved: Array
    gradients: Array
    levels: Array
    output_gradients: float = 0.0
    defers: NDArray[np.bool_] | None = None
    output_gradients_left: Array | None = None
    flow: ValueGradients | None = None
    keeps: KeptForBackward | None = None
    spans: Sequence[tuple[int, int]] = ()
    deferred_weights: DeferredWeights | None = None


def action_peaks(layers: RunningLayers, copies: Array | None = None) -> ActionPeaks:
    """How high memory rises while the actions of a stage run.

    Args:
        copies: by layer that completes a bucket of gradients, what putting it together takes.
    """
    saved = layers.saved
    gradients = layers.gradients
    flow = layers.flow
    keeps = layers.keeps
    output_gradients = layers.output_gradients
    deferred_weights = layers.deferred_weights
    forward, backward, halved, weight, left, *_ = layers.levels
    kept, same = (saved, saved) if keeps is None else (keeps.kept, keeps.same)
    early = np.zeros_like(gradients) if layers.defers is None else np.where(layers.defers, 0.0, gradients)
    late = gradients - early
    upto = np.cumsum(kept)
    before = upto - kept
    made, made_early, made_late = (np.cumsum(each[::-1])[::-1] for each in (gradients, early, late))
    left_upto = np.cumsum(left)
    stays = left if layers.output_gradients_left is None else left + layers.output_gradients_left
    stays_upto = np.cumsum(stays)
    previous = np.concatenate(([0.0], saved[:-1]))
    received = np.full(len(saved), float(output_gradients))
    if flow is None:
        received[-1:] = 0.0
    else:
        received += flow.shared - np.minimum(flow.outside, output_gradients)
    backward, halved = (np.maximum(each + received, 0.0) for each in (backward, halved))
    below = before.copy()  # of layers below one while its backward runs
    second_forwards: list[tuple[float, float, float, float]] = []  # of each span, the most in its second forward
    for first, last in layers.spans:
        there = upto[last - 1]
        rising = np.cumsum(np.maximum(saved - same, 0.0)[first:last])
        grown = np.concatenate(([0.0], rising[:-1]))
        before[first + 1 : last] += np.diff(grown)
        top = float((there + grown + np.maximum(forward - same, 0.0)[first:last]).max())
        behind = slice(last, last + 1)
        halves = float(left[last:].sum())
        early_behind = float(made_early[behind].sum())
        second_forwards.append((top, top + float(made[behind].sum()), top + halves + early_behind, top + halves))
        upto[first:last] = there + rising
        below[first:last] = there + grown
    copied = np.zeros_like(saved) if copies is None else copies
    put_together = np.zeros(4)
    if copied.any():
        held = upto + backward if flow is None else below + flow.after + output_gradients
        rests = held + made, held + gradients, stays_upto - stays + made_late, stays_upto - stays + late
        put_together = np.array([np.where(copied > 0, rest + copied, 0.0).max() for rest in rests])

    waits = np.zeros(2)
    if deferred_weights is not None and flow is not None:
        backward = backward + deferred_weights.extra
        halved = halved + deferred_weights.extra
        there = np.where(deferred_weights.runs > 0, upto + flow.begin + output_gradients + deferred_weights.runs, 0.0)
        end = float(flow.after[0] + output_gradients + deferred_weights.end) if deferred_weights.end else 0.0
        whole, single = (np.where(there > 0, there + each, 0.0).max() for each in (made, gradients))
        waits = np.array([max(whole, end + made[0] * (end > 0)), max(single, end)])

    def most(values: Array, least: float = 0.0, which: int | None = None) -> int:
        once_more = max((each[which] for each in second_forwards), default=0.0) if which is not None else 0.0
        return round(max(float(values.max(initial=least)), once_more))

    return {
        "saved": round(float(kept.sum())),
        "deferred": round(float(stays.sum())),
        "early gradients": round(float(early.sum())),
        "forward": most(before + forward),
        "forward alone": most(previous + forward),
        "B first": most(upto + backward + made, max(put_together[0], waits[0]), 1),
        "B": most(upto + backward + gradients, max(put_together[1], waits[1]), 0),
        "I first": most(upto + halved + left_upto[-1:] - left_upto + made_early, waits[0], 2),
        "I": most(upto + halved + left_upto[-1:] - left_upto + early, waits[1], 3),
        "W first": most(stays_upto + weight + made_late, put_together[2]),
        "W": most(stays_upto + weight + late, put_together[3]),
    }


def plain_peaks(saved: float, left: float, gradients: float, workspace: float, recomputed: float = 0.0) -> ActionPeaks:
    """The course of a stage of which no levels are known.

    Args:
        left: what inputs and gradients of outputs of its layers take.
        again: saved beside ``saved`` while backward runs, having been computed again.
    """
    held = round(saved)
    kept = round(max(saved, left))
    needs = round(workspace)
    back = held + round(recomputed) + needs
    return {
        "saved": held,
        "deferred": kept,
        "early gradients": 0,
        "forward": held + needs,
        "forward alone": held + needs,
        "B first": back + round(gradients),
        "B": back,
        "I first": max(kept + needs, back),
        "I": max(kept + needs, back),
        "W first": kept + needs + round(gradients),
        "W": kept + needs,
    }


def recomputed(peaks: ActionPeaks) -> ActionPeaks:
    """Of a stage that keeps nothing of a forward, and runs it once more in the backward."""
    backwards = {name: max(size, peaks["forward"]) for name, size in peaks.items() if name[0] in "BI"}
    return {**peaks, **backwards, "saved": 0, "forward": peaks["forward alone"]}
