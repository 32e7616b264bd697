"""Why not another plan: the best of each other strategy, schedule and number of stages."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

from planner.costs.predict import Forecast, forecast
from planner.ir.plan import Alternative
from planner.solvers.candidates.answer import binding, slower, too_large
from planner.solvers.candidates.assemble import Candidate, decision_of
from planner.solvers.candidates.choose import Choice
from planner.solvers.candidates.evaluate import Evaluation, Evaluator
from planner.solvers.candidates.space import schedule_names


def alternatives(
    evaluator: Evaluator, best: Evaluation, strategies: Mapping[str, Choice], by_num_stages: Mapping[int, Evaluation]
) -> tuple[Alternative, ...]:
    """The everyday strategies, then other schedules for the same stages, then other numbers of stages."""
    taken = {choice.best.candidate for choice in strategies.values() if choice.best is not None}
    return (
        *_strategies(evaluator, best, strategies),
        *_schedules(evaluator, best),
        *_numbers_of_stages(evaluator, best, by_num_stages, taken),
    )


def _strategies(evaluator: Evaluator, best: Evaluation, known: Mapping[str, Choice]) -> Iterator[Alternative]:
    for name, choice in known.items():
        if choice.best is not None and choice.best.candidate == best.candidate:
            continue
        if choice.best is not None:
            yield _slower(evaluator, name, choice.best, best)
        elif choice.closest is not None:
            yield too_large(name, evaluator.problem, choice.closest)


def _schedules(evaluator: Evaluator, best: Evaluation) -> Iterator[Alternative]:
    for name in schedule_names(evaluator.problem):
        other = replace(best.candidate, schedule=name)
        wanted = name != best.candidate.schedule and best.candidate.num_stages > 1
        if wanted and evaluator.has_time_for(other) and not evaluator.unmet(other):
            found = evaluator.evaluate(other)
            title = f"schedule {name}"
            yield (_slower(evaluator, title, found, best) if found.fits else too_large(title, evaluator.problem, found))


def _numbers_of_stages(
    evaluator: Evaluator, best: Evaluation, seen: Mapping[int, Evaluation], taken: Collection[Candidate]
) -> Iterator[Alternative]:
    for number, found in sorted(seen.items()):
        if number != best.candidate.num_stages and found.candidate not in taken:
            yield _slower(evaluator, f"{number} stage{'s' if number > 1 else ''} (best seen)", found, best)


def _slower(evaluator: Evaluator, name: str, found: Evaluation, best: Evaluation) -> Alternative:
    return slower(name, found.step_s, found.peak_bytes, best.step_s, _reason(evaluator, found))


def _reason(evaluator: Evaluator, found: Evaluation) -> str:
    """What the other plan spends its time on, beside computing; empty if there is no time to find out."""
    if not evaluator.has_time_for(found.candidate):
        return ""
    decision = decision_of(evaluator.problem, found.candidate)
    margin, limit_bytes = evaluator.problem.memory_margin, evaluator.problem.memory_bytes
    seen: Forecast = forecast(evaluator.book, decision, margin, limit_bytes, num_draws=0)
    words = binding(decision, seen)
    return next((text for text in words if "computes" not in text), next(iter(words), ""))
