"""Prices candidates by the true simulator, quickly: programs of the same shape are lowered and compiled once."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import InitVar, dataclass, field, replace
from functools import cached_property
from itertools import starmap
from math import inf

from planner.costs.candidate import Candidate
from planner.costs.cost_model import CostModel
from planner.costs.memory.lifetimes import RankMemory
from planner.costs.predict import Forecast, forecast, sustained
from planner.costs.pricing import PricedProgram, Pricing
from planner.costs.simulator.events import least_s, run, step_unless_longer
from planner.costs.simulator.prices import SlotPrices
from planner.costs.simulator.symmetry import slices
from planner.costs.stages.input_pipeline import is_core
from planner.costs.stages.placement import LayoutCosts
from planner.costs.ties import Ties
from planner.costs.uncertainty import DRAWS
from planner.ir.cluster import RankIds
from planner.ir.errors import IllegalProgramError, MissingMeasurementError
from planner.ir.layout import Shares
from planner.ir.lazy import once
from planner.ir.problem import Problem
from planner.ir.profile import Measurement
from planner.schedules import traits
from planner.solvers.budget import ACTION_S, Budget, part_of_current
from planner.solvers.candidates.candidate import divided
from planner.solvers.candidates.constraints import Constraints
from planner.solvers.candidates.feasibility import schedule_names, unmet

_ROUNDING = 1e-9

_BOUND_TAKES = 0.1
"""What it takes to see that a candidate is not wanted, in times of one evaluation."""

_RANK_S = 1e-4
"""Of each rank of a candidate that is evaluated: what it sends and receives."""

_FORECAST_TAKES = 1.35
_WRITTEN_S = 6e-7
"""What it takes to forecast a plan (``costs.predict``): in times of one evaluation, and of each action of all ranks."""

_DRAWING_TAKES = 1.3
"""What it takes to draw a plan's step anew, in times of one evaluation of each of its ranks."""

_LAYER_S = 2e-4
_PART_S = 1e-7

_ACTIONS_OF_A_STAGE = 6
"""For a micro-batch, on each rank: F and B, and messages to and from both sides."""

_WORTH = 0.005
"""Of a step: for less no thread prepares the next one, as two threads of a process take turns with the interpreter."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What the simulator says of a candidate.

    Attributes:
        step_s: infinity if it does not fit; no more than a lower bound where that alone was asked for.
        memories: by rank; ranks that are not used hold nothing.  Empty where the step alone says that it is not wanted.
        excess_rank: the rank that is furthest over its limit, None if all fit.
        too_slow_per_s: samples a second that a stream of it sustains, where that is less than was asked for; else 0.
    """

    candidate: Candidate
    step_s: float
    memories: tuple[RankMemory, ...]
    excess_rank: int | None
    too_slow_per_s: float = 0.0

    @property
    def fits(self) -> bool:
        """Whether every rank is known to stay within its limit, and a stream is as fast as was asked for."""
        return bool(self.memories) and self.excess_rank is None and not self.too_slow_per_s

    @property
    def peak_bytes(self) -> int:
        """The most that any rank holds."""
        return max(memory.peak_bytes for memory in self.memories)


@dataclass(frozen=True, slots=True, eq=False)
class _PricedCandidate:
    """A candidate that is looked at, with its prices.

    Attributes:
        known_s: a step that is had already.
        may_look_ahead: whether the next step's inputs may be prepared in its waits, on cores that ranks compute on.
    """

    candidate: Candidate
    program: PricedProgram
    prices: SlotPrices
    known_s: float
    may_look_ahead: bool

    @property
    def is_cheap(self) -> bool:
        """Whether it takes less to simulate it than to ask what ranks hold."""
        return self.prices.traffic is None and not self.may_look_ahead

    @property
    def most_s(self) -> float:
        """A longer step is of no interest; where looking ahead makes it shorter, any is."""
        return inf if self.may_look_ahead else self.known_s * (1 + _ROUNDING)

    def rejected(self, bound_s: float) -> Evaluation:
        """Not wanted, since it takes no less."""
        return Evaluation(self.candidate, bound_s, (), None)


@dataclass(eq=False)
class Evaluator:
    """Simulates candidates of one problem, and counts them.

    Attributes:
        budget: what the search may spend, by default the problem's time limit from now on; simulations are noted in it.
    """

    problem: Problem
    cost_model: CostModel
    num_simulated: int = 0
    within: InitVar[Budget | None] = None
    budget: Budget = field(init=False)
    pricing: Pricing = field(init=False, repr=False)
    layouts: LayoutCosts = field(init=False, repr=False)

    def __post_init__(self, within: Budget | None) -> None:
        self.budget = within or part_of_current(self.problem.time_limit_s)
        evaluates = not any(traits(name).trains for name in self.schedules)
        self.layouts = LayoutCosts(self.cost_model, self.problem.allow, self.problem.halo_depth, evaluates)
        self.pricing = Pricing(self.cost_model, self.layouts)

    @property
    def schedules(self) -> tuple[str, ...]:
        """Names of the schedules that may be used."""
        return schedule_names(self.problem)

    @cached_property
    def ties(self) -> Ties:
        """Plans held against one another."""
        return Ties(self.pricing)

    @cached_property
    def constraints(self) -> Constraints:
        """The problem's rules; raises as ``Constraints.of``."""
        return Constraints.of(self.problem)

    def unmet(self, candidate: Candidate) -> str:
        """What was asked for and is not met (``candidates.feasibility``); empty if the candidate may be an answer."""
        return unmet(self.constraints, candidate)

    def evaluation_work_s(self, candidate: Candidate) -> float:
        """The work of :meth:`evaluate`, about: it grows with ranks and micro-batches."""
        return ACTION_S * self.num_actions(candidate) + _RANK_S * sum(map(len, candidate.groups))

    def forecast_work_s(self, candidate: Candidate) -> float:
        """The work of a forecast, about; the rows of all ranks are written down, those of like ranks alike."""
        varies = self._ranks_vary(candidate.groups, candidate.shares, frozenset(candidate.micro_batches))
        work_s = self.drawing_work_s(candidate) if varies else self.evaluation_work_s(candidate)
        return _FORECAST_TAKES * work_s + _WRITTEN_S * num_actions(candidate)

    def rows_work_s(self, num_microbatches: int) -> float:
        """Of it, the work of writing down what all ranks do in a pipeline, about."""
        return _WRITTEN_S * _ACTIONS_OF_A_STAGE * num_microbatches * len(self.problem.ranks)

    def drawing_work_s(self, candidate: Candidate) -> float:
        """The work of drawing its step anew, about: no rank stands for others."""
        return _DRAWING_TAKES * ACTION_S * num_actions(candidate)

    @once
    def _ranks_vary(self, groups: tuple[RankIds, ...], shares: tuple[Shares, ...], sizes: frozenset[int]) -> bool:
        """Whether costs vary, or were not measured at these sizes: a forecast then draws every rank by itself."""
        if any(one.spread > 0 or len(one.raw_s) > 1 for kind in self._measured for one in kind):
            return True
        measured = {one.samples for kind in self._measured for one in kind}
        return not all(measured.issuperset(self.pricing.samples(own, size)) for own in shares for size in sizes)

    @property
    def _measured(self) -> Collection[Sequence[Measurement]]:
        """By kind of device."""
        return self.problem.profile.measurements.values()

    def answer_work_s(self, candidate: Candidate) -> float:
        """The work of what is said of the candidate where it is the answer, about."""
        return self.forecast_work_s(candidate) + self.writing_work_s

    def num_actions(self, candidate: Candidate) -> int:
        """About how many actions are simulated of it: those of ranks that nobody stands for."""
        alike = (candidate.groups, candidate.shares, frozenset(candidate.micro_batches))
        return num_actions(candidate) // (1 if any(candidate.options) else self._num_slices(*alike))

    @once
    def _num_slices(self, groups: tuple[RankIds, ...], shares: tuple[Shares, ...], sizes: frozenset[int]) -> int:
        """Ranks for which one of them stands."""
        samples = [[self.pricing.samples(own, size) for size in sizes] for own in shares]
        symmetry = slices(self.problem.cluster, groups, samples)
        return 1 if symmetry is None else len(symmetry.stands_for) // len(symmetry.kept)

    @property
    def writing_work_s(self) -> float:
        """The work of writing a plan down, about: it has fingerprints of all layers, and their parts."""
        return (_LAYER_S + _PART_S * len(self.problem.ranks)) * len(self.problem.graph.layers)

    def has_time_for(self, candidate: Candidate, within: Budget | None = None) -> bool:
        """Whether it can be evaluated within a part of the budget, or the whole, and said at last what it does."""
        work_s = self.evaluation_work_s(candidate)
        within = within or self.budget
        return within.allows(work_s + max(0.0, self.answer_work_s(candidate) - within.reserve_s))

    def evaluate(self, candidate: Candidate, known_s: float = inf) -> Evaluation:
        """The candidate's step and memory, as ``predict`` would find them.

        Where its ranks prepare inputs on their own cores, it is looked at both ways: each step prepared in itself, or
        in the waits of the one before.  The latter is taken where it fits and is shorter by ``_WORTH``; in the
        evaluation the candidate says which.  Of graphs there is but the latter.

        Args:
            known_s: a step that is had already: of a candidate that is not as short the evaluation has no memories, and
                where messages share anything a lower bound of its step (above ``known_s``), for less work.

        Raises:
            MissingMeasurementError: the profile does not say what a layer costs at a size the candidate uses.
        """
        work_s = self.evaluation_work_s(candidate)
        self.budget.spend(_BOUND_TAKES * work_s)
        trial = self._trial(candidate, known_s)
        bound_s = self._lower_bound_s(trial)
        if bound_s > trial.most_s:
            return trial.rejected(bound_s)
        self.budget.spend((1 - _BOUND_TAKES) * work_s)
        memories = trial.program.memories()
        excess_rank = self._excess_rank(memories)
        if excess_rank is not None:
            return Evaluation(trial.candidate, inf, memories, excess_rank)
        step_s = bound_s if trial.is_cheap else self._step_s(trial)
        if step_s > trial.most_s:
            return trial.rejected(step_s)
        simulated = Evaluation(trial.candidate, step_s, memories, None)
        if trial.may_look_ahead:
            simulated = self._looking_ahead(trial, simulated)
        return self._as_fast_as_asked(simulated) if simulated.step_s <= known_s else simulated

    def _trial(self, candidate: Candidate, known_s: float) -> _PricedCandidate:
        """The candidate, priced; raises as :meth:`evaluate`."""
        always = self.cost_model.preparations.look_ahead
        if candidate.prepares_next_step is not always:
            candidate = replace(candidate, prepares_next_step=always)
        program = self.pricing.priced(divided(self.problem, candidate))
        grid = program.compiled.grid
        devices = self.problem.cluster.devices
        prepares = candidate.trains and candidate.prepares_ahead and program.compiled.num_prepared > 0
        on_cores = prepares and all(is_core(devices[rank]) for rank, row in enumerate(grid) if row)
        return _PricedCandidate(candidate, program, program.prices(), known_s, may_look_ahead=on_cores and not always)

    def _lower_bound_s(self, trial: _PricedCandidate) -> float:
        """The candidate takes no less; if that is cheap to say, no more either."""
        if trial.is_cheap:
            self.num_simulated += 1
            return run(trial.program.compiled, trial.prices).step_s
        return least_s(trial.program.compiled, trial.prices) if trial.most_s < inf else 0.0

    def _step_s(self, trial: _PricedCandidate) -> float:
        """What the candidate takes, or a lower bound of it that is more than is of interest."""
        self.num_simulated += 1
        return step_unless_longer(trial.program.compiled, trial.prices, trial.most_s)

    def _looking_ahead(self, trial: _PricedCandidate, in_step: Evaluation) -> Evaluation:
        """That of the same candidate with the next step's inputs prepared during this one, if that is worth it."""
        ahead = replace(trial.program, costs=replace(trial.program.costs, prepares_next_step=True))
        memories = ahead.memories()
        if self._excess_rank(memories) is not None:
            return in_step
        step_s = run(ahead.compiled, ahead.prices()).step_s
        if step_s >= in_step.step_s * (1 - _WORTH):
            return in_step
        return Evaluation(replace(trial.candidate, prepares_next_step=True), step_s, memories, None)

    def _as_fast_as_asked(self, evaluation: Evaluation) -> Evaluation:
        """The same, or, if a stream of it sustains fewer samples a second than are asked for, one that says so."""
        if not self.problem.rate_per_s:
            return evaluation
        rate_per_s = self.sustained_per_s(evaluation.candidate)
        if rate_per_s >= self.problem.rate_per_s * (1 - _ROUNDING):
            return evaluation
        return replace(evaluation, step_s=inf, too_slow_per_s=rate_per_s)

    def tried(self, candidate: Candidate, known_s: float = inf) -> Evaluation | None:
        """As :meth:`evaluate`; None where that raises an error."""
        with suppress(MissingMeasurementError, IllegalProgramError):
            return self.evaluate(candidate, known_s)
        return None

    def forecast(self, candidate: Candidate, num_draws: int = DRAWS) -> Forecast:
        """What is predicted of the candidate; rows that it has are validated."""
        problem = self.problem
        self.budget.spend(self.forecast_work_s(candidate))
        return forecast(
            self.pricing, divided(problem, candidate), problem.memory_margin, problem.memory_bytes, num_draws
        )

    def sustained_per_s(self, candidate: Candidate) -> float:
        """Samples a second of a stream of forward passes, as ``predict`` would find them."""
        period_s = sustained(self.pricing, candidate).period_s
        return sum(candidate.micro_batches) / period_s if period_s > 0 else inf

    def excess(self, evaluation: Evaluation) -> float:
        """How many times its limit the fullest rank holds."""
        return max(starmap(self._fullness, enumerate(evaluation.memories)))

    def _fullness(self, rank: int, memory: RankMemory) -> float:
        return memory.peak_bytes / max(1, self.problem.memory_limit_bytes(rank))

    def _excess_rank(self, memories: Sequence[RankMemory]) -> int | None:
        """The rank that is furthest over its limit, by ratio; None if all fit."""
        worst = max(range(len(memories)), key=lambda rank: self._fullness(rank, memories[rank]))
        return worst if memories[worst].peak_bytes > self.problem.memory_limit_bytes(worst) else None


def num_actions(candidate: Candidate) -> int:
    """About how many actions the candidate's program has: F and B, and their messages where there are stages."""
    each = 2 if candidate.num_stages == 1 else _ACTIONS_OF_A_STAGE
    return each * len(candidate.micro_batches) * sum(map(len, candidate.groups))
