"""The integer program of :mod:`planner.solvers.span_ilp`, solved by HiGHS."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import highspy
import numpy as np
import pulp

from planner.solvers.ilp import chains, rows
from planner.solvers.ilp.model import Model
from planner.solvers.ilp.objective import objective_s, order
from planner.solvers.ilp.spans import Instance

OPTIMAL, TIME_LIMIT, INFEASIBLE = "optimal", "time limit", "infeasible"

_TOLERANCE = 1e-6
"""Relative, on bounds: what HiGHS may let rows be violated by."""


@dataclass(frozen=True, slots=True)
class Solution:
    """What HiGHS found.

    Attributes:
        status: ``optimal`` only if HiGHS proved it; ``infeasible`` only if it proved that.
        value_s: the objective of ``spans``, reckoned anew; infinite if there are none.
        bound_s: no solution is below; infinite if there is none.
        spans: by index, in order; empty if none was found.
    """

    status: str
    value_s: float
    bound_s: float
    spans: tuple[int, ...] = ()


@dataclass(slots=True, eq=False)
class Program:
    """The program of an instance; solutions that were seen can be excluded, to get the next best."""

    instance: Instance
    upper_s: float
    _model: Model = field(init=False, repr=False)
    _excluded: list[frozenset[int]] = field(init=False, default_factory=list, repr=False)

    def __post_init__(self) -> None:
        self._model = Model.of(self.instance, self.upper_s)
        self.limit(self.upper_s)
        for family in (
            rows.path,
            rows.resources,
            rows.depths,
            rows.stage_numbers,
            chains.round_trips,
            chains.forwards,
        ):
            family(self._model)

    def solve(self, time_limit_s: float) -> Solution:
        """The best solution that was not excluded, as far as HiGHS gets in that time.

        ``Optimal`` is believed only where PuLP's ``sol_status`` and HiGHS' own status say so: after a time limit
        ``status`` alone may say it too.
        """
        if not len(self.instance.spans):
            return Solution(INFEASIBLE, float("inf"), float("inf"))
        problem = self._model.problem
        problem.solve(pulp.HiGHS(msg=False, timeLimit=max(time_limit_s, 1e-3), gapRel=0.0, gapAbs=1e-9, threads=1))
        status = problem.solverModel.getModelStatus()
        if status in (highspy.HighsModelStatus.kInfeasible, highspy.HighsModelStatus.kUnboundedOrInfeasible):
            return Solution(INFEASIBLE, float("inf"), float("inf"))
        bound = float(problem.solverModel.getInfo().mip_dual_bound)
        bound_s = max(0.0, bound * self._model.unit_s * (1 - _TOLERANCE)) if np.isfinite(bound) else 0.0
        optimal, feasible = pulp.constants.LpSolutionOptimal, pulp.constants.LpSolutionIntegerFeasible
        found = self._rounded() if problem.sol_status in (optimal, feasible) else ()
        if not found:
            return Solution(TIME_LIMIT, float("inf"), bound_s)
        value_s = objective_s(self.instance, found)
        proved = problem.sol_status == optimal and status == highspy.HighsModelStatus.kOptimal
        return Solution(OPTIMAL if proved else TIME_LIMIT, value_s, min(bound_s, value_s), found)

    def limit(self, upper_s: float) -> None:
        """From now on only solutions of at most ``upper_s`` are looked for."""
        if np.isfinite(upper_s):
            self._model.step.upBound = self._model.scaled(upper_s) * (1 + _TOLERANCE)

    def exclude(self, spans: Sequence[int]) -> None:
        """From now on at least one of ``spans`` is not in the solution."""
        self._excluded.append(frozenset(spans))
        row = self._model.number(self._model.stages, spans) <= len(spans) - 1
        self._model.add(row, f"excluded{len(self._excluded)}")

    def _rounded(self) -> tuple[int, ...]:
        """The chosen spans in order; empty if they are no path, or one that was excluded."""
        values = [variable.varValue for variable in self._model.stages]
        chosen = [v for v, value in enumerate(values) if value is not None and round(value) == 1]
        return () if frozenset(chosen) in self._excluded else order(self.instance, chosen)
