"""The mathematical program over spans: each constraint beside the function that adds it; solved by HiGHS.

Given       cuts of the network, a lattice from nothing to the whole                 ``best_first.graph_cuts``
            pools k of N_k like devices; groups g of n_gk of them      ``device_groups``, ``spans.group_counts``
            prices of stages, and of what they hand over             ``priced_groups``, ``message_bound``
Choose      z[v] = 1 if span v = (cuts i < j, group, recompute) is a stage                ``spans.SpanTable``
            y[h] = 1 if at cut i group g hands over to group g'                       ``spans.HandoverTable``
Minimise    T
Subject to  a path: sum of z from the first cut is 1; at each inner cut and for each group              ``path``
                sum of z that end = sum of y that leave, sum of z that start = sum of y that arrive
            sum of n_gk z <= N_k, and of n_gk (w + u) z <= N_k T; like hosts in order;
                at most S stages                                                                   ``resources``
            memory: sum of z starting at i or later + sum of (S - d) z starting at i <= S              ``depths``
            side constraints: as a filter on spans (``PricedGroup.stage``), and
                stage:k of a layer as sum of z that end before it = k                          ``stage_numbers``
            R(i) = sum of r z that end at i + sum of r y there, and F(i) the same of f                 ``passing``
            for every layer, with Z the z that have it, over the cuts i without it,
                T >= sum of R(i) + sum of t z in Z + sum of u z from the first cut, and
                T >= sum of F(i) + sum of (w + u) z in Z                                                ``stages``
            for every cut j, over the cuts i in it, j included,
                T >= sum of R(i) + sum of m y at j (+ sum of (f + b) z starting at j) + the u as above   ``wires``

Of z, f is the shortest F of the stage and r the shortest F and B, w all its work and t the part that ends before its
last B (all, unless backwards are split), u reduction and update.  Of y, f is a message and r one there and one back, m
what the other messages on that wire add.  d is the most stages downstream, the stage included, for which memory
suffices with the micro-batches that the schedule then has in flight.  So T is

    max over stages s of  R_s + M (f_s + b_s) + u,    R_s = sum over earlier stages of (f + b) + 2 c

with unlike members, statistics and the sum of gradients told apart, and no big M: an F of a stage follows one of the
stage before, and a B is followed by one there.  The stages before a layer's are those of the path that end at a cut
without it; for a cut that is not on the path, the sum is that of its first stages, and says less.  Where a stage need
not read from the one before, all rows begin anew after that cut.  So T is below the simulated step of every
synchronous schedule with one stage a position.

Sizes of micro-batches and schedules are enumerated outside, best bound first; every solution is simulated and then
excluded (sum of its z <= number of its stages - 1), until no bound is below the best step: that is the proof
                                                                                                    ``ilp.solver``
What cannot be in a plan below the best step is left out before a variable exists            ``spans.prune``

Ignored: several stages on a rank, layers cut otherwise than by samples, windows other than a schedule's own; where
groups are more than ``spans.FEW_GROUPS``, those of several kinds, or across hosts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from math import inf

import numpy as np
from scipy.sparse import csr_array

from planner.costs.layers.cost_table import Array
from planner.solvers.best_first.graph_cuts import Flags, Numbers
from planner.solvers.ilp.spans import Chain, SpanInstance, chains, scaled
from planner.solvers.integer_program import INFEASIBLE, OPTIMAL, TIME_LIMIT, IntegerProgram

_TOLERANCE = 1e-6
"""Relative, on bounds: what HiGHS may let rows be violated by."""

_SCALE = 100.0
"""The objective is about that large, so that HiGHS' absolute tolerances are fine enough."""


@dataclass(frozen=True, slots=True)
class Solution:
    """What HiGHS found.

    Attributes:
        status: ``optimal`` only if HiGHS proved it; ``infeasible`` only if it proved that.
        bound_s: no solution is below; infinite if there is none.
        spans: by index, in order; empty if none was found.
    """

    status: str
    bound_s: float
    spans: tuple[int, ...] = ()


@dataclass(slots=True, eq=False)
class SpanProgram:
    """The program of an instance; solutions that were seen can be excluded, to get the next best.

    Attributes:
        upper_s: only solutions of at most so much are looked for.
        unit_s: what 1 stands for in rows of time.
    """

    instance: SpanInstance
    upper_s: float
    unit_s: float = field(init=False)
    _program: IntegerProgram = field(init=False, repr=False)

    def __post_init__(self) -> None:
        longest_s = float((self.instance.spans.work_s + self.instance.spans.last_s).max(initial=0.0))
        self.unit_s = (self.upper_s if np.isfinite(self.upper_s) else longest_s or 1.0) / _SCALE
        spans = scaled(self.instance.spans, self.unit_s)
        handovers = scaled(self.instance.handovers, self.unit_s)
        instance = replace(self.instance, spans=spans, handovers=handovers)
        cuts = dict.fromkeys(("passed_R", "breaks_R", "passed_F", "breaks_F"), instance.cuts.last + 1)
        above = sum(len(layers) for _, _, layers in instance.stage_rules)
        widths = {"T": 1, "stages": len(spans), "handovers": len(handovers), **cuts, "above": above}
        rows = self._program = IntegerProgram(widths, binary=("stages", "above"), parts=("handovers",))
        for family in (path, resources, depths, stage_numbers):
            family(rows, instance)
        for chain in chains(spans, handovers):
            enough = passing(rows, instance, chain)
            stages(rows, instance, chain, enough)
            wires(rows, instance, chain, enough)

    def solve(self, time_limit_s: float) -> Solution:
        """The best solution that was not excluded, as far as HiGHS gets in that time."""
        if not len(self.instance.spans):
            return Solution(INFEASIBLE, inf)
        answer = self._program.minimise(self.upper_s / self.unit_s * (1 + _TOLERANCE), time_limit_s)
        chain = self._in_order(answer.variables["stages"]) if answer.variables else ()
        status = TIME_LIMIT if answer.status == OPTIMAL and not chain else answer.status
        return Solution(status, answer.bound * self.unit_s * (1 - _TOLERANCE), chain)

    def exclude(self, spans: Sequence[int]) -> None:
        """From now on at least one of ``spans`` is not in the solution."""
        chosen = np.isin(np.arange(len(self.instance.spans)), spans)
        self._program.add(-inf, len(spans) - 1, stages=chosen[None].astype(np.float64))

    def _in_order(self, values: Array) -> tuple[int, ...]:
        """The chosen spans in the order of the pipeline; empty if they are none from the first cut to the last."""
        spans = self.instance.spans
        chosen = np.flatnonzero(values > 0.5)
        chosen = chosen[np.argsort(spans.first[chosen])]
        starts = [*spans.first[chosen].tolist(), self.instance.cuts.last]
        return tuple(chosen.tolist()) if starts == [0, *spans.last[chosen].tolist()] else ()


def path(rows: IntegerProgram, instance: SpanInstance) -> None:
    """A stage starts at the first cut; where one ends, its group hands over to that of the next."""
    spans = instance.spans
    handovers = instance.handovers
    count = len(instance.groups)
    rows.add(1, 1, stages=(spans.first == 0)[None])
    inner = slice(count, instance.cuts.last * count)
    for cut, group in ((spans.last, handovers.source), (spans.first, handovers.destination)):
        stages_there = _at(cut * count + spans.group, inner.stop)[inner]
        rows.add(0, 0, stages=stages_there, handovers=-_at(handovers.cut * count + group, inner.stop)[inner])


def resources(rows: IntegerProgram, instance: SpanInstance) -> None:
    """No more devices of a pool, nor time on them, than there is; like hosts in order; a limit on stages.

    Time on devices follows from the rest; while z are fractions it says more.
    """
    spans = instance.spans
    pools = instance.prices.pools
    used = np.array([group.counts for group in instance.groups])[spans.group].T.astype(np.float64)
    counts = np.array([len(pool.ranks) for pool in pools], dtype=np.float64)
    rows.add(-inf, counts, stages=used)
    rows.add(-inf, 0, stages=used * (spans.work_s + spans.last_s), T=-counts[:, None])
    for later, earlier in instance.twins:
        rows.add(-inf, 0, stages=(used[later] - used[earlier])[None])
    rows.add(-inf, instance.most_stages, stages=np.ones((1, len(spans))))


def depths(rows: IntegerProgram, instance: SpanInstance) -> None:
    """A stage that starts at a cut has at most ``depth`` stages downstream, if all of them surely wait in a row."""
    spans = instance.spans
    most = instance.most_stages
    cuts = instance.cuts
    broken = ~spans.linked & (spans.last < cuts.last)
    here = spans.first == np.arange(cuts.last)[:, None]
    later = here | cuts.inside[: cuts.last, spans.first]
    missing = here * np.maximum(most - spans.depth, 0)
    tight = missing.any(axis=1)
    rows.add(-inf, most, stages=(later * np.where(broken, 1 - most, 1) + missing)[tight])


def stage_numbers(rows: IntegerProgram, instance: SpanInstance) -> None:
    """The number of a layer's stage is how many stages end before it."""
    most = instance.most_stages
    first_above = 0
    for number, fixed, layers in instance.stage_rules:
        before = 1.0 - instance.cuts.members[instance.spans.last][:, list(layers)].T
        above = np.eye(len(layers), rows.widths["above"], first_above)
        first_above += len(layers)
        if fixed:
            rows.add(number, number, stages=before)
        else:
            rows.add(-inf, number - 1, stages=before, above=-most * above)
            rows.add(0, inf, stages=before, above=-(number + 1) * above)


def passing(rows: IntegerProgram, instance: SpanInstance, chain: Chain) -> float:
    """What passes at each cut, and how many stages there break the chain; more than any row can come to."""
    spans = instance.spans
    handovers = instance.handovers
    cuts = instance.cuts
    count = cuts.last + 1
    ends = _at(spans.last, count)
    over = _at(handovers.cut, count)
    passed = {f"passed_{chain.name}": -np.eye(count)}
    rows.add(0, 0, stages=ends * chain.pass_s, handovers=over * chain.message_s, **passed)
    rows.add(0, 0, stages=ends * _broken(instance, chain), **{f"breaks_{chain.name}": -np.eye(count)})
    longest, messages = np.zeros((2, count))
    np.maximum.at(messages, handovers.cut, chain.message_s)
    for cut in range(1, count):
        here = np.flatnonzero(spans.last == cut)
        longest[cut] = messages[cut] + (longest[spans.first[here]] + chain.pass_s[here]).max(initial=0.0)
    at_end = [chain.end_s, *(after_s for _, after_s in chain.wires)]
    wire_s = max((float(seconds.max(initial=0.0)) for seconds, _ in chain.wires), default=0.0)
    ending = sum(float(seconds.max(initial=0.0)) for seconds in (np.maximum.reduce(at_end), chain.first_s))
    return float(longest.max()) + wire_s + ending


def _broken(instance: SpanInstance, chain: Chain) -> Flags:
    """The spans after which the chain begins anew."""
    return np.asarray(~chain.linked & (instance.spans.last < instance.cuts.last))


def _starts(instance: SpanInstance, chain: Chain) -> list[int]:
    """The cuts where the chain may begin."""
    return [0, *np.unique(instance.spans.last[_broken(instance, chain)]).tolist()]


def _bound(rows: IntegerProgram, chain: Chain, before: Flags, enough: float, **at_end: Array) -> None:
    """T >= what passes at the cuts ``before`` and ``at_end``, a row each; void if the chain breaks at one of them."""
    count = len(before)
    chain_blocks = {f"passed_{chain.name}": before.astype(np.float64), f"breaks_{chain.name}": -enough * before}
    rows.add(-inf, 0, T=-np.ones((count, 1)), **chain_blocks, **at_end)


def stages(rows: IntegerProgram, instance: SpanInstance, chain: Chain, enough: float) -> None:
    """A row for each layer, of those always between the same cuts: of the stages that may have it, one does.

    (Rows for the stages that start at a cut would do, but bound far less while z are fractions.)
    """
    spans = instance.spans
    cuts = instance.cuts
    layers = np.unique(cuts.members > 0, axis=1).T  # (layer, cut)
    for start in _starts(instance, chain):
        later = layers[~layers[:, start]]
        own = (later[:, spans.last] & ~later[:, spans.first]) * chain.end_s
        first_s = chain.first_s * (spans.first == 0) * (start == 0)
        _bound(rows, chain, cuts.inside[start] & ~later, enough, stages=own + first_s)


def wires(rows: IntegerProgram, instance: SpanInstance, chain: Chain, enough: float) -> None:
    """All messages on a wire: one way, with the last F and B after it, or both ways where they share it."""
    spans = instance.spans
    handovers = instance.handovers
    cuts = instance.cuts
    for (seconds, after_s), start in product(chain.wires, _starts(instance, chain)):
        busy = np.unique(handovers.cut[seconds > 0])
        at = busy[cuts.inside[start, busy]]
        before = cuts.inside[start] & (cuts.inside[:, at].T | (np.arange(cuts.last + 1) == at[:, None]))
        first_s = chain.first_s * (spans.first == 0) * (start == 0)
        own = (spans.first == at[:, None]) * after_s + first_s
        _bound(rows, chain, before, enough, stages=own, handovers=(handovers.cut == at[:, None]) * seconds)


def _at(places: Numbers, count: int) -> csr_array:
    """1 in row ``places[n]`` of ``count`` and column n; where there is no such row, nothing."""
    columns = np.flatnonzero(places < count)
    return csr_array((np.ones(len(columns)), (places[columns], columns)), shape=(count, len(places)))
