"""The planner: the pipeline with the shortest simulated step, found by best-first search under an admissible bound.

Given       layers in topological order; pools of like devices (kind, host, memory); a global batch.
Choose      sizes of micro-batches, hence their number M                                   ``space.micro_batch_sizes``
            cuts 0 = c_0 < c_1 < ... < c_S, none inside a tied parameter                    ``space.cut_positions``
            for each stage s a group of devices of one pool, sharing each micro-batch       ``Bounds.used``
            equally; pools in any order along the pipeline; devices may stay unused
            a schedule for all of them                                                      ``space.schedule_names``
            or: replicas of the whole model on the first ranks, whatever they are           ``incumbents``
Minimise    the step, by ``costs.simulate``
Subject to  memory on every rank, with the micro-batches in flight of that schedule         ``costs.memory``
            a sample of every micro-batch on every rank of a stage                          ``shares.usable``

The bound.  f_s, b_s are the shortest F and B of stage s, w_s all its work, u_s its reduction and update, c_s a message
to the next stage that certainly exists.  An F of stage s + 1 follows an F of s, and a B of s follows one of s + 1, so

    G(s) = max(w_s, f_s + c_s + G(s + 1) + c_s + b_s)               from the first F of s to its last B
    V(s) = max(G(s) + u_s, f_s + c_s + V(s + 1))                    from the first F of s to the end of the step

hold for every schedule with whole backwards.  (For u = 0 and equal micro-batches V(0) is max_s [R_s + M (f_s + b_s)],
R_s the f, b and 2 c of the stages before.)  A schedule also says how many forwards a stage does before its first B and
how many backwards after its last F; a stage that runs out of them waits, which raises G(s)  ``refine``, ``windows``
Where stage s + 1 need not read from s, only the step as a whole is bounded                 ``Suffix.free_s``
The least values over all stages behind a cut, with given devices left and as many stages downstream as memory
upstream allows, are a DP over suffixes, one for each micro-batch size and schedule         ``suffix.Suffixes``

Prefixes of pipelines wait in a queue by the bound of their best continuation; complete ones get a sharper bound, and
are simulated when it is their turn.  The search ends with a proof when no bound in the queue is below the best step.

Ignored: groups of unequal devices beside those replicas, groups across hosts, several stages on a rank.
"""

from __future__ import annotations

from planner.costs.predict import forecast
from planner.costs.stage import PriceBook
from planner.ir.errors import InfeasibleError
from planner.ir.plan import Plan, Search
from planner.ir.problem import Problem
from planner.solvers.candidates.answer import binding
from planner.solvers.candidates.assemble import decision_of, plan_of
from planner.solvers.candidates.compare import alternatives
from planner.solvers.candidates.evaluate import Evaluator
from planner.solvers.progress import Progress
from planner.solvers.search.best_first import Outcome, Queue
from planner.solvers.search.remedies import no_plan_fits
from planner.solvers.search.start import Start

METHOD = "best-first search under a suffix DP's bound, every candidate simulated"


def solve(problem: Problem, progress: Progress | None = None) -> Plan:
    """The plan with the shortest simulated step.

    Ctrl-C ends the search with the best plan so far, status ``stopped``.

    Raises:
        InfeasibleError: nothing fits; the error says what lacks least and what would fit.
        MissingMeasurementError: the profile says nothing about any size that may be used.
    """
    evaluator = Evaluator(problem, PriceBook(problem.profile))
    start = Start(evaluator)
    outcome = Queue(evaluator, progress).run(start.items)
    if outcome.best is None:
        raise _nothing_found(evaluator, outcome)
    decision = decision_of(problem.profile, outcome.best.candidate)
    seen = forecast(evaluator.book, decision, problem.memory_margin, problem.memory_bytes)
    step_s = seen.prediction.step_s
    bound_s = min(outcome.bound_s, step_s)
    search = Search(
        method=METHOD,
        solver="suffix-dp",
        status=outcome.status,
        bound_s=bound_s,
        gap=step_s / bound_s - 1 if bound_s > 0 else 0.0,
        num_simulated=evaluator.num_simulated,
        num_candidates=outcome.num_candidates,
        bounds_s={"frontier": bound_s, "root": min(outcome.root_s, bound_s)},
        binding=binding(decision, seen),
        rejected=tuple(start.rejected),
    )
    others = alternatives(evaluator, outcome.best, start.choices, outcome.by_num_stages)
    return plan_of(problem, decision, seen.prediction, search, others)


def _nothing_found(evaluator: Evaluator, outcome: Outcome) -> Exception:
    if outcome.status != "time limit":
        return no_plan_fits(evaluator)
    return InfeasibleError(
        "no plan found in time",
        [f"none of {outcome.num_candidates} candidates fits after {evaluator.problem.time_limit_s:g} s"],
        ["search longer: --time-limit"],
    )
