"""Processes of the profiler: results, typed errors and deaths come back, and nothing stays behind."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

import pytest

from cuda_ops import core_of
from planner.ir.errors import DeadlineError, InfeasibleError, WorkerDiedError, WorkerError
from profiler.measure.child_process import Child, Report

HERE = "tests.profiler.measure.test_child_process"


def add(report: Report, a: int, b: int) -> tuple[int, list[int]]:
    report("adding")
    return a + b, sorted(os.sched_getaffinity(0))


def refuse(report: Report) -> None:
    raise InfeasibleError("no plan fits", ["too large"], ["a smaller one"])


def fail(report: Report) -> None:
    raise KeyError("lost")


def die(report: Report, number: int) -> None:
    sys.stdout.write("last words")
    sys.stdout.flush()
    os.kill(os.getpid(), number)


def sleep(report: Report) -> None:
    report(os.getpid())
    time.sleep(600)


def run(name: str, *arguments: Any) -> Any:
    with Child(f"{HERE}:{name}", *arguments, core=core_of(0)) as child:
        return child.result(deadline_s=60)


def test_a_result_comes_back_from_the_pinned_process() -> None:
    reports = []
    with Child(f"{HERE}:add", 2, 3, core=core_of(0)) as child:
        result = child.finish(60, reports.append)
    assert reports == ["adding"]
    assert result == (5, [core_of(0)])


def test_errors_keep_their_type_and_others_say_where_they_arose() -> None:
    with pytest.raises(InfeasibleError) as caught:
        run("refuse")
    assert (caught.value.details, caught.value.remedies) == (("too large",), ("a smaller one",))
    with pytest.raises(WorkerError, match=r"raised KeyError: 'lost'[\s\S]*test_child_process.py") as other:
        run("fail")
    assert type(other.value) is WorkerError


def test_a_death_is_told_with_its_signal_and_last_words() -> None:
    with pytest.raises(WorkerDiedError, match=r"signal SIGKILL[\s\S]*last words[\s\S]*memory"):
        run("die", signal.SIGKILL)


def test_silence_ends_at_the_deadline_and_the_process_is_gone() -> None:
    with Child(f"{HERE}:sleep", core=None) as child:
        stream = child.reports(deadline_s=60)
        process = next(stream)
        stream.close()
        with pytest.raises(DeadlineError, match="said nothing for 0 s"):
            next(child.reports(deadline_s=0.1))
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)


def test_an_interrupt_kills_the_process() -> None:
    process = 0

    def interrupted() -> None:
        nonlocal process
        with Child(f"{HERE}:sleep", core=None) as child:
            process = next(child.reports(deadline_s=60))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)
