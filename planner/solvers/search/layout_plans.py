"""From stages to plans: each layer of a stage gets the layout that is best for the stage, and the plan is simulated."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from planner.costs.shards import Option
from planner.ir.constraints import Ways
from planner.ir.errors import MissingMeasurementError
from planner.ir.problem import ALWAYS, AUTO, NEVER
from planner.passes import in_flight
from planner.schedules import traits
from planner.solvers.candidates.assemble import Candidate, program_of
from planner.solvers.candidates.evaluate import Evaluation, Evaluator
from planner.solvers.candidates.laid_out import gives_all_work, joins_all_ranks, with_options
from planner.solvers.candidates.rules import Constraints
from planner.solvers.candidates.space import micro_batches, mixing_layers, schedule_names
from planner.solvers.inner.stage import LEAST, NONE, WHOLE, Options, Question, best_layouts, options_of
from planner.solvers.search.layout_chains import Chain

_FITTINGS = 4  # attempts at layouts within the memory of a pipeline
_FITTING_S = 5.0  # seconds for the layouts of one stage

Layouts = dict[int, Option]
"""By layer."""


@dataclass(frozen=True, slots=True, eq=False)
class LayoutPlans:
    """Makes and simulates plans with layouts, as far as side constraints allow them.

    Attributes:
        stops: when to end, by ``time.monotonic``.
    """

    evaluator: Evaluator
    constraints: Constraints
    stops: float

    @property
    def backward(self) -> str:
        """Which backward passes the schedules that may be used have (``Question.backward``)."""
        known = [traits(name) for name in schedule_names(self.evaluator.problem)]
        if not all(one.trains for one in known):
            return NONE
        return LEAST if any(one.splits_backward for one in known) else WHOLE

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
            found = self._evaluated(candidate, options, best.step_s if best is not None else float("inf"))
            if found is not None and found.fits and (best is None or found.step_s < best.step_s):
                best = found
        return best

    def of_chain(self, size: int, chain: Chain) -> Iterator[Evaluation]:
        """The chain under every schedule that has a stage on each position, recomputing or not."""
        problem = self.evaluator.problem
        last = chain.stages[-1][1]
        batches = micro_batches(problem, size)
        options = _joined(table.layouts(first, stop) for first, stop, _, table in chain.stages)
        groups = tuple(ranks for _, _, ranks, _ in chain.stages)
        shares = tuple(table.shares for _, _, _, table in chain.stages)
        bounds = (*(first for first, _, _, _ in chain.stages), last)
        for schedule in schedule_names(problem):
            if traits(schedule).stages_per_position > 1:
                continue
            for again in {ALWAYS: (True,), AUTO: (False, True)}.get(problem.recompute, (False,)):
                plain = Candidate.chain(bounds, groups, shares, batches, schedule)
                candidate = replace(plain, recompute=(again,) * len(groups) if again else ())
                found = self._evaluated(candidate, options)
                if found is not None and not found.fits:
                    found = self._fitted(candidate, found)
                if found is not None:
                    yield found

    def _evaluated(self, candidate: Candidate, options: Layouts, known_s: float = float("inf")) -> Evaluation | None:
        """What the simulator says (``Evaluator.evaluate``); None if it is no plan that is allowed."""
        found = with_options(self.evaluator.layouts, candidate, options)
        try:
            return self.evaluator.evaluate(found, known_s) if self._is_allowed(found) else None
        except MissingMeasurementError:
            return None

    def _is_allowed(self, candidate: Candidate) -> bool:
        if self.evaluator.unmet(candidate):
            return False
        graph, sizes = self.evaluator.problem.profile.graph, set(candidate.micro_batches)
        mixing = mixing_layers(graph)
        for stage, group in enumerate(candidate.groups):
            layers = [index for index, number in enumerate(candidate.stage_of) if number == stage]
            own = {index: option for index in layers if (option := candidate.option_of(index)) is not None}
            if own and not gives_all_work(self.evaluator.layouts, group, own, sizes):
                return False
            if not own and len(group) > 1:
                shares = [self.evaluator.samples(candidate.shares[stage], rows) for rows in sizes]
                if min(map(min, shares)) < 1 or any(graph.layers[index].name in mixing for index in layers):
                    return False
        return not candidate.options or joins_all_ranks(graph, candidate)

    def _fitted(self, candidate: Candidate, closest: Evaluation) -> Evaluation | None:
        """The same stages with layouts within the memory there is, found in a few attempts; None if none fits."""
        problem = self.evaluator.problem
        beside = [0] * len(closest.memories)  # bytes of each rank that layouts do not decide about
        for rank, memory in enumerate(closest.memories):
            held = memory.resident
            beside[rank] = held.buffers + held.receive_buffers + held.batch
        for _ in range(_FITTINGS):
            options: Layouts = {}
            for stage, group in enumerate(candidate.groups):
                if len(group) == 1:
                    continue
                limit = tuple(max(0, problem.memory_limit_bytes(rank) - beside[rank]) for rank in group)
                found = self._best(candidate, stage, limit)
                if not found:
                    return None
                options.update(found)
            evaluated = self._evaluated(candidate, options) if options else None
            if evaluated is None or evaluated.fits:
                return evaluated
            for rank, memory in enumerate(evaluated.memories):
                beside[rank] += max(0, memory.peak_bytes - problem.memory_limit_bytes(rank))
        return None

    def _best(self, candidate: Candidate, stage: int, limit_bytes: tuple[int, ...] = ()) -> Layouts:
        """The best layouts of a stage on its own; empty if there are none.

        Args:
            limit_bytes: by rank of its group; empty: what there is.
        """
        problem = self.evaluator.problem
        group = candidate.groups[stage]
        prices = self.evaluator.layouts.prices(group, max(candidate.micro_batches))
        layers = tuple(index for index, number in enumerate(candidate.stage_of) if number == stage)
        rows = program_of(problem.profile.graph, candidate).rows
        question = Question(
            layers,
            problem.global_batch / max(candidate.micro_batches),
            in_flight(rows, candidate.num_stages)[stage],
            limit_bytes or tuple(problem.memory_limit_bytes(rank) for rank in group),
            ALWAYS if candidate.recomputes(stage) else NEVER,
            backward=self.backward,
        )
        options = self._options(layers, options_of(prices, question))
        if not all(options):
            return {}
        left_s = min(_FITTING_S, max(0.1, self.stops - time.monotonic()))
        return dict(best_layouts(prices, question, left_s, options=options).chosen)

    def _options(self, layers: tuple[int, ...], options: tuple[Options, ...]) -> tuple[Options, ...]:
        """Those that side constraints allow."""
        if not self.constraints.rules:
            return options
        return tuple(
            tuple(option for option in each if self.constraints.allows_layer(index, Ways.of(dict(option.cuts))))
            for index, each in zip(layers, options, strict=True)
        )


def _joined(parts: Iterable[Layouts]) -> Layouts:
    return {index: option for part in parts for index, option in part.items()}
