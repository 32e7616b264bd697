"""What a stage keeps of a micro-batch on one of its ranks, and how high memory rises meanwhile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from planner.costs.layers.cost_table import SizeTable
from planner.costs.memory.action_peaks import (
    ActionPeaks,
    DeferredWeights,
    KeptForBackward,
    ValueGradients,
    action_peaks,
    plain_peaks,
)
from planner.costs.memory.levels import (
    BACKWARD,
    BACKWARD_INPUT,
    FORWARD,
    GRADIENTS_LEFT,
    INPUTS_SAVED,
    LEFT,
    OUTPUTS_SAVED,
    WEIGHT,
    Array,
    Indices,
    Run,
    Running,
    layers_in,
)
from planner.costs.memory.messages import Received
from planner.costs.shards.sharding_spec import Reading
from planner.costs.simulator.program import ActivationSlot
from planner.costs.stages.action_costs import StageCosts, left_to_others
from planner.costs.stages.gradient_overlap import Bucket, buckets_of_parts
from planner.costs.stages.placement import StagePlacement
from planner.costs.stages.stage_cost import StageCost
from planner.ir.plan import samples_in


@dataclass(frozen=True, slots=True)
class Activation:
    """What a stage holds of a micro-batch on a rank, in bytes, what it received apart.

    Attributes:
        unsaved: of the outputs that are sent on their own, what nobody saves.
        recompute: whether what layers save is not kept, but computed again for the backward.
        last: the course in which sums of gradients begin, of the last backward of a stage whose ranks sum them behind.
        inputs: what it received, with its buffers, behind the forward; ``inputs_left``: what of that weight gradients
            need after those of inputs.
        assembled: of ``inputs``, tensors that the forward makes of what several messages brought.
    """

    peaks: ActionPeaks
    unsaved: int = 0
    recompute: bool = False
    last: ActionPeaks | None = None
    inputs: int = 0
    inputs_left: int = 0
    assembled: int = 0

    @property
    def saved(self) -> int:
        """From forward to backward, of what layers save."""
        return 0 if self.recompute else self.peaks.saved


def activation_of(
    costs: StageCosts,
    slot: ActivationSlot,
    sent_bytes: int,
    output_gradients: Received,
    received: Received,
    buckets: Sequence[Bucket] = (),
) -> Activation:
    """Of a stage on one of its ranks.

    Args:
        sent_bytes: of its outputs for this micro-batch, what is sent on its own.
        output_gradients: the gradients of its outputs that it receives for it.
        buckets: in which its gradients are summed behind the last backward (:func:`buckets_behind`).
    """
    placed, copies = costs.stages[slot.stage], _copies(buckets)
    stage, microbatch, member = slot.stage, slot.microbatch, placed.ranks.index(slot.rank)
    senders = tuple(sorted(run for number in received.senders for run in costs.stages[number].runs))
    if placed.laid_out:
        cost = placed.laid_out[costs.micro_batches[microbatch]]
        if cost.unrecorded_bytes is not None:
            most = round(float(cost.unrecorded_bytes[member]))
            peaks = replace(plain_peaks(0, 0, 0, 0), unrecorded=most)
            return Activation(peaks, sent_bytes, assembled=received.assembled)
        known_of_parts = (
            None if placed.recompute else _laid_out(costs, placed, cost, member, output_gradients, senders, copies)
        )
        if known_of_parts is not None:
            stage_peaks, last, alone = known_of_parts
            inputs = received.whole, 0, received.assembled
            return Activation(stage_peaks, min(alone, sent_bytes), False, last, *inputs)
        parts = (cost.saved_bytes, cost.transient_bytes, cost.workspace_bytes, cost.parameter_bytes)
        saved, had_back, workspace, parameters = (round(float(part[member])) for part in parts)
        left = saved + had_back
        if placed.recomputed:
            saved, had_back = _of_spans(costs, placed, cost, member)
        stage_peaks = plain_peaks(saved, left, parameters, workspace, had_back)
        last = plain_peaks(saved, left, parameters, workspace + max(copies.values()), had_back) if copies else None
        inputs = received.whole, received.left(None), received.assembled
        return Activation(stage_peaks, sent_bytes, False, last, *inputs)
    rank = placed.ranks[member]
    table, kind, on_chip = costs.table(stage, member, microbatch), costs.kind(rank), costs.on_chip_bytes(rank) > 0
    samples = placed.samples[samples_in(costs.micro_batches[microbatch])][member]
    memo = costs.book.levels.known
    made_bytes = 0 if on_chip else placed.parameter_bytes
    slices = (placed.zero, len(placed.ranks), placed.tied) if costs.trains and placed.zero > 1 else ()
    sums_behind = placed.sums_behind and placed.tied
    key = (
        placed.runs,
        kind,
        samples,
        made_bytes,
        output_gradients.sizes,
        sums_behind,
        senders,
        slices,
        placed.recomputed,
    )
    if key not in memo:
        stage_peaks, unsaved = _course_of(costs, placed, table, kind, samples, output_gradients, senders, made_bytes)
        last = (
            _course_of(costs, placed, table, kind, samples, output_gradients, senders, made_bytes, copies)[0]
            if copies
            else None
        )
        memo[key] = stage_peaks, unsaved, last, _inputs_left(costs, placed, kind, samples)
    stage_peaks, unsaved, last, wanted = memo[key]
    left = sent_bytes if unsaved is None or placed.recompute else min(unsaved, sent_bytes)
    inputs = received.whole, received.left(wanted), received.assembled
    return Activation(stage_peaks, left, placed.recompute, last, *inputs)


def _laid_out(
    costs: StageCosts,
    placed: StagePlacement,
    cost: StageCost,
    member: int,
    output_gradients: Received,
    senders: Sequence[Run],
    copies: Mapping[int, int],
) -> tuple[ActionPeaks, ActionPeaks | None, int] | None:
    """Of layers with layouts of their own the course, the last one, and what is sent without being saved.

    None if no levels are known.

    The runtime makes their weight gradients with those of inputs, also where a backward comes in halves.

    Args:
        senders: layers of the stages that sent it something.
        copies: by layer, what putting a bucket together takes.
    """
    kind, own = costs.kind(placed.ranks[member]), cost.by_layer
    parameters = np.diff(costs.book.tables.graph.parameter_bytes)
    rows, inputs, is_slice = list[Array](), list[tuple[float, float]](), len(placed.ranks) == 1
    for place, layer in enumerate(own.layers):
        columns = own.samples, own.share, own.read_share, own.received, own.copied
        samples, share, read_share, received, copied = (float(each[place, member]) for each in columns)
        part = Reading(samples, share, read_share, received, copied, is_slice)
        whole = float(costs.book.tables.at(kind, part.samples).workspace_bytes[layer])
        more = float(own.workspace[place, member]) - part.share * whole
        weights = float(own.parameters[place, member]) / parameters[layer] if parameters[layer] else 0.0
        levels = costs.book.levels.of_part(kind, layer, part, more, weights, float(parameters[layer]))
        if levels is None:
            return None
        rows.append(levels)
        inputs.append(costs.book.levels.inputs_saved(kind, layer, part))
    running = costs.book.levels.running(np.array(own.layers, dtype=np.int64), placed.recomputed)
    layers, at = running.order, np.searchsorted(own.layers, running.order)
    by_layer = np.array(rows).T[:, at]
    flow = costs.book.levels.flow_of_parts(kind, own.samples[at, member], own.share[at, member], layers)
    needs, puts_off = by_layer[WEIGHT].copy(), np.zeros(len(at), dtype=np.bool_)
    if own.puts_off and flow is not None and not placed.recomputed:
        puts_off = np.array(own.puts_off)[at]
    by_layer[BACKWARD] = np.where(puts_off, by_layer[BACKWARD_INPUT], by_layer[BACKWARD])
    by_layer[BACKWARD_INPUT], by_layer[[WEIGHT, LEFT]] = by_layer[BACKWARD], 0.0
    (beyond, in_place), parts = np.array(inputs)[at].T, (own.samples * own.share)[at, member]
    saved = own.saved[at, member] + beyond
    read = own.samples[at, member] * np.maximum(own.share, own.read_share)[at, member]
    there = np.minimum(_in_buffers(costs, layers, in_place, read, senders), saved)
    by_layer[FORWARD] -= there
    saved = saved - there
    keeps = _kept(costs, placed, running, saved, by_layer, parts)
    made, defers = own.parameters[at, member], np.zeros(len(layers), dtype=np.bool_)
    rest = saved, made, by_layer, output_gradients.total, defers, None, flow
    together = np.array([float(copies.get(layer, 0)) for layer in layers.tolist()])
    deferred_weights = None
    if own.meets is not None and flow is not None and puts_off.any():
        deferred_weights = DeferredWeights.of(
            puts_off.tolist(), own.meets[at, member].tolist(), flow.given + saved, needs
        )
    last = action_peaks(*rest, together, keeps, running.bounds, deferred_weights) if copies else None
    saves, outputs_saved = (np.where(running.within, 0.0, e) for e in (own.saved[at, member], by_layer[OUTPUTS_SAVED]))
    unsaved = _unsaved(costs, layers, saves, outputs_saved, parts, own.copied[at, member] == 0)
    return action_peaks(*rest, None, keeps, running.bounds, deferred_weights), last, unsaved


def _kept(
    costs: StageCosts, placed: StagePlacement, running: Running, saved: Array, levels: Array | None, parts: Array
) -> KeptForBackward:
    """By layer as they run, what stays from forward to backward; of those outside spans all that they save."""
    if not placed.recomputed:
        return KeptForBackward(saved, saved)
    of_segments = costs.book.levels.kept(running.order, placed.recomputed, levels, parts)
    return KeptForBackward(*(np.where(running.within, each, saved) for each in (of_segments.kept, of_segments.same)))


def _of_spans(costs: StageCosts, placed: StagePlacement, cost: StageCost, member: int) -> tuple[int, int]:
    """(what stays from forward to backward, what the largest span has back) of layers of which no levels are known."""
    own = cost.by_layer
    running = costs.book.levels.running(np.array(own.layers, dtype=np.int64), placed.recomputed)
    at = np.searchsorted(own.layers, running.order)
    saved = (own.saved[:, member] + own.received[:, member])[at]
    stays = _kept(costs, placed, running, saved, None, (own.samples * own.share)[at, member])
    return round(float(stays.kept.sum())), _largest_span(running, saved, stays)


def _largest_span(running: Running, saved: Array, stays: KeptForBackward) -> int:
    """What the layers of a span save beside what stays, of that where it is most."""
    more = np.maximum(saved - stays.same, 0.0)
    return round(max((float(more[first:last].sum()) for first, last in running.bounds), default=0.0))


def buckets_behind(costs: StageCosts, placed: StagePlacement, member: int) -> tuple[Bucket, ...]:
    """In which the gradients of a rank are summed while the last backward of the stage runs."""
    if placed.sums_behind:
        return costs.book.buckets(placed.runs, placed.tied)
    if placed.once is None or len(placed.ranks) < 2 or not costs.trains:
        return ()
    own = placed.once.by_layer
    return buckets_of_parts(costs.book.profile.graph, own.layers, own.weights, member, placed.tied)


def _copies(buckets: Sequence[Bucket]) -> dict[int, int]:
    """By the layer (its index) that completes a bucket in the last backward, what putting it together takes.

    One bucket alone is put together when it is summed; the only gradient of a bucket is summed where it lies.
    """
    by_layer: dict[int, int] = {}
    for one in buckets if len(buckets) > 1 else ():
        by_layer[one.first_layer] = max(one.copied_bytes, by_layer.get(one.first_layer, 0))
    return {layer: size for layer, size in by_layer.items() if size}


def _course_of(
    costs: StageCosts,
    placed: StagePlacement,
    table: SizeTable,
    kind: str,
    samples: float,
    output_gradients: Received,
    senders: Sequence[Run],
    made_bytes: int,
    copies: Mapping[int, int] | None = None,
) -> tuple[ActionPeaks, int | None]:
    """The course, and what is sent to other stages without being saved; None if that is not known.

    Args:
        made_bytes: of gradients of parameters; 0 where they lie on chip.
    """
    levels, copies = costs.book.levels.at(kind, samples), copies or {}
    running = costs.book.levels.running(layers_in(placed.runs), placed.recomputed)
    layers = running.order
    saved_by, parts = np.diff(table.saved_bytes)[layers], np.full(len(layers), float(samples))
    if levels is None:
        hungriest = max((float(table.workspace_bytes[a:b].max()) for a, b in placed.runs if a < b), default=0.0)
        left = costs.book.tables.deferred_bytes(kind, samples, placed.runs)
        kept = _kept(costs, placed, running, saved_by, None, parts)
        plain = float(kept.kept.sum()), left, hungriest, _largest_span(running, saved_by, kept)
        if costs.trains and placed.zero > 1 and made_bytes:
            return _plain_in_slices(costs, placed, *plain), None
        hungriest += max(copies.values(), default=0)
        return plain_peaks(plain[0], left, made_bytes, hungriest, plain[3]), None
    made = np.diff(costs.book.tables.graph.parameter_bytes)[layers] * (made_bytes > 0)
    defers, own = costs.book.tables.deferring(kind)[layers], levels[:, layers]
    put_together = np.array([float(copies.get(layer, 0)) for layer in layers.tolist()])
    if costs.trains and placed.zero > 1 and made_bytes:
        made = _in_slices(costs, placed, layers, own, made)
        made_bytes = kept_gradients(placed)
    flow = costs.book.levels.flow(kind, samples, layers)
    there = np.minimum(_in_buffers(costs, layers, own[INPUTS_SAVED], parts, senders), saved_by)
    own[FORWARD] -= there
    own[LEFT] -= np.clip(own[LEFT] - own[GRADIENTS_LEFT] - (saved_by - there), 0.0, there)  # so much at least is of it
    stays = _left_in_buffers(costs, layers, own, output_gradients, flow)
    keeps = _kept(costs, placed, running, saved_by - there, own, parts)
    gradients = made.copy()
    gradients[:1] += max(0.0, made_bytes - made.sum())  # of parameters that an earlier stage uses too: taken to be last
    rest = (own, output_gradients.total, defers, stays, flow, put_together, keeps, running.bounds)
    peaks = action_peaks(saved_by - there, gradients, *rest)
    if costs.trains and placed.zero > 1:  # later ones find the slices there, and add to them
        peaks = replace(peaks, backward_later=action_peaks(saved_by - there, np.zeros_like(made), *rest).backward_later)
    # What spans that are computed again save of their outputs is dropped.
    saved_by, outputs_saved = (np.where(running.within, 0.0, each) for each in (saved_by, own[OUTPUTS_SAVED]))
    return peaks, _unsaved(costs, layers, saved_by, outputs_saved, parts)


def _inputs_left(costs: StageCosts, placed: StagePlacement, kind: str, samples: float) -> float | None:
    """Of the values that other stages made, what weight gradients of the stage need; None if that is not known."""
    levels, layers = costs.book.levels, layers_in(placed.runs)
    if levels.gradients_made(kind, samples) is None:
        return None
    readers, makers, sizes = levels.pairs_at("inputs_left", kind, samples)
    by_maker: dict[int, float] = {}
    for place in np.flatnonzero(np.isin(readers, layers) & ~np.isin(makers, layers)).tolist():
        maker = int(makers[place])
        by_maker[maker] = max(by_maker.get(maker, 0.0), float(sizes[place]))
    return sum(by_maker.values())


def _in_slices(costs: StageCosts, placed: StagePlacement, layers: Indices, levels: Array, made: Array) -> Array:
    """Gradients that stay, by layer, of a stage whose ranks keep slices of them; ``levels`` get what is there beside.

    That is what a layer finds of the bucket's gradients while these are made, what putting them together takes when
    the last of them is there, and with ZeRO-3 the parameters of the buckets that it uses, whole.
    """
    share = 1 / len(placed.ranks)
    kept, copied = made.copy(), np.zeros_like(made)
    for bucket in costs.book.buckets(placed.runs, placed.tied):
        used = (bucket.first_layer <= layers) & (layers <= bucket.last_layer)
        if placed.zero > 2:
            levels[: WEIGHT + 1, used] += bucket.num_bytes
        for layer, size in bucket.by_layer:
            levels[BACKWARD, used & (layers <= layer)] += size
            kept[layers == layer] -= size
        ends = layers == bucket.first_layer
        copied[ends] = np.maximum(copied[ends], bucket.copied_bytes * (placed.zero < 3))  # else it went before
        kept[layers == bucket.first_layer] += share * bucket.num_bytes
    levels[BACKWARD] += copied
    return np.maximum(kept, 0.0)


def _plain_in_slices(
    costs: StageCosts, placed: StagePlacement, saved: float, left: float, hungriest: float, recomputed: float
) -> ActionPeaks:
    """The same where no levels of layers are known."""
    buckets = costs.book.buckets(placed.runs, placed.tied)
    gathered = max((bucket.num_bytes for bucket in buckets), default=0) if placed.zero > 2 else 0
    making = max((bucket.num_bytes + bucket.copied_bytes * (placed.zero < 3) for bucket in buckets), default=0)
    plain = plain_peaks(saved, left, kept_gradients(placed), hungriest + gathered, recomputed)
    first, later = plain.backward_first + making, plain.backward_later + making
    return replace(plain, backward_first=first, backward_later=later)


def kept_gradients(placed: StagePlacement) -> int:
    """Bytes of gradients that a rank of a stage keeps between passes, of parameters that it has whole or in slices."""
    return placed.parameter_bytes - (left_to_others(placed) if placed.zero > 1 else 0)


def _in_buffers(costs: StageCosts, layers: Indices, saved: Array, parts: Array, senders: Sequence[Run]) -> Array:
    """By layer, of what it saves, at least so much that other stages made: it lies where it was received.

    Args:
        saved: of earlier layers' values.
        parts: by layer, of how many samples it reads its inputs.
    """
    inside, outside = set(layers.tolist()), set(layers_in(senders).tolist())
    in_buffers = np.zeros(len(layers))
    for place, layer in enumerate(layers.tolist()):
        read = costs.book.levels.inputs[layer]
        mine, theirs = (parts[place] * sum(size for maker, size in read if maker in made) for made in (inside, outside))
        in_buffers[place] = min(max(0.0, saved[place] - mine), theirs)
    return in_buffers


def _left_in_buffers(
    costs: StageCosts, layers: Indices, levels: Array, output_gradients: Received, flow: ValueGradients | None
) -> Array:
    """By layer, what its weight gradients need of the gradients received, in their buffers.

    What is known to lie there is taken out of what ``levels`` have as left.
    """
    gradients_left = np.zeros(len(layers))
    if flow is None:
        gradients_left[:1] = _output_gradients_left(costs, layers, levels, output_gradients.total)  # taken to go last
    elif output_gradients.total:
        levels[LEFT] -= np.minimum(flow.left, levels[LEFT])
        wanted = float(flow.left.sum())
        gradients_left = flow.left * (output_gradients.left(wanted) / max(1.0, wanted))
    return gradients_left


def _output_gradients_left(costs: StageCosts, layers: Indices, levels: Array, output_gradients: int) -> float:
    """What stays of the gradients that were received, in their buffers, beside what is counted as left of them.

    A gradient that no layer of the stage adds to is that of the weight gradients where it lies; a buffer goes whole.
    """
    inside, readers = set(layers.tolist()), costs.book.levels.readers
    alone = [place for place, layer in enumerate(layers.tolist()) if inside.isdisjoint(readers[layer])]
    counted = min(float(levels[GRADIENTS_LEFT, alone].sum()), float(levels[LEFT].sum()))
    return max(0.0, output_gradients - counted) if counted > 0 else 0.0


def _unsaved(
    costs: StageCosts,
    layers: Indices,
    saved_by: Array,
    outputs_saved: Array,
    parts: Array,
    in_place: NDArray[np.bool_] | None = None,
) -> int:
    """Of the outputs that other stages read, what neither their makers nor readers in this stage save.

    Args:
        saved_by: by layer; ``outputs_saved``: of that its own outputs.
        parts: by layer, how many whole samples its part is.
        in_place: by layer, whether it reads its inputs where they lie; None: all do.
    """
    outputs, readers = costs.book.levels.outputs, costs.book.levels.readers
    inside = {int(layer): place for place, layer in enumerate(layers)}
    saves = saved_by if in_place is None else np.where(in_place, saved_by, 0.0)
    unsaved = 0.0
    for layer, place in inside.items():
        if all(reader in inside for reader in readers[layer]):
            continue
        size = outputs[layer] * parts[place]
        kept_by_reader = any(saves[inside[r]] >= 0.99 * size for r in readers[layer] if r in inside)
        unsaved += 0.0 if kept_by_reader else max(0.0, size - float(outputs_saved[place]))
    return round(unsaved)
