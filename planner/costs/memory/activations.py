"""What a stage keeps of a micro-batch on one of its ranks, and how high memory rises meanwhile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from planner.costs.layers.cost_table import SizeTable, span
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
    Course,
    Flow,
    Indices,
    Run,
    course,
    layers_in,
    plain_course,
)
from planner.costs.memory.messages import Received
from planner.costs.stages.action_costs import StageCosts, left_to_others
from planner.costs.stages.placement import StagePlacement
from planner.costs.stages.stage_cost import StageCost
from planner.ir.plan import samples_in


@dataclass(frozen=True, slots=True)
class Activation:
    """What a stage holds of a micro-batch on a rank, in bytes, what it received apart.

    Attributes:
        kept: from forward to the end of backward: what was saved.
        unsaved: of the outputs that are sent on their own, what nobody saves.
        recompute: whether what layers save is not among that, but computed again for the backward.
        last: the course in which sums of gradients begin, of the last backward of a stage whose ranks sum them behind.
        inputs: what it received, with its buffers, behind the forward; ``inputs_left``: what of that weight gradients
            need after those of inputs.
        assembled: of ``inputs``, tensors that the forward makes of what several messages brought.
    """

    course: Course
    kept: int
    unsaved: int = 0
    recompute: bool = False
    last: Course | None = None
    inputs: int = 0
    inputs_left: int = 0
    assembled: int = 0

    @property
    def saved(self) -> int:
        """The part of ``kept`` that layers save."""
        return 0 if self.recompute else self.course.saved


def activation_of(
    costs: StageCosts, stage: int, member: int, microbatch: int, sent_bytes: int, seeds: Received, received: Received
) -> Activation:
    """Of the stage's rank number ``member``.

    Args:
        sent_bytes: of its outputs for this micro-batch, what is sent on its own.
        seeds: the gradients of its outputs that it receives for it.
    """
    placed = costs.stages[stage]
    if placed.laid_out:
        cost = placed.laid_out[costs.micro_batches[microbatch]]
        if cost.unrecorded_bytes is not None:
            most = round(float(cost.unrecorded_bytes[member]))
            course = replace(plain_course(0, 0, 0, 0), unrecorded=most)
            return Activation(course, 0, sent_bytes, assembled=received.assembled)
        laid_out = None if placed.recompute else _laid_out(costs, placed, cost, member, seeds)
        if laid_out is not None:
            inputs = received.whole, 0, received.assembled
            return Activation(laid_out, laid_out.saved, sent_bytes, False, None, *inputs)
        parts = (cost.saved_bytes, cost.transient_bytes, cost.workspace_bytes, cost.parameter_bytes)
        saved, again, workspace, parameters = (round(float(part[member])) for part in parts)
        found = plain_course(saved, saved + again, parameters, workspace, again)
        return Activation(
            found, found.saved, sent_bytes, False, None, received.whole, received.left(None), received.assembled
        )
    rank = placed.ranks[member]
    table, kind, on_chip = costs.table(stage, member, microbatch), costs.kind(rank), costs.on_chip_bytes(rank) > 0
    samples = placed.samples[samples_in(costs.micro_batches[microbatch])][member]
    known = costs.book.levels.known
    senders = tuple(sorted(run for number in received.senders for run in costs.stages[number].runs))
    made_bytes = 0 if on_chip else placed.parameter_bytes
    slices = (placed.zero, len(placed.ranks), placed.tied) if costs.trains and placed.zero > 1 else ()
    sums_behind = placed.sums_behind and placed.tied
    key = (placed.runs, kind, samples, made_bytes, seeds.sizes, sums_behind, senders, slices)
    if key not in known:
        copies = _copies(costs, placed)
        found, unsaved = _course_of(costs, placed, table, kind, samples, seeds, senders, made_bytes)
        last = (
            _course_of(costs, placed, table, kind, samples, seeds, senders, made_bytes, copies)[0] if copies else None
        )
        known[key] = found, unsaved, last, _inputs_left(costs, placed, kind, samples)
    found, unsaved, last, wanted = known[key]
    left = sent_bytes if unsaved is None or placed.recompute else min(unsaved, sent_bytes)
    kept = 0 if placed.recompute else found.saved
    inputs = received.whole, received.left(wanted), received.assembled
    return Activation(found, kept, left, placed.recompute, last, *inputs)


def _laid_out(
    costs: StageCosts, placed: StagePlacement, cost: StageCost, member: int, seeds: Received
) -> Course | None:
    """Of layers with layouts of their own; None if no levels are known.

    The runtime makes their weight gradients with those of inputs, also where a backward comes in halves.
    """
    kind, own = costs.kind(placed.ranks[member]), cost.by_layer
    found, inputs = [], []
    for place, layer in enumerate(own.layers):
        samples, share, read = (float(each[place, member]) for each in (own.samples, own.share, own.read_share))
        whole = float(costs.book.tables.at(kind, samples).workspace_bytes[layer])
        more = float(own.workspace[place, member]) - share * whole
        levels = costs.book.levels.of_part(kind, layer, samples, share, float(own.received[place, member]), more)
        if levels is None:
            return None
        found.append(levels)
        inputs.append(costs.book.levels.inputs_beyond(kind, layer, samples, share, read))
    layers, by_layer = np.array(own.layers, dtype=np.int64), np.array(found).T
    by_layer[BACKWARD_INPUT], by_layer[[WEIGHT, LEFT]] = by_layer[BACKWARD], 0.0
    flow = costs.book.levels.flow_of_parts(kind, own.samples[:, member], own.share[:, member], layers)
    saved = own.saved[:, member] + np.maximum(own.received[:, member], inputs)
    defers = np.zeros(len(layers), dtype=np.bool_)
    return course(saved, own.parameters[:, member], by_layer, seeds.total, defers, flow=flow)


def _copies(costs: StageCosts, placed: StagePlacement) -> dict[int, int]:
    """By the layer (its index) that completes a bucket in the last backward, what putting it together takes.

    One bucket alone is put together when it is summed; the only gradient of a bucket is summed where it lies.
    """
    buckets = costs.book.buckets(placed.runs, placed.tied) if placed.sums_behind else ()
    found: dict[int, int] = {}
    for one in buckets if len(buckets) > 1 else ():
        found[one.first_layer] = max(one.copied_bytes, found.get(one.first_layer, 0))
    return {layer: size for layer, size in found.items() if size}


def _course_of(
    costs: StageCosts,
    placed: StagePlacement,
    table: SizeTable,
    kind: str,
    samples: float,
    seeds: Received,
    senders: Sequence[Run],
    made_bytes: int,
    copies: Mapping[int, int] | None = None,
) -> tuple[Course, int | None]:
    """The course, and what is sent to other stages without being saved; None if that is not known.

    Args:
        made_bytes: of gradients of parameters; 0 where they lie on chip.
    """
    levels, copies = costs.book.levels.at(kind, samples), copies or {}
    if levels is None:
        if costs.trains and placed.zero > 1 and made_bytes:
            return _plain_in_slices(costs, placed, table, kind, samples), None
        hungriest = max((float(table.workspace_bytes[a:b].max()) for a, b in placed.runs if a < b), default=0.0)
        hungriest += max(copies.values(), default=0)
        left = costs.book.tables.left_bytes(kind, samples, placed.runs)
        return plain_course(span(table.saved_bytes, placed.runs), left, made_bytes, hungriest), None
    layers = layers_in(placed.runs)
    saved_by = np.diff(table.saved_bytes)[layers]
    made = np.diff(costs.book.tables.graph.parameter_bytes)[layers] * (made_bytes > 0)
    defers, own = costs.book.tables.deferring(kind)[layers], levels[:, layers]
    put_together = np.array([float(copies.get(layer, 0)) for layer in layers.tolist()])
    if costs.trains and placed.zero > 1 and made_bytes:
        made = _in_slices(costs, placed, layers, own, made)
        made_bytes = kept_gradients(placed)
    flow = costs.book.levels.flow(kind, samples, layers)
    there = np.minimum(_in_buffers(costs, layers, own, samples, senders), saved_by)
    own[FORWARD] -= there
    own[LEFT] -= np.clip(own[LEFT] - own[GRADIENTS_LEFT] - (saved_by - there), 0.0, there)  # so much at least is of it
    stays = _left_in_buffers(costs, layers, own, seeds, flow)
    found = course(saved_by - there, _gradients(made_bytes, made), own, seeds.total, defers, stays, flow, put_together)
    if costs.trains and placed.zero > 1:  # later ones find the slices there, and add to them
        later = course(saved_by - there, np.zeros_like(made), own, seeds.total, defers, stays, flow, put_together)
        found = replace(found, backward_later=later.backward_later)
    return found, _unsaved(costs, layers, saved_by, levels, samples)


def _inputs_left(costs: StageCosts, placed: StagePlacement, kind: str, samples: float) -> float | None:
    """Of the values that other stages made, what weight gradients of the stage need; None if that is not known."""
    levels, layers = costs.book.levels, layers_in(placed.runs)
    if levels.gradients_made(kind, samples) is None:
        return None
    readers, makers, sizes = levels.inputs_left(kind, samples)
    found: dict[int, float] = {}
    for place in np.flatnonzero(np.isin(readers, layers) & ~np.isin(makers, layers)).tolist():
        maker = int(makers[place])
        found[maker] = max(found.get(maker, 0.0), float(sizes[place]))
    return sum(found.values())


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


def _plain_in_slices(costs: StageCosts, placed: StagePlacement, table: SizeTable, kind: str, samples: float) -> Course:
    """The same where no levels of layers are known."""
    hungriest = max((float(table.workspace_bytes[a:b].max()) for a, b in placed.runs if a < b), default=0.0)
    found = costs.book.buckets(placed.runs, placed.tied)
    gathered = max((bucket.num_bytes for bucket in found), default=0) if placed.zero > 2 else 0
    making = max((bucket.num_bytes + bucket.copied_bytes * (placed.zero < 3) for bucket in found), default=0)
    left = costs.book.tables.left_bytes(kind, samples, placed.runs)
    plain = plain_course(span(table.saved_bytes, placed.runs), left, kept_gradients(placed), hungriest + gathered)
    first, later = plain.backward_first + making, plain.backward_later + making
    return replace(plain, backward_first=first, backward_later=later)


def kept_gradients(placed: StagePlacement) -> int:
    """Bytes of gradients that a rank of a stage keeps between passes, of parameters that it has whole or in slices."""
    return placed.parameter_bytes - (left_to_others(placed) if placed.zero > 1 else 0)


def _in_buffers(costs: StageCosts, layers: Indices, levels: Array, samples: float, senders: Sequence[Run]) -> Array:
    """By layer, of what it saves, at least so much that other stages made: it lies where it was received."""
    inside, outside = set(layers.tolist()), set(layers_in(senders).tolist())
    found = np.zeros(len(layers))
    for place, layer in enumerate(layers.tolist()):
        read = costs.book.levels.inputs[layer]
        mine, theirs = (samples * sum(size for maker, size in read if maker in made) for made in (inside, outside))
        found[place] = min(max(0.0, levels[INPUTS_SAVED, place] - mine), theirs)
    return found


def _left_in_buffers(costs: StageCosts, layers: Indices, levels: Array, seeds: Received, flow: Flow | None) -> Array:
    """By layer, what its weight gradients need of the gradients received, in their buffers.

    What is known to lie there is taken out of what ``levels`` have as left.
    """
    found = np.zeros(len(layers))
    if flow is None:
        found[:1] = _seeds_left(costs, layers, levels, seeds.total)  # taken to go last
    elif seeds.total:
        levels[LEFT] -= np.minimum(flow.left, levels[LEFT])
        wanted = float(flow.left.sum())
        found = flow.left * (seeds.left(wanted) / max(1.0, wanted))
    return found


def _seeds_left(costs: StageCosts, layers: Indices, levels: Array, seeds: int) -> float:
    """What stays of the gradients that were received, in their buffers, beside what is counted as left of them.

    A gradient that no layer of the stage adds to is that of the weight gradients where it lies; a buffer goes whole.
    """
    inside, readers = set(layers.tolist()), costs.book.levels.readers
    alone = [place for place, layer in enumerate(layers.tolist()) if inside.isdisjoint(readers[layer])]
    counted = min(float(levels[GRADIENTS_LEFT, alone].sum()), float(levels[LEFT].sum()))
    return max(0.0, seeds - counted) if counted > 0 else 0.0


def _gradients(made_bytes: int, made: Array) -> Array:
    """By layer; those of parameters that an earlier stage uses too are taken to come last."""
    found = made.copy()
    if len(found):
        found[0] += max(0.0, made_bytes - made.sum())
    return found


def _unsaved(costs: StageCosts, layers: Indices, saved_by: Array, levels: Array, samples: float) -> int:
    """Of the outputs that other stages read, what neither their makers nor readers in this stage save."""
    outputs, readers = costs.book.levels.outputs, costs.book.levels.readers
    inside = {int(layer): place for place, layer in enumerate(layers)}
    found = 0.0
    for layer in inside:
        if all(reader in inside for reader in readers[layer]):
            continue
        size = outputs[layer] * samples
        kept_by_reader = any(saved_by[inside[r]] >= 0.99 * size for r in readers[layer] if r in inside)
        found += 0.0 if kept_by_reader else max(0.0, size - float(levels[OUTPUTS_SAVED, layer]))
    return round(found)
