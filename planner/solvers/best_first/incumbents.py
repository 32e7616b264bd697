"""Plans that are looked at before and beside the search, so that it never does worse than them.

Everyday strategies come first: their steps are upper bounds.  Replicas on several kinds of devices or hosts, shared in
proportion to speed, are not among the stages that the search builds; they are priced here, each with its own bound.

Pipelines of several stages a position (interleaved, ZB-V, greedy): balanced, then improved cut by cut.

Devices of the largest pool, one a position; v stages on each where the schedule leaves v open (``WAYS``).  The cuts
balance the stages by a DP (least largest work of a stage), then move one at a time while the simulated step gets
shorter.  Activations are computed again where that is asked for, or where it is left open and nothing else fits.  No
proof comes with these plans but the bound that holds for all plans: all work over all devices.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np

from planner.baselines import bapipe, dapple, everyday, sparsepipe
from planner.baselines.pipedream import solver as pipedream
from planner.baselines.piper import solver as piper
from planner.baselines.tarnawski import solver as tarnawski
from planner.costs.cost_model import PriceBook
from planner.costs.layers.cost_table import Array
from planner.costs.stages.action_costs import StageCosts
from planner.costs.stages.placement import StagePlacement
from planner.ir.errors import HalopipeError, IllegalProgramError, InfeasibleError, MissingMeasurementError
from planner.ir.layout import samples_of
from planner.ir.problem import AUTO, Problem
from planner.ir.schedule import Action, Op
from planner.schedules import positions, traits
from planner.solvers.best_first.graph_cuts import Numbers
from planner.solvers.best_first.priced_groups import Prices
from planner.solvers.candidates.candidate import Candidate, Pool, Recomputes, group_shares, micro_batches
from planner.solvers.candidates.choose import Choice, better, cheapest_first, choose
from planner.solvers.candidates.evaluate import Evaluation, Evaluator
from planner.solvers.candidates.feasibility import as_asked, mixing_layers, recompute_choices, schedule_names, usable

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


MANY_RANKS = 64
"""On more ranks, replicas are tried on whole pools only."""

_PUBLISHED = (
    dapple.pipelines,
    pipedream.pipelines,
    pipedream.hierarchical_pipelines,
    piper.pipelines,
    tarnawski.pipelines,
    sparsepipe.pipelines,
    bapipe.pipelines,
)
_REPLICATING = (dapple.pipelines, sparsepipe.pipelines)
"""Of these, those that know nothing of layers that mix samples."""

_SHARE_OF_TIME = 0.15  # of what is left, for one strategy


@dataclass(frozen=True, slots=True)
class Replicas:
    """One stage on several pools, in the queue beside the pipelines under construction."""

    bound_s: float
    ranks: tuple[int, ...]
    shares: tuple[int, ...]
    micro_batches: tuple[int, ...]


def strategies(evaluator: Evaluator) -> Iterator[tuple[str, Choice]]:
    """The everyday strategies, as far as the problem and time allow them; some may not fit."""
    problem, book = evaluator.problem, evaluator.book

    def best(candidates: Iterable[Candidate]) -> Choice:
        stops = time.monotonic() + _SHARE_OF_TIME * (evaluator.stops - time.monotonic())
        return choose(evaluator, cheapest_first(evaluator, candidates, stops), stops=stops)

    yield "one-device", best(everyday.one_device(problem, book))
    if len(problem.ranks) > 1 and not mixing_layers(problem.profile.graph):
        with suppress(InfeasibleError):  # fewer samples than ranks: there is no such plan to compare with
            replicas = everyday.replicas(problem, book)
            yield "data-parallel", choose(evaluator, replicas, first_that_fits=True)
    if len(problem.ranks) > 1 and "gpipe" in schedule_names(problem) and problem.max_stages != 1:
        yield "even-split", best(everyday.even_split(problem, book))


def published(evaluator: Evaluator, stops: float) -> Iterator[Choice]:
    """What published planners choose, each with an equal part of the time that is left.

    Args:
        stops: when the last must have ended, by ``time.monotonic``.
    """
    mixes, waiting = bool(mixing_layers(evaluator.problem.profile.graph)), list(_PUBLISHED)
    while waiting and len(evaluator.problem.ranks) > 1:
        pipelines = waiting.pop(0)
        if mixes and pipelines in _REPLICATING:
            continue
        left_s = max(0.0, stops - time.monotonic()) / (len(waiting) + 1)
        problem = replace(evaluator.problem, time_limit_s=left_s)
        with suppress(HalopipeError):  # its own restrictions rule the problem out
            yield choose(evaluator, pipelines(problem, evaluator.book), stops=time.monotonic() + left_s)


def mixed_replicas(
    problem: Problem, book: PriceBook, pools: tuple[Pool, ...], sizes: tuple[int, ...]
) -> Iterator[Replicas]:
    """Replicas on the first 2, 3, ... ranks where these are no pool's own, for every micro-batch size."""
    if mixing_layers(problem.profile.graph) or len({pool.kind for pool in pools}) == 1:
        return
    ends = np.cumsum([len(pool.ranks) for pool in pools]).tolist()
    counts = range(2, len(problem.ranks) + 1) if len(problem.ranks) <= MANY_RANKS else ends
    for count in counts:
        ranks = problem.ranks[:count]
        if any(set(ranks) <= set(pool.ranks) for pool in pools):
            continue
        for size in sizes:
            shares, batches = group_shares(problem, book, ranks, size), micro_batches(problem, size)
            try:
                if usable(problem, book, ranks, shares, batches):
                    yield Replicas(_bound_s(book, ranks, shares, batches), ranks, shares, batches)
            except MissingMeasurementError:
                continue


def replica_candidate(problem: Problem, found: Replicas, schedule: str) -> Candidate:
    """The replicas as a candidate."""
    last = len(problem.profile.graph.layers)
    plain = Candidate.chain((0, last), (found.ranks,), (found.shares,), found.micro_batches, schedule)
    return as_asked(problem, plain)


def _bound_s(book: PriceBook, ranks: tuple[int, ...], shares: tuple[int, ...], batches: tuple[int, ...]) -> float:
    """Every F, B, the reduction and the update, one after another, on the slowest rank."""
    graph = book.profile.graph
    samples = {rows: samples_of(shares, rows) for rows in set(batches)}
    placed = StagePlacement(((0, len(graph.layers)),), ranks, samples, graph.parameter_bytes())
    costs = StageCosts(book, (placed,), batches)
    after = Action(0, Op.REDUCE_GRAD), Action(0, Op.UPDATE)
    return max(
        sum(costs.action_s(rank, Action(0, Op.FORWARD, m)) for m in range(len(batches)))
        + sum(costs.action_s(rank, Action(0, Op.BACKWARD, m), m > 0) for m in range(len(batches)))
        + sum(costs.action_s(rank, action) for action in after)
        for rank in ranks
    )
