"""The best of a few candidates.

Why not another plan: the best of each other strategy, schedule and number of stages.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from planner.costs.candidate import Candidate
from planner.costs.sentences import binding
from planner.ir.errors import InfeasibleError, MissingMeasurementError
from planner.ir.plan import Alternative, Decision, Tie
from planner.ir.problem import THROUGHPUT, Problem
from planner.solvers.budget import Budget, made_within
from planner.solvers.candidates.candidate import decision_of, divided, stages_of
from planner.solvers.candidates.evaluate import Evaluation, Evaluator
from planner.solvers.candidates.explain import infeasible, out_of_time, slower, too_large
from planner.solvers.candidates.feasibility import as_asked, schedule_names

ROUNDING = 1e-9
"""Steps closer than this are equally good; the candidate seen first stays."""

_FAR = 3.0
"""A plan that takes so many times as long is no tie."""

_JUDGING_TAKES = 2.0
"""What it takes to draw a plan, in times of one simulation."""

_LATE_S = 1.0
"""What one candidate may still take when time is up and there is no plan yet."""


@dataclass(frozen=True, slots=True)
class Selection:
    """What a few candidates come to.

    Attributes:
        best: the one to take; None if none fits.
        closest: of those that do not fit, the one that lacks least.
        unknown: why a candidate could not be priced.
        unmet: why a candidate may not be an answer, whatever it takes; empty if each may.
        is_cut_short: whether some were not looked at for want of time.
    """

    best: Evaluation | None
    closest: Evaluation | None
    unknown: MissingMeasurementError | None
    unmet: str = ""
    is_cut_short: bool = False


def cheapest_first(evaluator: Evaluator, candidates: Iterable[Candidate], within: Budget) -> Iterable[Candidate]:
    """The candidates in their order; if they are too much work for the budget, those of few micro-batches first."""
    ordered = list(candidates)
    if sum(map(evaluator.takes_s, ordered)) > within.left_s:
        ordered.sort(key=evaluator.takes_s)
    return ordered


def choose(
    evaluator: Evaluator,
    candidates: Iterable[Candidate],
    first_that_fits: bool = False,
    within: Budget | None = None,
) -> Selection:
    """The fastest of ``candidates`` that fits, or the first; candidates of sizes nobody measured are passed over.

    None is looked at that does not meet the problem's request, or, once there is a plan, that cannot be evaluated in
    time.  Without a plan those that take long are passed over.

    Args:
        within: a part of the evaluator's budget; by default all of it.
    """
    best: Evaluation | None = None
    closest: Evaluation | None = None
    unknown: MissingMeasurementError | None = None
    unmet, is_cut_short = "", False
    for asked in made_within(within or evaluator.budget, candidates):
        if asked is None:
            is_cut_short = True
            break
        candidate = as_asked(evaluator.problem, asked)
        why = evaluator.unmet(candidate)
        if why:
            unmet = unmet or why
            continue
        takes_long = best is not None or evaluator.takes_s(candidate) > _LATE_S
        if takes_long and not evaluator.has_time_for(candidate, within):
            is_cut_short = True
            continue
        try:
            evaluation = evaluator.evaluate(candidate, best.step_s if best is not None else float("inf"))
        except MissingMeasurementError as error:
            unknown = error
            continue
        if evaluation.fits:
            best = better(best, evaluation)
            if first_that_fits:
                break
        elif evaluation.memories and (closest is None or evaluator.excess(evaluation) < evaluator.excess(closest)):
            closest = evaluation
    return Selection(best, closest, unknown, unmet, is_cut_short)


def no_schedule(problem: Problem) -> InfeasibleError:
    """The error of a strategy that has one stage on a device, where all schedules are for several."""
    return InfeasibleError(
        "no plan of this strategy meets what was asked",
        [f"it has one stage on a device; asked: schedule {', '.join(problem.schedules)}"],
        ["name a schedule for one stage on a device, such as 1f1b, or plan with another solver"],
    )


def better(best: Evaluation | None, other: Evaluation) -> Evaluation:
    """The faster of two; if they are equally fast the one that holds less, else ``best``."""
    if best is None or other.step_s < best.step_s * (1 - ROUNDING):
        return other
    return other if other.step_s <= best.step_s and other.peak_bytes < best.peak_bytes else best


def best_of(
    evaluator: Evaluator, candidates: Iterable[Candidate], first_that_fits: bool = False, why: Sequence[str] = ()
) -> Evaluation:
    """As :func:`choose`, for those who need a plan.

    Args:
        why: what ``candidates`` says of those that it does not offer, filled while they are made.

    Raises:
        InfeasibleError: none fits.
        MissingMeasurementError: none could be priced.
    """
    selection = choose(evaluator, candidates, first_that_fits)
    if selection.best is not None:
        return selection.best
    if selection.closest is not None:
        raise infeasible(evaluator.problem, selection.closest)
    if selection.is_cut_short:
        raise out_of_time(evaluator.problem, f"none was simulated after {evaluator.problem.time_limit_s:g} s")
    if not evaluator.schedules:
        raise no_schedule(evaluator.problem)
    if selection.unmet:
        is_rule = selection.unmet.startswith(("fix", "forbid", "a side"))
        what = "keeps to the side constraints" if is_rule else "meets what was asked"
        raise InfeasibleError(
            f"no plan of this strategy {what}",
            [selection.unmet],
            ["ask for less, or plan with another solver"],
        )
    if why and selection.unknown is None:
        raise InfeasibleError(
            "this strategy has no plan at any micro-batch size that may be used",
            list(dict.fromkeys(why)),
            ["use other micro-batches, fewer devices or more time, or plan with another solver"],
        )
    raise selection.unknown or MissingMeasurementError(
        "no micro-batch size that may be used was measured",
        [f"global batch {evaluator.problem.global_batch}"],
        ["profile more sizes, or name the sizes to use"],
    )


def without_ties(evaluator: Evaluator, best: Evaluation, others: Iterable[Evaluation]) -> tuple[Evaluation, Tie | None]:
    """The plan to take where ``best`` is the fastest at the mean, and what was given up for it.

    That is one of ``others`` that ``best`` is not faster than with the problem's confidence, on fewer ranks or, where
    it is hardly slower, with fewer exchanges (``planner.costs.ties``); else ``best``.  Others are looked at as far as
    there is time, those on few ranks first.
    """
    problem = evaluator.problem
    if not problem.confidence or problem.objective != THROUGHPUT:
        return best, None
    rivals: dict[Candidate, Decision] = {}
    takes_s = _JUDGING_TAKES * evaluator.takes_s(best.candidate)
    different = {each.candidate: each for each in others if each.fits and each.candidate != best.candidate}
    for candidate in sorted(different, key=evaluator.takes_s):
        takes_s += _JUDGING_TAKES * evaluator.takes_s(candidate)
        if evaluator.budget.allows(takes_s):
            rivals[candidate] = _drawn(evaluator, candidate)
    if not rivals:
        return best, None
    fastest = _drawn(evaluator, best.candidate)
    decision = evaluator.ties.taken(fastest, list(rivals.values()), problem.confidence)
    if decision is fastest:
        return best, None
    leaner = evaluator.evaluate(next(candidate for candidate, other in rivals.items() if other is decision))
    if leaner.step_s <= best.step_s:  # as fast, and leaner
        return leaner, None
    confidence = round(evaluator.ties.confidence(fastest, decision), 4)
    given_up, num_ranks = leaner.step_s / best.step_s - 1, len(fastest.used_ranks)
    return leaner, Tie(in_words(best.candidate), best.step_s, given_up, confidence, num_ranks)


def _drawn(evaluator: Evaluator, candidate: Candidate) -> Decision:
    """The candidate as a plan writes it down, by which its draws are found."""
    whole = divided(evaluator.problem, evaluator.pricing.with_rows(candidate))
    decision = decision_of(evaluator.problem, whole)
    evaluator.ties.judged(decision, whole)
    return decision


def in_words(candidate: Candidate) -> str:
    """``2 stages on 2 ranks, 1f1b, 8 micro-batches``."""
    numbers = (
        (candidate.num_stages, "stage"),
        (len({rank for group in candidate.groups for rank in group}), "rank"),
        (len(candidate.micro_batches), "micro-batch"),
    )
    stages, ranks, batches = (
        f"{number} {name}{'' if number == 1 else 'es' if name.endswith('h') else 's'}" for number, name in numbers
    )
    return f"{stages} on {ranks}, {candidate.schedule}, {batches}"


FASTEST = "fastest at the mean"
"""What the plan is called among the alternatives that was given up for a leaner one."""


def alternatives(
    evaluator: Evaluator,
    best: Evaluation,
    strategies: Mapping[str, Selection],
    by_num_stages: Mapping[int, Evaluation],
    fastest: Evaluation | None = None,
) -> tuple[Alternative, ...]:
    """The everyday strategies, then other schedules for the same stages, then other numbers of stages.

    Args:
        best: the plan that was taken.
        fastest: the one that is faster at the mean, if it was not taken; it comes first.
    """
    listed = {choice.best.candidate for choice in strategies.values() if choice.best is not None}
    if fastest is not None:
        listed.add(fastest.candidate)
    return (
        *([_slower(evaluator, FASTEST, fastest, best)] if fastest is not None else []),
        *_strategies(evaluator, best, strategies),
        *_schedules(evaluator, best),
        *_numbers_of_stages(evaluator, best, by_num_stages, listed),
    )


def _strategies(evaluator: Evaluator, best: Evaluation, strategies: Mapping[str, Selection]) -> Iterator[Alternative]:
    for name, choice in strategies.items():
        if choice.best is not None and choice.best.candidate == best.candidate:
            continue
        if choice.best is not None:
            yield _slower(evaluator, name, choice.best, best)
        elif choice.closest is not None:
            yield too_large(name, evaluator.problem, choice.closest)


def _schedules(evaluator: Evaluator, best: Evaluation) -> Iterator[Alternative]:
    for name in schedule_names(evaluator.problem):
        other = replace(best.candidate, schedule=name)
        wanted = name != best.candidate.schedule and best.candidate.num_stages > 1 and not best.candidate.positions
        if wanted and evaluator.has_time_for(other) and not evaluator.unmet(other):
            evaluation = evaluator.evaluate(other)
            title = f"schedule {name}"
            yield (
                _slower(evaluator, title, evaluation, best)
                if evaluation.fits
                else too_large(title, evaluator.problem, evaluation)
            )


def _numbers_of_stages(
    evaluator: Evaluator, best: Evaluation, by_num_stages: Mapping[int, Evaluation], listed: Collection[Candidate]
) -> Iterator[Alternative]:
    for number, evaluation in sorted(by_num_stages.items()):
        if number != best.candidate.num_stages and evaluation.candidate not in listed:
            yield _slower(evaluator, f"{number} stage{'s' if number > 1 else ''} (best seen)", evaluation, best)


def _slower(evaluator: Evaluator, name: str, evaluation: Evaluation, best: Evaluation) -> Alternative:
    why = _reason(evaluator, evaluation)
    return slower(
        name, evaluation.step_s, evaluation.peak_bytes, best.step_s, why, is_tie=_is_tie(evaluator, evaluation, best)
    )


def _is_tie(evaluator: Evaluator, evaluation: Evaluation, best: Evaluation) -> bool:
    """Whether it cannot be told which of the two is the faster."""
    wanted = evaluator.problem.confidence
    if not wanted or not evaluator.has_time_for(evaluation.candidate) or evaluation.step_s > _FAR * best.step_s:
        return False
    one, other = (_drawn(evaluator, each.candidate) for each in (evaluation, best))
    return evaluator.ties.is_tie(one, other, wanted)


def _reason(evaluator: Evaluator, evaluation: Evaluation) -> str:
    """What the other plan spends its time on, beside computing; empty if there is no time to find out."""
    if not evaluator.has_time_for(evaluation.candidate):
        return ""
    limits = binding(
        stages_of(evaluator.problem, evaluation.candidate), evaluator.forecast(evaluation.candidate, num_draws=0)
    )
    return next((limit for limit in limits if "computes" not in limit), next(iter(limits), ""))
