"""The integer program over spans: a second road to the best plan, for cross-checks and for side constraints.

Given       layers in a row, cuts c_0 < ... < c_n where they may be cut                     ``space.cut_positions``
            classes k of N_k devices that nothing tells apart; groups g of n_gk of them     ``ilp.groups``
Choose      z[v] = 1 if span v = (cuts i < j, group, recompute) is a stage                  ``ilp.spans.Builder``
            y[h] = 1 if at cut i group g hands over to group g'
Minimise    T
Subject to  a path: sum of z from c_0 is 1; at each inner cut and for each group            ``rows.path``
                sum of z that end = sum of y that leave, sum of z that start = sum of y that arrive
            sum of n_gk z <= N_k, and of n_gk (w + u) z <= N_k T; like hosts in order;
                at most S stages                                                            ``rows.resources``
            memory: sum of z starting at i or later + sum of (S - d) z starting at i <= S   ``rows.depths``
            side constraints: as a filter on spans (``candidates.rules.Constraints.mask``), and
                stage:k of a layer as sum of z starting before its end = k + 1              ``rows.stage_numbers``
            for every i, with Z(i) the z that have the layers behind c_i,
                R(i) = sum of r z ending by i + sum of r y up to i, and F(i) the same of f
                T >= R(i) + sum of t z in Z(i) + sum of u z starting at c_0                 ``chains.round_trips``
                T >= R(i) + sum of m y at i (+ sum of r z starting at i) + the same
                T >= F(i) + sum of (w + u) z in Z(i)                                        ``chains.forwards``

Of z, f is the shortest F of the stage and r the shortest F and B, w all its work and t the part that ends before its
last B (all, unless backwards are split), u reduction and update.  Of y, f is a message and r one there and one back, m
what the other messages on that wire add.  d is the most stages downstream, the stage included, for which memory
suffices with the micro-batches that the schedule then has in flight.  So T is

    max over stages s of  R_s + M (f_s + b_s) + u,    R_s = sum over earlier stages of (f + b) + 2 c

with unlike members, statistics and the sum of gradients told apart, and no big M: an F of a stage follows one of the
stage before, and a B is followed by one there.  Where a stage need not read from the one before, all rows begin anew
behind that cut.  So T is below the simulated step of every synchronous schedule with one stage a position.

Sizes of micro-batches and schedules are enumerated outside, best bound first; every solution is simulated and then
excluded (sum of its z <= number of its stages - 1), until no bound is below the best step: that is the proof
                                                                                            ``ilp.enumeration``
Tables are numpy, and what cannot be in a plan below the best step is left out before a variable exists  ``ilp.prune``

Ignored: stages that are no stretches of the graph's order of layers, several stages on a rank, layers cut otherwise
than by samples, windows other than a schedule's own; where compositions of devices are many (``FEW_COMPOSITIONS``),
groups of several kinds, or across hosts.
"""

from __future__ import annotations

from planner.costs.predict import forecast
from planner.costs.stage import PriceBook
from planner.ir.constraints import format_rule
from planner.ir.errors import InfeasibleError, UsageError
from planner.ir.plan import Plan, Search
from planner.ir.problem import THROUGHPUT, Problem
from planner.solvers.candidates.answer import binding, infeasible
from planner.solvers.candidates.assemble import decision_of, plan_of
from planner.solvers.candidates.choose import choose
from planner.solvers.candidates.evaluate import Evaluator
from planner.solvers.candidates.rules import Constraints
from planner.solvers.progress import Progress

METHOD = "integer program over spans, its solutions simulated in order of their bound"


def solve(problem: Problem, progress: Progress | None = None) -> Plan:
    """The plan with the shortest simulated step, and a proof as far as time allows.

    Ctrl-C ends the search with the best plan so far, status ``stopped``.

    Raises:
        InfeasibleError: nothing fits, or the side constraints allow nothing.
        UnknownNameError: a side constraint matches no layer.
        UsageError: another objective than throughput.
    """
    from planner.solvers.ilp.enumeration import Enumeration, known  # here, as HiGHS takes long to load

    if problem.objective != THROUGHPUT:
        raise UsageError(
            f"span-ilp cannot minimise {problem.objective}", ["it knows the step alone"], ["use --solver suffix-dp"]
        )
    evaluator = Evaluator(problem, PriceBook(problem.profile))
    constraints = Constraints.of(problem)
    enumeration = Enumeration(evaluator, constraints, progress)
    found = enumeration.run()
    if found.best is None:
        if found.status == "time limit":
            raise InfeasibleError("no plan found in time", [f"after {problem.time_limit_s:g} s"], ["search longer"])
        rules = [f"--fix {format_rule(rule)}" for rule in problem.fix]
        rules += [f"--forbid {format_rule(rule)}" for rule in problem.forbid]
        if rules and enumeration.fits_without_rules():
            raise InfeasibleError("no plan satisfies the side constraints", rules, ["drop one of them"])
        closest = choose(evaluator, known(problem, evaluator.book)).closest
        if closest is not None:
            raise infeasible(problem, closest)
        raise InfeasibleError("no plan fits", [f"on {len(problem.ranks)} devices"], ["use more devices"])
    decision = decision_of(problem, found.best.candidate)
    seen = forecast(evaluator.book, decision, problem.memory_margin, problem.memory_bytes)
    step_s = seen.prediction.step_s
    bound_s = min(found.bound_s, step_s)
    search = Search(
        method=METHOD,
        solver="span-ilp",
        status=found.status,
        bound_s=bound_s,
        gap=step_s / bound_s - 1 if bound_s > 0 else 0.0,
        num_simulated=evaluator.num_simulated,
        num_candidates=found.num_solutions,
        bounds_s={"integer program": bound_s, "root": min(found.root_s, bound_s)},
        binding=binding(decision, seen),
    )
    return plan_of(problem, decision, seen.prediction, search)
