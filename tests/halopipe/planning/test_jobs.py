"""Searches shared out to processes: the same answers, refusals in words, and nobody left behind."""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from pathlib import Path

import pytest

import halopipe as hp
from benchmarks.chains import chain_profile
from halopipe.planning import solve
from halopipe.planning.jobs import Jobs
from halopipe.planning.problem import make_problem
from planner.ir.codec import dump
from planner.ir.errors import InfeasibleError, UsageError, WorkerDiedError
from tests.halopipe.commands import call

PROFILE = chain_profile(4, parameter_bytes=2**20, activation_bytes=2**18, sizes=(2,))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    dump(PROFILE, "profile.json")
    return tmp_path


def _front(folder: Path, jobs: int) -> dict[str, bytes]:
    asked = ("--global-batch", "4", "--recompute", "auto", "--pareto", "4", "--jobs", str(jobs))
    made = call("plan", "profile.json", *asked, "-o", f"jobs{jobs}.json")
    assert made.exit_code == 0, made.stderr
    files = sorted(folder.glob(f"jobs{jobs}*.json"))
    return {path.name.replace(f"jobs{jobs}", "plan"): path.read_bytes() for path in files}


def test_the_plans_of_a_front_are_the_same_bytes_whatever_the_number_of_processes(folder: Path) -> None:
    alone = _front(folder, 1)
    assert len(alone) > 2
    assert _front(folder, 2) == alone


def test_one_search_is_the_same_whatever_the_number_of_processes(folder: Path) -> None:
    for jobs in ("1", "2"):
        made = call("plan", "profile.json", "--global-batch", "4", "--jobs", jobs, "-o", f"plan{jobs}.json")
        assert made.exit_code == 0, made.stderr
    assert Path("plan1.json").read_bytes() == Path("plan2.json").read_bytes()


def test_strategies_are_the_same_whatever_the_number_of_processes(folder: Path) -> None:
    assert call("plan", "profile.json", "--global-batch", "4").exit_code == 0
    said = []
    for jobs in ("1", "2"):
        compared = call("compare", "plan.json", "--baselines", "--jobs", jobs, "--json")
        assert compared.exit_code == 0, compared.stderr
        said.append(json.loads(compared.stdout))
    alone, both = said
    assert alone.pop("planning_s").keys() == both.pop("planning_s").keys()
    assert both == alone


def test_a_front_from_python_is_the_same() -> None:
    asked = {"num_points": 3, "global_batch": 4, "recompute": "auto"}
    assert hp.pareto(PROFILE, jobs=2, **asked) == hp.pareto(PROFILE, **asked)


@pytest.mark.every_case
@pytest.mark.parametrize("verb", [("plan", "profile.json", "--pareto", "3"), ("compare", "plan.json", "--baselines")])
@pytest.mark.parametrize("jobs", ["0", "-1", "two", "1.5"])
def test_what_is_no_number_of_processes_is_refused(folder: Path, verb: tuple[str, ...], jobs: str) -> None:
    refused = call(*verb, "--jobs", jobs)
    assert refused.exit_code == 2
    assert "error[H200]" in refused.stderr
    assert "--jobs" in refused.stderr
    assert sorted(path.name for path in folder.iterdir()) == ["profile.json"]


@pytest.mark.parametrize("num_points", [0, 3])
def test_fewer_than_one_process_is_refused_in_python(num_points: int) -> None:
    with pytest.raises(UsageError, match="0 processes") as caught:
        hp.pareto(PROFILE, num_points=num_points, jobs=0)
    assert caught.value.remedies == ("jobs=2",)


def test_an_error_of_a_search_keeps_its_type_and_text() -> None:
    problem = make_problem(PROFILE, memory_bytes=1000)
    with pytest.raises(InfeasibleError) as alone:
        solve.solve(problem)
    with Jobs(2) as processes, pytest.raises(InfeasibleError) as shared:
        processes.submit(solve.solve, problem)()
    assert str(shared.value) == str(alone.value)


def test_a_process_that_dies_is_an_error_that_says_so() -> None:
    with Jobs(2) as processes, pytest.raises(WorkerDiedError, match="a process of --jobs died"):
        processes.submit(os._exit, 3)()


def test_ctrl_c_ends_the_processes_in_the_midst_of_their_work() -> None:
    with suppress(KeyboardInterrupt), Jobs(2) as processes:
        process = processes.submit(os.getpid)()
        for _ in range(4):
            processes.submit(time.sleep, 3600)
        raise KeyboardInterrupt
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)


def test_a_call_alone_is_made_once_where_its_result_is_asked_for() -> None:
    made = list[int]()
    with Jobs() as processes:
        first, _ = processes.submit(made.append, 1), processes.submit(made.append, 2)
        assert made == []
        first()
        first()
    assert made == [1]
