"""Candidates some of whose stages give each layer a layout of its own."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from itertools import pairwise

from planner.costs.placement import LayoutBook, cut_alike
from planner.costs.shards import Option
from planner.costs.staged import with_ways
from planner.ir.graph import Graph
from planner.solvers.candidates.assemble import Candidate, boundaries_of


def with_options(layouts: LayoutBook, candidate: Candidate, options: Mapping[int, Option]) -> Candidate:
    """``candidate`` with the layouts ``options`` (by layer): of all layers of a stage or of none.

    Where an option leaves open how many ranks share input channels, it is what is cheapest in a full micro-batch.  A
    stage whose layers are all cut alike along samples is one with these shares, as it is priced and written down.
    """
    by_stage: dict[int, dict[int, Option]] = {}
    for index, option in options.items():
        by_stage.setdefault(candidate.stage_of[index], {})[index] = replace(option, recompute=False)
    own: list[Option | None] = list(candidate.options or (None,) * len(candidate.stage_of))
    shares = list(candidate.shares)
    for stage, found in by_stage.items():
        plain = cut_alike([option.cuts for option in found.values()])
        if plain:
            shares[stage] = _shares(next(iter(found.values())), sum(shares[stage]))
        else:
            prices = layouts.prices(candidate.groups[stage], max(candidate.micro_batches))
            found = with_ways(prices, found)
        for index, option in found.items():
            own[index] = None if plain else option
    return replace(candidate, shares=tuple(shares), options=tuple(own) if any(o is not None for o in own) else ())


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


def _shares(option: Option, samples: int) -> tuple[int, ...]:
    """Samples of each rank; all of them where nothing is cut."""
    return tuple(b - a for a, b in pairwise(option.cuts[0][1])) if option.cuts else (samples,)
