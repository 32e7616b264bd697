"""The best of a few candidates, and what is said of it: what binds, why other plans lose, and why nothing fits.

Other plans are the best of each other strategy, schedule and number of stages (``alternatives``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, inf

from planner.costs.candidate import Candidate
from planner.costs.layers.interpolation import measured_together
from planner.costs.predict import Forecast, forecast
from planner.costs.pricing import Pricing
from planner.costs.sentences import AS_FAST, TIE, binding, needs_text, size_text, slower_text, too_slow_text
from planner.ir.errors import InfeasibleError, MissingMeasurementError
from planner.ir.plan import HEURISTIC, Alternative, Decision, Plan, Search, Tie
from planner.ir.problem import THROUGHPUT, Problem, memory_limit_bytes
from planner.solvers.budget import Budget, made_within
from planner.solvers.candidates.candidate import decision_of, divided, plan_of, stages_of
from planner.solvers.candidates.evaluate import Evaluation, Evaluator
from planner.solvers.candidates.feasibility import as_asked, mixing_text, schedule_names

ROUNDING = 1e-9
"""Steps closer than this are equally good; the candidate seen first stays."""

_FAR = 3.0
"""Times as long from which a plan is no tie."""

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
    if sum(map(evaluator.evaluation_work_s, ordered)) > within.left_s:
        ordered.sort(key=evaluator.evaluation_work_s)
    return ordered


def choose(
    evaluator: Evaluator,
    candidates: Iterable[Candidate],
    first_that_fits: bool = False,
    within: Budget | None = None,
    has_plan: bool = False,
) -> Selection:
    """The fastest of ``candidates`` that fits, or the first; candidates of sizes nobody measured are passed over.

    None is looked at that does not meet the problem's request, or, once there is a plan, that cannot be evaluated in
    time.  Without a plan those that take long are passed over.

    Args:
        within: a part of the evaluator's budget; by default all of it.
        has_plan: whether there is a plan already, elsewhere.
    """
    best: Evaluation | None = None
    closest: Evaluation | None = None
    unknown: MissingMeasurementError | None = None
    unmet = ""
    is_cut_short = False
    for asked in made_within(within or evaluator.budget, candidates):
        if asked is None:
            is_cut_short = True
            break
        candidate = as_asked(evaluator.problem, asked)
        why = evaluator.unmet(candidate)
        if why:
            unmet = unmet or why
            continue
        takes_long = has_plan or best is not None or evaluator.evaluation_work_s(candidate) > _LATE_S
        if takes_long and not evaluator.has_time_for(candidate, within):
            is_cut_short = True
            continue
        try:
            evaluation = evaluator.evaluate(candidate, best.step_s if best is not None else inf)
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
    raise selection.unknown or unmeasured(evaluator.problem)


def unmeasured(problem: Problem) -> MissingMeasurementError:
    """The error for a problem whose profile tells of no size that may be used."""
    measured = {each.samples for measurements in problem.profile.measurements.values() for each in measurements}
    sizes = problem.micro_batch_sizes or (1, problem.global_batch)
    return MissingMeasurementError(
        "no micro-batch size that may be used was measured",
        [f"global batch {problem.global_batch}, {len(problem.ranks)} ranks", f"measured: {_listed(measured)}"],
        measured_together([*sizes, *measured]),
    )


def _listed(sizes: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(sizes))) or "no size"


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
    work_s = evaluator.drawing_work_s(best.candidate)
    different = {each.candidate: each for each in others if each.fits and each.candidate != best.candidate}
    for candidate in sorted(different, key=evaluator.drawing_work_s):
        if evaluator.budget.allows(work_s + evaluator.drawing_work_s(candidate)):
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
    given_up = leaner.step_s / best.step_s - 1
    num_ranks = len(fastest.used_ranks)
    return leaner, Tie(in_words(best.candidate), best.step_s, given_up, confidence, num_ranks)


def _drawn(evaluator: Evaluator, candidate: Candidate) -> Decision:
    """The candidate as a plan writes it down, by which its draws are found."""
    evaluator.budget.spend(evaluator.drawing_work_s(candidate))
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
) -> Iterator[Alternative]:
    """The everyday strategies, then other schedules for the same stages, then other numbers of stages.

    Args:
        best: the plan that was taken.
        fastest: the one that is faster at the mean, if it was not taken; it comes first.
    """
    problem = evaluator.problem
    listed = set[Candidate]()
    if fastest is not None:
        listed.add(fastest.candidate)
        yield _slower(evaluator, FASTEST, fastest, best)
    for name, choice in strategies.items():
        if choice.best is not None:
            listed.add(choice.best.candidate)
            if choice.best.candidate != best.candidate:
                yield _slower(evaluator, name, choice.best, best)
        elif choice.closest is not None:
            yield too_large(name, problem, choice.closest)
    for name in schedule_names(problem):
        other = replace(best.candidate, schedule=name)
        wanted = name != best.candidate.schedule and best.candidate.num_stages > 1 and not best.candidate.positions
        if wanted and evaluator.has_time_for(other) and not evaluator.unmet(other):
            evaluation = evaluator.evaluate(other)
            title = f"schedule {name}"
            is_slower = evaluation.fits
            yield _slower(evaluator, title, evaluation, best) if is_slower else too_large(title, problem, evaluation)
    for number, evaluation in sorted(by_num_stages.items()):
        if number != best.candidate.num_stages and evaluation.candidate not in listed:
            yield _slower(evaluator, f"{number} stage{'s' if number > 1 else ''} (best seen)", evaluation, best)


def _slower(evaluator: Evaluator, name: str, evaluation: Evaluation, best: Evaluation) -> Alternative:
    """With what it spends its time on beside computing, and whether the two are a tie, as time allows."""
    problem = evaluator.problem
    candidate = evaluation.candidate
    why = ""
    is_tie = False
    if evaluator.has_time_for(candidate):
        limits = binding(stages_of(problem, candidate), evaluator.forecast(candidate, num_draws=0))
        why = next((limit for limit in limits if "computes" not in limit), next(iter(limits), ""))
    work_s = evaluator.drawing_work_s(candidate) + evaluator.drawing_work_s(best.candidate)
    if problem.confidence and evaluation.step_s <= _FAR * best.step_s and evaluator.budget.allows(work_s):
        one, other = (_drawn(evaluator, each.candidate) for each in (evaluation, best))
        is_tie = evaluator.ties.is_tie(one, other, problem.confidence)
    return slower(name, evaluation.step_s, evaluation.peak_bytes, best.step_s, why, is_tie=is_tie)


def heuristic_plan(evaluator: Evaluator, evaluation: Evaluation, solver: str, method: str) -> Plan:
    """The plan of a solver that knows no bound."""
    decision, predicted = written(evaluator.problem, evaluator.pricing, evaluation.candidate)
    search = Search(
        method=method,
        solver=solver,
        status=HEURISTIC,
        bound_s=0.0,
        gap=0.0,
        num_simulated=evaluator.num_simulated,
        num_candidates=evaluator.num_simulated,
        binding=binding(decision.stages, predicted),
    )
    return plan_of(evaluator.problem, decision, predicted.prediction, search)


def written(problem: Problem, pricing: Pricing, candidate: Candidate) -> tuple[Decision, Forecast]:
    """The candidate as a plan writes it down, with its rows validated, and what is predicted of it."""
    whole = pricing.with_rows(candidate)
    predicted = forecast(pricing, divided(problem, whole), problem.memory_margin, problem.memory_bytes)
    return decision_of(problem, whole), predicted


def slower(name: str, step_s: float, peak_bytes: int, best_s: float, why: str, *, is_tie: bool = False) -> Alternative:
    """Another plan that fits; a tie if it cannot be told which is the faster."""
    slowdown = slower_text(step_s, best_s)
    why_not = AS_FAST if slowdown == AS_FAST else f"{slowdown}{TIE * is_tie}{f': {why}' if why else ''}"
    return Alternative(name, step_s, peak_bytes, why_not)


def too_large(name: str, problem: Problem, evaluation: Evaluation) -> Alternative:
    """Another plan that does not fit, or is too slow."""
    if evaluation.too_slow_per_s:
        return Alternative(name, None, None, too_slow_text(evaluation.too_slow_per_s, problem.rate_per_s))
    rank = evaluation.excess_rank or 0
    peak_bytes = evaluation.memories[rank].peak_bytes
    return Alternative(name, None, peak_bytes, needs_text(peak_bytes, rank, problem.memory_limit_bytes(rank)))


def infeasible(problem: Problem, closest: Evaluation, would_fit: Sequence[str] = ()) -> InfeasibleError:
    """The error that says why nothing fits.

    Args:
        closest: the candidate that lacks least.
        would_fit: what helps, in words.
    """
    rank = closest.excess_rank or 0
    device = problem.cluster.devices[rank]
    limit = problem.memory_limit_bytes(rank)
    memory = closest.memories[rank]
    part, size = max(memory.parts().items(), key=lambda item: item[1])
    whole = f"{size_text(device.memory_bytes)} minus {problem.memory_margin:.0%} margin"
    if limit < memory_limit_bytes(device, problem.memory_margin):
        whole = f"asked for; the device has {whole}"
    details = [
        f"rank {rank}, {device.name} ({device.kind}): the leanest plan needs {size_text(memory.peak_bytes)}",
        f"usable {size_text(limit)} ({whole})",
        f"largest part: {part}, {size_text(size)}, at micro-batch {max(closest.candidate.micro_batches)}",
    ]
    mixing = mixing_text(problem.graph)
    if mixing and len(problem.ranks) > 1:
        details.append(f"{mixing}: a stage that has one is not divided among ranks by samples")
    peaks = {rank: memory.peak_bytes for rank, memory in enumerate(closest.memories)}
    over = {rank: peak for rank, peak in peaks.items() if peak > problem.memory_limit_bytes(rank)} or peaks
    usable = 1 - problem.memory_margin
    if all(peak <= problem.cluster.devices[rank].memory_bytes * usable for rank, peak in over.items()):
        another = f"--memory {ceil(max(over.values()) / 2**20)}MiB, which the devices have"
    else:
        needed = size_text(max(over.values()) / usable)
        another = f"{needed} of memory a device, or more devices: --cluster FILE plans for other machines"
    return InfeasibleError("no plan fits", details, [*would_fit, another])


def out_of_time(problem: Problem, why: str) -> InfeasibleError:
    """The error where a search ended before it had a plan."""
    longer_s = max(60.0, 4 * problem.time_limit_s)
    return InfeasibleError("no plan found in time", [why], [f"search longer: --time-limit {longer_s:g}"])
