"""Agents: started for each host of a file, here all on this one."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from halopipe.launch import agent
from halopipe.launch.agent import MARK, Order
from halopipe.launch.hosts import Host, Hosts
from halopipe.launch.interfaces import LOOPBACK
from halopipe.launch.processes import Ended
from halopipe.launch.remote import RemoteWorkers
from halopipe.launch.run import run_plan
from halopipe.run_spec.options import RunOptions
from halopipe.version import version
from planner.ir.errors import StageFailedError, StaleFileError, UsageError
from planner.ir.plan import Plan
from runtime.monitor.failure import read_error
from tests.halopipe.plans import mined

HERE = (Host("localhost", 1), Host("127.0.0.1", 1))


def on_two_hosts(plan: Plan) -> Plan:
    stages = (replace(stage, devices=(f"n{number}/cpu0",)) for number, stage in enumerate(plan.decision.stages))
    return replace(plan, decision=replace(plan.decision, stages=tuple(stages)))


def order(**changes: object) -> Order:
    made = Order(mined(), RunOptions(), (0, 1), LOOPBACK, 1, "", "/", ("/a",), version())
    return replace(made, **changes)


def saying(*lines: str) -> RemoteWorkers:
    """An agent of a few lines, which hears its order and then waits for its end."""
    script = "; ".join(["import sys", "sys.stdin.readline()", *lines])
    return RemoteWorkers("n7", [sys.executable, "-S", "-c", script], order())


def ended(workers: RemoteWorkers, count: int) -> dict[int, Ended]:
    workers.start()
    end_s = time.monotonic() + 30
    while len(workers.ended()) < count and time.monotonic() < end_s:
        time.sleep(0.02)
    found = dict(workers.ended())
    workers.end()
    return found


SSH = """#!/bin/sh
while [ "$1" = -o ]; do shift 2; done
shift
exec sh -c "$*"
"""


def test_a_plan_runs_over_ssh_and_checks_its_numerics_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ssh").write_text(SSH)  # as ssh does: a shell on the other side reads one line
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    options = RunOptions(steps=3, warmup=0, check_numerics=True, dtype="float64")
    result = run_plan(on_two_hosts(mined()), options, hosts=Hosts((Host("node07"), Host("node09")), interface="lo"))
    assert result is not None
    assert len(result.losses) == 3
    assert result.numerics is not None
    assert max(each.error for each in result.numerics.worst.values()) < 1e-10


def test_the_error_of_a_rank_comes_back_from_its_host() -> None:
    options = RunOptions(steps=5, warmup=0, data="tests.halopipe.bombs:poison", check_first_step=False)
    with pytest.raises(StageFailedError, match="the bomb went off"):
        run_plan(on_two_hosts(mined(2, "raise")), options, hosts=Hosts(HERE))


def test_hosts_cannot_be_named_inside_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="hosts cannot be named inside a job"):
        run_plan(on_two_hosts(mined()), hosts=Hosts(HERE))


def test_an_order_comes_through_text_whole_and_another_release_is_refused() -> None:
    assert Order.from_json(order().to_json()) == order()
    with pytest.raises(StaleFileError, match="halopipe is not the same on all hosts") as caught:
        Order.from_json(order(version="0.0.1").to_json())
    assert caught.value.details[0] == "launcher: 0.0.1"


def test_what_an_agent_says_is_told_from_what_its_shell_says() -> None:
    event = json.dumps({"rank": 1, "code": -9, "result": "", "error": "", "output": "last words"})
    found = ended(saying("print('Welcome to n7!')", f"print({MARK + event!r}, flush=True)", "sys.stdin.read()"), 1)
    assert found == {1: Ended(-9, output="last words")}


def test_an_agent_that_dies_takes_its_ranks_along() -> None:
    event = json.dumps({"rank": 1, "code": 0, "result": "{}", "error": "", "output": ""})
    found = ended(saying(f"print({MARK + event!r})", "print('oh', file=sys.stderr)", "sys.exit(3)"), 2)
    assert found == {0: Ended(3, output="oh"), 1: Ended(0, result="{}")}


def test_a_host_that_cannot_be_reached_is_named_with_what_was_tried() -> None:
    found = ended(saying("print('no route', file=sys.stderr)", "sys.exit(255)"), 2)
    error = read_error(found[0].error)
    assert error.title == "no rank could be started on n7"
    assert "ended with exit code 255" in error.details[0]
    assert error.details[1] == "stderr: no route"
    missing = ended(RemoteWorkers("n8", ["/nowhere/ssh"], order()), 2)
    assert "No such file" in read_error(missing[1].error).details[0]


def test_an_agent_that_does_not_leave_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("halopipe.launch.remote._LEAVING_S", 0.2)
    workers = saying("import time", "time.sleep(600)")
    workers.start()
    start_s = time.monotonic()
    workers.end()
    assert time.monotonic() - start_s < 60.0


def test_an_agent_without_an_order_ends() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "halopipe.launch.agent"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
        cwd=Path(__file__).parents[3],
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (1, b"")


def test_an_interface_that_is_not_on_the_host_is_told_to_the_launcher(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    text = order(address="192.0.2.1", interface="nowhere0", folder=str(tmp_path)).to_json() + "\n"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    monkeypatch.chdir(tmp_path)
    assert agent.main() == 1
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith(MARK))
    assert "has no interface nowhere0" in json.loads(line.removeprefix(MARK))["failed"]
