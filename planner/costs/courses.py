"""What a stage keeps of a micro-batch on one of its ranks, and how high memory rises meanwhile."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from planner.costs.levels import Array, Course, Indices, course, layers_in, plain_course
from planner.costs.stage import StageCosts, StagePlacement
from planner.costs.tables import SizeTable, span


@dataclass(frozen=True, slots=True)
class Activation:
    """What a stage holds of a micro-batch on a rank, in bytes, what it received apart.

    Attributes:
        kept: from forward to the end of backward: what was saved.
        unsaved: of the outputs that are sent on their own, what nobody saves.
        recompute: whether what layers save is not among that, but computed again for the backward.
    """

    course: Course
    kept: int
    unsaved: int = 0
    recompute: bool = False

    @property
    def saved(self) -> int:
        """The part of ``kept`` that layers save."""
        return 0 if self.recompute else self.course.saved


def activation_of(
    costs: StageCosts, stage: int, member: int, microbatch: int, sent_bytes: int, seeds: int
) -> Activation:
    """Of the stage's rank number ``member``.

    Args:
        sent_bytes: of its outputs for this micro-batch, what is sent on its own.
        seeds: of the gradients that it receives for it, with their buffers.
    """
    placed = costs.stages[stage]
    if placed.laid_out:
        cost = placed.laid_out[costs.micro_batches[microbatch]]
        parts = (cost.saved_bytes, cost.transient_bytes, cost.workspace_bytes, cost.parameter_bytes)
        saved, again, workspace, parameters = (round(float(part[member])) for part in parts)
        found = plain_course(saved, saved + again, parameters, workspace, again)
        return Activation(found, found.saved, sent_bytes)
    table, kind = costs.table(stage, member, microbatch), costs.book.kind(placed.ranks[member])
    samples = placed.samples[costs.micro_batches[microbatch]][member]
    known = costs.book.levels.known
    key = (placed.runs, kind, samples, placed.parameter_bytes, seeds)
    if key not in known:
        known[key] = _course_of(costs, placed, table, kind, samples, seeds)
    found, unsaved = known[key]
    left = sent_bytes if unsaved is None or placed.recompute else min(unsaved, sent_bytes)
    return Activation(found, 0 if placed.recompute else found.saved, left, placed.recompute)


def _course_of(
    costs: StageCosts, placed: StagePlacement, table: SizeTable, kind: str, samples: float, seeds: int
) -> tuple[Course, int | None]:
    """The course, and what is sent to other stages without being saved; None if that is not known."""
    levels = costs.book.levels.at(kind, samples)
    if levels is None:
        hungriest = max((float(table.workspace_bytes[a:b].max()) for a, b in placed.runs if a < b), default=0.0)
        left = costs.book.tables.left_bytes(kind, samples, placed.runs)
        return plain_course(span(table.saved_bytes, placed.runs), left, placed.parameter_bytes, hungriest), None
    layers = layers_in(placed.runs)
    saved_by = np.diff(table.saved_bytes)[layers]
    made = np.diff(costs.book.tables.graph.parameter_bytes)[layers]
    defers = costs.book.tables.deferring(kind)[layers]
    found = course(saved_by, _gradients(placed, made), levels[:, layers], seeds, defers)
    return found, _unsaved(costs, layers, saved_by, levels, samples)


def _gradients(placed: StagePlacement, made: Array) -> Array:
    """By layer; those of parameters that an earlier stage uses too are taken to come last."""
    found = made.copy()
    if len(found):
        found[0] += max(0.0, placed.parameter_bytes - made.sum())
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
        found += 0.0 if kept_by_reader else max(0.0, size - float(levels[-1, layer]))
    return round(found)
