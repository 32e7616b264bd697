"""Plans as ``halopipe run`` runs them on this host, plans that were written by hand, programs that are simulated."""

from __future__ import annotations

import os
from collections.abc import Callable

from halopipe.launch.run import run_plan
from halopipe.run_spec.options import RunOptions
from halopipe.run_spec.result import RunResult
from planner.costs.candidate import Candidate
from planner.costs.predict import forecast
from planner.costs.pricing import Pricing
from planner.costs.simulator.events import execute
from planner.costs.simulator.prices import SlotPrices
from planner.costs.simulator.program import compile_program
from planner.ir.plan import Plan, Search
from planner.ir.problem import Problem
from planner.ir.program import Program
from planner.ir.schedule import Action
from planner.solvers.candidates.candidate import decision_of, plan_of

RUN_WARM_UP = 8
"""Steps before those that count.  Of two ranks the first ones are longer than of one: 808, 293, 261, 231, 227, 231, 235
and 227 ms of GPT-2 cut along samples, then 222; 137, 105, 84, 71, 61, 66, 84 and 64 ms of a U-Net, then 61."""


def ran(plan: Plan, options: RunOptions) -> RunResult:
    """What becomes of the plan; never part of a torchrun job.

    Raises:
        HalopipeError: the job ended.
    """
    os.environ.pop("RANK", None)
    result = run_plan(plan, options)
    if result is None:
        raise RuntimeError("this benchmark runs outside torchrun")
    return result


def step_s(plan: Plan, steps: int, warmup: int) -> float:
    """Median seconds of a step, with what is waited for before it."""
    return ran(plan, RunOptions(steps=steps, warmup=warmup, check_first_step=False)).measured(plan.prediction).step_s


def by_hand(problem: Problem, candidate: Candidate, search: Search | None = None) -> Plan:
    """The plan of a candidate that no solver is asked for; of better ones only ``search`` may know."""
    decision = decision_of(problem, candidate)
    prediction = forecast(Pricing.of(problem.profile), decision, problem.memory_margin).prediction
    return plan_of(problem, decision, prediction, search or Search("by hand", "benchmark", "heuristic", 0.0, 0.0, 1, 1))


def simulated_s(
    program: Program,
    micro_batches: tuple[int, ...],
    action_s: Callable[[Action], float],
    transfer_s: Callable[[tuple[int, int, int]], float] = lambda _: 0.0,
) -> float:
    """The step of a program whose actions and messages cost this.

    Args:
        transfer_s: of a route: both stages, and the micro-batch or the slice of one.
    """
    compiled = compile_program(program, micro_batches)
    prices = [action_s(slot.action) for slot in compiled.actions]
    transfers = [transfer_s(slot.route) for slot in compiled.transfers]
    return execute(compiled, SlotPrices(prices, transfers, range(len(compiled.channels)))).step_s
