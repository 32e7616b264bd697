"""The integer program over spans: a second road to the best plan, for cross-checks and for side constraints.

Every way to cut the batch and every schedule around the program of :mod:`planner.solvers.ilp.formulas`, best bound
first.  Read ``formulas`` (the program), ``spans`` (its tables), then this.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from math import inf

from planner.costs.candidate import Candidate, Recomputes
from planner.costs.cost_model import CostModel
from planner.costs.memory.memory_bound import fewest_kept
from planner.costs.sentences import binding
from planner.ir.constraints import format_rule
from planner.ir.errors import InfeasibleError, MissingMeasurementError, UsageError
from planner.ir.plan import PROVEN, SEARCHED, STOPPED, TIME_LIMIT, BatchSizes, Plan, Rejected, Search, status_of
from planner.ir.problem import NEVER, SAMPLE_DIMS, Problem
from planner.schedules import traits
from planner.solvers import everyday
from planner.solvers.best_first.device_groups import DeviceStates, ranks_apart
from planner.solvers.best_first.graph_cuts import GraphCuts, cuts_of, may_part_free
from planner.solvers.best_first.priced_groups import Freedom, GroupPrices, PricedGroup
from planner.solvers.candidates.candidate import FEW_SHARES, micro_batches, plan_of, pools
from planner.solvers.candidates.choose import ROUNDING, better, cheapest_first, choose, infeasible, out_of_time, written
from planner.solvers.candidates.constraints import Constraints
from planner.solvers.candidates.evaluate import Evaluation, Evaluator
from planner.solvers.candidates.feasibility import (
    as_asked,
    may_part_ties,
    micro_batch_sizes,
    mixing_layers,
    schedule_names,
)
from planner.solvers.ilp.formulas import SpanProgram
from planner.solvers.ilp.spans import (
    FEW_GROUPS,
    NextStages,
    SpanInstance,
    group_counts,
    prune,
    span_tables,
    stage_groups,
    twin_pools,
)
from planner.solvers.integer_program import INFEASIBLE
from planner.solvers.progress import Progress, SearchProgress

MANY_IDEALS = 64
"""Of more places to cut, those between layers in the graph's own order are looked at."""

METHOD = "integer program over spans, its solutions simulated in order of their bound"


def solve(problem: Problem, progress: Progress | None = None) -> Plan:
    """The plan with the shortest simulated step, and a proof as far as time allows.

    Ctrl-C ends the search with the best plan so far, status ``stopped``.

    Raises:
        InfeasibleError: nothing fits, or the side constraints allow nothing.
        UnknownNameError: a side constraint matches no layer.
        UsageError: it can price none of the schedules.
    """
    evaluator = Evaluator(problem, CostModel(problem.profile))
    constraints = Constraints.of(problem)
    enumeration = Enumeration(evaluator, constraints, progress)
    outcome = enumeration.run()
    if outcome.best is None:
        if outcome.status == TIME_LIMIT:
            raise out_of_time(problem, f"after {problem.time_limit_s:g} s")
        rules = [f"--fix {format_rule(rule)}" for rule in problem.fix]
        rules += [f"--forbid {format_rule(rule)}" for rule in problem.forbid]
        if rules and enumeration.fits_without_rules():
            raise InfeasibleError("no plan satisfies the side constraints", rules, ["drop one of them"])
        closest = choose(evaluator, everyday_plans(problem, evaluator.cost_model)).closest
        if closest is not None:
            raise infeasible(problem, closest)
        raise InfeasibleError("no plan fits", [f"on {len(problem.ranks)} devices"], ["use more devices"])
    decision, predicted = written(problem, evaluator.pricing, outcome.best.candidate)
    step_s = predicted.prediction.step_s
    bound_s = min(outcome.bound_s, step_s)
    search = Search(
        method=METHOD,
        solver="span-ilp",
        status=outcome.status,
        bound_s=bound_s,
        gap=step_s / bound_s - 1 if bound_s > 0 else 0.0,
        num_simulated=evaluator.num_simulated,
        num_candidates=outcome.num_solutions,
        bounds_s={"integer program": bound_s, "root": min(outcome.root_s, bound_s)},
        binding=binding(decision.stages, predicted),
        rejected=tuple(Rejected(*row) for row in enumeration.rejected.items()),
    )
    looked_at = replace(problem, allow=tuple(name for name in problem.allow if name == SAMPLE_DIMS), chunks=NEVER)
    return plan_of(looked_at, decision, predicted.prediction, search)


@dataclass(frozen=True, slots=True)
class Enumerated:
    """What the enumeration comes to.

    Attributes:
        status: as of ``planner.ir.plan.Search``.
        best: None if nothing fits.
        bound_s, root_s: no plan of the space is faster; the same before any program was solved.
        num_solutions: of integer programs.
    """

    status: str
    best: Evaluation | None
    bound_s: float
    root_s: float
    num_solutions: int


@dataclass(slots=True, eq=False)
class BatchSplit:
    """One way to cut the batch, with the schedules that allow the same spans; the program is built when it is due."""

    instance: SpanInstance
    micro_batches: BatchSizes
    schedules: tuple[str, ...]
    program: SpanProgram | None = None


def everyday_plans(problem: Problem, cost_model: CostModel) -> Iterator[Candidate]:
    """Plans that people make without a planner, as far as the program knows their schedules; they may not fit."""
    names = priced_schedules(problem)
    for candidate in _unfiltered(problem, cost_model):
        if candidate.schedule in names and not 0 < problem.max_stages < candidate.num_stages:
            yield as_asked(problem, candidate)


def _unfiltered(problem: Problem, cost_model: CostModel) -> Iterator[Candidate]:
    yield from everyday.one_device(problem, cost_model)
    if len(problem.ranks) > 1 and not mixing_layers(problem.graph) and SAMPLE_DIMS in problem.allow:
        with suppress(InfeasibleError):  # fewer samples than ranks: there is no such plan to compare with
            yield from everyday.replicas(problem, cost_model)
    if len(problem.ranks) > 1:
        yield from everyday.even_split(problem, cost_model)


OTHER_WINDOWS = "windows of micro-batches in flight that are not a schedule's own"
"""What the program leaves out of schedules that may have any."""


def priced_schedules(problem: Problem) -> tuple[str, ...]:
    """The schedules that the program can price.

    Raises:
        UsageError: there are none.
    """
    names = schedule_names(problem)
    named_traits = [(name, traits(name)) for name in names]
    priced = tuple(name for name, t in named_traits if t.synchronous and t.trains and t.stages_per_position in (0, 1))
    if not priced:
        raise UsageError(
            f"span-ilp knows no schedule of {', '.join(problem.schedules or names)}",
            ["it prices synchronous schedules with one stage a rank"],
            ["use --solver best-first, or --schedule 1f1b"],
        )
    return priced


@dataclass(slots=True, eq=False)
class Enumeration:
    """The search over ways; run it once.

    Attributes:
        rejected: what is not in the space, with the reason.
    """

    evaluator: Evaluator
    constraints: Constraints
    progress: Progress | None = None
    best: Evaluation | None = field(init=False, default=None)
    root_s: float = field(init=False, default=0.0)
    num_solutions: int = field(init=False, default=0)
    rejected: dict[str, str] = field(init=False, default_factory=dict)
    _heap: list[tuple[float, int, BatchSplit]] = field(init=False, default_factory=list, repr=False)
    _pushed: int = field(init=False, default=0, repr=False)
    _current_s: float = field(init=False, default=inf, repr=False)

    def run(self) -> Enumerated:
        """The best plan, and how far it can be from the best there is."""
        try:
            self._try_everyday_plans()
            for bound_s, way in self._ways():
                self._push(bound_s, way)
            self.root_s = self._bound_s()
            status = self._search()
        except KeyboardInterrupt:
            if self.best is None:
                raise
            status = STOPPED
        return Enumerated(status, self.best, self._bound_s(), self.root_s, self.num_solutions)

    def fits_without_rules(self) -> bool:
        """Whether there is a plan once the side constraints are dropped."""
        problem = replace(self.evaluator.problem, fix=(), forbid=(), gap=inf)
        free = Enumeration(Evaluator(problem, self.evaluator.cost_model), Constraints.of(problem))
        return free.run().best is not None

    def _try_everyday_plans(self) -> None:
        candidates = everyday_plans(self.evaluator.problem, self.evaluator.cost_model)
        for candidate in cheapest_first(self.evaluator, candidates, self.evaluator.budget):
            if self.best is not None and not self.evaluator.has_time_for(candidate):
                continue
            if not self.evaluator.unmet(candidate):
                with suppress(MissingMeasurementError):
                    self._take(self.evaluator.evaluate(candidate))

    def _ways(self) -> Iterator[tuple[float, BatchSplit]]:
        """Every way with a lower bound on all its plans; those that cannot beat what is known are left out."""
        problem = self.evaluator.problem
        cost_model = self.evaluator.cost_model
        freedom = replace(Freedom.of(problem), virtual=(), trains=True)
        devices = DeviceStates(pools(problem, self.constraints), freedom.may_replicate)
        cuts = cuts_of(cost_model, MANY_IDEALS, may_part_ties(problem), may_part_free(problem), merges_orders=False)
        received = NextStages.of(cuts).least_received()
        counts, left_out = group_counts(devices)
        self._note_left_out(devices, cuts, left_out)
        most = min(len(problem.ranks), cuts.last, problem.max_stages or len(problem.ranks))
        for size in micro_batch_sizes(problem, cost_model):
            batches = micro_batches(problem, size)
            for splits, by_flight in self._schedules(most, len(batches)).items():
                own = replace(freedom, splits=splits)
                prices = GroupPrices(problem, cost_model, devices.pools, cuts, batches, own, received)
                yield from self._splits(prices, stage_groups(prices, counts), most, by_flight)

    def _splits(
        self,
        prices: GroupPrices,
        versions: tuple[tuple[PricedGroup, ...], ...],
        most: int,
        by_flight: Mapping[tuple[int, ...], tuple[str, ...]],
    ) -> Iterator[tuple[float, BatchSplit]]:
        """Those of one way to cut the batch, which schedules share that keep as many micro-batches in flight.

        Args:
            versions: of groups of devices (``stage_groups``).
            most: stages.
        """
        if not versions:
            return
        groups = tuple(group for group, *_ in versions)
        if any(prices.leaves_out(group.counts) for group in groups):
            why = f"more than {FEW_SHARES} ways; those with which the whole network takes least are taken"
            self.rejected["other shares of unlike devices"] = why
        spans, handovers = span_tables(prices, versions)
        twins = twin_pools(prices.pools, groups)
        rules = self.constraints.stage_rules()
        for in_flight, names in by_flight.items():
            whole = SpanInstance(prices, groups, twins, spans.within(in_flight), handovers, most, rules)
            instance, bound_s = prune(whole, self._upper_s())
            if bound_s < inf:
                yield bound_s, BatchSplit(instance, prices.micro_batches, names)

    def _note_left_out(self, devices: DeviceStates, cuts: GraphCuts, left_out: str) -> None:
        """Says what the program does not know."""
        self.rejected.update(devices.restrictions)
        if any(traits(name).windowed for name in priced_schedules(self.evaluator.problem)):
            self.rejected[OTHER_WINDOWS] = "the program knows one for each schedule"
        if left_out:
            self.rejected[left_out] = f"more than {FEW_GROUPS} groups of devices"
        if not cuts.complete:
            why = "the network has too many; stages are stretches of its own order of layers"
            self.rejected["stages of any set of layers"] = why

    def _schedules(self, most: int, count: int) -> dict[bool, dict[tuple[int, ...], tuple[str, ...]]]:
        """By whether they split backwards and by what they keep in flight, where times do not decide that."""
        by_split: dict[bool, dict[tuple[int, ...], tuple[str, ...]]] = {}
        for name in priced_schedules(self.evaluator.problem):
            flight = (1,) * most if traits(name).timed else fewest_kept(name, most, count)
            by_flight = by_split.setdefault(traits(name).splits_backward, {})
            by_flight[flight] = (*by_flight.get(flight, ()), name)
        return by_split

    def _search(self) -> str:
        while self._heap and not self._is_done(self._heap[0][0]):
            if self.evaluator.budget.is_over:
                return TIME_LIMIT
            self._report()
            bound_s, _, way = heappop(self._heap)
            self._current_s = bound_s
            self._step(bound_s, way)
            self._current_s = inf
        if self.best is None:
            return PROVEN
        return status_of(SEARCHED, self.best.step_s, self._bound_s(), self.evaluator.problem.gap)

    def _step(self, bound_s: float, way: BatchSplit) -> None:
        """Solves the way's program once more, simulates what it finds, and queues what remains."""
        program = way.program
        if program is None:
            instance, least_s = prune(way.instance, self._upper_s())
            if least_s == inf:
                return
            program = SpanProgram(instance, self._upper_s())
            way = replace(way, instance=instance, program=program)
        program.upper_s = self._upper_s()
        solution = program.solve(self.evaluator.budget.clock_s)
        if solution.status == INFEASIBLE:
            return
        if solution.spans:
            self.num_solutions += 1
            program.exclude(solution.spans)
            self._simulate(way, solution.spans)
        self._push(max(bound_s, solution.bound_s), way)

    def _simulate(self, way: BatchSplit, chain: Sequence[int]) -> None:
        spans = way.instance.spans
        prices = way.instance.prices
        groups = [way.instance.groups[int(spans.group[v])] for v in chain]
        recompute = tuple(Recomputes(int(spans.recompute[v])) for v in chain)
        for name in way.schedules:
            candidate = Candidate(
                prices.cuts.stage_of((*spans.first[list(chain)].tolist(), prices.cuts.last)),
                ranks_apart(prices.pools, [group.counts for group in groups]),
                tuple(group.shares for group in groups),
                way.micro_batches,
                name,
                recompute=recompute if any(recompute) else (),
            )
            self._take(self.evaluator.evaluate(candidate, self._upper_s()))

    def _take(self, evaluation: Evaluation) -> None:
        if evaluation.fits:
            self.best = better(self.best, evaluation)

    def _upper_s(self) -> float:
        return self.best.step_s if self.best is not None else inf

    def _is_done(self, bound_s: float) -> bool:
        if self.best is None:
            return False
        return bound_s >= self.best.step_s / (1 + self.evaluator.problem.gap) * (1 - ROUNDING)

    def _push(self, bound_s: float, way: BatchSplit) -> None:
        self._pushed += 1
        heappush(self._heap, (bound_s, self._pushed, way))

    def _bound_s(self) -> float:
        """No plan is faster than the best known, or than what is in the queue or under way."""
        waiting_s = self._heap[0][0] if self._heap else inf
        return min(self._upper_s(), waiting_s, self._current_s)

    def _report(self) -> None:
        if self.progress is None:
            return
        best_s = self._upper_s()
        bound_s = self._bound_s()
        gap = best_s / bound_s - 1 if bound_s > 0 else inf
        elapsed_s = self.evaluator.budget.elapsed_s
        self.progress(SearchProgress(best_s, bound_s, gap, self.evaluator.num_simulated, elapsed_s))
