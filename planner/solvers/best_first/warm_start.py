"""What the search starts from: first answers, known strategies, and the space of every micro-batch size."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import inf

from planner.costs.cost_model import CostModel
from planner.ir.plan import Rejected
from planner.ir.problem import Problem
from planner.schedules import traits
from planner.solvers.best_first import policy
from planner.solvers.best_first.bound import Suffixes
from planner.solvers.best_first.capacity import Capacity, capacity
from planner.solvers.best_first.counts_table import rising_bounds
from planner.solvers.best_first.device_groups import DeviceStates
from planner.solvers.best_first.first_answers import FirstAnswers
from planner.solvers.best_first.graph_cuts import GraphCuts, cuts_of, may_part_free
from planner.solvers.best_first.incumbents import Replicas, mixed_replicas, strategies
from planner.solvers.best_first.leaf_bound import CAPS
from planner.solvers.best_first.like_stages import LikeStages
from planner.solvers.best_first.message_bound import handovers_of
from planner.solvers.best_first.prefixes import Frontier
from planner.solvers.best_first.priced_groups import Freedom, GroupPrices
from planner.solvers.best_first.repair import Repair
from planner.solvers.best_first.search import BatchSpace, BestFirstSearch, Outcome
from planner.solvers.best_first.share_bound import has_open_shares
from planner.solvers.best_first.virtual_pipelines import PipelineFamilies, families, good_pipelines, not_searched
from planner.solvers.budget import NUMBER_S, Budget, made_within
from planner.solvers.candidates.candidate import micro_batches, pools
from planner.solvers.candidates.choose import Selection, better
from planner.solvers.candidates.evaluate import Evaluation, Evaluator
from planner.solvers.candidates.feasibility import may_part_ties, micro_batch_sizes, schedule_names, uncut

_LAYER_S = 3e-4  # to find the places to cut, of each layer
_SPACE_S = 3e-3  # to begin with a way to cut the batch
_RANK_S = 5e-6  # of each rank
_FEW_RANKS = 8  # of more a bound is made before the search


@dataclass(slots=True, eq=False)
class SearchStart:
    """What the search starts from, and what was left out.

    Attributes:
        cuts: where the network may be cut, and devices: which of them a stage may have; known once the items are made.
        choices: the everyday strategies, by name.
        rejected: what the search need not look at, or does not.
        capacity_s: all work over all devices.
        whole_s: bound of every pipeline, of coarser groups of devices or not (``counts_table``).
        mixes_kinds: whether that counts stages on several kinds of devices, too.
        least_work_s: bound of what there was no time to price, if there is any.
        best: of the plans that were made so far and may be an answer.
    """

    evaluator: Evaluator
    cuts: GraphCuts | None = field(init=False, default=None)
    devices: DeviceStates | None = field(init=False, default=None)
    choices: dict[str, Selection] = field(init=False, default_factory=dict)
    rejected: list[Rejected] = field(init=False, default_factory=list)
    capacity_s: float = field(init=False, default=0.0)
    whole_s: float = field(init=False, default=0.0)
    mixes_kinds: bool = field(init=False, default=True)
    least_work_s: float = field(init=False, default=inf)
    best: Evaluation | None = field(init=False, default=None)
    _repair: Repair | None = field(init=False, default=None)
    _answers: FirstAnswers = field(init=False)

    def __post_init__(self) -> None:
        self._answers = FirstAnswers(self.evaluator)

    def items(self) -> Iterator[Evaluation | BatchSpace | Replicas | PipelineFamilies]:
        """First answers and strategies first, as their steps prune what follows."""
        problem = self.evaluator.problem
        cost_model = self.evaluator.cost_model
        freedom = Freedom.of(problem)
        devices = self.devices = _devices(freedom)
        cuts = self.cuts = _cuts(cost_model, freedom)
        self.evaluator.budget.spend(_LAYER_S * len(problem.graph.layers))
        self._note(cuts, devices)
        spaces = list(self._spaces(devices, cuts))
        self.capacity_s = min((space.bound_s for space in spaces), default=0.0)
        if freedom.schedules:
            self._answers.spaces = [LikeStages(space.prices, self.evaluator.budget) for space in spaces]
            self._repair = Repair(self.evaluator, [space.prices for space in spaces])
            yield from self._noted(self._answers.soon())
        spaces = self._bounded(spaces)
        self.whole_s = min((space.bound_s for space in spaces), default=0.0)
        if freedom.schedules:
            yield from self._noted(self._answers.others(self._best_s))
        yield from self._noted(self._strategies())
        if freedom.virtual:
            self.rejected += not_searched(devices, freedom.virtual, problem.recompute)
            every = tuple(families([space.prices for space in spaces], devices, freedom.virtual))
            yield from self._noted(good_pipelines(every, self.evaluator, self._best_s))
            yield from every
        groups = [option.group for option in devices.options(devices.all_unused)]
        for space in spaces:
            is_closed = not freedom.virtual and has_open_shares(space.prices, devices)
            if not is_closed and any(map(space.prices.leaves_out, groups)):
                self.least_work_s = self.capacity_s
        if not freedom.schedules:
            return
        yield from spaces
        if not devices.mixes_kinds and not freedom.constraints.rules:
            sizes = micro_batch_sizes(problem, cost_model)
            yield from self._replicas(mixed_replicas(problem, cost_model, devices.pools, sizes))

    def chunked(self, names: Sequence[str]) -> Iterator[PipelineFamilies]:
        """All pipelines under schedules of several stages a position that are not among the items."""
        if self.devices is not None:
            yield from families([space.prices for space in self._answers.spaces], self.devices, names)

    def chunked_work_s(self) -> float:
        """The work before the first of them, about."""
        return NUMBER_S * sum(space.prices.cuts.crossing_of.size for space in self._answers.spaces)

    def chunked_left_out(self, names: Sequence[str]) -> Iterator[Rejected]:
        """What they leave out, and why."""
        if self.devices is not None:
            yield from not_searched(self.devices, names, self.evaluator.problem.recompute)

    @property
    def _best_s(self) -> float:
        """The step of the best plan so far."""
        return inf if self.best is None else self.best.step_s

    def bound_s(self) -> float:
        """No plan is faster, as far as is known."""
        return max(self.capacity_s, self.whole_s)

    def _noted(self, plans: Iterable[Evaluation]) -> Iterator[Evaluation]:
        """The same; the best of them that may be an answer is remembered."""
        for plan in plans:
            if plan.fits and not self.evaluator.unmet(plan.candidate):
                self.best = better(self.best, plan)
            yield plan

    def _strategies(self) -> Iterator[Evaluation]:
        """Those that may be an answer; all are known by name, but where there is a plan and no time for them."""
        if self.best is not None and self.evaluator.budget.is_over:
            return
        for name, choice in strategies(self.evaluator, lambda: self.best is not None):
            self.choices[name] = choice
            if choice.best is not None:
                yield choice.best

    def _replicas(self, replicas: Iterable[Replicas]) -> Iterator[Replicas]:
        """Those that can be priced with a part of the budget; of the others nothing but the work bounds the step."""
        budget = self.evaluator.budget
        for one in made_within(budget.part(policy.REPLICAS * budget.limit_s), replicas):
            if one is None:
                self.least_work_s = self.capacity_s
                self.rejected.append(Rejected("some replicas on devices of several kinds", "no time to price them"))
                return
            yield one

    def improved(self, best: Evaluation, within: Budget) -> Evaluation:
        """The best plan near ``best``, which has no proof."""
        return best if self._repair is None else better(best, self._repair.improved(best, within))

    def _spaces(self, devices: DeviceStates, cuts: GraphCuts) -> Iterator[BatchSpace]:
        begun_s = _SPACE_S + _RANK_S * len(self.evaluator.problem.ranks)
        for prices in priced(self.evaluator, cuts):
            self.evaluator.budget.spend(begun_s)
            if _has_groups(prices, devices):
                yield BatchSpace(_capacity(prices).work_s, prices, devices)
            else:
                what = f"micro-batches of {prices.micro_batches[0]}"
                self.rejected.append(Rejected(what, "not measured, or fewer samples than ranks"))

    def _bounded(self, spaces: list[BatchSpace]) -> list[BatchSpace]:
        """The same with bounds of all pipelines, whatever their groups of devices."""
        if len(self.evaluator.problem.ranks) <= _FEW_RANKS:  # the DP knows more as soon
            return spaces
        within = self.evaluator.budget.part(policy.BOUNDS * self.evaluator.budget.left_s)
        bounds = [space.bound_s for space in spaces]
        ways = [(space.prices, _capacity(space.prices)) for space in spaces]
        self.mixes_kinds = all(space.devices.mixes_kinds or len(space.prices.devices_by_kind()) < 2 for space in spaces)
        for better_bounds in made_within(within, rising_bounds(ways, self._best_s, self.mixes_kinds)):
            bounds = bounds if better_bounds is None else list(better_bounds)
        return [replace(space, bound_s=bound_s) for space, bound_s in zip(spaces, bounds, strict=True)]

    def _note(self, cuts: GraphCuts, devices: DeviceStates) -> None:
        if cuts.num_left_out:
            why = f"next to layers that cost nothing; {cuts.last - 1} places remain"
            self.rejected.append(Rejected(f"{cuts.num_left_out} places to cut", why))
        graph = self.evaluator.problem.graph
        if not may_part_ties(self.evaluator.problem):
            why = "they share parameters, and the schedule updates within a step, with some of the gradients alone"
            self.rejected += uncut(graph.tied_layers(), graph, why)
        self.rejected += uncut(graph.sharing_layers(), graph, "they use a buffer that one of them writes")
        if any(traits(name).windowed for name in schedule_names(self.evaluator.problem)):
            multiples = ", ".join(map(str, CAPS))
            why = f"where these are many: {multiples} times the stages downstream are tried, as memory allows"
            self.rejected.append(Rejected("other windows of micro-batches in flight", why))
        if not cuts.complete:
            why = "the network has too many; stages are stretches of its own order of layers"
            self.rejected.append(Rejected("stages of any set of layers", why))
        self.rejected += [Rejected(what, why) for what, why in devices.restrictions]


def priced(evaluator: Evaluator, cuts: GraphCuts) -> Iterator[GroupPrices]:
    """Every way to cut the batch, with the prices of stages between ``cuts``."""
    problem = evaluator.problem
    cost_model = evaluator.cost_model
    freedom = Freedom.of(evaluator.problem)
    of_devices = pools(problem, freedom.constraints)
    for size in micro_batch_sizes(problem, cost_model):
        yield GroupPrices(problem, cost_model, of_devices, cuts, micro_batches(problem, size), freedom)


def _has_groups(prices: GroupPrices, devices: DeviceStates) -> bool:
    """Whether some group of devices can be priced."""
    return any(prices.versions(option.group) for option in devices.options(devices.all_unused))


def spaces(evaluator: Evaluator) -> Iterator[Frontier]:
    """Every way to cut the batch that can be priced."""
    freedom = Freedom.of(evaluator.problem)
    cuts = _cuts(evaluator.cost_model, freedom)
    devices = _devices(freedom)
    for prices in priced(evaluator, cuts):
        if _has_groups(prices, devices):
            yield Frontier(Suffixes(prices, devices, handovers_of(prices)))


def all_families(evaluator: Evaluator) -> Iterator[PipelineFamilies]:
    """The same of schedules for several stages a position."""
    freedom = Freedom.of(evaluator.problem)
    cuts = _cuts(evaluator.cost_model, freedom)
    yield from families(priced(evaluator, cuts), _devices(freedom), freedom.virtual)


def first_fit(problem: Problem, within: Budget) -> tuple[Evaluator, Outcome]:
    """The search for any plan that fits, within a budget, and what evaluated it."""
    limited = replace(problem, time_limit_s=within.left_s)
    evaluator = Evaluator(limited, CostModel(problem.profile), within=within)
    return evaluator, BestFirstSearch(evaluator, None, any_fit=True).run(SearchStart(evaluator).items())


def _devices(freedom: Freedom) -> DeviceStates:
    return DeviceStates(pools(freedom.problem, freedom.constraints), freedom.may_replicate)


def _cuts(cost_model: CostModel, freedom: Freedom) -> GraphCuts:
    """The places to cut; each order of stages by itself where rules or positions go by the numbers of stages."""
    goes_by_numbers = freedom.virtual or freedom.constraints.stage_rules()
    parts_ties = may_part_ties(freedom.problem)
    parts_free = may_part_free(freedom.problem)
    return cuts_of(cost_model, parts_ties=parts_ties, parts_free=parts_free, merges_orders=not goes_by_numbers)


def _capacity(prices: GroupPrices) -> Capacity:
    """What all devices can do together."""
    return capacity(prices.capacity_s(), tuple(prices.devices_by_kind().values()))
