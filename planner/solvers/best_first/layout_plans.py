"""From stages to plans: each layer gets the layout that is best for its stage, and the plan is simulated."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from math import inf

from planner.costs.candidate import Candidate
from planner.costs.memory.table import What
from planner.costs.pricing import program_of
from planner.costs.shards.sharding_spec import ShardingSpec
from planner.ir.errors import MissingMeasurementError
from planner.ir.problem import ALWAYS, NEVER
from planner.layers.recomputed import cores_by_index
from planner.passes import in_flight
from planner.schedules import traits
from planner.solvers.best_first.layout_bound import open_options
from planner.solvers.best_first.layout_chains import LayoutChain
from planner.solvers.budget import Budget, OutOfTimeError
from planner.solvers.candidates.candidate import micro_batches, with_options
from planner.solvers.candidates.constraints import Constraints
from planner.solvers.candidates.evaluate import Evaluation, Evaluator
from planner.solvers.candidates.feasibility import (
    gives_all_work,
    joins_all_ranks,
    recompute_choices,
    schedule_names,
)
from planner.solvers.layouts.stage import LEAST, NONE, WHOLE, Question, best_layouts

_FITTINGS = 4  # attempts at layouts within the memory of a pipeline
_FITTING_S = 5.0  # of work for the layouts of one stage

Layouts = dict[int, ShardingSpec]
"""By layer."""


@dataclass(frozen=True, slots=True, eq=False)
class LayoutPlans:
    """Makes and simulates plans with layouts, as far as side constraints allow them.

    Attributes:
        options_work_s: what the options of one group may take to be priced (``layouts.stage.most_options``).
    """

    evaluator: Evaluator
    constraints: Constraints
    budget: Budget
    options_work_s: float

    @property
    def backward(self) -> str:
        """Which backward passes the schedules that may be used have (``Question.backward``)."""
        open_traits = [traits(name) for name in schedule_names(self.evaluator.problem)]
        if not all(one.trains for one in open_traits):
            return NONE
        return LEAST if any(one.splits_backward for one in open_traits) else WHOLE

    def refined(self, candidate: Candidate) -> Evaluation | None:
        """The pipeline with the best layouts for each of its stages, or for some; None if none of these fits."""
        by_stage = {
            stage: layouts
            for stage, group in enumerate(candidate.groups)
            if len(group) > 1 and (layouts := self._best(candidate, stage))
        }
        choices = [_joined(by_stage.values())] if len(by_stage) > 1 else []
        choices += list(by_stage.values())
        best: Evaluation | None = None
        for options in choices:
            evaluation = self._evaluated(candidate, options, best.step_s if best is not None else inf)
            if evaluation is not None and evaluation.fits and (best is None or evaluation.step_s < best.step_s):
                best = evaluation
        return best

    def of_chain(self, size: int, pipeline: LayoutChain) -> Iterator[Evaluation]:
        """The pipeline under every schedule that has a stage on each position, recomputing or not."""
        problem = self.evaluator.problem
        last = pipeline.stages[-1][1]
        batches = micro_batches(problem, size)
        options = _joined(
            table.layouts(first, stop, inf if first in pipeline.laid_out else None)
            for first, stop, _, table in pipeline.stages
        )
        groups = tuple(ranks for _, _, ranks, _ in pipeline.stages)
        shares = tuple(table.shares for _, _, _, table in pipeline.stages)
        bounds = (*(first for first, _, _, _ in pipeline.stages), last)
        for schedule in schedule_names(problem):
            if traits(schedule).stages_per_position > 1:
                continue
            for recomputes in recompute_choices(problem):
                plain = Candidate.chain(bounds, groups, shares, batches, schedule)
                candidate = replace(plain, recompute=(recomputes,) * len(groups) if recomputes else ())
                evaluation = self._evaluated(candidate, options)
                if evaluation is not None and not evaluation.fits:
                    evaluation = self._fitted(candidate, evaluation)
                if evaluation is not None:
                    yield evaluation

    def _evaluated(self, candidate: Candidate, options: Layouts, known_s: float = inf) -> Evaluation | None:
        """What the simulator says (``Evaluator.evaluate``); None if it is no plan that is allowed."""
        laid_out = with_options(self.evaluator.layouts, candidate, options)
        with suppress(MissingMeasurementError):
            return self.evaluator.evaluate(laid_out, known_s) if self._is_allowed(laid_out) else None
        return None

    def _is_allowed(self, candidate: Candidate) -> bool:
        if self.evaluator.unmet(candidate):
            return False
        graph = self.evaluator.problem.graph
        sizes = set(candidate.micro_batches)
        mixing = self.evaluator.cost_model.mixing()
        for stage, group in enumerate(candidate.groups):
            layers = candidate.layers_of(stage)
            own = candidate.options_of(layers)
            if own and not gives_all_work(self.evaluator.layouts, group, own, sizes):
                return False
            if not own and len(group) > 1:
                shares = [self.evaluator.pricing.samples(candidate.shares[stage], size) for size in sizes]
                if min(map(min, shares)) < 1 or any(graph.layers[index].name in mixing for index in layers):
                    return False
        return not candidate.options or joins_all_ranks(graph, candidate)

    def _fitted(self, candidate: Candidate, closest: Evaluation) -> Evaluation | None:
        """The same stages with layouts within the memory there is, found in a few attempts; None if none fits."""
        problem = self.evaluator.problem
        beside = [0] * len(closest.memories)  # bytes of each rank that layouts do not decide about
        for rank, memory in enumerate(closest.memories):
            beside[rank] = sum(memory.held[what] for what in (What.BUFFERS, What.RECEIVE_BUFFERS, What.BATCH))
        for _ in range(_FITTINGS):
            options: Layouts = {}
            for stage, group in enumerate(candidate.groups):
                if len(group) == 1:
                    continue
                limit = tuple(max(0, problem.memory_limit_bytes(rank) - beside[rank]) for rank in group)
                layouts = self._best(candidate, stage, limit)
                if not layouts:
                    return None
                options.update(layouts)
            evaluated = self._evaluated(candidate, options) if options else None
            if evaluated is None or evaluated.fits:
                return evaluated
            for rank, memory in enumerate(evaluated.memories):
                beside[rank] += max(0, memory.peak_bytes - problem.memory_limit_bytes(rank))
        return None

    def _best(self, candidate: Candidate, stage: int, limit_bytes: tuple[int, ...] = ()) -> Layouts:
        """The best layouts of a stage on its own; empty if there are none, or the profile lacks a size that they need.

        Args:
            limit_bytes: by rank of its group; empty: what there is.
        """
        problem = self.evaluator.problem
        group = candidate.groups[stage]
        prices = self.evaluator.layouts.prices(group, max(candidate.micro_batches))
        layers = tuple(candidate.layers_of(stage))
        rows = program_of(problem.graph, candidate).rows
        cores = chain.from_iterable(cores_by_index(problem.graph))
        question = Question(
            layers,
            problem.global_batch / max(candidate.micro_batches),
            in_flight(rows, candidate.num_stages)[stage],
            limit_bytes or tuple(problem.memory_limit_bytes(rank) for rank in group),
            ALWAYS if candidate.recomputes(stage) else NEVER,
            backward=self.backward,
            recomputed=frozenset(cores) if candidate.recomputes_cores(stage) else frozenset(),
        )
        options, _ = open_options(self.constraints, prices, question, self.options_work_s)
        if not options or not all(options):
            return {}
        try:
            return dict(best_layouts(prices, question, self.budget.part(_FITTING_S), options).chosen)
        except (MissingMeasurementError, OutOfTimeError):
            return {}


def _joined(parts: Iterable[Layouts]) -> Layouts:
    return {index: option for part in parts for index, option in part.items()}
