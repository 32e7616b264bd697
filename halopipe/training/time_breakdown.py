"""Where the measured steps of a run went: by rank, and once a step by stage."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean, median

from planner.ir.plan import Decision, RankMeasured
from planner.ir.schedule import RECEIVE, SEND, Action, Op
from planner.ir.timeline import Span, Timeline


def ranks_measured(timelines: Sequence[Timeline], decision: Decision) -> tuple[RankMeasured, ...]:
    """By rank, means over the steps; nothing if there are none."""
    if not timelines:
        return ()
    found = []
    for rank in range(decision.num_ranks):
        parts = zip(*(_parts(timeline, rank, decision) for timeline in timelines), strict=True)
        found.append(RankMeasured(rank, *(fmean(part) for part in parts)))
    return tuple(found)


def stage_once_s(timelines: Sequence[Timeline], decision: Decision, op: Op) -> tuple[float, ...]:
    """By stage, the median over steps of ``UPDATE`` (its slowest rank's) or ``REDUCE_GRAD`` (from the last arrival)."""
    found: dict[int, list[float]] = defaultdict(list)
    for timeline in timelines:
        lengths: dict[int, list[float]] = defaultdict(list)
        for span in timeline.spans:
            action = Action.parse(span.action)
            if action.op is op:
                lengths[action.stage].append(span.stop_s - span.start_s)
        for stage, each in lengths.items():
            found[stage].append(min(each) if op is Op.REDUCE_GRAD else max(each))
    return tuple(median(found[stage]) if stage in found else 0.0 for stage in range(len(decision.stages)))


def _parts(timeline: Timeline, rank: int, decision: Decision) -> tuple[float, float, float, float]:
    """Compute, communication, bubble and idle seconds of a rank in one step."""
    spans = {(span.rank, span.action): span for span in timeline.spans}
    compute_s = communication_s = last_s = 0.0
    for span in timeline.spans:
        if span.rank != rank:
            continue
        action, length_s = Action.parse(span.action), span.stop_s - span.start_s
        last_s = max(last_s, span.stop_s)
        if action.op in SEND:
            communication_s += length_s
        elif action.op in RECEIVE:
            communication_s += span.stop_s - _sent_s(spans, decision, span, action)
        elif action.op is Op.REDUCE_GRAD:
            others = (spans.get((member, span.action), span) for member in decision.stages[action.stage].ranks)
            last_in_s = max(other.start_s for other in others)
            communication_s += max(0.0, span.stop_s - max(span.start_s, last_in_s))
        else:
            compute_s += length_s
    idle_s = max(0.0, timeline.step_s - last_s)
    bubble_s = max(0.0, timeline.step_s - idle_s - compute_s - communication_s)
    return compute_s, communication_s, bubble_s, idle_s


def _sent_s(spans: dict[tuple[int, str], Span], decision: Decision, received: Span, action: Action) -> float:
    """From when on a receive waits for what was sent already; its end where nobody is known to have sent."""
    if action.peer is None:
        return received.stop_s
    op = Op.SEND_FORWARD if action.op is Op.RECV_FORWARD else Op.SEND_BACKWARD
    sent = Action(action.peer, op, action.microbatch, action.stage, blocking=action.blocking, streams=action.streams)
    send = str(sent)
    ranks = decision.stages[action.peer].ranks
    starts = [spans[rank, send].start_s for rank in ranks if (rank, send) in spans]
    return min(received.stop_s, max([received.start_s, *starts])) if starts else received.start_s
