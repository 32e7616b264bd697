"""What is asked beside the shortest step, by bisection; and when nothing fits, what lacks least and what would help.

The objective memory: the least limit on every device under which some plan fits.

Streams of forward passes: the most samples a second that a plan sustains, and the plan of least latency at a rate.

Given       forward passes alone, as in :mod:`planner.solvers.best_first.solver`; a batch enters every T seconds
Choose      the pipeline                                                                            as there
Minimise    the latency of a batch that meets no other: the step                                    ``LATENCY``
Subject to  sum of the forwards of a stage <= T on each of its ranks           ``priced_groups.GroupPrices._in_time``
            the period of the simulated stream <= T             ``candidates.evaluate.Evaluator.sustained_per_s``

The first constraint is what prunes prefixes; the second, which counts messages and waiting as well, decides.  The
highest rate is found by bisection on T, as the least memory is: a rate is refused once a search has
proved that no plan keeps it.
"""

from __future__ import annotations

import contextlib
import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from math import inf

import numpy as np

from planner.costs.candidate import Candidate
from planner.costs.cost_model import CostModel
from planner.costs.layers.cost_table import Array
from planner.costs.memory.memory_bound import kept_by
from planner.costs.sentences import size_text
from planner.ir.errors import HalopipeError, InfeasibleError, MissingMeasurementError
from planner.ir.lazy import once
from planner.ir.plan import TIME_LIMIT
from planner.ir.problem import ALWAYS, AUTO, LATENCY, MICRO, NEVER, SELECTIVE, THROUGHPUT, Problem
from planner.layers.stage_rules import why_gradients_stay_whole
from planner.schedules import positions, traits
from planner.solvers.best_first.bound import GroupChoice
from planner.solvers.best_first.device_groups import Counts
from planner.solvers.best_first.graph_cuts import Numbers
from planner.solvers.best_first.layout_search import with_layouts
from planner.solvers.best_first.prefixes import Frontier, PipelinePrefix
from planner.solvers.best_first.search import Outcome
from planner.solvers.best_first.virtual_pipelines import Family
from planner.solvers.best_first.warm_start import all_families, first_fit, spaces
from planner.solvers.budget import NUMBER_S, Budget, part_of_current
from planner.solvers.candidates.choose import infeasible, out_of_time, unmeasured
from planner.solvers.candidates.constraints import Applied, Constraints
from planner.solvers.candidates.evaluate import Evaluation, Evaluator
from planner.solvers.candidates.feasibility import mixing_text, sees_whole_batch

_QUICKLY_S = 5.0
_FEW = 5  # pipelines of several stages a position
_MORE_THAN_ENOUGH = 2**50  # bytes
_SIMPLER = ["a schedule of one stage a device, such as --schedule 1f1b"]


def no_plan_fits(evaluator: Evaluator) -> HalopipeError:
    """The error for a problem of which no plan fits."""
    closest = leanest(evaluator)
    if closest is None and not evaluator.schedules and (why := why_no_families(evaluator)):
        return InfeasibleError("no pipeline of several stages a device", why, _SIMPLER)
    if closest is None:
        cluster = evaluator.problem.cluster
        within = evaluator.budget.part(_QUICKLY_S)
        devices = tuple(replace(device, memory_bytes=_MORE_THAN_ENOUGH) for device in cluster.devices)
        profile = replace(evaluator.problem.profile, cluster=replace(cluster, devices=devices))
        roomy = replace(evaluator.problem, profile=profile, memory_bytes=0, rate_per_s=0.0)
        outcome = _any_plan(roomy, within)
        if outcome.best is not None:
            closest = evaluator.evaluate(_bisected(roomy, outcome.best, within)[0].candidate)
        elif outcome.status == TIME_LIMIT:
            return out_of_time(evaluator.problem, "whether more memory would help is not known")
        elif clashing := _clashing_rules(roomy, within):
            return _rules_clash(evaluator, clashing)
    if closest is None:
        return unmeasured(evaluator.problem)
    return infeasible(evaluator.problem, closest, tuple(_would_fit(evaluator)))


def leanest(evaluator: Evaluator) -> Evaluation | None:
    """The candidate whose fullest rank is least over its limit, buffers at boundaries apart; None if none is known.

    Of each way to cut the batch one is looked at, which may break a side constraint; then it does not count.
    """
    best: Evaluation | None = None
    for frontier in spaces(evaluator):
        for schedule in frontier.suffixes.prices.freedom.schedules:
            if best is not None and evaluator.budget.is_over:
                return best
            prefix = Leanest(frontier, schedule).prefix()
            if prefix is None:
                continue
            candidate = frontier.candidate(prefix, schedule)
            if traits(schedule).windowed:
                candidate = replace(candidate, windows=(1,) * candidate.num_stages)
            if evaluator.unmet(candidate) or (best is not None and not evaluator.has_time_for(candidate)):
                continue
            evaluation = evaluator.evaluate(candidate)
            if best is None or evaluator.excess(evaluation) < evaluator.excess(best):
                best = evaluation
    for candidate in leanest_virtual(evaluator):
        if best is not None and not evaluator.has_time_for(candidate):
            break
        tried = evaluator.tried(candidate)
        if tried is not None and (best is None or evaluator.excess(tried) < evaluator.excess(best)):
            best = tried
    return best


def leanest_virtual(evaluator: Evaluator) -> Iterator[Candidate]:
    """Of pipelines of several stages a position, a few whose fullest stage is least full."""
    every: list[tuple[float, int, Family, list[int]]] = []
    for member in chain.from_iterable(each.members() for each in all_families(evaluator)):
        if every and evaluator.budget.is_over:
            break
        fullness, cuts = member.leanest()
        evaluator.budget.spend(NUMBER_S * len(member.where) * member.stage_prices.prices.cuts.inside.size)
        if cuts is not None:
            every.append((fullness, len(every), member, cuts))
    for _, _, member, cuts in heapq.nsmallest(_FEW, every):
        candidate = member.candidate(cuts)
        if not evaluator.unmet(candidate):
            yield candidate


def why_no_families(evaluator: Evaluator) -> list[str]:
    """Why there is no pipeline of several stages a position, by schedule; empty if that is not the reason."""
    reasons: dict[str, None] = {}
    for each in all_families(evaluator):
        name = each.schedule
        prices = each.stage_prices.prices
        own_traits = traits(each.schedule)
        problem = prices.problem
        cuts = prices.cuts
        most = min(cuts.last, problem.max_stages or cuts.last)
        ways = own_traits.stages_per_position or 1
        fewest = min((len(positions(name, len(groups), ways)) for groups in each.sequences), default=0)
        mixing = mixing_text(problem.graph) if own_traits.bidirectional else ""
        if mixing:
            reasons[f"{name}: every stage is on two devices, which share its samples, and {mixing}"] = None
        elif not each.sequences:
            why = "stages may not be cut along samples" if len(problem.ranks) > 1 else "1 may be used"
            reasons[f"{name}: every stage is on two devices, and {why}"] = None
        elif fewest > most:
            asked = f"at most {most} were asked for" if most < cuts.last else f"the network can be cut into {most}"
            reasons[f"{name}: {fewest} stages are the fewest, and {asked}"] = None
        elif next(each.members(), None) is not None:
            return []
        elif any(prices.versions(tuple(int(own is pool) for own in prices.pools)) for pool in prices.pools):
            text = f"in micro-batches of {', '.join(map(str, sorted(set(prices.micro_batches))))}"
            reasons[f"{name}: {text} not every device of a stage has a sample"] = None
    return list(reasons)


@dataclass(eq=False)
class Leanest:
    """The suffix DP with the fullest rank's share of its limit in place of time, under one schedule."""

    frontier: Frontier
    schedule: str

    def prefix(self) -> PipelinePrefix | None:
        """The complete pipeline whose fullest rank is least full."""
        suffixes = self.frontier.suffixes
        state = suffixes.devices.all_unused
        most = min(sum(state), suffixes.prices.freedom.max_stages or sum(state), suffixes.prices.cuts.last)
        count = min(range(1, most + 1), key=lambda count: self._suffix(state, count)[0][0])
        choices: list[GroupChoice] = []
        cuts = [0]
        for downstream in range(count, 0, -1):
            fullness, number, last = self._suffix(state, downstream)
            if not np.isfinite(fullness[cuts[-1]]):
                return None
            choice = suffixes.choices(state)[number[cuts[-1]]]
            choices.append(choice)
            state = choice.option.left
            cuts.append(int(last[cuts[-1]]))
        return PipelinePrefix(tuple(choices), (), tuple(cuts), state, 0.0, 0.0, 0, 0.0)

    @once
    def _suffix(self, state: Counts, downstream: int) -> tuple[Array, Numbers, Numbers]:
        """By first cut: the fullest rank's share of its limit, number of the first choice, where its stage ends."""
        prices = self.frontier.suffixes.prices
        count = len(prices.cuts.members)
        batches = prices.num_microbatches
        kept = 1 if traits(self.schedule).windowed else kept_by(self.schedule, downstream, batches)[0]
        first = np.arange(count)[:, None]
        last = np.arange(count)[None, :]
        best = np.full(count, inf)
        choice = np.zeros(count, dtype=np.int64)
        cut = np.zeros(count, dtype=np.int64)
        for number, option in enumerate(self.frontier.suffixes.choices(state)):
            fullness = option.group.fullness(first, last, kept)
            if downstream > 1:
                fullness = np.maximum(fullness, self._suffix(option.option.left, downstream - 1)[0][None, :])
            else:
                fullness = np.where(last == prices.cuts.last, fullness, inf)
            ends = fullness.argmin(axis=1)
            values = fullness.min(axis=1)
            choice = np.where(values < best, number, choice)
            cut = np.where(values < best, ends, cut)
            best = np.minimum(best, values)
        return best, choice, cut


def _any_plan(problem: Problem, within: Budget) -> Outcome:
    """What a search for any plan ends with: over samples, then over layouts."""
    evaluator, outcome = first_fit(replace(problem, gap=inf), within)
    if outcome.best is None:
        outcome = with_layouts(evaluator, outcome, within)
    return outcome


def _clashing_rules(roomy: Problem, within: Budget) -> tuple[Applied, ...]:
    """Rules that were asked for and cannot all be met; without any of them the others can, as far as time tells.

    Empty if there is no plan without any rule either.

    Args:
        roomy: a problem that has no plan, though memory is no matter.
    """
    clashing = _asked_rules(roomy)
    for applied in clashing:
        others = tuple(other for other in clashing if other is not applied)
        with contextlib.suppress(MissingMeasurementError):
            outcome = _any_plan(_with_rules(roomy, others), within)
            if outcome.best is None and outcome.status != TIME_LIMIT:
                clashing = others
    return clashing


def _rules_clash(evaluator: Evaluator, clashing: tuple[Applied, ...]) -> InfeasibleError:
    """The error for rules that cannot all be met, with those whose absence alone lets a plan fit."""
    problem = evaluator.problem
    every = _asked_rules(evaluator.problem)
    within = evaluator.budget.part(_QUICKLY_S)
    remedies = []
    for applied in clashing:
        others = tuple(other for other in every if str(other) != str(applied))
        with contextlib.suppress(HalopipeError):
            if _any_plan(_with_rules(problem, others), within).best is not None:
                remedies.append(f"leave out {applied}")
    space = f"{len(problem.ranks)} devices" + f", at most {problem.max_stages} stages" * bool(problem.max_stages)
    space += f", schedule {' or '.join(problem.schedules)}" * bool(problem.schedules)
    return InfeasibleError(
        "no plan keeps to the side constraints",
        [
            *map(str, clashing),
            *(applied.why for applied in evaluator.constraints.rules if applied.why),
            f"no plan meets {'all of these' if len(clashing) > 1 else 'this'} with {space}, whatever their memory",
        ],
        remedies or ["leave one of them out; then other rules clash, or memory lacks"],
    )


def _asked_rules(problem: Problem) -> tuple[Applied, ...]:
    return tuple(applied for applied in Constraints.of(problem).rules if not applied.why)


def _with_rules(problem: Problem, rules: Sequence[Applied]) -> Problem:
    fix, forbid = (tuple(each.rule for each in rules if each.fixed is fixed) for fixed in (True, False))
    return replace(problem, fix=fix, forbid=forbid)


def _would_fit(evaluator: Evaluator) -> Iterator[str]:
    """Under what else a plan fits, as time allows: without the first restriction that can go, and by each means."""
    problem = evaluator.problem
    batch = problem.global_batch // 2
    relaxed = {
        "without --micro-batch": replace(problem, micro_batch_sizes=()) if problem.micro_batch_sizes else None,
        "without --schedule": replace(problem, schedules=()) if problem.schedules else None,
        "without --ranks": replace(problem, num_ranks=0) if problem.num_ranks else None,
        "--batch-statistics micro": replace(problem, batch_statistics=MICRO) if sees_whole_batch(problem) else None,
        "without --max-stages": replace(problem, max_stages=0) if problem.max_stages else None,
    }
    restrictions = {option: other for option, other in relaxed.items() if other is not None}
    if len(restrictions) > 1:
        free = replace(problem, batch_statistics=MICRO, micro_batch_sizes=(), schedules=(), num_ranks=0, max_stages=0)
        restrictions["without all these restrictions"] = free
    may_divide = not why_gradients_stay_whole(problem.graph)
    means = {
        "--recompute auto": replace(problem, recompute=AUTO) if problem.recompute in (NEVER, SELECTIVE) else None,
        "--shard auto": replace(problem, shard=ALWAYS) if problem.shard == NEVER else None,
        "--shard auto --zero 3": replace(problem, shard=ALWAYS, zero=3) if may_divide and problem.zero < 3 else None,
        f"--global-batch {batch}": replace(problem, global_batch=batch, micro_batch_sizes=()) if batch else None,
    }
    for group in (restrictions, {option: other for option, other in means.items() if other is not None}):
        for option, other in group.items():
            within = evaluator.budget.part(_QUICKLY_S / len(group))
            with contextlib.suppress(HalopipeError):  # it has no plan at all, or is no problem
                evaluation = None if within.is_over else first_fit(other, within)[1].best
                if evaluation is not None:
                    yield f"{option}: {_shown(evaluation)}"
                    if group is restrictions:
                        break


def _shown(evaluation: Evaluation) -> str:
    candidate = evaluation.candidate
    return (
        f"{candidate.num_stages} stages, micro-batch {candidate.micro_batches[0]}, "
        f"{candidate.schedule} fits ({size_text(evaluation.peak_bytes)})"
    )


_PRECISION = 1e-3
_SHARE_OF_WORK = 0.5  # the rest is for the fastest plan under the limit, or that of least latency at the rate


def least_memory(problem: Problem) -> tuple[Problem, tuple[str, ...]]:
    """The problem of the fastest plan under the least limit that was found, and in words how sure that is.

    Returns the problem as it is, without words, if no plan was found: the search that follows says why.
    """
    asked = replace(problem, objective=THROUGHPUT)
    budget = part_of_current(problem.time_limit_s)
    best = leanest(Evaluator(asked, CostModel(problem.profile)))
    if best is None or not best.fits:
        best, _ = _fitting(asked, problem.memory_bytes, budget)
    if best is None:
        return asked, ()
    best, least = _bisected(asked, best, budget.part(_SHARE_OF_WORK * budget.limit_s))
    certainty = (
        f"memory: no plan holds less than {size_text(least)}" if least else "memory: no lower bound was found in time"
    )
    return replace(asked, memory_bytes=best.peak_bytes, time_limit_s=problem.time_limit_s * (1 - _SHARE_OF_WORK)), (
        certainty,
    )


def _bisected(problem: Problem, best: Evaluation, within: Budget) -> tuple[Evaluation, int]:
    """The leanest plan found in time, at first ``best``; and a limit under which there certainly is none."""
    least = 0
    while best.peak_bytes - least > max(1, _PRECISION * best.peak_bytes) and not within.is_over:
        middle = (least + best.peak_bytes) // 2
        evaluation, nothing_fits = _fitting(problem, middle, within)
        if evaluation is not None:
            best = evaluation
        elif nothing_fits:
            least = middle
        else:
            break
    return best, least


def _fitting(problem: Problem, memory_bytes: int, within: Budget) -> tuple[Evaluation | None, bool]:
    """A plan under the limit, the leanest that comes soon; and whether there is certainly none."""
    _, outcome = first_fit(replace(problem, memory_bytes=memory_bytes), within)
    return outcome.best, outcome.refutes


_FASTER = 1.5  # what is tried next, as long as no rate was refused


def is_stream(problem: Problem) -> bool:
    """Whether throughput is asked for of forward passes alone: that of a stream without an end."""
    forward = problem.schedules and not any(traits(name).trains for name in problem.schedules)
    return problem.objective == THROUGHPUT and bool(forward)


def highest_rate(problem: Problem) -> tuple[Problem, tuple[str, ...]]:
    """The problem of the plan of least latency at the highest rate that was found, and in words how sure that is.

    Returns the problem without a rate, and no words, if no plan was found: the search that follows says why.

    Raises:
        InfeasibleError: the rate that was asked for is above it.
    """
    asked = replace(problem, objective=LATENCY, rate_per_s=0.0)
    budget = part_of_current(problem.time_limit_s)
    within = budget.part(_SHARE_OF_WORK * budget.limit_s)
    best_per_s = 0.0
    refused_per_s = inf
    reached_per_s, _ = _sustaining(asked, 0.0, budget)
    if reached_per_s is None:
        return asked, ()
    best_per_s = reached_per_s
    while refused_per_s > best_per_s * (1 + _PRECISION) and not within.is_over:
        wanted = best_per_s * _FASTER if refused_per_s == inf else (best_per_s + refused_per_s) / 2
        reached_per_s, is_certain = _sustaining(asked, wanted, within)
        if reached_per_s is not None:
            best_per_s = reached_per_s
        elif is_certain:
            refused_per_s = wanted
        else:
            break
    sure = (
        f"no plan sustains more than {refused_per_s:.5g} samples/s"
        if refused_per_s < inf
        else "no bound was found in time"
    )
    if problem.rate_per_s > best_per_s:
        raise too_fast(problem, best_per_s, sure)
    left = replace(
        asked, rate_per_s=best_per_s * (1 - _PRECISION**2), time_limit_s=problem.time_limit_s * (1 - _SHARE_OF_WORK)
    )
    return left, (f"rate: {sure}",)


def too_fast(problem: Problem, best_per_s: float, sure: str = "") -> InfeasibleError:
    """The error for a rate that no plan keeps.

    Args:
        best_per_s: what can be sustained.
        sure: how sure that is.
    """
    devices = len(problem.ranks)
    return InfeasibleError(
        f"no plan sustains {problem.rate_per_s:g} samples/s",
        [
            f"{best_per_s:.6g} samples/s can be sustained on {devices} device{'s' * (devices > 1)}",
            *([sure] if sure else []),
        ],
        [
            f"--rate {best_per_s * 0.99:.3g}",
            "more devices, or larger requests, where they cost less a sample",
        ],
    )


def _sustaining(problem: Problem, rate_per_s: float, within: Budget) -> tuple[float | None, bool]:
    """What a plan sustains that keeps the rate, the first that comes; and whether there is certainly none."""
    evaluator, outcome = first_fit(replace(problem, rate_per_s=rate_per_s), within)
    best = outcome.best
    return None if best is None else evaluator.sustained_per_s(best.candidate), outcome.refutes
