"""What a run of a plan says of the costs it was predicted from: one ``Observation``.

How much of an action, and of the step, is of which class is read off the simulator itself: every class is made a little
dearer, and the step predicted again.  An action's measured length (median over steps) then speaks for the class that
most of it is of; what the others have in it is taken at its predicted length.

    forward, backward, update,      the action's length; of a sum of gradients, from the arrival of the last rank
    statistics, sums
    messages                        from the call that sends to the end of the receive, where the receiver waited all
                                    the while and no other message was between the two ranks

What an action takes longer after a wait is part of the action in a run, and of the receive in a prediction: ``as_run``.
An update that also moves tensors waits for other ranks and says nothing.  Clocks of ranks agree as far as the ranks
left the barrier at once before the step, so that messages shorter than ``LEAST_MESSAGE_S`` say nothing either.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from planner.costs.calibration.apply_corrections import corrected
from planner.costs.calibration.fit import clipped
from planner.costs.cost_model import CostModel
from planner.costs.predict import predict
from planner.costs.uncertainty import kind_of
from planner.ir.codec import fingerprint
from planner.ir.plan import Decision
from planner.ir.profile import (
    ALL_REDUCES,
    BACKWARD,
    FORWARD,
    MESSAGES,
    OVERHEAD,
    STATISTIC_SUMS,
    UPDATE,
    Correction,
    CostClass,
    Observation,
    Profile,
    Seen,
)
from planner.ir.schedule import COMPUTE, RECEIVE, Action, Op
from planner.ir.timeline import Span, Timeline
from planner.layers.boundary import Boundaries

LEAST_MESSAGE_S = 3e-4
_SMALL = 1e-4
_MOSTLY = {Op.UPDATE: 0.9}
_HALF = 0.5
_LEAST_SHARE = 0.1  # of what was predicted; less is no measurement of it

Where = tuple[object, ...]
"""An action of a rank; of a reduction, which is one for all, ``(stage, text)``."""


@dataclass(frozen=True, slots=True)
class _Travel:
    """A message that a receive waits for: its send and receive, and all others between the two ranks."""

    sent: tuple[int, str]
    received: tuple[int, str]
    link: str
    seconds: float

    @property
    def ends(self) -> tuple[int, int]:
        """The two ranks."""
        return self.sent[0], self.received[0]


def observe(
    profile: Profile,
    decision: Decision,
    timelines: Sequence[Timeline],
    step_s: float,
    spread: float,
    machine: tuple[Correction, ...] = (),
) -> Observation:
    """What the measured steps of a plan say.

    Args:
        profile: that the plan was made from; corrections it has are not looked at.
        timelines: of the steps after warm-up.
        step_s, spread: median, and interquartile range over it.
        machine: how fast the machine was; what is observed is the rest.
    """
    bare = profile.corrected_by(machine)
    base = _run_of(bare, decision)
    medians = _medians([_lengths(one, decision) for one in timelines])
    steps = _Steps(decision, base, _lengths(base, decision), timelines, medians, _travels(bare, decision))
    by_class = [
        steps.seen(of, _run_of(bare.corrected_by((*machine, *_with({}, of))), decision))
        for of in _classes(bare, decision)
    ]
    explained_s, explained = _explained(bare, decision, by_class)
    kind = kind_of([stage.ranks for stage in decision.stages])
    plain_s = predict(profile.bare, decision)[0].step_s if machine else base.step_s
    slower = base.step_s / plain_s if plain_s else 1.0
    plan = fingerprint(decision)
    return Observation(plan, len(timelines), spread, base.step_s, step_s, explained_s, explained, kind, slower)


@dataclass(frozen=True, slots=True)
class _Steps:
    """A plan's step as predicted, and its steps as measured.

    Attributes:
        base: as a run shows what is predicted; ``lengths_s``: of its actions.
        medians_s: of the same actions in ``timelines``.
        travels: messages that travel alone.
    """

    decision: Decision
    base: Timeline
    lengths_s: Mapping[Where, float]
    timelines: Sequence[Timeline]
    medians_s: Mapping[Where, float]
    travels: Sequence[_Travel]

    def seen(self, of: CostClass, dearer: Timeline) -> Seen:
        """What the steps say of a class; ``dearer``: the predicted one where it costs a little more."""
        if of.what == MESSAGES:
            on_link = [one for one in self.travels if one.link == of.where]
            predicted_s, measured_s = _of_messages(on_link, self.timelines)
        else:
            parts = {at: (s - self.lengths_s[at]) / _SMALL for at, s in _lengths(dearer, self.decision).items()}
            predicted_s, measured_s = _of_actions(parts, self.lengths_s, self.medians_s)
        return Seen(of, predicted_s, measured_s, max(0.0, (dearer.step_s - self.base.step_s) / _SMALL), 0.0)


def _run_of(profile: Profile, decision: Decision) -> Timeline:
    """The predicted step, as a run shows it."""
    return as_run(predict(profile, decision)[1], profile)


def as_run(predicted: Timeline, profile: Profile) -> Timeline:
    """A step that was predicted from ``profile``, as a run of it shows it: receives end when the message is there."""
    overhead_s = corrected(profile).action_overhead_s
    owed: dict[int, float] = {}
    spans = []
    for span in predicted.spans:
        op = Action.parse(span.action).op
        before_s = owed.get(span.rank, 0.0)
        if op in RECEIVE:
            owed[span.rank] = before_s + overhead_s.get(profile.cluster.devices[span.rank].kind, 0.0)
        elif op in COMPUTE:
            owed[span.rank] = 0.0
        spans.append(replace(span, start_s=span.start_s - before_s, stop_s=span.stop_s - owed.get(span.rank, 0.0)))
    return replace(predicted, spans=tuple(spans))


def _explained(profile: Profile, decision: Decision, by_class: Sequence[Seen]) -> tuple[float, tuple[Seen, ...]]:
    """The step under the plan's own ratios, and what was seen with its part of that step; less what plays no part."""
    own = {each.of: clipped(each.ratio) for each in by_class}
    machine = profile.calibration.corrections
    step_s = predict(profile.corrected_by((*machine, *_corrections(own))), decision)[0].step_s
    explained = []
    for one in by_class:
        if one.predicted_s > 0 or one.step_s > 0:
            dearer_s = predict(profile.corrected_by((*machine, *_with(own, one.of))), decision)[0].step_s
            explained.append(replace(one, corrected_step_s=max(0.0, (dearer_s - step_s) / (_SMALL * own[one.of]))))
    return step_s, tuple(explained)


def _classes(profile: Profile, decision: Decision) -> Iterator[CostClass]:
    devices = profile.cluster.devices
    cluster = profile.cluster
    shared = {(devices[rank].kind, len(stage.ranks) > 1) for stage in decision.stages for rank in stage.ranks}
    for what in (FORWARD, BACKWARD):
        yield from (CostClass(what, kind, several) for kind, several in sorted(shared))
    for what in (UPDATE, OVERHEAD):
        yield from (CostClass(what, kind) for kind in sorted({kind for kind, _ in shared}))
    ranks = decision.used_ranks
    links = sorted({cluster.link_class(a, b) for a in ranks for b in ranks if a != b})
    for what in (MESSAGES, ALL_REDUCES, STATISTIC_SUMS):
        yield from (CostClass(what, link) for link in links)


def _corrections(factors: Mapping[CostClass, float]) -> tuple[Correction, ...]:
    return tuple(Correction(of, factor, 0) for of, factor in factors.items())


def _with(factors: Mapping[CostClass, float], dearer: CostClass) -> tuple[Correction, ...]:
    """Makes one class a little dearer; where nothing is said of it, a shared stage would go with one of one rank."""
    other = CostClass(dearer.what, dearer.where, not dearer.shared)
    plain = {dearer: 1.0, other: 1.0, **factors}
    return _corrections({**plain, dearer: plain[dearer] * (1 + _SMALL)})


def _lengths(timeline: Timeline, decision: Decision) -> dict[Where, float]:
    """How long each action lasts, but receives; a reduction as long as its last rank is in it."""
    lengths: dict[Where, float] = {}
    for span in timeline.spans:
        action = Action.parse(span.action)
        if action.op in RECEIVE:
            continue
        where: Where = (span.rank, span.action)
        length_s = span.stop_s - span.start_s
        if action.op is Op.REDUCE_GRAD:
            where = (decision.stages[action.stage].ranks, span.action)
            length_s = min(length_s, lengths.get(where, length_s))
        lengths[where] = length_s
    return lengths


def _medians(of_steps: Sequence[Mapping[Where, float]]) -> dict[Where, float]:
    collected: dict[Where, list[float]] = {}
    for lengths in of_steps:
        for where, length_s in lengths.items():
            collected.setdefault(where, []).append(length_s)
    return {where: median(several_s) for where, several_s in collected.items()}


def _of_actions(
    parts: Mapping[Where, float], lengths: Mapping[Where, float], measured: Mapping[Where, float]
) -> tuple[float, float]:
    """(predicted, measured) seconds of a class whose ``parts`` of actions are given."""
    predicted_s = measured_s = 0.0
    for where, part_s in parts.items():
        mostly = _MOSTLY.get(Action.parse(str(where[1])).op, _HALF)
        if where in measured and part_s > 0 and part_s >= mostly * lengths[where]:
            predicted_s += part_s
            measured_s += max(measured[where] - (lengths[where] - part_s), _LEAST_SHARE * part_s)
    return predicted_s, measured_s


def _travels(profile: Profile, decision: Decision) -> list[_Travel]:
    """Messages that travel alone: of receives that wait for one."""
    program = Boundaries.of_decision(profile.graph, decision).program(decision)
    network = CostModel(profile).network
    travels = []
    if program.blocking:
        return []
    joined = program.joined()
    shared = {(src, send, dst) for (src, last, dst), before in joined.items() for send in (*before, last)}
    for rank, row in enumerate(program.rows):
        for action in row:
            messages = program.messages_of(rank, action) if action.op in RECEIVE else ()
            if len(messages) != 1 or action.peer is None:
                continue
            forward = action.op is Op.RECV_FORWARD
            message = messages[0]
            source = message.src if forward else message.dst
            size = message.forward_bytes if forward else message.backward_bytes
            op = Op.SEND_FORWARD if forward else Op.SEND_BACKWARD
            send = Action(action.peer, op, action.microbatch, action.stage, streams=action.streams)
            if (source, send, rank) in shared:
                continue
            seconds = network.transfer_s(source, rank, size)
            link = profile.cluster.link_class(source, rank)
            travels.append(_Travel((source, str(send)), (rank, str(action)), link, seconds))
    return travels


def _of_messages(travels: Sequence[_Travel], timelines: Sequence[Timeline]) -> tuple[float, float]:
    """(predicted, measured) seconds of messages that were waited for from the call that sends."""
    waited: dict[_Travel, list[float]] = {}
    for timeline in timelines:
        spans = {(span.rank, span.action): span for span in timeline.spans}
        there = [one for one in travels if one.sent in spans and one.received in spans]
        for one in there:
            sent = spans[one.sent]
            received = spans[one.received]
            others = [other for other in there if other is not one and {*one.ends} == {*other.ends}]
            alone = all(_apart(sent, received, spans[other.sent], spans[other.received]) for other in others)
            if one.seconds >= LEAST_MESSAGE_S and alone and received.start_s <= sent.start_s:
                waited.setdefault(one, []).append(received.stop_s - sent.start_s)
    predicted_s = measured_s = 0.0
    for one, seconds in waited.items():
        if 2 * len(seconds) >= len(timelines):
            predicted_s += one.seconds
            measured_s += max(median(seconds), _LEAST_SHARE * one.seconds)
    return predicted_s, measured_s


def _apart(sent: Span, received: Span, other_sent: Span, other_received: Span) -> bool:
    """Whether one message arrived before the other was sent."""
    return other_received.stop_s <= sent.start_s or received.stop_s <= other_sent.start_s
