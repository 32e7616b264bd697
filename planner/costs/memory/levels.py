"""How high memory rises while single layers run: as a profile has it, between the sizes measured, and of parts.

Levels are affine in the samples between the sizes measured, and beyond.  What the layers of a stage make of them is in
``action_peaks``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.costs.layers.cost_table import Flags, IndexSpans, Run
from planner.costs.memory.action_peaks import (
    INPUTS_KEPT,
    INPUTS_SAVED,
    OUTPUTS_SAVED,
    WEIGHT,
    Array,
    HeldInStage,
    KeptForBackward,
    ValueGradients,
)
from planner.ir.graph import producer
from planner.ir.lazy import once
from planner.ir.profile import LEVEL_NAMES, Levels, Profile
from planner.layers.data_movement import copied_at
from planner.layers.recomputed import running_order

Indices = NDArray[np.int64]
RESHAPE = "reshape"
CONCAT = "concat"
_ALL = 0.99
"""Who saves so much of a tensor has saved it: sizes between those that were measured are on a line."""

LayerPairs = tuple[Indices, Indices, Array]
"""Layers by index, other layers, and bytes of each two."""


class LayerParts(NamedTuple):
    """What a rank has of layers, an array each: all of them of its samples where these alone are divided.

    Attributes:
        layers: by index in the graph.
        saved: bytes of its part.
        samples, share: of the part, and what it is of the work of as many whole samples.
        read_share: what it reads of their inputs.
        received: bytes that come from other ranks of the stage; ``copied``: those that make it read a copy.
        needs: workspace of the part, where it was measured itself, beyond such a share of that of whole samples.
        parameters: bytes of those that it uses; ``all_parameters``: of the whole layer's.
    """

    layers: Indices
    saved: Array
    samples: Array
    share: Array
    read_share: Array
    received: Array
    copied: Array
    needs: Array
    parameters: Array
    all_parameters: Array

    def at(self, order: Indices) -> LayerParts:
        """The same layers, in that order."""
        places = np.searchsorted(self.layers, order)
        return LayerParts(self.layers[places], *(column[places] for column in self[1:]))

    @property
    def whole(self) -> Array:
        """Samples of which each part is as much as the whole."""
        return self.samples * self.share


class LevelTables:
    """The levels of a profile, by kind of device.

    Attributes:
        outputs: by layer, bytes of its outputs per sample.
        inputs: by layer, of each value that it reads and a layer made: that layer, and bytes per sample.
        names: of these values, in the same order.
        shapes: by layer, of the first value that it reads.
        readers: by layer, those that read its outputs.
        known: what was worked out by stage and samples (:mod:`planner.costs.memory.activations`).
    """

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        graph = profile.graph
        values = profile.graph.values()
        self.known = dict[tuple[object, ...], HeldInStage]()
        index = {layer.name: position for position, layer in enumerate(graph.layers)}
        made = [{v: index[producer(v)] for v in layer.inputs if v not in graph.inputs} for layer in graph.layers]
        self.names = tuple(map(tuple, made))
        self.inputs = tuple(
            tuple((maker, values[v].num_bytes / graph.samples) for v, maker in of.items()) for of in made
        )
        readers: list[dict[int, None]] = [{} for _ in graph.layers]
        for position, makers in enumerate(made):
            for maker in makers.values():
                readers[maker][position] = None
        self.readers = tuple(map(tuple, readers))
        self.shapes = tuple(values[layer.inputs[0]].shape if layer.inputs else () for layer in graph.layers)
        self.outputs = tuple(sum(spec.num_bytes for spec in layer.outputs) / graph.samples for layer in graph.layers)

    def at(self, kind: str, samples: float) -> Array | None:
        """``[quantity, layer]`` in the order of :class:`planner.ir.profile.Levels`; None if they were not measured."""
        return self._known(kind, samples) if len(self._measured(kind).sizes) else None

    @once
    def _known(self, kind: str, samples: float) -> Array:
        """The same, of a kind of which they were measured."""
        measured = self._measured(kind)
        return np.maximum(affine(measured.sizes, measured.table, samples), 0.0)

    def of_parts(self, kind: str, parts: LayerParts, alone: bool) -> tuple[Array, Array, Array] | None:
        """Of parts of layers their levels, and what they save of inputs; None if levels were not measured.

        A part's levels, ``[quantity, layer]``, are its share of those of as many whole samples.  What does not grow
        with the samples, at most the bytes of the weights, is a copy of these in another order of elements: it is there
        in as far as the part uses them.  What it receives comes while it runs, and its gradients leave.

        Of others' values a part saves something beyond its share, and some of all that lies where it was.  Where it
        reads a copy, it saves that, whoever else has saved the values; else as much more as it reads more.

        Args:
            alone: whether one rank has the stage: what is received is kept then, whoever saves it.
        """
        none = self.at(kind, 0.0)
        if none is None:
            return None
        whole = np.zeros((len(LEVEL_NAMES), len(parts.layers)))
        tells = np.zeros(len(parts.layers), dtype=bool)
        for samples in dict.fromkeys(parts.samples.tolist()):
            mine = parts.samples == samples
            levels = self._known(kind, samples)
            whole[:, mine] = levels[:, parts.layers[mine]]
            tells[mine] = levels[INPUTS_KEPT].any()
        used = parts.parameters / np.maximum(parts.all_parameters, 1e-9)
        copies = np.minimum(np.minimum(none[:, parts.layers], whole)[: WEIGHT + 1], parts.all_parameters)
        levels = whole * parts.share
        beside = np.maximum(copies * np.maximum(used - parts.share, 0.0), np.maximum(parts.needs, 0.0))
        levels[: WEIGHT + 1] += parts.received + beside
        first = whole[INPUTS_SAVED]
        every = whole[INPUTS_KEPT]
        read = np.maximum(parts.share, parts.read_share)
        stays = alone | ~tells  # or the profile does not know who saves what others saved
        copied = (parts.copied > 0) & ~stays
        more = first * np.maximum(parts.read_share - parts.share, 0.0)
        beyond = np.where(copied, every * read - first * parts.share, more)
        received = np.where(stays | (every > 0), parts.received, 0.0)
        return levels, np.maximum(received, beyond), np.where(copied, 0.0, first * read)

    def running(self, layers: Indices, spans: IndexSpans) -> Running:
        """The order in which a stage runs its layers: a span as one (``planner.layers.recomputed``)."""
        if not spans:
            return Running(layers, np.zeros(len(layers), dtype=bool), ())
        reads = {layer: [maker for maker, _ in self.inputs[layer]] for layer in layers.tolist()}
        order = [each for unit in running_order(layers.tolist(), reads, spans) for each in unit]
        bounds = tuple((order.index(span[0]), order.index(span[0]) + len(span)) for span in map(sorted, spans))
        recomputed = [layer for span in spans for layer in span]
        return Running(np.array(order, dtype=np.int64), np.isin(order, recomputed), tuple(sorted(bounds)))

    def kept(self, order: Indices, spans: IndexSpans, levels: Array | None, parts: Array) -> KeptForBackward:
        """Of layers in spans, what stays from the forward on; of others 0.

        That is what the spans read of the stage's other layers and none of these saves; what other stages made lies
        where it was received.  What a span saves of its own results stays as well, if who reads them needs it.

        Args:
            order: of the stage's layers, as they run.
            levels: ``[quantity, layer]`` in that order; None: nobody else is known to save anything.
            parts: by layer, samples of the rank's part, times its share of the work of as many whole ones.
        """
        place = {layer: at for at, layer in enumerate(order.tolist())}
        span_of = {layer: number for number, span in enumerate(spans) for layer in span}
        saved = np.zeros((2, len(order))) if levels is None else levels[[OUTPUTS_SAVED, INPUTS_SAVED]]
        stays = np.zeros(len(order))
        same = np.zeros(len(order))
        kept_names = set[str]()

        def is_saved(maker: int, name: str, size: float, before: int) -> bool:
            others = [r for r in self.readers[maker] if r in place and r not in span_of and place[r] < before]
            mine = maker not in span_of and saved[0, place[maker]] >= _ALL * size
            return name in kept_names or bool(mine) or any(saved[1, place[r]] >= _ALL * size for r in others)

        for number, span in enumerate(spans):
            measured = listed = 0.0
            inside = sorted(span, key=place.__getitem__)
            for layer in inside:
                at = place[layer]
                own = 0.0
                for (maker, size_of_one), name in zip(self.inputs[layer], self.names[layer], strict=True):
                    if maker not in place:  # and not among what is kept for the spans
                        own += size_of_one * parts[at]
                        continue
                    size = size_of_one * parts[place[maker]]
                    if span_of.get(maker) == number:
                        own += max(0.0, size - float(saved[0, place[maker]]))
                    elif not is_saved(maker, name, size, at):
                        stays[at] += size
                        listed += size
                        kept_names.add(name)
                same[at] = stays[at] if levels is None else max(0.0, float(saved[1, at]) - own)
                measured += same[at]
                stays[at] += self._results_needed(layer, span, place, saved)
            stays[place[inside[0]]] += max(0.0, measured - listed)
        return KeptForBackward(stays, same)

    def _results_needed(self, layer: int, span: Collection[int], place: Mapping[int, int], saved: Array) -> float:
        """Of what a layer of a span saves of its outputs, what stays as others read it and save nothing else of it."""
        size = float(saved[0, place[layer]])
        if not size:
            return 0.0
        open_ends = [reader for reader in self.readers[layer] if reader not in span]
        while open_ends:
            reader = open_ends.pop()
            if reader not in place:
                continue
            if self.profile.graph.layers[reader].kind == RESHAPE:
                open_ends += self.readers[reader]
            elif saved[1, place[reader]] < _ALL * size:
                return size
        return 0.0

    def flow(self, kind: str, parts: LayerParts) -> ValueGradients | None:
        """The gradients under way in a stage of these layers; None if that is not known."""
        columns = np.zeros((len(fields(ValueGradients)), len(parts.layers)))
        for samples in dict.fromkeys(parts.samples.tolist()):
            pairs = self.pairs_at("gradients_made", kind, samples)
            mine = parts.samples == samples
            if not len(pairs[0]):
                return None
            whole = self._flow(pairs, self.pairs_at("gradients_left_from", kind, samples), parts.layers)
            columns[:, mine] = whole[:, mine] * parts.share[mine]
        return ValueGradients(*columns)

    def _flow(self, pairs: LayerPairs, left_from: LayerPairs, layers: Indices) -> Array:
        """The fields of :class:`ValueGradients`, one below the other, of whole layers."""
        inside = frozenset(layers.tolist())
        (makers, lasts, sizes), copied = self._with_copies(pairs, inside)
        shared = list(self._kept_by_parts(makers, lasts, sizes, inside))
        shared_ends = np.array([each[:2] for each in shared], np.int64).reshape(-1, 2)
        shared_sizes = np.array([each[2] for each in shared])
        makers = np.concatenate((makers, shared_ends[:, 0]))
        lasts = np.concatenate((lasts, shared_ends[:, 1]))
        sizes = np.concatenate((sizes, shared_sizes))
        mine = np.isin(makers, layers)
        count = len(self.outputs)
        given_bytes = np.zeros(count)
        np.add.at(given_bytes, lasts[mine], sizes[mine])
        of_layers = (
            _between(lasts[~mine], makers[~mine], sizes[~mine], count),
            _between(lasts[mine] + 1, makers[mine] + 1, sizes[mine], count),
            self._left_outside(left_from, layers, copied),
            _between(lasts[mine], makers[mine], sizes[mine], count),
            given_bytes,
            _between(shared_ends[:, 1], shared_ends[:, 0], shared_sizes, count),
        )
        return np.array([column[layers] for column in of_layers])

    def _left_outside(self, left_from: LayerPairs, layers: Indices, copied: Collection[int]) -> Array:
        """By layer of the graph, what others made of what is left for its weight gradients, if it is given no copy."""
        readers, makers, sizes = left_from
        is_outside = ~np.isin(makers, layers) & ~np.isin(readers, list(copied))
        left = np.zeros(len(self.outputs))
        np.add.at(left, readers[is_outside], sizes[is_outside])
        return left

    def _with_copies(self, pairs: LayerPairs, inside: frozenset[int]) -> tuple[LayerPairs, frozenset[int]]:
        """``pairs`` as a stage of layers ``inside`` has them, and those of its layers that are given copies.

        From the copy on a gradient that came from outside is one that the stage makes.
        """
        makers, lasts, sizes = pairs
        lasts_outside = [
            last if maker not in inside else -1 for maker, last in zip(makers.tolist(), lasts.tolist(), strict=True)
        ]
        copied = {last: self._copied_at(last, inside) for last in inside.intersection(lasts_outside)}
        copies = np.array([copied.get(last, -1) for last in lasts_outside], dtype=np.int64)
        there = copies >= 0
        all_pairs = (
            np.concatenate((makers, copies[there])),
            np.concatenate((np.where(there, copies + 1, lasts), lasts[there])),
            np.concatenate((sizes, sizes[there])),
        )
        return all_pairs, frozenset(last for last, at in copied.items() if at >= 0)

    def _kept_by_parts(
        self, makers: Indices, lasts: Indices, sizes: Array, inside: frozenset[int]
    ) -> Iterator[tuple[int, int, float]]:
        """(maker, last, bytes) of what is sent on of a concatenation's gradient, in memory that others still read."""
        for maker in sorted(inside & {*makers.tolist()}):
            if self.profile.graph.layers[maker].kind == CONCAT:
                parts = [(lasts[place], sizes[place]) for place in np.flatnonzero(makers == maker).tolist()]
                own = [int(last) for last, _ in parts if last in inside]
                sent = sum(float(size) for last, size in parts if last not in inside)
                if own and sent:
                    yield maker, min(own), sent

    def _copied_at(self, layer: int, inside: Collection[int]) -> int:
        """The reshape of a stage that copies the gradient that comes for ``layer`` from others; -1: none.

        It is given that gradient through reshapes alone, the last of which makes what is handed on.
        """
        layers = self.profile.graph.layers
        chain = list[int]()
        at = layer
        while all(reader in inside for reader in self.readers[at]):
            if len(self.readers[at]) != 1 or layers[self.readers[at][0]].kind != RESHAPE:
                return -1
            at = self.readers[at][0]
            chain.append(at)
        if not chain:
            return -1
        place = copied_at([layers[each] for each in chain], [self.shapes[each] for each in chain])
        return -1 if place is None else chain[place]

    @once
    def _measured(self, kind: str) -> _Measured:
        """As the profile has them, at sizes at which all layers have some."""
        by_size: dict[int, dict[str, Levels]] = {}
        for one in self.profile.measurements.get(kind, ()):
            if one.levels is not None and not one.part:
                by_size.setdefault(one.samples, {})[one.layer] = one.levels
        names = [layer.name for layer in self.profile.graph.layers]
        rows = [[of[name] for name in names] for _, of in sorted(by_size.items()) if of.keys() >= {*names}]
        sizes = [float(size) for size, of in sorted(by_size.items()) if of.keys() >= {*names}]
        table = [[[float(getattr(one, what)) for one in row] for what in LEVEL_NAMES] for row in rows]
        return _Measured(np.array(sizes), np.array(table), rows)

    def pairs_at(self, what: str, kind: str, samples: float) -> LayerPairs:
        """Of what a layer's levels have by name: ``inputs_left``, what weight gradients need of others' values.

        (reader, maker, bytes); of ``gradients_left_from`` of the gradients of values; ``gradients_made``.
        """
        ends, values = self._pairs(kind, what)
        if not len(ends):
            return ends[:, 0], ends[:, 1], np.zeros(0)
        return ends[:, 0], ends[:, 1], np.maximum(affine(self._measured(kind).sizes, values, samples), 0.0)

    @once
    def _pairs(self, kind: str, what: str) -> tuple[Indices, Array]:
        """The pairs of a kind and a name, and ``[size, pair]`` bytes."""
        index = {layer.name: position for position, layer in enumerate(self.profile.graph.layers)}
        rows: list[Counter[tuple[int, int]]] = []
        for levels in self._measured(kind).levels:
            rows.append(Counter())
            for k, one in enumerate(levels):
                for name, size in getattr(one, what):
                    rows[-1][k, index[name]] += size
        keys = sorted(set[tuple[int, int]]().union(*rows))
        values = np.array([[float(row[key]) for key in keys] for row in rows])
        return np.array(keys, dtype=np.int64).reshape(-1, 2), values


def _between(first: Indices, last: Indices, sizes: Array, count: int) -> Array:
    """By layer, the bytes that are there from the layer ``first`` to the one before ``last``."""
    changes = np.zeros(count + 2)
    np.add.at(changes, first, sizes)
    np.subtract.at(changes, last, sizes)
    return np.asarray(np.maximum(np.cumsum(changes), 0.0))


class _Measured(NamedTuple):
    """Levels of a kind: sizes, ``[size, quantity, layer]``, and by size those of all layers."""

    sizes: Array
    table: Array
    levels: list[list[Levels]]


def affine(sizes: Array, values: Array, at: float) -> Array:
    """``values`` (first axis: ``sizes``, ascending) on the line through the two sizes around or nearest to ``at``.

    One size alone scales with the samples.
    """
    if len(sizes) == 1:
        return np.asarray(values[0] * at / sizes[0])
    upper = int(np.clip(np.searchsorted(sizes, at), 1, len(sizes) - 1))
    share = (at - sizes[upper - 1]) / (sizes[upper] - sizes[upper - 1])
    return np.asarray(values[upper - 1] + share * (values[upper] - values[upper - 1]))


@dataclass(frozen=True, slots=True, eq=False)
class Running:
    """The layers of a stage as they run.

    Attributes:
        order: by index in the graph.
        within: by place, whether the layer is in a span that is computed again.
        bounds: of each span, its first place and the one after its last.
    """

    order: Indices
    within: Flags
    bounds: tuple[tuple[int, int], ...]


def layers_in(runs: Iterable[Run]) -> Indices:
    """The layers of runs, by index."""
    return np.concatenate([np.arange(first, last) for first, last in runs] or [np.zeros(0, dtype=np.int64)])
