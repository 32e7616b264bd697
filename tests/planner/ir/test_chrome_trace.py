from __future__ import annotations

import json
from typing import Any

from planner.ir.chrome_trace import chrome_trace
from planner.ir.timeline import MemorySample, Span, Timeline

PREDICTED = Timeline(
    "predicted",
    0.004,
    (
        Span(0, "0F0", 0.0, 0.001),
        Span(0, "0SEND_F0>1", 0.001, 0.0015),
        Span(1, "1RECV_F0<0", 0.0, 0.0015),
        Span(1, "1F0", 0.0015, 0.0025),
        Span(1, "1UPDATE", 0.0025, 0.004),
    ),
    (MemorySample(1, 0.0015, 4096),),
)
MEASURED = Timeline("measured", 0.005, (Span(0, "0F0", 0.0, 0.0011),))


def events(**wanted: Any) -> list[dict[str, Any]]:
    trace = json.loads(chrome_trace([PREDICTED, MEASURED], ["n0/cpu0", "n0/cpu1"]))
    found = trace["traceEvents"]
    return [event for event in found if all(event.get(key) == value for key, value in wanted.items())]


def test_each_source_is_a_process_and_each_rank_a_thread() -> None:
    assert [e["args"]["name"] for e in events(name="process_name")] == ["predicted", "measured"]
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events(name="thread_name")}
    assert threads == {
        (0, 0): "rank 0 (n0/cpu0)",
        (0, 1): "rank 1 (n0/cpu1)",
        (1, 0): "rank 0 (n0/cpu0)",
    }


def test_actions_are_complete_events_in_microseconds() -> None:
    (event,) = events(name="1F0")
    assert (event["ph"], event["ts"], event["dur"], event["cat"]) == ("X", 1500.0, 1000.0, "forward")
    assert event["args"] == {"stage": 1, "micro_batch": 0}
    assert len(events(ph="X")) == len(PREDICTED.spans) + len(MEASURED.spans)


def test_a_send_is_joined_to_its_receive() -> None:
    (start,) = events(ph="s")
    (finish,) = events(ph="f")
    assert start["id"] == finish["id"]
    assert (start["tid"], finish["tid"]) == (0, 1)
    assert (start["ts"], finish["ts"]) == (1000.0, 1500.0)


def test_memory_is_a_counter() -> None:
    (event,) = events(ph="C")
    assert (event["name"], event["args"], event["ts"]) == ("memory of rank 1", {"bytes": 4096}, 1500.0)


def test_a_timeline_of_nothing_is_a_trace_of_names_alone() -> None:
    trace = json.loads(chrome_trace([Timeline("predicted", 1.0, ())]))
    assert {event["ph"] for event in trace["traceEvents"]} == {"M"}


def test_what_a_host_prepares_has_a_thread_of_its_own() -> None:
    spans = (Span(0, "0PREP0", 0.0, 0.001), Span(0, "0PREP1", 0.001, 0.003), Span(0, "0F0", 0.001, 0.002))
    found = json.loads(chrome_trace([Timeline("predicted", 0.003, spans)]))["traceEvents"]
    threads = {event["tid"]: event["args"]["name"] for event in found if event["name"] == "thread_name"}
    (host,) = (tid for tid, name in threads.items() if name == "host of rank 0")
    assert {event["name"]: event["tid"] for event in found if event["ph"] == "X"} == {
        "0PREP0": host,
        "0PREP1": host,
        "0F0": 0,
    }
    assert {event["cat"] for event in found if event.get("tid") == host and event["ph"] == "X"} == {"prepare"}
