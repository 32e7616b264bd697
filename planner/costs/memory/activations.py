"""What a stage keeps of a micro-batch on one of its ranks, and how high memory rises meanwhile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from planner.costs.layers.cost_table import Flags, Run
from planner.costs.memory.action_peaks import (
    BACKWARD,
    BACKWARD_INPUT,
    FORWARD,
    GRADIENTS_LEFT,
    LEFT,
    OUTPUTS_SAVED,
    WEIGHT,
    ActionPeaks,
    Array,
    DeferredWeights,
    HeldInStage,
    KeptForBackward,
    RunningLayers,
    ValueGradients,
    action_peaks,
    plain_peaks,
    recomputed,
)
from planner.costs.memory.levels import (
    Indices,
    LayerParts,
    Running,
    layers_in,
)
from planner.costs.memory.messages import Received
from planner.costs.memory.table import What
from planner.costs.stages.action_costs import StageCosts, left_to_others
from planner.costs.stages.gradient_overlap import Bucket, buckets_of_parts
from planner.costs.stages.placement import StagePlacement
from planner.ir.plan import Size, samples_in

RankPart = tuple[int, int, Size]
"""A rank, a stage, and what micro-batches of one cost are."""


def activation_of(
    costs: StageCosts,
    part: RankPart,
    sent_bytes: int,
    output_gradients: Received,
    received: Received,
    buckets: Sequence[Bucket] = (),
) -> tuple[dict[str, int], int]:
    """What a stage holds of a micro-batch of one size on a rank: bytes by size of the memory table.

    And of the outputs that are sent on their own, how many bytes nobody saves.

    Args:
        sent_bytes: of its outputs for one of them, what is sent on its own.
        output_gradients: the gradients of its outputs that it receives for it.
        buckets: in which its gradients are summed during the last backward (:func:`overlapped_buckets`).
    """
    stage = _RankStage(costs, part)
    cost = stage.cost
    if cost is not None and cost.unrecorded_bytes is not None:
        most = round(float(cost.unrecorded_bytes[stage.member]))
        return {**plain_peaks(0, 0, 0, 0), "forward alone": most + received.assembled}, sent_bytes
    senders = tuple(sorted(run for number in received.senders for run in costs.stages[number].runs))
    held = stage.held_once(output_gradients, senders, _copies(buckets))
    recomputes = stage.placed.recompute and cost is None
    peaks, last = (recomputed(each) if recomputes else each for each in (held.peaks, held.last or held.peaks))
    left = min(received.whole, received.left(held.inputs_left))
    sizes = {
        **peaks,
        **{f"{name} last": size for name, size in last.items()},
        **{name: received.assembled + peaks[name] for name in ("forward", "forward alone")},
        "inputs": received.whole,
        "inputs of I": received.whole - left,
        "inputs of W": left,
    }
    return sizes, sent_bytes if held.unsaved is None or recomputes else min(held.unsaved, sent_bytes)


class _RankStage:
    """A stage on one of its ranks, for micro-batches of one size.

    Attributes:
        cost: where its layers have layouts of their own; None: all are cut alike, and the rank has ``samples``.
        made_bytes: of gradients of parameters; 0 where they lie beside the main memory.
        in_slices: whether a rank keeps its slices of them alone.
    """

    def __init__(self, costs: StageCosts, part: RankPart) -> None:
        rank, number, size = part
        self.costs = costs
        self.levels = costs.cost_model.levels
        self.tables = costs.cost_model.tables
        self.placed = costs.stages[number]
        self.kind = costs.kind(rank)
        self.member = self.placed.ranks.index(rank)
        self.cost = self.placed.laid_out[size] if self.placed.laid_out else None
        self.samples = 0.0 if self.cost is not None else self.placed.samples[samples_in(size)][self.member]
        self.made_bytes = 0 if costs.bytes_beside(rank) else self.placed.parameter_bytes
        self.in_slices = self.cost is None and costs.trains and self.placed.zero > 1 and self.made_bytes > 0

    def held_once(self, output_gradients: Received, senders: tuple[Run, ...], copies: Mapping[int, int]) -> HeldInStage:
        """As :meth:`held`, which is asked once for stages alike."""
        placed = self.placed
        if self.cost is not None:
            return self.held(output_gradients, senders, copies)
        slices = (placed.zero, len(placed.ranks), placed.tied) if self.costs.trains and placed.zero > 1 else ()
        of_stage = placed.runs, self.kind, self.samples, self.made_bytes, slices, placed.recomputed
        key = (*of_stage, output_gradients.sizes, senders, placed.overlaps_sums and placed.tied)
        memo: dict[tuple[object, ...], HeldInStage] = self.levels.known
        return memo[key] if key in memo else memo.setdefault(key, self.held(output_gradients, senders, copies))

    def held(self, output_gradients: Received, senders: Sequence[Run], copies: Mapping[int, int]) -> HeldInStage:
        """What it holds.

        Args:
            senders: layers of the stages that sent it something.
            copies: by layer, what putting a bucket together takes.
        """
        parts = self._parts()
        running = self.levels.running(parts.layers, self.placed.recomputed)
        parts = parts.at(running.order)
        of_parts = None
        if self.cost is None or not self.placed.recompute:
            of_parts = self.levels.of_parts(self.kind, parts, alone=len(self.placed.ranks) == 1)
        if of_parts is None:
            return self._without_levels(parts, running, copies)
        layers = self._layers(parts, running, of_parts, output_gradients, senders)
        together = np.array([float(copies.get(layer, 0)) for layer in running.order.tolist()])
        peaks = action_peaks(layers)
        last = action_peaks(layers, together) if copies else None
        if self.in_slices:  # later ones find the slices there, and add to them
            later = replace(layers, gradients=np.zeros_like(layers.gradients))
            peaks["B"] = action_peaks(later)["B"]
        return HeldInStage(peaks, last, self._unsaved(parts, running, layers.levels), self._inputs_left())

    def _parts(self) -> LayerParts:
        """What the rank has of each layer."""
        parameters = np.diff(self.tables.graph.parameter_bytes)
        if self.cost is None:
            layers = layers_in(self.placed.runs)
            table = self.tables.at(self.kind, self.samples)
            all_ = np.ones(len(layers))
            none = np.zeros(len(layers))
            saved = np.diff(table.saved_bytes)[layers]
            own = parameters[layers] * (self.made_bytes > 0)
            return LayerParts(layers, saved, self.samples * all_, all_, all_, none, none, none, own, parameters[layers])
        rows = self.cost.by_layer
        layers = np.array(rows.layers, dtype=np.int64)
        columns = rows.saved, rows.samples, rows.share, rows.read_share, rows.received, rows.copied, rows.parameters
        saved, samples, share, read_share, received, copied, own = (
            np.asarray(column[:, self.member], dtype=np.float64) for column in columns
        )
        of_whole = [
            self.tables.at(self.kind, n).workspace_bytes[k] for n, k in zip(samples.tolist(), rows.layers, strict=True)
        ]
        needs = rows.workspace[:, self.member] - share * np.array(of_whole)
        return LayerParts(layers, saved, samples, share, read_share, received, copied, needs, own, parameters[layers])

    def _layers(
        self,
        parts: LayerParts,
        running: Running,
        of_parts: tuple[Array, Array, Array],
        output_gradients: Received,
        senders: Sequence[Run],
    ) -> RunningLayers:
        """The layers as they run, with what lies in buffers taken out of what they save and leave."""
        levels, beyond, in_place = of_parts
        flow = self.levels.flow(self.kind, parts)
        gradients = parts.parameters
        deferred_weights = None
        needs = levels[WEIGHT].copy()
        defers = np.zeros(len(parts.layers), dtype=np.bool_)
        if self.cost is None:
            defers = self.tables.deferring(self.kind)[parts.layers]
            gradients = self._kept_gradients(parts, levels)
        saved = parts.saved + beyond
        there = np.minimum(self._in_buffers(parts, in_place, senders), saved)
        levels[FORWARD] -= there
        saved = saved - there
        if self.cost is not None:  # the runtime makes weight gradients with those of inputs, also if B comes in halves
            puts_off = self._puts_off(running.order) if flow is not None else defers
            levels[BACKWARD] = np.where(puts_off, levels[BACKWARD_INPUT], levels[BACKWARD])
            levels[BACKWARD_INPUT] = levels[BACKWARD]
            levels[[WEIGHT, LEFT]] = 0.0
            flow = flow and replace(flow, left=np.zeros_like(flow.left))
            meets = self.cost.by_layer.meets
            if flow is not None and meets is not None and puts_off.any():
                waits = meets[np.searchsorted(self.cost.by_layer.layers, running.order), self.member]
                deferred_weights = DeferredWeights.of(puts_off.tolist(), waits.tolist(), flow.given + saved, needs)
        levels[LEFT] -= np.clip(levels[LEFT] - levels[GRADIENTS_LEFT] - saved, 0.0, there)  # at least so much is of it
        return RunningLayers(
            saved,
            gradients,
            levels,
            output_gradients.total,
            defers,
            self._left_in_buffers(parts.layers, levels, output_gradients, flow),
            flow,
            self._kept(running, saved, levels, parts),
            running.bounds,
            deferred_weights,
        )

    def _puts_off(self, order: Indices) -> Flags:
        """By layer with a layout of its own, whether its weight gradients wait until ranks wait for statistics."""
        rows = self.cost.by_layer if self.cost is not None else None
        if rows is None or not rows.puts_off or self.placed.recomputed:
            return np.zeros(len(order), dtype=np.bool_)
        return np.array(rows.puts_off)[np.searchsorted(rows.layers, order)]

    def _without_levels(self, parts: LayerParts, running: Running, copies: Mapping[int, int]) -> HeldInStage:
        """What it holds where a profile has workspaces alone, or a stage with layouts recomputes."""
        stays = self._kept(running, parts.saved + parts.received, None, parts)
        more = np.maximum(parts.saved + parts.received - stays.same, 0.0)
        had_back = round(max((float(more[first:last].sum()) for first, last in running.bounds), default=0.0))
        needs = 0.0
        saved = float(stays.kept.sum())
        made = self.made_bytes
        gathered = 0
        making = 0
        if self.cost is not None:
            cost = self.cost
            whole = cost.saved_bytes, cost.transient_bytes, cost.workspace_bytes, cost.parameter_bytes
            in_all, once, needs, made = (round(float(part[self.member])) for part in whole)
            left = float(in_all + once)
            if not self.placed.recomputed:
                saved = in_all
                had_back = once
        else:
            needs = float(self.tables.at(self.kind, self.samples).workspace_bytes[parts.layers].max(initial=0.0))
            left = self.tables.deferred_bytes(self.kind, self.samples, self.placed.runs)
        if self.in_slices:
            buckets = self.costs.cost_model.buckets(self.placed.runs, self.placed.tied)
            made = kept_gradients(self.placed)
            puts_together = self.placed.zero < 3
            making = max((bucket.num_bytes + bucket.copied_bytes * puts_together for bucket in buckets), default=0)
            gathered = 0 if puts_together else max((bucket.num_bytes for bucket in buckets), default=0)

        def peaks(copied: int) -> ActionPeaks:
            plain = plain_peaks(saved, left, made, needs + gathered + copied, had_back)
            return {**plain, "B first": plain["B first"] + making, "B": plain["B"] + making}

        return HeldInStage(peaks(0), peaks(max(copies.values())) if copies else None)

    def _kept(self, running: Running, saved: Array, levels: Array | None, parts: LayerParts) -> KeptForBackward:
        """By layer as they run, what stays from forward to backward; of those outside spans all that they save."""
        if not self.placed.recomputed:
            return KeptForBackward(saved, saved)
        of_spans = self.levels.kept(running.order, self.placed.recomputed, levels, parts.whole)
        return KeptForBackward(*(np.where(running.within, each, saved) for each in (of_spans.kept, of_spans.same)))

    def _kept_gradients(self, parts: LayerParts, levels: Array) -> Array:
        """By layer, gradients of parameters that stay from one backward to the next.

        Where ranks keep slices of them, ``levels`` get what is there beside.  That is what a layer finds of the
        bucket's gradients while these are made, what putting them together takes when the last of them is there, and
        with ZeRO-3 the parameters of the buckets that it uses, whole.
        """
        placed = self.placed
        layers = parts.layers
        gradients = parts.parameters.copy()
        in_all = self.made_bytes
        if self.in_slices:
            share = 1 / len(placed.ranks)
            copied = np.zeros_like(gradients)
            in_all = kept_gradients(placed)
            for bucket in self.costs.cost_model.buckets(placed.runs, placed.tied):
                used = (bucket.first_layer <= layers) & (layers <= bucket.last_layer)
                if placed.zero > 2:
                    levels[: WEIGHT + 1, used] += bucket.num_bytes
                for layer, size in bucket.by_layer:
                    levels[BACKWARD, used & (layers <= layer)] += size
                    gradients[layers == layer] -= size
                ends = layers == bucket.first_layer
                copied[ends] = np.maximum(copied[ends], bucket.copied_bytes * (placed.zero < 3))  # else it went before
                gradients[ends] += share * bucket.num_bytes
            levels[BACKWARD] += copied
            gradients = np.maximum(gradients, 0.0)
        gradients[:1] += max(0.0, in_all - gradients.sum())  # of what an earlier stage uses too: taken to be last
        return gradients

    def _inputs_left(self) -> float | None:
        """Of the values that other stages made, what weight gradients of the stage need; None if that is not known."""
        if self.cost is not None:
            return 0.0
        if not len(self.levels.pairs_at("gradients_made", self.kind, self.samples)[0]):
            return None
        layers = layers_in(self.placed.runs)
        by_maker = dict[int, float]()
        readers, makers, sizes = self.levels.pairs_at("inputs_left", self.kind, self.samples)
        for place in np.flatnonzero(np.isin(readers, layers) & ~np.isin(makers, layers)).tolist():
            maker = int(makers[place])
            by_maker[maker] = max(by_maker.get(maker, 0.0), float(sizes[place]))
        return sum(by_maker.values())

    def _in_buffers(self, parts: LayerParts, saved: Array, senders: Sequence[Run]) -> Array:
        """By layer, of what it saves, at least so much that other stages made: it lies where it was received.

        Args:
            saved: of earlier layers' values.
        """
        inside = set(parts.layers.tolist())
        outside = set(layers_in(senders).tolist())
        in_buffers = np.zeros(len(parts.layers))
        reads = parts.samples * np.maximum(parts.share, parts.read_share)
        for place, layer in enumerate(parts.layers.tolist()):
            read = self.levels.inputs[layer]
            mine, theirs = (reads[place] * sum(size for maker, size in read if maker in by) for by in (inside, outside))
            in_buffers[place] = min(max(0.0, saved[place] - mine), theirs)
        return in_buffers

    def _left_in_buffers(
        self, layers: Indices, levels: Array, output_gradients: Received, flow: ValueGradients | None
    ) -> Array:
        """By layer, what its weight gradients need of the gradients received, in their buffers.

        What is known to lie there is taken out of what ``levels`` have as left.  Where the flow of gradients is not
        known, the lowest layer is taken to need them last: a gradient that no layer of the stage adds to is that of the
        weight gradients where it lies, and a buffer goes whole.
        """
        gradients_left = np.zeros(len(layers))
        if flow is None:
            inside = set(layers.tolist())
            alone = [place for place, k in enumerate(layers.tolist()) if inside.isdisjoint(self.levels.readers[k])]
            counted = min(float(levels[GRADIENTS_LEFT, alone].sum()), float(levels[LEFT].sum()))
            gradients_left[:1] = max(0.0, output_gradients.total - counted) if counted > 0 else 0.0
        elif output_gradients.total:
            levels[LEFT] -= np.minimum(flow.left, levels[LEFT])
            wanted = float(flow.left.sum())
            gradients_left = flow.left * (output_gradients.left(wanted) / max(1.0, wanted))
        return gradients_left

    def _unsaved(self, parts: LayerParts, running: Running, levels: Array) -> int:
        """Of the outputs that other stages read, what neither their makers nor readers in this stage save.

        What spans that are computed again save is dropped, and who reads a copy does not save the output itself.
        """
        saves, outputs_saved = (np.where(running.within, 0.0, each) for each in (parts.saved, levels[OUTPUTS_SAVED]))
        saves = np.where(parts.copied == 0, saves, 0.0)
        inside = {layer: place for place, layer in enumerate(parts.layers.tolist())}
        unsaved = 0.0
        for layer, place in inside.items():
            readers = self.levels.readers[layer]
            if any(reader not in inside for reader in readers):
                size = self.levels.outputs[layer] * parts.whole[place]
                if not any(saves[inside[reader]] >= 0.99 * size for reader in readers if reader in inside):
                    unsaved += max(0.0, size - float(outputs_saved[place]))
        return round(unsaved)


def overlapped_buckets(costs: StageCosts, placed: StagePlacement, member: int) -> tuple[Bucket, ...]:
    """In which the gradients of a rank are summed while the last backward of the stage runs."""
    if placed.overlaps_sums:
        return costs.cost_model.buckets(placed.runs, placed.tied)
    if placed.once is None or len(placed.ranks) < 2 or not costs.trains:
        return ()
    own = placed.once.by_layer
    return buckets_of_parts(costs.cost_model.graph, own.layers, own.weights, member, placed.tied)


def _copies(buckets: Sequence[Bucket]) -> dict[int, int]:
    """By the layer (its index) that completes a bucket in the last backward, what putting it together takes.

    One bucket alone is put together when it is summed; the only gradient of a bucket is summed where it lies.
    """
    by_layer: dict[int, int] = {}
    for one in buckets if len(buckets) > 1 else ():
        by_layer[one.first_layer] = max(one.copied_bytes, by_layer.get(one.first_layer, 0))
    return {layer: size for layer, size in by_layer.items() if size}


def kept_gradients(placed: StagePlacement) -> int:
    """Bytes of gradients that a rank of a stage keeps between passes, of parameters that it has whole or in slices."""
    return placed.parameter_bytes - left_to_others(placed, What.GRADIENTS)
