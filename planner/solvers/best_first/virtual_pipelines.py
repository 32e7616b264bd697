"""Pipelines of several stages a position (interleaved, ZB-V, greedy): balanced, then improved cut by cut.

Devices of the largest pool, one a position; v stages on each where the schedule leaves v open (``WAYS``).  The cuts
balance the stages by a DP (least largest work of a stage), then move one at a time while the simulated step gets
shorter.  Activations are computed again where that is asked for, or where it is left open and nothing else fits.  No
proof comes with these plans but the bound that holds for all plans: all work over all devices.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from planner.costs.layers.cost_table import Array
from planner.ir.errors import IllegalProgramError, MissingMeasurementError
from planner.ir.layout import samples_of
from planner.ir.problem import AUTO
from planner.schedules import positions, traits
from planner.solvers.best_first.graph_cuts import Numbers
from planner.solvers.best_first.priced_groups import Prices
from planner.solvers.candidates.candidate import Candidate, Recomputes
from planner.solvers.candidates.choose import better
from planner.solvers.candidates.evaluate import Evaluation, Evaluator
from planner.solvers.candidates.feasibility import as_asked, recompute_choices

WAYS = (2, 3, 4)
"""Stages a position that are tried where the schedule leaves it open."""

_ROUNDS = 3

Groups = tuple[tuple[int, ...], ...]
"""The ranks of each stage."""


def virtual_pipelines(evaluator: Evaluator, prices: Prices, names: tuple[str, ...]) -> Iterator[Evaluation]:
    """The best pipeline of each schedule in ``names`` and number of positions that fits."""
    pool = max(prices.pools, key=lambda pool: len(pool.ranks))
    counts = tuple(int(other is pool) for other in prices.pools)
    groups = prices.versions(counts)
    if not groups:
        return
    chain = _chain(prices)
    every = np.arange(len(chain))
    cost = groups[0].stage(chain[every[:, None]], chain[every[None, :]]).work
    for name in names:
        fixed = traits(name).stages_per_position
        twice = traits(name).bidirectional
        for num_ranks in range(2, len(pool.ranks) + 1, 2 if twice else 1):
            for ways in (fixed,) if fixed else WAYS:
                where = _groups(name, pool.ranks[:num_ranks], ways)
                cuts = _balanced(cost, len(where))
                if cuts is not None and time.monotonic() < evaluator.stops:
                    found = _improved(evaluator, prices, chain, cuts, (name, where))
                    if found is not None:
                        yield found


def _groups(name: str, ranks: tuple[int, ...], ways: int) -> Groups:
    """Where the stages of a schedule lie: on one rank a position, or on two, the second stage in the other order."""
    if not traits(name).bidirectional:
        return tuple((ranks[position],) for position in positions(name, len(ranks), ways))
    return tuple(zip(ranks, reversed(ranks), strict=True))


def _chain(prices: Prices) -> Numbers:
    """A longest chain of cuts: one after another, each the next that holds the last."""
    found = [0]
    for cut in range(1, len(prices.cuts.members)):
        if prices.cuts.inside[found[-1], cut]:
            found.append(cut)
    return np.array(found)


def _balanced(cost: Array, num_stages: int) -> list[int] | None:
    """Where to cut a chain so that the largest cost of a stage is least; None if it has too few pieces."""
    last = len(cost) - 1
    if num_stages > last:
        return None
    above = np.where(np.triu(np.ones_like(cost, dtype=bool), 1), cost, np.inf)
    best, chosen = above[:, last], []
    for _ in range(num_stages - 1):
        both = np.maximum(above, best[None, :])
        chosen.append(both.argmin(axis=1))
        best = both.min(axis=1)
    cuts = [0]
    for choice in reversed(chosen):
        cuts.append(int(choice[cuts[-1]]))
    return [*cuts, last] if np.isfinite(best[0]) else None


def _improved(
    evaluator: Evaluator, prices: Prices, chain: Numbers, cuts: list[int], way: tuple[str, Groups]
) -> Evaluation | None:
    """The best of the pipeline and those that moving cuts leads to; None if none fits."""
    best = _evaluated(evaluator, prices, chain, cuts, way)
    for _ in range(_ROUNDS):
        before = best
        for place in range(1, len(cuts) - 1):
            for moved in (cuts[place] - 1, cuts[place] + 1):
                if cuts[place - 1] < moved < cuts[place + 1]:
                    other = [*cuts[:place], moved, *cuts[place + 1 :]]
                    found = _evaluated(evaluator, prices, chain, other, way, best)
                    if found is not None and better(best, found) is found and found is not best:
                        best, cuts = found, other
        if best is before:
            break
    return best


def _evaluated(
    evaluator: Evaluator,
    prices: Prices,
    chain: Numbers,
    cuts: list[int],
    way: tuple[str, Groups],
    best: Evaluation | None = None,
) -> Evaluation | None:
    name, groups = way
    size = prices.micro_batches[0]
    if size < len(groups[0]):
        return None
    candidate = Candidate(
        prices.cuts.stage_of(tuple(int(chain[cut]) for cut in cuts)),
        groups,
        (samples_of((1,) * len(groups[0]), size),) * len(groups),
        prices.micro_batches,
        name,
    )
    for chosen in dict.fromkeys((as_asked(evaluator.problem, candidate), *_recomputed(evaluator, candidate))):
        if evaluator.unmet(chosen) or not evaluator.has_time_for(chosen):
            continue
        try:
            found = evaluator.evaluate(chosen, best.step_s if best is not None else float("inf"))
        except (MissingMeasurementError, IllegalProgramError):
            return None
        if found.fits:
            return found
    return None


def _recomputed(evaluator: Evaluator, candidate: Candidate) -> tuple[Candidate, ...]:
    """The same computing activations again, attention's cores first, where that is a choice."""
    if evaluator.problem.recompute != AUTO:
        return ()
    others = sorted(set(recompute_choices(evaluator.problem)) - {Recomputes.NOTHING}, reverse=True)
    return tuple(replace(candidate, recompute=(again,) * candidate.num_stages) for again in others)
