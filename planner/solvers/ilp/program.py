"""The integer program of :mod:`planner.solvers.span_ilp`, row by row, solved by HiGHS."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain as joined
from typing import Any

import highspy
import numpy as np
import pulp

from planner.costs.tables import Array
from planner.solvers.ilp.crossing import Flags
from planner.solvers.ilp.objective import objective_s, order
from planner.solvers.ilp.spans import Instance

OPTIMAL, TIME_LIMIT, INFEASIBLE = "optimal", "time limit", "infeasible"

_SCALE = 100.0
"""The objective is about that large, so that HiGHS' absolute tolerances are fine enough."""
_TOLERANCE = 1e-6
"""Relative, on bounds: what rows may be violated by at most."""
_SOLUTION_OPTIMAL = 1


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
    """The program of an instance; solutions that were seen can be excluded, to get the next best.

    z[v] = 1 if span v is a stage; y[h] = 1 if hand-over h happens; T the objective.
    """

    instance: Instance
    upper_s: float
    _problem: Any = field(init=False, repr=False)
    _stages: list[Any] = field(init=False, repr=False)
    _handovers: list[Any] = field(init=False, repr=False)
    _step: Any = field(init=False, repr=False)
    _unit_s: float = field(init=False, repr=False)
    _excluded: list[frozenset[int]] = field(init=False, default_factory=list, repr=False)

    def __post_init__(self) -> None:
        spans = self.instance.spans
        longest_s = float((spans.work_s + spans.last_s).max(initial=0.0))
        self._unit_s = (self.upper_s if np.isfinite(self.upper_s) else longest_s or 1.0) / _SCALE
        self._problem = pulp.LpProblem("spans", pulp.LpMinimize)
        highest = _SCALE * (1 + _TOLERANCE) if np.isfinite(self.upper_s) else None
        self._step = self._problem.add_variable("T", lowBound=0, upBound=highest)
        self._stages = [self._problem.add_variable(f"z{v}", cat=pulp.LpBinary) for v in range(len(spans))]
        self._handovers = [
            self._problem.add_variable(f"y{h}", lowBound=0, upBound=1) for h in range(len(self.instance.handovers))
        ]
        self._problem.setObjective(self._step)
        self._path()
        self._resources()
        self._depths()
        self._stage_numbers()
        self._chain(spans.round_s, spans.turn_s, self.instance.handovers.round_s, spans.linked_back, "A")
        self._chain(spans.there_s, spans.work_s + spans.last_s, self.instance.handovers.there_s, spans.linked, "B")

    def solve(self, time_limit_s: float) -> Solution:
        """The best solution that was not excluded, as far as HiGHS gets in that time."""
        if not len(self.instance.spans):
            return Solution(INFEASIBLE, float("inf"), float("inf"))
        solver = pulp.HiGHS(msg=False, timeLimit=max(time_limit_s, 1e-3), gapRel=0.0, gapAbs=1e-9, threads=1)
        self._problem.solve(solver)
        highs = self._problem.solverModel
        status = highs.getModelStatus()
        if status in (highspy.HighsModelStatus.kInfeasible, highspy.HighsModelStatus.kUnboundedOrInfeasible):
            return Solution(INFEASIBLE, float("inf"), float("inf"))
        bound = float(highs.getInfo().mip_dual_bound)
        bound_s = max(0.0, bound * self._unit_s * (1 - _TOLERANCE)) if np.isfinite(bound) else 0.0
        proved = self._problem.sol_status == _SOLUTION_OPTIMAL and status == highspy.HighsModelStatus.kOptimal
        has_values = self._problem.sol_status in (_SOLUTION_OPTIMAL, pulp.constants.LpSolutionIntegerFeasible)
        found = self._rounded() if has_values else ()
        if not found:
            return Solution(TIME_LIMIT, float("inf"), bound_s)
        value_s = objective_s(self.instance, found)
        return Solution(OPTIMAL if proved else TIME_LIMIT, value_s, min(bound_s, value_s), found)

    def exclude(self, spans: Sequence[int]) -> None:
        """From now on at least one of ``spans`` is not in the solution."""
        self._excluded.append(frozenset(spans))
        self._add(self._sum(self._stages, spans) <= len(spans) - 1, f"excluded{len(self._excluded)}")

    def _rounded(self) -> tuple[int, ...]:
        """The chosen spans in order; empty if they are no path, or one that was excluded."""
        values = [variable.varValue for variable in self._stages]
        chosen = [v for v, value in enumerate(values) if value is not None and round(value) == 1]
        return () if frozenset(chosen) in self._excluded else order(self.instance, chosen)

    def _path(self) -> None:
        """A stage starts at the first cut; where one ends, its group hands over to that of the next."""
        spans, handovers = self.instance.spans, self.instance.handovers
        starts, ends = _by(spans.first, spans.group), _by(spans.last, spans.group)
        given, taken = _by(handovers.cut, handovers.source), _by(handovers.cut, handovers.destination)
        self._add(self._sum(self._stages, np.flatnonzero(spans.first == 0)) == 1, "start")
        for cut in range(1, self.instance.end):
            for number in range(len(self.instance.groups)):
                key = (cut, number)
                out, into = ends.get(key, []), starts.get(key, [])
                sent, got = given.get(key, []), taken.get(key, [])
                if out or sent:
                    self._add(self._sum(self._stages, out) == self._sum(self._handovers, sent), f"end{cut}_{number}")
                if into or got:
                    self._add(self._sum(self._stages, into) == self._sum(self._handovers, got), f"begin{cut}_{number}")

    def _resources(self) -> None:
        """No more devices of a class, nor time on them, than there is; like hosts in order; a limit on stages."""
        spans, takes = self.instance.spans, np.array([group.takes for group in self.instance.groups])
        counts = takes[spans.group]
        used = [pulp.lpSum(int(count[v]) * self._stages[v] for v in np.flatnonzero(count)) for count in counts.T]
        for number, found in enumerate(self.instance.classes):
            self._add(used[number] <= len(found.ranks), f"devices{number}")
            if found.twin >= 0:
                self._add(used[number] <= used[found.twin], f"twin{number}")
            work = counts[:, number] * (spans.work_s + spans.last_s)
            done = pulp.lpSum(self._scaled(work[v]) * self._stages[v] for v in np.flatnonzero(work))
            self._add(done <= len(found.ranks) * self._step, f"capacity{number}")
        self._add(pulp.lpSum(self._stages) <= self.instance.most_stages, "stages")

    def _depths(self) -> None:
        """A stage that starts at a cut has at most ``depth`` stages downstream, if all of them surely wait in a row."""
        spans, most = self.instance.spans, self.instance.most_stages
        if (spans.depth >= most).all():
            return
        broken = ~spans.linked & (spans.last < self.instance.end)
        for cut in range(self.instance.end):
            tight = np.flatnonzero((spans.first == cut) & (spans.depth < most))
            if len(tight):
                later = np.flatnonzero(spans.first >= cut)
                weights = np.where(broken[later], 1 - most, 1)
                downstream = pulp.lpSum(int(n) * self._stages[v] for v, n in zip(later, weights, strict=True))
                missing = pulp.lpSum(int(most - spans.depth[v]) * self._stages[v] for v in tight)
                self._add(downstream + missing <= most, f"depth{cut}")

    def _stage_numbers(self) -> None:
        """The number of a layer's stage is how many stages start before its end, less one."""
        cuts, spans = self.instance.cuts, self.instance.spans
        most = self.instance.most_stages
        for rule, (number, fixed, layers) in enumerate(self.instance.stage_rules):
            for cut in sorted({int(np.searchsorted(cuts, layer, side="right")) - 1 for layer in layers}):
                started = self._sum(self._stages, np.flatnonzero(spans.first <= cut))
                name = f"number{rule}_{cut}"
                if fixed:
                    self._add(started == number + 1, name)
                    continue
                above = self._problem.add_variable(f"above{rule}_{cut}", cat=pulp.LpBinary)
                self._add(started <= number + most * above, f"{name}_below")
                self._add(started >= (number + 2) * above, f"{name}_above")

    def _chain(self, passing: Array, ending: Array, message: Array, linked: Flags, name: str) -> None:
        """T is at least what passes before a stage, since the start or the last break, and the stage itself.

        A row for each stretch of layers between two cuts: of the stages that may have it, one does.  (Rows for the
        stages that start there would do, but bound far less while z are fractions.)
        """
        spans, end = self.instance.spans, self.instance.end
        broken = ~linked & (spans.last < end)
        enough = self._enough(passing, ending, message)
        passed, breaks = self._running(passing, message, name), self._counted(broken, name)
        starts = [0, *sorted({int(cut) for cut in spans.last[broken]})]
        for start in starts:
            for cut in range(max(start, 1) if name == "A" and not start else start, end):
                own = np.flatnonzero((spans.first <= cut) & (cut < spans.last))
                row = pulp.lpSum(self._scaled(ending[v]) * self._stages[v] for v in own) - self._step
                row += passed[cut] - passed[start] if cut > start else 0
                row -= enough * (breaks[cut] - breaks[start]) if cut > start else 0
                if name == "A" and start == 0:
                    row += pulp.lpSum(
                        self._scaled(spans.last_s[v]) * self._stages[v] for v in np.flatnonzero(spans.first == 0)
                    )
                self._add(row <= 0, f"{name}{start}_{cut}")

    def _running(self, passing: Array, message: Array, name: str) -> list[Any]:
        """By cut: what the spans that end there or before pass, messages included."""
        spans, handovers = self.instance.spans, self.instance.handovers
        found = [0]
        for cut in range(1, self.instance.end):
            total = self._problem.add_variable(f"passed{name}{cut}", lowBound=0)
            stages = (self._scaled(passing[v]) * self._stages[v] for v in np.flatnonzero(spans.last == cut))
            over = (self._scaled(message[h]) * self._handovers[h] for h in np.flatnonzero(handovers.cut == cut))
            self._add(total == found[-1] + pulp.lpSum(joined(stages, over)), f"passing{name}{cut}")
            found.append(total)
        return found

    def _counted(self, broken: Flags, name: str) -> list[Any]:
        """By cut: how many chosen spans that end there or before break the chain."""
        found = [0]
        for cut in range(1, self.instance.end):
            here = np.flatnonzero(broken & (self.instance.spans.last == cut))
            if not len(here):
                found.append(found[-1])
                continue
            total = self._problem.add_variable(f"breaks{name}{cut}", lowBound=0)
            self._add(total == found[-1] + self._sum(self._stages, here), f"breaking{name}{cut}")
            found.append(total)
        return found

    def _enough(self, passing: Array, ending: Array, message: Array) -> float:
        """More than any row without a break can come to, in units of T: with a break a row says nothing."""
        cuts, handovers = self.instance.spans.last, self.instance.handovers
        longest = np.zeros(len(self.instance.cuts))
        np.maximum.at(longest, cuts, passing)
        messages = np.zeros(len(self.instance.cuts))
        np.maximum.at(messages, handovers.cut, message)
        last = float(self.instance.spans.last_s.max(initial=0.0))
        return self._scaled(float(longest.sum() + messages.sum() + ending.max(initial=0.0) + last))

    def _scaled(self, seconds: float) -> float:
        return float(seconds) / self._unit_s

    def _sum(self, variables: Sequence[Any], which: Iterable[int]) -> Any:
        return pulp.lpSum(variables[int(index)] for index in which)

    def _add(self, row: Any, name: str) -> None:
        self._problem.addConstraint(row, name)


def _by(cut: Iterable[int], group: Iterable[int]) -> dict[tuple[int, int], list[int]]:
    """Indices by (cut, group)."""
    found: dict[tuple[int, int], list[int]] = {}
    for index, key in enumerate(zip(map(int, cut), map(int, group), strict=True)):
        found.setdefault(key, []).append(index)
    return found
