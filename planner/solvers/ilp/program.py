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


@dataclass(frozen=True, slots=True, eq=False)
class _Passing:
    """One of the two chains: round trips (A), or forwards (B).

    Attributes:
        passed: by cut, what the stages and messages up to there pass.
        breaks: by cut, how many stages up to there need not be read by the next.
        starts: the cuts where the chain may begin.
    """

    name: str
    passed: tuple[Any, ...]
    breaks: tuple[Any, ...]
    starts: tuple[int, ...]


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
    _enough: float = field(init=False, repr=False)
    _excluded: list[frozenset[int]] = field(init=False, default_factory=list, repr=False)

    def __post_init__(self) -> None:
        spans = self.instance.spans
        longest_s = float((spans.work_s + spans.last_s).max(initial=0.0))
        self._unit_s = (self.upper_s if np.isfinite(self.upper_s) else longest_s or 1.0) / _SCALE
        self._enough = self._scaled(self._longest_s())
        self._problem = pulp.LpProblem("spans", pulp.LpMinimize)
        self._step = self._problem.add_variable("T", lowBound=0)
        self.limit(self.upper_s)
        self._stages = [self._problem.add_variable(f"z{v}", cat=pulp.LpBinary) for v in range(len(spans))]
        self._handovers = [
            self._problem.add_variable(f"y{h}", lowBound=0, upBound=1) for h in range(len(self.instance.handovers))
        ]
        self._problem.setObjective(self._step)
        self._path()
        self._resources()
        self._depths()
        self._stage_numbers()
        round_trip = self._passing(spans.round_s, self.instance.handovers.round_s, spans.linked_back, "A")
        self._rows(round_trip, spans.turn_s, spans.last_s)
        self._wires(round_trip)
        forwards = self._passing(spans.there_s, self.instance.handovers.there_s, spans.linked, "B")
        self._rows(forwards, spans.work_s + spans.last_s, np.zeros(len(spans)))

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

    def limit(self, upper_s: float) -> None:
        """From now on only solutions of at most ``upper_s`` are looked for."""
        if np.isfinite(upper_s):
            self._step.upBound = self._scaled(upper_s) * (1 + _TOLERANCE)

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

    def _passing(self, passing: Array, message: Array, linked: Flags, name: str) -> _Passing:
        """What passes before a stage: running sums over cuts."""
        spans, handovers = self.instance.spans, self.instance.handovers
        broken = ~linked & (spans.last < self.instance.end)
        passed: list[Any] = [0]
        breaks: list[Any] = [0]
        for cut in range(1, self.instance.end):
            ending = np.flatnonzero(spans.last == cut)
            stages = (self._scaled(passing[v]) * self._stages[v] for v in ending)
            over = (self._scaled(message[h]) * self._handovers[h] for h in np.flatnonzero(handovers.cut == cut))
            passed.append(self._sum_variable(f"passed{name}{cut}", passed[-1], pulp.lpSum(joined(stages, over))))
            ending = ending[broken[ending]]
            if len(ending):
                breaks.append(self._sum_variable(f"breaks{name}{cut}", breaks[-1], self._sum(self._stages, ending)))
            else:
                breaks.append(breaks[-1])
        return _Passing(name, tuple(passed), tuple(breaks), (0, *sorted({int(cut) for cut in spans.last[broken]})))

    def _rows(self, before: _Passing, ending: Array, first_s: Array) -> None:
        """T is at least what passes before a stage, since the start or the last break, and the stage itself.

        A row for each stretch of layers between two cuts: of the stages that may have it, one does.  (Rows for the
        stages that start there would do, but bound far less while z are fractions.)

        Args:
            first_s: what the first stage adds at the end of the step.
        """
        spans = self.instance.spans
        for cut in range(self.instance.end):
            own = np.flatnonzero((spans.first <= cut) & (cut < spans.last))
            done = pulp.lpSum(self._scaled(ending[v]) * self._stages[v] for v in own)
            self._add_rows(before, cut, done, first_s, "stage")

    def _wires(self, before: _Passing) -> None:
        """T is at least what passes before a message, and all other messages on its wire, with an F and B behind it."""
        spans, handovers = self.instance.spans, self.instance.handovers
        for cut in range(1, self.instance.end):
            starting = np.flatnonzero(spans.first == cut)
            pair = pulp.lpSum(self._scaled(spans.pair_s[v]) * self._stages[v] for v in starting)
            for name, seconds, more in (("wire", handovers.wire_s, pair), ("shared", handovers.shared_s, 0)):
                over = np.flatnonzero((handovers.cut == cut) & (seconds > 0))
                if len(over):
                    done = pulp.lpSum(self._scaled(seconds[h]) * self._handovers[h] for h in over)
                    self._add_rows(before, cut, done + more, spans.last_s, name)

    def _add_rows(self, before: _Passing, cut: int, done: Any, first_s: Array, name: str) -> None:
        """T >= what passed up to ``cut`` + ``done``, from the start and from every break; void if a break follows."""
        for start in before.starts:
            if start > cut or (name != "stage" and start == cut):
                continue
            row = done - self._step
            if start < cut:
                row += before.passed[cut] - before.passed[start]
                row -= self._enough * (before.breaks[cut] - before.breaks[start])
            if start == 0 and cut > 0:
                first = np.flatnonzero((self.instance.spans.first == 0) & (first_s > 0))
                row += pulp.lpSum(self._scaled(first_s[v]) * self._stages[v] for v in first)
            self._add(row <= 0, f"{name}{before.name}{start}_{cut}")

    def _sum_variable(self, name: str, before: Any, more: Any) -> Any:
        """A variable that is ``before + more``."""
        found = self._problem.add_variable(name, lowBound=0)
        self._add(found == before + more, f"is_{name}")
        return found

    def _longest_s(self) -> float:
        """More than any row without a break can come to: with a break a row says nothing."""
        spans, handovers = self.instance.spans, self.instance.handovers
        passing, messages = np.zeros(len(self.instance.cuts)), np.zeros(len(self.instance.cuts))
        np.maximum.at(passing, spans.last, spans.round_s)
        np.maximum.at(messages, handovers.cut, handovers.round_s)
        ending = (spans.work_s + spans.pair_s + spans.last_s).max(initial=0.0)
        ending += np.maximum(handovers.wire_s, handovers.shared_s).max(initial=0.0)
        return float(passing.sum() + messages.sum() + ending + spans.last_s.max(initial=0.0))

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
