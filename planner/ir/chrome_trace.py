"""Timelines as a Chrome trace: a process a source (predicted, measured), a thread a rank; Perfetto reads it.

What a rank's host prepares, which may go on while the rank computes, has a thread of its own.

The format is the "Trace Event Format" of the Chromium project: complete events (``ph`` = ``X``) with ``ts`` and ``dur``
in microseconds, counters (``C``) for memory, metadata (``M``) for names, and flow events (``s``, ``f``) that join each
send to its receive.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from planner.ir.schedule import RECEIVE, SEND, Action, Op
from planner.ir.timeline import Timeline

_US_PER_S = 1e6
_HOSTS = 1_000_000
"""The first number of a host's thread, above those of ranks."""
_WORDS = {
    Op.FORWARD: "forward",
    Op.BACKWARD: "backward",
    Op.BACKWARD_INPUT: "backward-input",
    Op.BACKWARD_WEIGHT: "backward-weight",
    Op.SEND_FORWARD: "send",
    Op.SEND_BACKWARD: "send",
    Op.RECV_FORWARD: "receive",
    Op.RECV_BACKWARD: "receive",
    Op.REDUCE_GRAD: "all-reduce",
    Op.UPDATE: "update",
    Op.PREPARE: "prepare",
}

TraceEvent = dict[str, Any]


def chrome_trace(timelines: Iterable[Timeline], devices: Sequence[str] = ()) -> str:
    """The timelines as JSON text; ``devices`` are names by rank."""
    events = [
        event
        for process, timeline in enumerate(timelines)
        for event in (*_names(process, timeline, devices), *_spans(process, timeline), *_memory(process, timeline))
    ]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, allow_nan=False) + "\n"


def _names(process: int, timeline: Timeline, devices: Sequence[str]) -> Iterator[TraceEvent]:
    yield _metadata("process_name", process, 0, {"name": timeline.source})
    yield _metadata("process_sort_index", process, 0, {"sort_index": process})
    for rank in sorted({span.rank for span in timeline.spans}):
        device = f" ({devices[rank]})" if rank < len(devices) else ""
        yield _metadata("thread_name", process, rank, {"name": f"rank {rank}{device}"})
        yield _metadata("thread_sort_index", process, rank, {"sort_index": rank})
    for rank in sorted({span.rank for span in timeline.spans if Action.parse(span.action).op is Op.PREPARE}):
        yield _metadata("thread_name", process, _HOSTS + rank, {"name": f"host of rank {rank}"})
        yield _metadata("thread_sort_index", process, _HOSTS + rank, {"sort_index": rank})


def _spans(process: int, timeline: Timeline) -> Iterator[TraceEvent]:
    for span in timeline.spans:
        action = Action.parse(span.action)
        where: TraceEvent = {"pid": process, "tid": span.rank + (_HOSTS if action.op is Op.PREPARE else 0)}
        yield {
            "name": span.action,
            "cat": _WORDS[action.op],
            "ph": "X",
            "ts": span.start_s * _US_PER_S,
            "dur": (span.stop_s - span.start_s) * _US_PER_S,
            **where,
            "args": {"stage": action.stage, "micro_batch": action.microbatch},
        }
        if action.op in SEND:
            yield {**_flow(process, action), "ph": "s", "ts": span.start_s * _US_PER_S, **where}
        elif action.op in RECEIVE:
            yield {**_flow(process, action), "ph": "f", "bp": "e", "ts": span.stop_s * _US_PER_S, **where}


def _flow(process: int, action: Action) -> TraceEvent:
    """A send and its receive get the same name and id; several ranks of a stage share an arrow's id."""
    forward = action.op in (Op.SEND_FORWARD, Op.RECV_FORWARD)
    ends = (action.stage, action.peer) if action.op in SEND else (action.peer, action.stage)
    name = f"{'activation' if forward else 'gradient'} {action.microbatch}"
    return {"name": name, "cat": "message", "id": f"{process}:{name}:{ends[0]}>{ends[1]}"}


def _memory(process: int, timeline: Timeline) -> Iterator[TraceEvent]:
    for sample in timeline.memory:
        yield {
            "name": f"memory of rank {sample.rank}",
            "ph": "C",
            "ts": sample.at_s * _US_PER_S,
            "pid": process,
            "args": {"bytes": sample.num_bytes},
        }


def _metadata(name: str, process: int, thread: int, arguments: TraceEvent) -> TraceEvent:
    return {"name": name, "ph": "M", "pid": process, "tid": thread, "args": arguments}
