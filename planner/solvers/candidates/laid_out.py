"""Candidates some of whose stages give each layer a layout of its own."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from itertools import pairwise

from planner.costs.placement import LayoutBook, cut_alike
from planner.costs.shards import Option
from planner.ir.graph import Graph
from planner.solvers.candidates.assemble import Candidate, Cuts, boundaries_of


def with_options(candidate: Candidate, options: Mapping[int, Option]) -> Candidate:
    """``candidate`` with the layouts ``options`` (by layer): of all layers of a stage or of none.

    A stage whose layers are all cut alike along samples is one with these shares, as it is priced and written down.
    """
    by_stage: dict[int, dict[int, Cuts]] = {}
    for index, option in options.items():
        by_stage.setdefault(candidate.stage_of[index], {})[index] = option.cuts
    cuts: list[Cuts | None] = list(candidate.cuts or (None,) * len(candidate.stage_of))
    shares = list(candidate.shares)
    for stage, found in by_stage.items():
        plain = cut_alike(found.values())
        if plain:
            shares[stage] = _shares(next(iter(found.values())), sum(shares[stage]))
        for index, own in found.items():
            cuts[index] = None if plain else own
    return replace(candidate, shares=tuple(shares), cuts=tuple(cuts) if any(c is not None for c in cuts) else ())


def gives_all_work(
    layouts: LayoutBook, ranks: tuple[int, ...], options: Mapping[int, Option], sizes: Collection[int]
) -> bool:
    """Whether no rank is left without a part of a layer, in micro-batches of any of ``sizes``."""
    for rows in sizes:
        prices = layouts.prices(ranks, rows)
        if any((prices.shards(index, (option,)).share <= 0).any() for index, option in options.items()):
            return False
    return True


def joins_all_ranks(graph: Graph, candidate: Candidate) -> bool:
    """Whether every rank has a part in each hand-over of its stage.

    Of ranks that hold the same, some might send nothing and so get no gradient back, which no program allows.
    """
    boundaries = boundaries_of(graph, candidate)
    for edge in boundaries.edges():
        for rows in set(candidate.micro_batches):
            messages = boundaries.messages(edge, rows)
            senders = {message.src for message in messages if message.gradient_parts or not edge.gradient}
            receivers = {message.dst for message in messages}
            if senders != set(candidate.groups[edge.src]) or receivers != set(candidate.groups[edge.dst]):
                return False
    return True


def _shares(cuts: Cuts, samples: int) -> tuple[int, ...]:
    """Samples of each rank; all of them where nothing is cut."""
    return tuple(b - a for a, b in pairwise(cuts[0][1])) if cuts else (samples,)
