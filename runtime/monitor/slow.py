"""Stragglers: ranks and links slower than expected while a job runs, told from what ranks say of their steps.

    ratio      seconds of a rank's own actions in a step (waits left out) / those that the plan predicts
    common     the median of the other ranks' ratios: what the machine has changed since the profile is on all ranks
    factor     ratio / common
    slow       ``IN_A_ROW`` steps one after another, each of a factor of ``LEAST_EACH``, of ``LEAST_MEAN`` on average;
               ``IN_A_ROW_NOISY`` where steps vary by more than ``NOISY`` (deviation)

Where the plan predicts nothing, a rank's first steps stand in for that.  So they do where a rank was clearly faster
than predicted in them, or else one that the plan thinks slow could become slow unseen.

A link is slow where its receiver waits ``LINK_FACTOR`` times as long for what its sender has sent as in its first
steps (or as the plan predicts, where the first are slow already), and that is ``LINK_SHARE`` of the step: a slow link
with which all else is overlapped costs nothing.

What this does not see: ranks of a stage that exchange inside their layers wait there, so all of them take as long as
the slowest; where a plan has no other ranks, that looks like a slower machine.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from statistics import fmean, median
from typing import Any, Protocol

from planner.ir.plan import Decision, Prediction
from planner.ir.schedule import MESSAGE, RECEIVE, Action, Op
from planner.ir.timeline import Slow, Span

IN_A_ROW = 3
IN_A_ROW_NOISY = 5
NOISY = 0.06
LEAST_EACH = 1.2
LEAST_MEAN = 1.22
RECOVERED = 1.1
LINK_FACTOR = 5.0
LINK_SHARE = 0.1

LEAST_S = 0.5e-3
"""What a step of a rank takes longer; less is noise of clocks and schedulers, and of small plans' predictions."""

_FIRST = 16
"""Steps of a rank that say how it was at first, and that others are compared with."""

_FASTER = 0.85
_SIGMA = 1.4826  # standard deviation over median absolute deviation, of a normal distribution
_KEPT = 8
"""Last steps of which a rank tells."""

_MARK_S = 2.0
"""Messages are told of steps that are so far apart that the ranks tell of the same one."""

Moves = Sequence[tuple[str, float, float]]
"""Messages of a step: the action, when it began and when it ended."""

_PASSES: Mapping[Op, str] = {
    Op.FORWARD: "forward",
    Op.BACKWARD: "backward",
    Op.BACKWARD_INPUT: "backward",
    Op.BACKWARD_WEIGHT: "backward",
    Op.UPDATE: "update",
    Op.PREPARE: "preparing inputs",
}


@lru_cache(maxsize=65536)
def _action(text: str) -> Action:
    return Action.parse(text)


def busy_s(spans: Iterable[Span]) -> dict[str, float]:
    """Seconds of a rank's own actions, by stage and pass: ``stage 1 backward``."""
    by_pass: dict[str, float] = {}
    for span in spans:
        action = _action(span.action)
        if action.op in _PASSES:
            key = f"stage {action.stage} {_PASSES[action.op]}"
            by_pass[key] = by_pass.get(key, 0.0) + span.stop_s - span.start_s
    return by_pass


@dataclass(slots=True)
class StepLog:
    """The last steps of a rank, as it tells them: noted by its main thread, read by its heartbeat.

    Attributes:
        last: the newest, by number and spans, at most ``_KEPT``.
        marked: the newest of those that all ranks tell the messages of.
    """

    last: tuple[tuple[int, tuple[Span, ...]], ...] = ()
    marked: tuple[int, tuple[Span, ...]] = (0, ())
    _num_noted: int = 0

    def note(self, number: int, spans: tuple[Span, ...], step_s: float) -> None:
        """A step is over; the first two, which allocate, are left out."""
        self._num_noted += 1
        if self._num_noted <= 2 or not spans:
            return
        self.last = (*self.last[1 - _KEPT :], (number, spans))
        if number % (1 << max(0, math.ceil(math.log2(_MARK_S / max(step_s, 1e-6))))) == 0:
            self.marked = (number, spans)

    def report(self) -> dict[str, Any]:
        """As :class:`StepReport` has it."""
        last = self.last
        marked, spans = self.marked
        busy = [busy_s(each) for _, each in last]
        moves = [(each.action, each.start_s, each.stop_s) for each in spans if _action(each.action).op in MESSAGE]
        return {
            "last": last[-1][0] if last else 0,
            "busy_s": tuple(sum(each.values()) for each in busy),
            "parts_s": busy[-1] if busy else {},
            "marked": marked,
            "moves": moves,
        }


class StepReport(Protocol):
    """What a rank tells of its steps.

    Attributes:
        last: number of the newest of them.
        busy_s: seconds of its own actions in each of the last steps, the newest at the end.
        parts_s: those of the newest by stage and pass.
        marked, moves: number and messages of an earlier step, the same on all ranks for a while.
    """

    @property
    def last(self) -> int: ...
    @property
    def busy_s(self) -> Sequence[float]: ...
    @property
    def parts_s(self) -> Mapping[str, float]: ...
    @property
    def marked(self) -> int: ...
    @property
    def moves(self) -> Moves: ...


@dataclass(slots=True)
class _Pace:
    """One rank.

    Attributes:
        ratios: the newest at the end.
        first: seconds of its first steps.
        base: what its factors are divided by; 0: not known yet.
        parts_s: of the newest step in which it was not slow.
        named: the factor that it was named with; 0: it was not, or has recovered.
    """

    ratios: deque[float] = field(default_factory=lambda: deque(maxlen=_FIRST))
    first: list[float] = field(default_factory=list)
    base: float = 0.0
    parts_s: dict[str, float] = field(default_factory=dict)
    last: int = 0
    named: float = 0.0


class SlowWatch:
    """Finds slow ranks and links; :meth:`note` what ranks tell now and then.

    Args:
        prediction: of the plan; seconds by rank that are 0 are not known.
    """

    def __init__(self, decision: Decision, prediction: Prediction) -> None:
        self._decision = decision
        ranks = {each.rank: each for each in prediction.ranks}
        self._predicted_s = {rank: each.compute_s for rank, each in ranks.items()}
        self._messages_s = {rank: each.communication_s for rank, each in ranks.items()}
        self._step_s = prediction.step_s
        self._paces: dict[int, _Pace] = {}
        self._links = _Links(decision)

    def note(self, reports: Mapping[int, StepReport]) -> list[Slow]:
        """What was found that is new, recoveries included."""
        slow_ranks = []
        for rank, each in reports.items():
            pace = self._paces.setdefault(rank, _Pace())
            fresh = min(each.last - pace.last, len(each.busy_s)) if each.last > pace.last else 0
            for busy in each.busy_s[len(each.busy_s) - fresh :]:
                self._add(rank, pace, busy)
            if fresh:
                pace.last = each.last
        for rank in sorted(reports, key=self.factor, reverse=True):
            if (one := self._judged(rank, reports[rank])) is not None:
                slow_ranks.append(one)
        return [*slow_ranks, *self._links.note(reports, self._step_s, self._messages_s)]

    def factor(self, rank: int) -> float:
        """Of its last steps, on average; 1.0 where too little is known."""
        return fmean(factors[-IN_A_ROW:]) if (factors := self._factors(rank)) else 1.0

    def _add(self, rank: int, pace: _Pace, busy: float) -> None:
        if busy <= 0:  # a rank without a stage
            return
        predicted_s = self._predicted_s.get(rank, 0.0)
        if predicted_s <= 0 and len(pace.first) >= _FIRST:
            predicted_s = median(pace.first)
        if predicted_s > 0:
            pace.ratios.append(busy / predicted_s)
        if len(pace.first) < _FIRST:
            pace.first.append(busy)

    def _common(self, rank: int) -> float:
        others = [median(pace.ratios) for other, pace in self._paces.items() if other != rank and pace.ratios]
        return median(others) if others else 0.0

    def _factors(self, rank: int) -> list[float]:
        """Of the last ``_KEPT`` steps."""
        pace = self._paces[rank]
        common = self._common(rank)
        if len(pace.ratios) < _KEPT or common <= 0:
            return []
        predicted_s = self._predicted_s.get(rank, 0.0)
        if not pace.base and len(pace.first) >= _FIRST and predicted_s > 0:
            faster = median(pace.first) / predicted_s / common
            others = self._paces.values()
            pace.base = faster if faster <= _FASTER and not any(other.named for other in others) else 1.0
        return [ratio / common / (pace.base or 1.0) for ratio in list(pace.ratios)[-_KEPT:]]

    def _judged(self, rank: int, report: StepReport) -> Slow | None:
        pace = self._paces[rank]
        factors = self._factors(rank)
        if not factors:
            return None
        newest = factors[-self._in_a_row(rank) :]
        factor = fmean(newest)
        longer_s = fmean(report.busy_s) * (1.0 - 1.0 / factor) if report.busy_s and factor > 1.0 else 0.0
        is_slow = min(newest) >= LEAST_EACH and longer_s >= LEAST_S
        if is_slow and factor >= LEAST_MEAN * max(1.0, pace.named):
            if any(self._paces[mate].named for mate in self._mates(rank)):
                return None  # it may wait for that one inside its layers
            pace.named = factor
            return Slow(rank, factor, report.last, self._why(pace, report))
        if pace.named and median(factors) < RECOVERED:
            pace.named = 0.0
            return Slow(rank, 1.0, report.last, "it has recovered")
        if max(newest) < LEAST_EACH:
            pace.parts_s = dict(report.parts_s)
        return None

    def _in_a_row(self, rank: int) -> int:
        """How many steps make a rank slow: by how it, and the others, varied before."""
        others = [_noise(pace.ratios) for pace in self._paces.values() if len(pace.ratios) >= _KEPT]
        return IN_A_ROW_NOISY if max(_noise(self._paces[rank].ratios), median(others)) > NOISY else IN_A_ROW

    def _mates(self, rank: int) -> set[int]:
        """The other ranks of its stages."""
        stages = (stage.ranks for stage in self._decision.stages if rank in stage.ranks)
        return {mate for ranks in stages for mate in ranks if mate != rank and mate in self._paces}

    def _why(self, pace: _Pace, report: StepReport) -> str:
        """The part that has grown most since it was not slow; of one that always was, the largest."""
        grown = {name: seconds - pace.parts_s.get(name, 0.0) for name, seconds in report.parts_s.items()}
        if not grown:
            return "what is not known"
        most = max(grown, key=grown.__getitem__)
        before = f", {_ms(pace.parts_s[most])} before" if most in pace.parts_s else ""
        return f"{most} takes {_ms(report.parts_s[most])} a step{before}"


def _noise(ratios: Iterable[float]) -> float:
    """The deviation of all but the last, which may be slow, by their median one."""
    before = list(ratios)[:-IN_A_ROW]
    middle = median(before)
    return _SIGMA * median(abs(each - middle) for each in before) / middle


@dataclass(slots=True)
class _Link:
    waits_s: list[float] = field(default_factory=list)
    is_named: bool = False


class _Links:
    """How long receivers wait for what was sent already, by sender and receiver, mark by mark."""

    def __init__(self, decision: Decision) -> None:
        self._ranks = [stage.ranks for stage in decision.stages]
        self._links: dict[tuple[int, int], _Link] = defaultdict(_Link)
        self._marked = 0

    def note(self, reports: Mapping[int, StepReport], step_s: float, predicted_s: Mapping[int, float]) -> list[Slow]:
        marks = {each.marked for each in reports.values()}
        if len(marks) != 1 or (mark := marks.pop()) <= self._marked:
            return []
        self._marked = mark
        slow_links = []
        moves = {rank: each.moves for rank, each in reports.items()}
        for (sender, receiver), wait_s in waits_s(moves, self._ranks).items():
            link = self._links[sender, receiver]
            link.waits_s.append(wait_s)
            least_s = LINK_SHARE * step_s
            first_s = median(link.waits_s[:IN_A_ROW])
            usual_s = first_s if first_s < least_s else predicted_s.get(receiver, 0.0)
            last_s = link.waits_s[-IN_A_ROW:]
            is_slow = len(last_s) == IN_A_ROW and min(last_s) > max(least_s, LINK_FACTOR * usual_s)
            if is_slow and not link.is_named:
                factor = fmean(last_s) / max(usual_s, least_s / LINK_FACTOR)
                late = f"messages on their way hold rank {receiver} up for {_ms(fmean(last_s))} a step"
                why = f"{late}, {_ms(usual_s)} is usual"
                slow_links.append(Slow(receiver, factor, mark, why, sender))
            link.is_named = is_slow or (link.is_named and max(last_s) > least_s)
            del link.waits_s[IN_A_ROW:-IN_A_ROW]
        return slow_links


def waits_s(moves: Mapping[int, Moves], ranks: Sequence[Sequence[int]]) -> dict[tuple[int, int], float]:
    """By sender and receiver, seconds of a step in which the receiver waited for what was on its way.

    Args:
        moves: by rank, since the common start of the step.
        ranks: of each stage; of several senders of a message, the last one counts.
    """
    began = {(rank, _action(text)): start_s for rank, each in moves.items() for text, start_s, _ in each}
    by_link: dict[tuple[int, int], float] = defaultdict(float)
    for rank, each in moves.items():
        for text, start_s, stop_s in each:
            action = _action(text)
            if action.op not in RECEIVE or action.peer is None:
                continue
            op = Op.SEND_FORWARD if action.op is Op.RECV_FORWARD else Op.SEND_BACKWARD
            send = Action(action.peer, op, action.microbatch, action.stage)
            sent = [(began[other, send], other) for other in ranks[action.peer] if (other, send) in began]
            if sent:
                sent_s, sender = max(sent)
                by_link[sender, rank] += max(0.0, stop_s - max(start_s, sent_s))
    return dict(by_link)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"
