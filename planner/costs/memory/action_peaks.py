"""How high memory rises while the layers of a stage run.

For a stage whose layers k = 0 .. n - 1 save s(k) bytes and have levels (:class:`planner.ir.profile.Levels`) f, b, i, w,
l and gradients of parameters of g(k) bytes:

    forward                 most over k of  s(<k) + f(k)
    backward, the first     most over k of  s(<=k) + b(k) + g(>=k)          gradients come layer by layer
    backward, later ones    most over k of  s(<=k) + b(k) + g(k)            beside the gradients that are there
    backward for inputs     most over k of  s(<=k) + i(k) + l(>k) + e(>=k), later ones with e(k) alone
    backward for weights    most over k of  l(<=k) + w(k) + (g - e)(>=k), later ones with (g - e)(k) alone

and where sums of gradients overlap with the last backward, in that one, when layer k has run that completes a bucket of
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

from planner.ir.profile import LEVEL_NAMES

Array = NDArray[np.float64]

FORWARD, BACKWARD, BACKWARD_INPUT, WEIGHT, LEFT, OUTPUTS_SAVED, INPUTS_SAVED, GRADIENTS_LEFT, INPUTS_KEPT = range(
    len(LEVEL_NAMES)
)
"""Quantities of a layer's levels by index, as :class:`planner.ir.profile.Levels` orders them."""

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
    """Of layers of a stage as they run."""

    kept: Array  # [layers] bytes that stay from forward to backward
    same: Array  # [layers] bytes of what a layer saves that are among these: the rest comes with its second forward


@dataclass(frozen=True, slots=True)
class ValueGradients:
    """Gradients of values under way in a stage, ``[layers]`` bytes each.

    A gradient from outside that reaches its layer through views that have to copy it is the stage's own from then on.

    Backward of a concatenation gives parts of one tensor, of which those that are sent on are copied, and stays as long
    as any of the rest: ``shared``.
    """

    outside: Array  # [layers] bytes made outside the stage, when the layer's backward begins
    after: Array  # [layers] bytes made in the stage, when the layer's backward has run
    left: Array  # [layers] bytes made outside the stage, of what is left for the layer's weight gradients
    begin: Array  # [layers] bytes made in the stage, when the layer's backward begins
    given: Array  # [layers] bytes of `begin` that go with the layer's backward
    shared: Array  # [layers] bytes of `begin` that lie in the memory of another gradient


@dataclass(frozen=True, slots=True)
class DeferredWeights:
    """Weight gradients that are made where ranks wait for statistics."""

    extra: Array  # [layers] bytes that those hold that are put off while the layer's backward runs
    runs: Array  # [layers] bytes held and needed while some are made before the layer's own backward; 0: none is
    end: float = 0.0  # bytes held and needed while some are made when all layers have run; 0: none is

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

    Where ``flow`` is not known, ``output_gradients`` are beside what all layers but the last are given.
    """

    saved: Array  # [layers] bytes
    gradients: Array  # [layers] bytes, of parameters
    levels: Array  # [quantities, layers] bytes
    output_gradients: float = 0.0  # bytes received for its outputs, which stay to the end of backward
    defers: NDArray[np.bool_] | None = None  # [layers] whether weight gradients can come later; None: of all layers
    output_gradients_left: Array | None = None  # [layers] bytes of them that weight gradients need beside their level
    flow: ValueGradients | None = None  # None: not known
    keeps: KeptForBackward | None = None  # None: all of `saved` stays from forward to backward
    spans: Sequence[tuple[int, int]] = ()  # first and last place, exclusive, of layers that are computed again
    deferred_weights: DeferredWeights | None = None  # made later in the same backward; `flow` is known then

    @property
    def early_gradients(self) -> Array:
        """``[layers]`` bytes of gradients of parameters that are made with those of inputs."""
        return np.zeros_like(self.gradients) if self.defers is None else np.where(self.defers, 0.0, self.gradients)

    @property
    def left_for_weights(self) -> Array:
        """``[layers]`` bytes that stay between the two halves of a backward."""
        left: Array = self.levels[LEFT]
        return left if self.output_gradients_left is None else left + self.output_gradients_left

    @property
    def received_gradients(self) -> Array:
        """``[layers]`` bytes of gradients from outside that are there beside the layer's own level, or less than it."""
        received = np.full(len(self.saved), float(self.output_gradients))
        if self.flow is None:
            received[-1:] = 0.0
        else:
            received += self.flow.shared - np.minimum(self.flow.outside, self.output_gradients)
        return received


@dataclass(frozen=True, slots=True, eq=False)
class _Saved:
    """What the layers of a stage have saved while one of them runs."""

    kept: Array  # [layers] bytes that stay from forward to backward
    in_forward: Array  # [layers] bytes below the layer while its forward runs
    in_backward: Array  # [layers] bytes of the layer and below it while its backward runs
    below_in_backward: Array  # [layers] bytes below the layer while its backward runs
    second_forwards: Sequence[tuple[int, float]]  # the place after a span, and the most bytes while it runs once more

    @classmethod
    def of(cls, layers: RunningLayers) -> _Saved:
        """Each span of ``layers`` has what it does not keep back while its own backward runs."""
        kept = layers.saved if layers.keeps is None else layers.keeps.kept
        same = layers.saved if layers.keeps is None else layers.keeps.same
        in_backward = np.cumsum(kept)
        in_forward = in_backward - kept
        below_in_backward = in_forward.copy()
        second_forwards = list[tuple[int, float]]()
        for first, last in layers.spans:
            held = in_backward[last - 1]
            rebuilt = np.cumsum(np.maximum(layers.saved - same, 0.0)[first:last])
            rebuilt_below = np.concatenate(([0.0], rebuilt[:-1]))
            in_forward[first + 1 : last] += np.diff(rebuilt_below)
            level = np.maximum(layers.levels[FORWARD] - same, 0.0)[first:last]
            second_forwards.append((last, float((held + rebuilt_below + level).max())))
            in_backward[first:last] = held + rebuilt
            below_in_backward[first:last] = held + rebuilt_below
        return cls(kept, in_forward, in_backward, below_in_backward, second_forwards)


@dataclass(frozen=True, slots=True, eq=False)
class _Gradients:
    """Gradients of parameters that a stage's layers make in a backward, the last layer first."""

    made: Array  # [layers] bytes, by the layer itself
    so_far: Array  # [layers] bytes, by the layer and those above it

    @classmethod
    def of(cls, made: Array) -> _Gradients:
        return cls(made, np.cumsum(made[::-1])[::-1])

    def before(self, place: int) -> float:
        """Bytes that are there before the layer below ``place`` runs."""
        return float(self.so_far[place]) if place < len(self.so_far) else 0.0


class _Backwards(NamedTuple):
    """Bytes of a first backward, which makes gradients of parameters, and of later ones, which find them there."""

    first: float
    later: float


def action_peaks(layers: RunningLayers, copies: Array | None = None) -> ActionPeaks:
    """How high memory rises while the actions of a stage run.

    Args:
        copies: by layer that completes a bucket of gradients, what putting it together takes.
    """
    saved = _Saved.of(layers)
    gradients = _Gradients.of(layers.gradients)
    early = _Gradients.of(layers.early_gradients)
    late = _Gradients.of(layers.gradients - early.made)
    waits = _while_ranks_wait(layers, saved, gradients)
    backward = _backward(layers, saved, gradients, waits, copies)
    input_backward = _input_backward(layers, saved, early, waits)
    weight_backward = _weight_backward(layers, late, copies)
    return {
        "saved": round(float(saved.kept.sum())),
        "deferred": round(float(layers.left_for_weights.sum())),
        "early gradients": round(float(early.made.sum())),
        "forward": round(_most(saved.in_forward + layers.levels[FORWARD])),
        "forward alone": round(_most(np.concatenate(([0.0], layers.saved[:-1])) + layers.levels[FORWARD])),
        "B first": round(backward.first),
        "B": round(backward.later),
        "I first": round(input_backward.first),
        "I": round(input_backward.later),
        "W first": round(weight_backward.first),
        "W": round(weight_backward.later),
    }


def _backward(
    layers: RunningLayers, saved: _Saved, gradients: _Gradients, waits: _Backwards, copies: Array | None
) -> _Backwards:
    """While layers run, spans run forward again, ranks wait, or buckets are put together."""
    level = np.maximum(layers.levels[BACKWARD] + layers.received_gradients, 0.0)
    if layers.flow is None:
        held_after = saved.in_backward + level
    else:
        held_after = saved.below_in_backward + layers.flow.after + layers.output_gradients
    held = saved.in_backward + _with_deferred(layers, level)
    return _Backwards(
        max(
            _most(held + gradients.so_far),
            _bucket_peak(held_after + gradients.so_far, copies),
            waits.first,
            *(peak + gradients.before(place) for place, peak in saved.second_forwards),
        ),
        max(
            _most(held + gradients.made),
            _bucket_peak(held_after + gradients.made, copies),
            waits.later,
            *(peak for _, peak in saved.second_forwards),
        ),
    )


def _input_backward(layers: RunningLayers, saved: _Saved, early: _Gradients, waits: _Backwards) -> _Backwards:
    """While layers run, spans run forward again, or ranks wait; what is left for weight gradients gathers meanwhile."""
    left = layers.levels[LEFT]
    left_upto = np.cumsum(left)
    level = np.maximum(layers.levels[BACKWARD_INPUT] + layers.received_gradients, 0.0)
    held = saved.in_backward + _with_deferred(layers, level) + left_upto[-1:] - left_upto
    peaks = [(place, peak + float(left[place:].sum())) for place, peak in saved.second_forwards]
    return _Backwards(
        max(_most(held + early.so_far), waits.first, *(peak + early.before(place) for place, peak in peaks)),
        max(_most(held + early.made), waits.later, *(peak for _, peak in peaks)),
    )


def _weight_backward(layers: RunningLayers, late: _Gradients, copies: Array | None) -> _Backwards:
    """While layers run, or buckets are put together of what they made."""
    left = layers.left_for_weights
    left_upto = np.cumsum(left)
    held = left_upto + layers.levels[WEIGHT]
    held_after = left_upto - left
    return _Backwards(
        max(_most(held + late.so_far), _bucket_peak(held_after + late.so_far, copies)),
        max(_most(held + late.made), _bucket_peak(held_after + late.made, copies)),
    )


def _while_ranks_wait(layers: RunningLayers, saved: _Saved, gradients: _Gradients) -> _Backwards:
    """While weight gradients are made that layers above have put off; 0 where none are."""
    deferred = layers.deferred_weights
    flow = layers.flow
    if deferred is None or flow is None:
        return _Backwards(0.0, 0.0)
    held = saved.in_backward + flow.begin + layers.output_gradients + deferred.runs
    waits = deferred.runs > 0
    first = float(np.where(waits, held + gradients.so_far, 0.0).max())
    later = float(np.where(waits, held + gradients.made, 0.0).max())
    if not deferred.end:
        return _Backwards(first, later)
    held_at_end = float(flow.after[0] + layers.output_gradients + deferred.end)
    return _Backwards(max(first, held_at_end + float(gradients.so_far[0])), max(later, held_at_end))


def _with_deferred(layers: RunningLayers, level: Array) -> Array:
    """``level`` and what weight gradients hold that layers above have put off."""
    if layers.deferred_weights is None or layers.flow is None:
        return level
    return level + layers.deferred_weights.extra


def _bucket_peak(held: Array, copies: Array | None) -> float:
    """While buckets of gradients are put together after the layers that complete them."""
    if copies is None or not copies.any():
        return 0.0
    return float(np.where(copies > 0, held + copies, 0.0).max())


def _most(held: Array) -> float:
    return float(held.max(initial=0.0))


def plain_peaks(saved: float, left: float, gradients: float, workspace: float, recomputed: float = 0.0) -> ActionPeaks:
    """How high memory rises in a stage of which no levels are known.

    Args:
        left: what inputs and gradients of outputs of its layers take.
        recomputed: saved beside ``saved`` while backward runs, having been computed again.
    """
    held = round(saved)
    kept = round(max(saved, left))
    needs = round(workspace)
    backward = held + round(recomputed) + needs
    return {
        "saved": held,
        "deferred": kept,
        "early gradients": 0,
        "forward": held + needs,
        "forward alone": held + needs,
        "B first": backward + round(gradients),
        "B": backward,
        "I first": max(kept + needs, backward),
        "I": max(kept + needs, backward),
        "W first": kept + needs + round(gradients),
        "W": kept + needs,
    }


def recomputed(peaks: ActionPeaks) -> ActionPeaks:
    """Of a stage that keeps nothing of a forward, and runs it once more in the backward."""
    backwards = {name: max(size, peaks["forward"]) for name, size in peaks.items() if name[0] in "BI"}
    return {**peaks, **backwards, "saved": 0, "forward": peaks["forward alone"]}
