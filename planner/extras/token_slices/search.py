"""Plans with token slices: stages, micro-batches and lengths of slices, after the best plan without slices.

Given      t_i the time of slice i on the slowest stage, forward and backward      ``prices``
           p stages, M micro-batches of K slices each
Choose     lengths of slices, by a DP over a grid of tokens                        :func:`best_slices`
           cuts of the chain of layers that make the slowest stage shortest        :func:`balanced`
           p, and the samples of a micro-batch: all that may be used               :func:`with_token_slices`
Minimise   first     M sum_i t_i + (p - 1) max_i t_i
           then      the step, by the simulator, of the best by that formula under each schedule that can order slices

For a given max_i t_i the least sum is a shortest path over the grid; all values that a slice takes are tried from the
least on, until (p - 1) of it is more than what is left (Li et al., "TeraPipe", ICML 2021, section 3.3, algorithm 1,
which is this with M = 1).  Equal slices are simulated too.

Not in the space, and hence nothing is proved of these plans: stages of several ranks, other slices in other
micro-batches, stages that are no runs of the list of layers, ranks in another order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from math import inf

import numpy as np

from planner import schedules
from planner.costs.candidate import Candidate, Recomputes
from planner.costs.cost_model import CostModel
from planner.costs.layers.cost_table import Array, running
from planner.costs.sentences import binding
from planner.extras.token_slices.axes import require_sliceable
from planner.extras.token_slices.order import can_slice
from planner.extras.token_slices.prices import SlicePrices
from planner.ir.errors import HalopipeError, InfeasibleError
from planner.ir.graph import Graph, producer
from planner.ir.layout import equal_shares
from planner.ir.plan import HEURISTIC, AxisPart, Plan, Rejected, Search
from planner.ir.problem import ALWAYS, AUTO, NEVER, THROUGHPUT, TIME_DIMS, Problem
from planner.solvers.best_first.continued import ContinuedSearch
from planner.solvers.candidates.candidate import micro_batches, plan_of
from planner.solvers.candidates.choose import slower, written
from planner.solvers.candidates.evaluate import Evaluator
from planner.solvers.candidates.feasibility import cut_positions, micro_batch_sizes, uncut

METHOD = "token slices by TeraPipe's DP over measured times, the best by its formula simulated"
_GRID = 32
"""Into how many parts a sequence is divided at most, between which slices begin."""
_EQUAL = (2, 4, 8, 16)
"""Numbers of equal slices that are simulated too."""
_RECOMPUTES = {
    NEVER: (Recomputes.NOTHING,),
    AUTO: (Recomputes.NOTHING, Recomputes.ALL),
    ALWAYS: (Recomputes.ALL,),
}
"""Whether stages compute activations again, by what may be."""


def require_slices(problem: Problem, cost_model: CostModel) -> None:
    """Raises :class:`UnsupportedModelError` where the network cannot be run in token slices, or not in those asked."""
    axes = cost_model.beside(SlicePrices).axes
    if problem.token_slices:
        require_sliceable(axes.graph, problem.token_slices)


def with_token_slices(evaluator: Evaluator, plan: Plan) -> Plan:
    """``plan``, or one with token slices if that is faster; until the evaluator's time is up.

    Raises:
        InfeasibleError: slices were asked for, and no plan with them fits.
    """
    problem = evaluator.problem
    prices = evaluator.cost_model.beside(SlicePrices)
    best: Candidate | None = None
    step_s = inf if problem.token_slices else plan.prediction.step_s
    num_simulated = 0
    for formula_s, candidate in sorted(_candidates(evaluator, prices), key=lambda each: each[0]):
        if evaluator.budget.is_over:
            break
        if formula_s >= step_s or evaluator.unmet(candidate):
            continue
        try:
            predicted = evaluator.forecast(evaluator.pricing.with_rows(candidate), num_draws=0)
        except HalopipeError:  # a schedule that cannot order these stages, a size of which nothing is known
            continue
        num_simulated += 1
        fits = all(rank.peak_bytes <= rank.memory_limit_bytes for rank in predicted.prediction.ranks)
        if fits and predicted.prediction.step_s < step_s:
            best = candidate
            step_s = predicted.prediction.step_s
    tried = f"{num_simulated} plans simulated, without a proof"
    if best is None and problem.token_slices:
        raise InfeasibleError(
            f"no plan with token slices of {' + '.join(map(str, problem.token_slices))} tokens",
            [f"{tried}: none fits and keeps to what was asked for"],
            ["without --token-slices", "--schedule gpipe"],
        )
    graph = problem.graph
    rejected = (
        *plan.search.rejected,
        *uncut(graph.tied_layers(), graph, "where sequences are cut into token slices: they share parameters"),
    )
    if best is None:
        missed = Rejected("token slices", f"none is faster: {tried}")
        return replace(plan, search=replace(plan.search, rejected=(*rejected, missed)))
    decision, predicted = written(problem, evaluator.pricing, best)
    peak = plan.prediction.peak_bytes
    whole = slower("no token slices", plan.prediction.step_s, peak, predicted.prediction.step_s, "")
    search = Search(
        METHOD,
        plan.search.solver,
        HEURISTIC,
        0.0,
        0.0,
        plan.search.num_simulated + num_simulated,
        plan.search.num_candidates + num_simulated,
        binding=binding(decision.stages, predicted),
        rejected=rejected,
    )
    return plan_of(problem, decision, predicted.prediction, search, (whole,))


SEARCH = ContinuedSearch(
    lambda problem: TIME_DIMS in problem.allow and problem.objective == THROUGHPUT,  # training steps alone
    plan=with_token_slices,
    require=require_slices,
    takes_half=True,
)


@dataclass(frozen=True, slots=True, eq=False)
class SliceTimes:
    """Seconds of slices between points of a grid.

    Attributes:
        points: tokens, from 0 to those of a sequence.
        seconds: ``[points, points]``: forward and backward of a slice from one point to another; infinity where that
            lies before.
    """

    points: tuple[int, ...]
    seconds: Array


def best_slices(times: SliceTimes, num_stages: int, num_micro_batches: int) -> tuple[tuple[int, ...], float]:
    """(tokens of each slice, ``M sum t + (p - 1) max t``) where that is least."""
    last = len(times.points) - 1
    limits = np.unique(times.seconds[np.isfinite(times.seconds)])
    least_s = inf
    slices: tuple[int, ...] = ()
    unlimited = _shortest(times.seconds, inf)[0][last]
    for limit in limits:
        if num_micro_batches * unlimited + (num_stages - 1) * limit >= least_s:
            break
        sums, before = _shortest(times.seconds, float(limit))
        total = num_micro_batches * sums[last] + (num_stages - 1) * float(limit)
        if total < least_s:
            path = [last]
            while path[-1]:
                path.append(int(before[path[-1]]))
            least_s = total
            slices = tuple(times.points[b] - times.points[a] for a, b in pairwise(reversed(path)))
    return slices, least_s


def _shortest(seconds: Array, limit: float) -> tuple[Array, Array]:
    """By point, the least sum of slices up to it of which none is longer than ``limit``, and the point before."""
    count = len(seconds)
    sums = np.full(count, inf)
    before = np.zeros(count)
    sums[0] = 0.0
    for stop in range(1, count):
        ways = np.where(seconds[:stop, stop] <= limit, sums[:stop] + seconds[:stop, stop], inf)
        before[stop] = np.argmin(ways)
        sums[stop] = ways[int(before[stop])]
    return sums, before


def balanced(seconds: Sequence[Array], positions: Sequence[int], crossing_s: Array) -> tuple[int, ...]:
    """Bounds of stages, of positions where the list of layers may be cut, whose slowest stage is shortest.

    Args:
        seconds: for each stage, on its device, running sums over layers.
        crossing_s: by position, what a stage spends on what passes there.
    """
    count = len(positions)
    places = np.array(positions)
    worst = np.full((len(seconds) + 1, count), inf)
    chosen = np.zeros((len(seconds) + 1, count), dtype=np.int64)
    worst[0, 0] = 0.0
    for stage, sums in enumerate(seconds):
        own = sums[places][None, :] - sums[places][:, None] + crossing_s[:, None] + crossing_s[None, :]
        own[np.tril_indices(count)] = inf
        ways = np.maximum(worst[stage][:, None], own)
        chosen[stage + 1] = ways.argmin(axis=0)
        worst[stage + 1] = ways.min(axis=0)
    bounds = [count - 1]
    for stage in range(len(seconds), 0, -1):
        bounds.append(int(chosen[stage, bounds[-1]]))
    return tuple(int(places[at]) for at in reversed(bounds))


def _candidates(evaluator: Evaluator, prices: SlicePrices) -> Iterator[tuple[float, Candidate]]:
    """Plans with slices, each with what the formula says of it."""
    problem = evaluator.problem
    graph = evaluator.cost_model.graph
    names = [name for name in evaluator.schedules if can_slice(name) and schedules.traits(name).trains]
    names = [name for name in names if not schedules.traits(name).windowed]
    positions = cut_positions(graph, parts_ties=False)
    for samples in micro_batch_sizes(problem, evaluator.cost_model):
        batches = micro_batches(problem, samples)
        most = min(len(problem.ranks), problem.max_stages or len(problem.ranks), len(positions) - 1)
        for num_stages in range(1 if problem.token_slices else 2, most + 1):
            if evaluator.budget.is_over:
                return
            ranks = problem.ranks[:num_stages]
            try:
                bounds = _stages(evaluator, prices, ranks, positions, samples)
                times = _times(evaluator, prices, ranks, bounds, samples)
            except HalopipeError:  # nothing is known of that many samples
                continue
            tokens = prices.axes.num_tokens
            ways = {best_slices(times, num_stages, len(batches))[0]}
            ways |= {equal_shares(tokens, count) for count in _EQUAL if count <= tokens}
            groups = tuple((rank,) for rank in ranks)
            shares = ((samples,),) * num_stages
            for slices in {problem.token_slices} if problem.token_slices else ways:
                formula_s = _formula_s(times, slices, num_stages, len(batches))
                for name, recomputed in product(names, _RECOMPUTES.get(problem.recompute, ())):
                    plain = Candidate.chain(bounds, groups, shares, batches, name)
                    yield formula_s, replace(plain, axis_parts=slices, recompute=(recomputed,) * num_stages)


def _stages(
    evaluator: Evaluator, prices: SlicePrices, ranks: Sequence[int], positions: Sequence[int], samples: int
) -> tuple[int, ...]:
    """Bounds of stages; a step's work is about that of eight equal slices."""
    cost_model = evaluator.cost_model
    graph = evaluator.cost_model.graph
    slices = equal_shares(prices.axes.num_tokens, min(8, prices.axes.num_tokens))
    ends = running(np.array(slices, dtype=np.float64)).astype(int).tolist()
    sums = []
    for rank in ranks:
        tables = [prices.table(cost_model.kind(rank), AxisPart(samples, a, b)) for a, b in pairwise(ends)]
        sums.append(running(np.sum([table.costs[0] + table.costs[1] for table in tables], axis=0)))
    crossing = _crossing_bytes(graph, positions) * (samples / graph.samples)
    sizes = crossing.round().astype(int).tolist() if len(ranks) > 1 else [0] * len(positions)  # one rank has no link
    hop_s = [cost_model.network.transfer_s(ranks[0], ranks[-1], size) if size else 0.0 for size in sizes]
    return balanced(sums, positions, np.array(hop_s))


def _crossing_bytes(graph: Graph, positions: Sequence[int]) -> Array:
    """By position, bytes of values that are made before it and read after it."""
    index = {layer.name: at for at, layer in enumerate(graph.layers)}
    specs = graph.values()
    last: dict[str, int] = {}
    for at, layer in enumerate(graph.layers):
        last.update({value: at for value in layer.inputs if producer(value) in index})
    crossing_bytes = np.zeros(len(positions))
    places = np.array(positions)
    for value, reader in last.items():
        crossing_bytes[(places > index[producer(value)]) & (places <= reader)] += specs[value].num_bytes
    return crossing_bytes


def _times(
    evaluator: Evaluator, prices: SlicePrices, ranks: Sequence[int], bounds: Sequence[int], samples: int
) -> SliceTimes:
    """Of slices between points of a grid, on the stage where each takes longest."""
    cost_model = evaluator.cost_model
    tokens = prices.axes.num_tokens
    count = min(_GRID, tokens)
    points = tuple(dict.fromkeys(tokens * k // count for k in range(count + 1)))
    seconds = np.full((len(points), len(points)), inf)
    for a, start in enumerate(points):
        for b in range(a + 1, len(points)):
            size = AxisPart(samples, start, points[b])
            stages = []
            for rank, (first, stop) in zip(ranks, pairwise(bounds), strict=True):
                costs = prices.table(cost_model.kind(rank), size).costs[:2, first:stop]
                stages.append(float(costs.sum()) + 2 * cost_model.tables.overhead_s(cost_model.kind(rank)))
            seconds[a, b] = max(stages)
    return SliceTimes(points, seconds)


def _formula_s(times: SliceTimes, slices: tuple[int, ...], num_stages: int, num_micro_batches: int) -> float:
    """``M sum t + (p - 1) max t``; slices that do not begin on the grid are read at the nearest points."""
    points = np.array(times.points)
    ends = [int(np.argmin(abs(points - sum(slices[:k])))) for k in range(len(slices) + 1)]
    each = [float(times.seconds[a, b]) for a, b in pairwise(ends) if b > a]
    return num_micro_batches * sum(each) + (num_stages - 1) * max(each)
