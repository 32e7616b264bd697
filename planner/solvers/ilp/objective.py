"""The objective of a given solution, reckoned stage by stage: what the integer program's rows must come to."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from planner.solvers.ilp.spans import Instance


def order(instance: Instance, chosen: Sequence[int]) -> tuple[int, ...]:
    """Spans, by index, in the order of the pipeline; empty if they are none from the first cut to the last."""
    spans = instance.spans
    ordered = tuple(sorted(chosen, key=lambda v: int(spans.first[v])))
    cuts = [0, *(int(spans.last[v]) for v in ordered)]
    starts = [*(int(spans.first[v]) for v in ordered), instance.end]
    return ordered if cuts == starts else ()


def objective_s(instance: Instance, chain: Sequence[int]) -> float:
    """Max over stages of what passes through the ones before it, and all its own work; the same of wires.

        round trip: sum of (F + B + both messages) before t + turn_t + reduction and update of stage 0
        forwards:   sum of (F + message) before t + work_t + reduction and update of stage t
        wire:       sum of (F + B + both messages) before t + the other messages one way + F + B of t + as above, of 0
        shared:     sum of (F + B + both messages) before t + the other messages both ways + as above, of 0

    Infinite where a hand-over was pruned.  All begin again behind a stage from which the next one need not read.
    """
    spans = instance.spans
    best = there = around = wire = shared = 0.0
    ending = float(spans.last_s[chain[0]])
    for position, v in enumerate(chain):
        best = max(best, around + float(spans.turn_s[v]) + ending, there + float(spans.work_s[v] + spans.last_s[v]))
        best = max(best, around + ending + max(wire + float(spans.pair_s[v]), shared))
        if position + 1 < len(chain):
            there_s, round_s, wire, shared = _message(instance, v, chain[position + 1])
            there = there + float(spans.there_s[v]) + there_s if spans.linked[v] else 0.0
            around = around + float(spans.round_s[v]) + round_s if spans.linked_back[v] else 0.0
            if not spans.linked_back[v]:
                ending = wire = shared = 0.0
    return best


def within_memory(instance: Instance, chain: Sequence[int]) -> bool:
    """Whether no stage has more stages downstream than it has memory for, as far as they surely wait in a row."""
    spans, certain = instance.spans, True
    for downstream, v in enumerate(reversed(chain), start=1):
        certain = certain and (downstream == 1 or bool(spans.linked[v]))
        if certain and downstream > spans.depth[v]:
            return False
    return True


def _message(instance: Instance, source: int, destination: int) -> tuple[float, float, float, float]:
    handovers, spans = instance.handovers, instance.spans
    match = (
        (handovers.cut == spans.last[source])
        & (handovers.source == spans.group[source])
        & (handovers.destination == spans.group[destination])
    )
    found = next(iter(np.flatnonzero(match)), None)
    if found is None:  # it was pruned
        return (float("inf"),) * 4
    columns = (handovers.there_s, handovers.round_s, handovers.wire_s, handovers.shared_s)
    there_s, round_s, wire_s, shared_s = (float(seconds[found]) for seconds in columns)
    return there_s, round_s, wire_s, shared_s


def cuts_of(instance: Instance, chain: Sequence[int]) -> tuple[int, ...]:
    """Positions in the list of layers, both ends included."""
    return (*(instance.cuts[int(instance.spans.first[v])] for v in chain), instance.cuts[-1])


def follows(instance: Instance, chain: Sequence[int]) -> bool:
    """Whether the numbers of the stages are what the rules want."""
    bounds = cuts_of(instance, chain)
    number = {layer: stage for stage, (a, b) in enumerate(pairwise(bounds)) for layer in range(a, b)}
    return all((number[layer] == wanted) == fixed for wanted, fixed, layers in instance.stage_rules for layer in layers)
