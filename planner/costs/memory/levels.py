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
weight gradients for later (recurrent ones) make them with those of inputs: e is g there, and 0 elsewhere.  Levels are
affine in the samples between the sizes measured, and beyond.

Levels are those of the whole network.  Of the gradients under way in them, a stage has those that its own layers make,
and in place of the others what it received, in its buffers, as long as its backward lasts (:class:`Flow`).

A profile without levels has workspaces: then every action of the stage needs that of the hungriest layer beyond all
that is saved.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from planner.ir.graph import producer
from planner.ir.profile import LEVEL_NAMES, Levels, Profile

Array = NDArray[np.float64]
Indices = NDArray[np.int64]
Run = tuple[int, int]
"""Layers ``[first, last)`` by index in the graph."""

FORWARD, BACKWARD, BACKWARD_INPUT, WEIGHT, LEFT, OUTPUTS_SAVED, INPUTS_SAVED, GRADIENTS_LEFT = range(len(LEVEL_NAMES))
"""Quantities of a layer's levels by index, as :class:`planner.ir.profile.Levels` orders them."""


@dataclass(frozen=True, slots=True)
class Course:
    """A stage's actions on a rank at one number of samples, in bytes, what it received apart.

    Attributes:
        saved: between forward and backward.
        left: between a backward for inputs and that for weights.
        forward, backward_first, backward_later, input_first, input_later, weight_first, weight_later: the most while it
            runs; of first backwards with the gradients of parameters that they make, of later ones beside them.
        early: gradients of parameters that a backward for inputs makes.
        unrecorded: the most while forward runs without keeping anything for a backward.
    """

    saved: int
    left: int
    forward: int
    backward_first: int
    backward_later: int
    input_first: int
    input_later: int
    weight_first: int
    weight_later: int
    unrecorded: int
    early: int = 0


@dataclass(frozen=True, slots=True)
class Flow:
    """Gradients of values under way in a stage, by layer of the stage, in bytes.

    Attributes:
        outside: when its backward begins, those that layers outside the stage made.
        after: when its backward has run, those that layers of the stage made.
        left: of what is left for weight gradients, those that layers outside the stage made.
    """

    outside: Array
    after: Array
    left: Array


Pairs = tuple[Indices, Indices, Array]
"""Layers by index, other layers, and bytes of each two."""


@dataclass(slots=True, eq=False)
class LevelTables:
    """The levels of a profile, by kind of device.

    Attributes:
        outputs: by layer, bytes of its outputs per sample.
        inputs: by layer, of each value that it reads and a layer made: that layer, and bytes per sample.
        readers: by layer, those that read its outputs.
        known: what was worked out by stage and samples (:mod:`planner.costs.memory.activations`).
    """

    profile: Profile
    outputs: tuple[float, ...] = field(init=False, repr=False)
    inputs: tuple[tuple[tuple[int, float], ...], ...] = field(init=False, repr=False)
    readers: tuple[tuple[int, ...], ...] = field(init=False, repr=False)
    known: dict[tuple[object, ...], tuple[Course, int | None, Course | None, float | None]] = field(
        init=False, default_factory=dict, repr=False
    )
    _whole: dict[str, dict[int, list[Levels]]] = field(init=False, default_factory=dict, repr=False)
    _sizes: dict[str, tuple[Array, Array]] = field(init=False, default_factory=dict, repr=False)
    _pairs: dict[tuple[str, str], tuple[Array, Indices, Array]] = field(init=False, default_factory=dict, repr=False)
    _at: dict[tuple[str, float], Array] = field(init=False, default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        graph = self.profile.graph
        index = {layer.name: position for position, layer in enumerate(graph.layers)}
        readers: list[dict[int, None]] = [{} for _ in graph.layers]
        inputs: list[tuple[tuple[int, float], ...]] = []
        values = graph.values()
        for position, layer in enumerate(graph.layers):
            made = {name: index[producer(name)] for name in layer.inputs if name not in graph.inputs}
            inputs.append(tuple((maker, values[name].num_bytes / graph.samples) for name, maker in made.items()))
            for maker in made.values():
                readers[maker][position] = None
        self.inputs, self.readers = tuple(inputs), tuple(map(tuple, readers))
        self.outputs = tuple(sum(spec.num_bytes for spec in layer.outputs) / graph.samples for layer in graph.layers)

    def at(self, kind: str, samples: float) -> Array | None:
        """``[quantity, layer]`` in the order of :class:`planner.ir.profile.Levels`; None if they were not measured."""
        sizes, measured = self._measured(kind)
        if not len(sizes):
            return None
        found = self._at.get((kind, samples))
        if found is None:
            found = self._at[kind, samples] = np.maximum(affine(sizes, measured, samples), 0.0)
        return found

    def of_part(
        self, kind: str, layer: int, samples: float, share: float, received: float, needs: float
    ) -> Array | None:
        """``[quantity]`` of a part of a layer: its share of those of as many whole samples; None if not measured.

        Args:
            layer: by index.
            received: bytes that come from other ranks while it runs, and whose gradients leave.
            needs: workspace of the part beyond such a share, where it was measured itself.
        """
        whole = self.at(kind, samples)
        if whole is None:
            return None
        found = whole[:, layer] * share
        found[: WEIGHT + 1] += received + max(0.0, needs)
        return np.asarray(found)

    def inputs_beyond(self, kind: str, layer: int, samples: float, share: float, read_share: float) -> float:
        """What a part of a layer saves of others' values beyond its share, where it reads more of them than that."""
        whole = self.at(kind, samples)
        return 0.0 if whole is None else float(whole[INPUTS_SAVED, layer]) * max(0.0, read_share - share)

    def gradients_made(self, kind: str, samples: float) -> Pairs | None:
        """(maker, the last layer that is given it, bytes) of each gradient of values; None if that is not known."""
        pairs = self._pairs_at("gradients_made", kind, samples)
        return pairs if len(pairs[0]) else None

    def inputs_left(self, kind: str, samples: float) -> Pairs:
        """(reader, maker, bytes) of what weight gradients need of others' values."""
        return self._pairs_at("inputs_left", kind, samples)

    def gradients_left(self, kind: str, samples: float) -> Pairs:
        """(reader, maker, bytes) of the gradients of values that weight gradients need."""
        return self._pairs_at("gradients_left_from", kind, samples)

    def flow(self, kind: str, samples: float, layers: Indices) -> Flow | None:
        """The gradients under way in a stage of ``layers``; None if that is not known."""
        pairs = self.gradients_made(kind, samples)
        if pairs is None:
            return None
        makers, lasts, sizes = pairs
        mine = np.isin(makers, layers)
        changes = np.zeros((2, len(self.outputs) + 2))
        np.add.at(changes[0], lasts[~mine], sizes[~mine])
        np.add.at(changes[0], makers[~mine], -sizes[~mine])
        np.add.at(changes[1], lasts[mine] + 1, sizes[mine])
        np.add.at(changes[1], makers[mine] + 1, -sizes[mine])
        outside, after = np.maximum(np.cumsum(changes, axis=1), 0.0)[:, layers]
        readers, makers, sizes = self.gradients_left(kind, samples)
        theirs = ~np.isin(makers, layers)
        left = np.zeros(len(self.outputs))
        np.add.at(left, readers[theirs], sizes[theirs])
        return Flow(outside, after, left[layers])

    def flow_of_parts(self, kind: str, samples: Indices, share: Array, layers: Indices) -> Flow | None:
        """As :meth:`flow`, where of each layer there is a share of what so many samples take, and nothing is left."""
        flows = {size: self.flow(kind, size, layers) for size in set(samples.tolist())}
        parts = [flows[size] for size in samples.tolist()]
        known = [(part, place) for place, part in enumerate(parts) if part is not None]
        if len(known) < len(parts):
            return None
        outside = np.array([part.outside[place] for part, place in known]) * share
        after = np.array([part.after[place] for part, place in known]) * share
        return Flow(outside, after, np.zeros_like(outside))

    def _measured(self, kind: str) -> tuple[Array, Array]:
        """Sizes at which all layers have levels, and these: ``[size, quantity, layer]``."""
        if kind not in self._sizes:
            whole = self._of_sizes(kind)
            rows = [[[float(getattr(one, name)) for one in found] for name in LEVEL_NAMES] for found in whole.values()]
            self._sizes[kind] = np.array(list(whole), dtype=np.float64), np.array(rows, dtype=np.float64)
        return self._sizes[kind]

    def _of_sizes(self, kind: str) -> dict[int, list[Levels]]:
        """By size at which all layers have levels, these."""
        if kind not in self._whole:
            layers = self.profile.graph.layers
            by_size: dict[int, dict[str, Levels]] = {}
            for one in self.profile.measurements.get(kind, ()):
                if one.levels is not None and not one.part:
                    by_size.setdefault(one.samples, {})[one.layer] = one.levels
            self._whole[kind] = {
                size: [found[layer.name] for layer in layers]
                for size, found in sorted(by_size.items())
                if all(layer.name in found for layer in layers)
            }
        return self._whole[kind]

    def _pairs_at(self, what: str, kind: str, samples: float) -> Pairs:
        if (kind, what) not in self._pairs:
            index = {layer.name: position for position, layer in enumerate(self.profile.graph.layers)}
            rows: list[Counter[tuple[int, int]]] = []
            for levels in self._of_sizes(kind).values():
                rows.append(Counter())
                for k, one in enumerate(levels):
                    for name, size in getattr(one, what):
                        rows[-1][k, index[name]] += size
            keys = sorted(set[tuple[int, int]]().union(*rows))
            values = np.array([[float(row[key]) for key in keys] for row in rows])
            ends = np.array(keys, dtype=np.int64).reshape(-1, 2)
            self._pairs[kind, what] = np.array(list(self._of_sizes(kind)), dtype=np.float64), ends, values
        sizes, ends, values = self._pairs[kind, what]
        if not len(ends):
            return ends[:, 0], ends[:, 1], np.zeros(0)
        return ends[:, 0], ends[:, 1], np.maximum(affine(sizes, values, samples), 0.0)


def affine(sizes: Array, values: Array, at: float) -> Array:
    """``values`` (first axis: ``sizes``, ascending) on the line through the two sizes around or nearest to ``at``.

    One size alone scales with the samples.
    """
    if len(sizes) == 1:
        return np.asarray(values[0] * at / sizes[0])
    upper = int(np.clip(np.searchsorted(sizes, at), 1, len(sizes) - 1))
    share = (at - sizes[upper - 1]) / (sizes[upper] - sizes[upper - 1])
    return np.asarray(values[upper - 1] + share * (values[upper] - values[upper - 1]))


def course(
    saved: Array,
    gradients: Array,
    levels: Array,
    seeds: float = 0.0,
    defers: NDArray[np.bool_] | None = None,
    seeds_left: Array | None = None,
    flow: Flow | None = None,
    copies: Array | None = None,
) -> Course:
    """The course of a stage.

    Args:
        saved, gradients: by layer of the stage, in order.
        levels: ``[quantity, layer]`` of the same layers.
        seeds: what came of the gradients of its outputs: it stays to the end of backward.
        defers: by layer, whether its weight gradients can come later than those of inputs; None: of all layers.
        seeds_left: of ``seeds``, by layer, what stays for its weight gradients beside what ``levels`` have as left.
        flow: None: it is not known; then ``seeds`` are beside what all layers but the last are given.
        copies: by layer that completes a bucket of gradients, what putting it together takes.
    """
    forward, backward, halved, weight, left, *_ = levels
    early = np.zeros_like(gradients) if defers is None else np.where(defers, 0.0, gradients)
    late = gradients - early
    upto = np.cumsum(saved)
    before = upto - saved
    made, made_early, made_late = (np.cumsum(each[::-1])[::-1] for each in (gradients, early, late))
    left_upto = np.cumsum(left)
    stays = left if seeds_left is None else left + seeds_left
    stays_upto = np.cumsum(stays)
    previous = np.concatenate(([0.0], saved[:-1]))
    came = np.full(len(saved), float(seeds))
    if flow is None:
        came[-1:] = 0.0
    else:
        came -= np.minimum(flow.outside, seeds)
    backward, halved = (np.maximum(each + came, 0.0) for each in (backward, halved))
    copied, put_together = (np.zeros_like(saved) if copies is None else copies), np.zeros(4)
    if copied.any():
        held = upto + backward if flow is None else before + flow.after + seeds
        rests = held + made, held + gradients, stays_upto - stays + made_late, stays_upto - stays + late
        put_together = np.array([np.where(copied > 0, rest + copied, 0.0).max() for rest in rests])

    def most(values: Array, least: float = 0.0) -> int:
        return round(float(values.max(initial=least)))

    return Course(
        saved=round(float(saved.sum())),
        left=round(float(stays.sum())),
        forward=most(before + forward),
        backward_first=most(upto + backward + made, put_together[0]),
        backward_later=most(upto + backward + gradients, put_together[1]),
        input_first=most(upto + halved + left_upto[-1:] - left_upto + made_early),
        input_later=most(upto + halved + left_upto[-1:] - left_upto + early),
        weight_first=most(stays_upto + weight + made_late, put_together[2]),
        weight_later=most(stays_upto + weight + late, put_together[3]),
        unrecorded=most(previous + forward),
        early=round(float(early.sum())),
    )


def plain_course(saved: float, left: float, gradients: float, workspace: float, again: float = 0.0) -> Course:
    """The course of a stage of which no levels are known.

    Args:
        left: what inputs and gradients of outputs of its layers take.
        again: saved beside ``saved`` while backward runs, having been computed again.
    """
    held, kept, needs = round(saved), round(max(saved, left)), round(workspace)
    back = held + round(again) + needs
    return Course(
        saved=held,
        left=kept,
        forward=held + needs,
        backward_first=back + round(gradients),
        backward_later=back,
        input_first=max(kept + needs, back),
        input_later=max(kept + needs, back),
        weight_first=kept + needs + round(gradients),
        weight_later=kept + needs,
        unrecorded=held + needs,
    )


def layers_in(runs: Iterable[Run]) -> Indices:
    """The layers of runs, by index."""
    return np.concatenate([np.arange(first, last) for first, last in runs] or [np.zeros(0, dtype=np.int64)])
