"""The mathematical program over spans: each constraint beside the function that adds it; solved by HiGHS.

Given       layers in a row, cuts c_0 < ... < c_n where they may be cut          ``feasibility.cut_positions``
            classes k of N_k devices that nothing tells apart; groups g of n_gk of them  ``ilp.device_groups``
Choose      z[v] = 1 if span v = (cuts i < j, group, recompute) is a stage             ``ilp.spans.SpanBuilder``
            y[h] = 1 if at cut i group g hands over to group g'
Minimise    T
Subject to  a path: sum of z from c_0 is 1; at each inner cut and for each group           ``path``
                sum of z that end = sum of y that leave, sum of z that start = sum of y that arrive
            sum of n_gk z <= N_k, and of n_gk (w + u) z <= N_k T; like hosts in order;
                at most S stages                                                      ``resources``
            memory: sum of z starting at i or later + sum of (S - d) z starting at i <= S  ``depths``
            side constraints: as a filter on spans (``candidates.constraints.Constraints.mask``), and
                stage:k of a layer as sum of z starting before its end = k + 1    ``stage_numbers``
            for every i, with Z(i) the z that have the layers behind c_i,
                R(i) = sum of r z ending by i + sum of r y up to i, and F(i) the same of f
                T >= R(i) + sum of t z in Z(i) + sum of u z starting at c_0         ``round_trips``
                T >= R(i) + sum of m y at i (+ sum of r z starting at i) + the same
                T >= F(i) + sum of (w + u) z in Z(i)                                   ``forwards``

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
                                                                                              ``ilp.solver``
Tables are numpy, and what cannot be in a plan below the best step is left out before a variable exists  ``ilp.spans``

Ignored: stages that are no stretches of the graph's order of layers, several stages on a rank, layers cut otherwise
than by samples, windows other than a schedule's own; where compositions of devices are many (``FEW_COMPOSITIONS``),
groups of several kinds, or across hosts.

``objective_s`` reckons the objective of a given solution stage by stage: what the rows must come to.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import highspy
import numpy as np
import pulp

from planner.costs.layers.cost_table import Array, Flags
from planner.solvers.ilp.spans import SpanInstance

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
class SpanProgram:
    """The program of an instance; solutions that were seen can be excluded, to get the next best."""

    instance: SpanInstance
    upper_s: float
    _model: PulpModel = field(init=False, repr=False)
    _excluded: list[frozenset[int]] = field(init=False, default_factory=list, repr=False)

    def __post_init__(self) -> None:
        self._model = PulpModel.of(self.instance, self.upper_s)
        self.limit(self.upper_s)
        for family in (
            path,
            resources,
            depths,
            stage_numbers,
            round_trips,
            forwards,
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
        chain = self._rounded() if problem.sol_status in (optimal, feasible) else ()
        if not chain:
            return Solution(TIME_LIMIT, float("inf"), bound_s)
        value_s = objective_s(self.instance, chain)
        proved = problem.sol_status == optimal and status == highspy.HighsModelStatus.kOptimal
        return Solution(OPTIMAL if proved else TIME_LIMIT, value_s, min(bound_s, value_s), chain)

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


_SCALE = 100.0
"""The objective is about that large, so that HiGHS' absolute tolerances are fine enough."""


@dataclass(slots=True, eq=False)
class PulpModel:
    """A PuLP problem over an instance.

    Attributes:
        unit_s: what 1 stands for in rows of time.
        step: T, the objective.
        stages: z[v] = 1 if span v is a stage.
        transfers: y[h] = 1 if transfer h happens; whole where z are.
    """

    instance: SpanInstance
    unit_s: float
    problem: Any = field(init=False, repr=False)
    step: Any = field(init=False, repr=False)
    stages: list[Any] = field(init=False, repr=False)
    transfers: list[Any] = field(init=False, repr=False)

    @classmethod
    def of(cls, instance: SpanInstance, upper_s: float) -> PulpModel:
        """Scaled for solutions of at most ``upper_s``."""
        longest_s = float((instance.spans.work_s + instance.spans.last_s).max(initial=0.0))
        return cls(instance, (upper_s if np.isfinite(upper_s) else longest_s or 1.0) / _SCALE)

    def __post_init__(self) -> None:
        self.problem = pulp.LpProblem("spans", pulp.LpMinimize)
        self.step = self.variable("T")
        self.stages = [self.binary(f"z{v}") for v in range(len(self.instance.spans))]
        self.transfers = [self.variable(f"y{h}", 1.0) for h in range(len(self.instance.transfers))]
        self.problem.setObjective(self.step)

    def variable(self, name: str, most: float | None = None) -> Any:
        """A number from 0 to ``most``."""
        return self.problem.add_variable(name, lowBound=0, upBound=most)

    def binary(self, name: str) -> Any:
        """0 or 1."""
        return self.problem.add_variable(name, cat=pulp.LpBinary)

    def add(self, row: Any, name: str) -> None:
        """One more row."""
        self.problem.addConstraint(row, name)

    def running(self, name: str, before: Any, more: Any) -> Any:
        """A variable that is ``before + more``."""
        total = self.variable(name)
        self.add(total == before + more, f"is_{name}")
        return total

    def scaled(self, seconds: float) -> float:
        """Seconds in the unit of the rows."""
        return float(seconds) / self.unit_s

    def seconds(self, each: Array, variables: Sequence[Any], which: Iterable[int]) -> Any:
        """The sum of seconds of those chosen, scaled."""
        return pulp.lpSum(self.scaled(each[v]) * variables[v] for v in which)

    def number(self, variables: Sequence[Any], which: Iterable[int]) -> Any:
        """How many of those are chosen."""
        return pulp.lpSum(variables[int(v)] for v in which)


def path(model: PulpModel) -> None:
    """A stage starts at the first cut; where one ends, its group hands over to that of the next."""
    spans, transfers = model.instance.spans, model.instance.transfers
    starts, ends = _by(spans.first, spans.group), _by(spans.last, spans.group)
    sources, destinations = _by(transfers.cut, transfers.source), _by(transfers.cut, transfers.destination)
    model.add(model.number(model.stages, np.flatnonzero(spans.first == 0)) == 1, "start")
    for cut in range(1, model.instance.end):
        for group in range(len(model.instance.groups)):
            for name, stages, over in (("end", ends, sources), ("begin", starts, destinations)):
                here, there = stages.get((cut, group), []), over.get((cut, group), [])
                if here or there:
                    row = model.number(model.stages, here) == model.number(model.transfers, there)
                    model.add(row, f"{name}{cut}_{group}")


def resources(model: PulpModel) -> None:
    """No more devices of a class, nor time on them, than there is; like hosts in order; a limit on stages.

    Time on devices follows from the rest; while z are fractions it says more.
    """
    instance, spans = model.instance, model.instance.spans
    counts = np.array([group.takes for group in instance.groups])[spans.group]
    used = [pulp.lpSum(int(count[v]) * model.stages[v] for v in np.flatnonzero(count)) for count in counts.T]
    across = any(len({member.groups for member in group.classes}) > 1 for group in instance.groups)
    for number, device_class in enumerate(instance.classes):
        model.add(used[number] <= len(device_class.ranks), f"devices{number}")
        if device_class.twin >= 0 and not across:  # else the order of a stage's hosts tells them apart
            model.add(used[number] <= used[device_class.twin], f"twin{number}")
        work_s = counts[:, number] * (spans.work_s + spans.last_s)
        busy = model.seconds(work_s, model.stages, np.flatnonzero(work_s))
        model.add(busy <= len(device_class.ranks) * model.step, f"capacity{number}")
    model.add(pulp.lpSum(model.stages) <= instance.most_stages, "stages")


def depths(model: PulpModel) -> None:
    """A stage that starts at a cut has at most ``depth`` stages downstream, if all of them surely wait in a row."""
    spans, most = model.instance.spans, model.instance.most_stages
    broken = ~spans.linked & (spans.last < model.instance.end)
    for cut in range(model.instance.end):
        tight = np.flatnonzero((spans.first == cut) & (spans.depth < most))
        if len(tight):
            later = np.flatnonzero(spans.first >= cut)
            weights = np.where(broken[later], 1 - most, 1)
            downstream = pulp.lpSum(int(n) * model.stages[v] for v, n in zip(later, weights, strict=True))
            missing = pulp.lpSum(int(most - spans.depth[v]) * model.stages[v] for v in tight)
            model.add(downstream + missing <= most, f"depth{cut}")


def stage_numbers(model: PulpModel) -> None:
    """The number of a layer's stage is how many stages start before its end, less one."""
    instance, most = model.instance, model.instance.most_stages
    for rule, (number, fixed, layers) in enumerate(instance.stage_rules):
        for cut in sorted({int(np.searchsorted(instance.cuts, layer, side="right")) - 1 for layer in layers}):
            started = model.number(model.stages, np.flatnonzero(instance.spans.first <= cut))
            name = f"number{rule}_{cut}"
            if fixed:
                model.add(started == number + 1, name)
            else:
                above = model.binary(f"above{rule}_{cut}")
                model.add(started <= number + most * above, f"{name}_below")
                model.add(started >= (number + 2) * above, f"{name}_above")


def _by(cut: Iterable[int], group: Iterable[int]) -> dict[tuple[int, int], list[int]]:
    """Indices by (cut, group)."""
    indices: dict[tuple[int, int], list[int]] = {}
    for index, key in enumerate(zip(map(int, cut), map(int, group), strict=True)):
        indices.setdefault(key, []).append(index)
    return indices


def round_trips(model: PulpModel) -> None:
    """The rows of stages and messages behind round trips; the first stage's reduction and update come after all."""
    spans = model.instance.spans
    before = _Passing.of(model, "A", spans.round_s, model.instance.transfers.round_s, spans.linked_back)
    _stages(before, spans.turn_s, spans.last_s)
    _wires(before)


def forwards(model: PulpModel) -> None:
    """The rows of stages, each with its own reduction and update, behind forwards."""
    spans = model.instance.spans
    before = _Passing.of(model, "B", spans.there_s, model.instance.transfers.there_s, spans.linked)
    _stages(before, spans.work_s + spans.last_s, np.zeros(len(spans)))


@dataclass(frozen=True, slots=True, eq=False)
class _Passing:
    """A chain, as sums over the cuts.

    Attributes:
        passed: by cut, what the stages and messages up to there pass.
        breaks: by cut, how many stages up to there need not be read by the next.
        starts: the cuts where the chain may begin.
        enough: more than any row without a break comes to, in the unit of rows: with a break a row says nothing.
    """

    model: PulpModel
    name: str
    passed: tuple[Any, ...]
    breaks: tuple[Any, ...]
    starts: tuple[int, ...]
    enough: float

    @classmethod
    def of(cls, model: PulpModel, name: str, passing: Array, message: Array, linked: Flags) -> _Passing:
        """The chain of what passes through spans and hand-overs."""
        spans, transfers = model.instance.spans, model.instance.transfers
        broken = ~linked & (spans.last < model.instance.end)
        passed: list[Any] = [0]
        breaks: list[Any] = [0]
        for cut in range(1, model.instance.end):
            ending = np.flatnonzero(spans.last == cut)
            more = model.seconds(passing, model.stages, ending)
            more += model.seconds(message, model.transfers, np.flatnonzero(transfers.cut == cut))
            passed.append(model.running(f"passed{name}{cut}", passed[-1], more))
            last = breaks[-1]
            if broken[ending].any():
                last = model.running(f"breaks{name}{cut}", last, model.number(model.stages, ending[broken[ending]]))
            breaks.append(last)
        starts = (0, *sorted({int(cut) for cut in spans.last[broken]}))
        return cls(model, name, tuple(passed), tuple(breaks), starts, model.scaled(_longest_s(model)))

    def bound(self, cut: int, done: Any, first_s: Array, name: str) -> None:
        """T >= what passed up to ``cut`` + ``done``, from the start and from every break; void if a break follows.

        Args:
            first_s: what the first stage adds at the end of the step, if that is not ``done`` already.
        """
        model = self.model
        for start in self.starts:
            if start > cut or (name != "stage" and start == cut):
                continue
            row = done - model.step
            if start < cut:
                row += self.passed[cut] - self.passed[start]
                row -= self.enough * (self.breaks[cut] - self.breaks[start])
            if start == 0 and cut > 0:
                first = np.flatnonzero((model.instance.spans.first == 0) & (first_s > 0))
                row += model.seconds(first_s, model.stages, first)
            model.add(row <= 0, f"{name}{self.name}{start}_{cut}")


def _stages(before: _Passing, own_s: Array, first_s: Array) -> None:
    """A row for each stretch of layers between two cuts: of the stages that may have it, one does.

    (Rows for the stages that start there would do, but bound far less while z are fractions.)
    """
    model, spans = before.model, before.model.instance.spans
    for cut in range(model.instance.end):
        own = np.flatnonzero((spans.first <= cut) & (cut < spans.last))
        before.bound(cut, model.seconds(own_s, model.stages, own), first_s, "stage")


def _wires(before: _Passing) -> None:
    """All messages on a wire: one way, with the last F and B behind it, or both ways where they share it."""
    model, spans, transfers = before.model, before.model.instance.spans, before.model.instance.transfers
    for cut in range(1, model.instance.end):
        pair = model.seconds(spans.pair_s, model.stages, np.flatnonzero(spans.first == cut))
        for name, seconds, more in (("wire", transfers.wire_s, pair), ("shared", transfers.shared_s, 0)):
            over = np.flatnonzero((transfers.cut == cut) & (seconds > 0))
            if len(over):
                before.bound(cut, model.seconds(seconds, model.transfers, over) + more, spans.last_s, name)


def _longest_s(model: PulpModel) -> float:
    spans, transfers = model.instance.spans, model.instance.transfers
    passing, messages = np.zeros(len(model.instance.cuts)), np.zeros(len(model.instance.cuts))
    np.maximum.at(passing, spans.last, spans.round_s)
    np.maximum.at(messages, transfers.cut, transfers.round_s)
    ending = (spans.work_s + spans.pair_s + spans.last_s).max(initial=0.0)
    ending += np.maximum(transfers.wire_s, transfers.shared_s).max(initial=0.0)
    return float(passing.sum() + messages.sum() + ending + spans.last_s.max(initial=0.0))


def order(instance: SpanInstance, chosen: Sequence[int]) -> tuple[int, ...]:
    """Spans, by index, in the order of the pipeline; empty if they are none from the first cut to the last."""
    spans = instance.spans
    ordered = tuple(sorted(chosen, key=lambda v: int(spans.first[v])))
    cuts = [0, *(int(spans.last[v]) for v in ordered)]
    starts = [*(int(spans.first[v]) for v in ordered), instance.end]
    return ordered if cuts == starts else ()


def objective_s(instance: SpanInstance, chain: Sequence[int]) -> float:
    """Max over stages of what passes through the ones before it, and all its own work; the same of wires.

        round trip: sum of (F + B + both messages) before t + turn_t + reduction and update of stage 0
        forwards:   sum of (F + message) before t + work_t + reduction and update of stage t
        wire:       sum of (F + B + both messages) before t + the other messages one way + F + B of t + as above, of 0
        shared:     sum of (F + B + both messages) before t + the other messages both ways + as above, of 0

    Infinite where a hand-over was pruned.  All begin again behind a stage from which the next one need not read.
    """
    spans = instance.spans
    best = there = around = wire = shared = 0.0
    ending = float(spans.last_s[chain[0]])
    for position, v in enumerate(chain):
        best = max(best, around + float(spans.turn_s[v]) + ending, there + float(spans.work_s[v] + spans.last_s[v]))
        best = max(best, around + ending + max(wire + float(spans.pair_s[v]), shared))
        if position + 1 < len(chain):
            there_s, round_s, wire, shared = _message(instance, v, chain[position + 1])
            there = there + float(spans.there_s[v]) + there_s if spans.linked[v] else 0.0
            around = around + float(spans.round_s[v]) + round_s if spans.linked_back[v] else 0.0
            if not spans.linked_back[v]:
                ending = wire = shared = 0.0
    return best


def _message(instance: SpanInstance, source: int, destination: int) -> tuple[float, float, float, float]:
    transfers, spans = instance.transfers, instance.spans
    match = (
        (transfers.cut == spans.last[source])
        & (transfers.source == spans.group[source])
        & (transfers.destination == spans.group[destination])
    )
    row = next(iter(np.flatnonzero(match)), None)
    if row is None:  # it was pruned
        return (float("inf"),) * 4
    columns = (transfers.there_s, transfers.round_s, transfers.wire_s, transfers.shared_s)
    there_s, round_s, wire_s, shared_s = (float(seconds[row]) for seconds in columns)
    return there_s, round_s, wire_s, shared_s


def cuts_of(instance: SpanInstance, chain: Sequence[int]) -> tuple[int, ...]:
    """Positions in the list of layers, both ends included."""
    return (*(instance.cuts[int(instance.spans.first[v])] for v in chain), instance.cuts[-1])


def follows(instance: SpanInstance, chain: Sequence[int]) -> bool:
    """Whether the numbers of the stages are what the rules want."""
    bounds = cuts_of(instance, chain)
    number = {layer: stage for stage, (a, b) in enumerate(pairwise(bounds)) for layer in range(a, b)}
    return all((number[layer] == wanted) == fixed for wanted, fixed, layers in instance.stage_rules for layer in layers)
