"""Options of a search, the problem that they make, and what becomes of it: baselines, processes, progress."""

from __future__ import annotations

import inspect
import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields, replace
from math import inf
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import typer.main

import halopipe as hp
from benchmarks.chains import chain_profile
from halopipe.cli.app import app
from halopipe.planning import plan_files, search_progress, solve
from halopipe.planning import problem as problems
from halopipe.planning.jobs import Jobs
from halopipe.planning.options import PlanOptions, ProfileOptions, SearchOptions, of_a_search
from halopipe.planning.problem import make_problem, problem_for
from halopipe.run_spec.schema import WRITTEN, asked_in, flag, from_text
from halopipe.terminal import console
from planner.ir import errors
from planner.ir.codec import dump
from planner.ir.constraints import broken
from planner.ir.graph import SHARED_STATE
from planner.ir.options import spec
from planner.ir.plan import Plan
from planner.ir.problem import AUTO, NEVER, SAMPLE_DIMS, Problem, Request, Rule
from planner.solvers import Progress, SearchProgress
from tests.halopipe.commands import call
from tests.planner.factories import chain_decision, plan_of
from tests.planner.networks import plain, priced

PROFILE = chain_profile(4, memory_bytes=2**30)
PLAN = plan_of(PROFILE, chain_decision(PROFILE, cuts=(2,)))


def command(verb: str) -> Any:
    return typer.main.get_command(app).commands[verb]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("verb", "group"), [("plan", PlanOptions), ("plan", SearchOptions), ("profile", ProfileOptions)]
)
def test_every_option_is_one_of_the_command_line_with_its_help_default_and_limits(verb: str, group: type) -> None:
    require_options(verb, group)


def require_options(verb: str, group: type) -> None:
    """The command line has each field of a list of options, with its help, default and limits."""
    known = {option.name: option for option in command(verb).params}
    for name, field in asked_in(group).items():
        shown = known[name]
        option = spec(field)
        assert (shown.help, flag(field) in shown.opts) == (option.help, True)
        assert shown.multiple is (isinstance(field.default, tuple) and not option.kind)
        if option.kind in WRITTEN:
            assert from_text(field, shown.default) == field.default
            continue
        assert shown.default == {(): None, True: not flag(field).startswith("--no-")}.get(field.default, field.default)
        assert (getattr(shown, "min", None), getattr(shown, "max", None)) == (option.least, option.most)


def test_a_request_has_every_option_of_a_plan_and_what_nobody_asks_is_its_default() -> None:
    options = asked_in(PlanOptions)
    specs = [spec(field) for field in options.values()]
    assert [name for name, field in asked_in(Problem).items() if spec(field) not in specs] == []
    of_request = [name for name in options if hasattr(Request(), name)]
    assert [name for name in of_request if options[name].default != getattr(Request(), name)] == ["allow"]
    problem = problem_for(PROFILE, PlanOptions())
    assert problem == make_problem(PROFILE)
    assert replace(problem.request, chunks=NEVER) == Request()
    assert of_a_search(SearchOptions(), PlanOptions()) == []


@pytest.mark.parametrize("search", [hp.plan, hp.pareto, hp.baselines])
def test_a_call_takes_every_option_of_a_plan_by_its_name_type_and_default(search: Callable[..., Any]) -> None:
    taken = inspect.signature(search).parameters
    hints = get_type_hints(PlanOptions)
    options = {field.name: field for field in fields(PlanOptions)}
    assert {name: taken[name].annotation for name in options} == hints
    assert all(taken[name].kind is inspect.Parameter.KEYWORD_ONLY for name in options)
    unlike = [name for name, field in options.items() if taken[name].default != field.default]
    assert unlike == (["time_limit_s"] if search is hp.baselines else [])
    assert next(iter(taken)) == "profile"


def test_what_is_typed_reaches_the_search_taken_apart() -> None:
    typed = {"allow": "sample, spatial", "without": "n0/*,n1/cpu0", "token_slices": "3+2", "memory": "2KiB"}
    values = {name: from_text(asked_in(PlanOptions)[name], text) for name, text in typed.items()}
    assert values == {
        "allow": (SAMPLE_DIMS, "spatial"),
        "without": ("n0/*", "n1/cpu0"),
        "token_slices": (3, 2),
        "memory": 2048,
    }
    with pytest.raises(errors.UsageError, match="--token-slices"):
        from_text(asked_in(PlanOptions)["token_slices"], "3+x")


def test_what_a_way_has_no_use_for_is_named_by_its_flags() -> None:
    options = PlanOptions(schedules=("gpipe",), zero=2, halo_depth=1, memory=2**30)
    search = SearchOptions(pareto=0, measure_missing=True)
    assert of_a_search(search, options) == ["--schedule", "--zero", "--halo-depth", "--pareto", "--measure-missing"]


def test_a_memory_limit_is_the_devices_own_where_that_is_less() -> None:
    uneven = chain_profile(4, memory_bytes=(2**30, 2**28))
    problem = problems.make_problem(uneven, memory=300_000_001)
    assert [problem.memory_limit_bytes(rank) for rank in (0, 1)] == [300_000_001, int(2**28 * 0.92)]


def test_what_is_asked_for_goes_into_the_problem() -> None:
    problem = problems.make_problem(
        PROFILE,
        objective="memory",
        allow=["channel", "sample"],
        recompute="auto",
        fix=["l*=replicas:2", Rule("l1", "recompute", "yes")],
        forbid=["loss=device:n0/cpu0"],
    )
    assert (problem.objective, problem.allow, problem.recompute) == ("memory", ("sample", "channel"), "auto")
    assert problem.fix == (Rule("l*", "replicas", "2"), Rule("l1", "recompute", "yes"))
    assert problem.forbid == (Rule("loss", "device", "n0/cpu0"),)


@pytest.mark.parametrize(
    ("asked", "allow", "chunks"),
    [
        ({}, ("sample", "spatial"), AUTO),
        ({"allow": ["sample"]}, ("sample",), AUTO),
        ({"schedules": ["1f1b"]}, ("sample", "spatial"), NEVER),
        ({"schedules": ["forward"]}, ("sample",), NEVER),
        ({"objective": "memory"}, ("sample",), AUTO),
    ],
)
def test_who_says_nothing_has_space_cut_as_well_and_several_stages_a_device_where_a_step_trains(
    asked: dict[str, Any], allow: tuple[str, ...], chunks: str
) -> None:
    pictures = priced(*plain(samples=4, height=16), speeds=(1.0, 1.0))
    problem = problems.make_problem(pictures, **asked)
    assert (problem.allow, problem.chunks) == (allow, chunks)
    assert problems.make_problem(PROFILE, **asked).allow == ("sample",)  # nothing of it has a height


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("asked", "kind", "text"),
    [
        ({"schedules": ["gpipe", "1b1f"]}, errors.UnknownNameError, "no schedule '1b1f'"),
        ({"objective": "speed"}, errors.UnknownNameError, "no objective 'speed'"),
        ({"allow": ["space"]}, errors.UnknownNameError, "no family of dims 'space'"),
        ({"recompute": "sometimes"}, errors.UnknownNameError, "no way to recompute 'sometimes'"),
        ({"fix": ["enc.*=replicas:2"]}, errors.UnknownNameError, "matches no layer"),
        ({"forbid": ["l1=device:n7/cpu0"]}, errors.UnknownNameError, "matches no device"),
        ({"fix": ["l1"]}, errors.UsageError, "is not a rule"),
        ({"num_ranks": 3}, errors.RankCountError, "3 ranks are asked for, the profile has 2"),
        ({"micro_batch": [16]}, errors.UsageError, "micro-batch 16 is larger than the global batch 8"),
        ({"zero": 3}, errors.UsageError, "--zero is 3, --shard never"),
        ({"memory": 2**31}, errors.UsageError, "more than the devices have"),
    ],
)
def test_what_cannot_be_asked_for_is_refused(
    asked: dict[str, object], kind: type[errors.HalopipeError], text: str
) -> None:
    with pytest.raises(kind, match=text) as caught:
        problems.make_problem(PROFILE, **asked)
    assert caught.value.remedies or caught.value.details


def test_what_was_asked_is_read_back_from_the_plan() -> None:
    asked = problems.make_problem(PROFILE, memory=300_000_001, max_stages=2, fix=["l1=stage:0"], gap=0.1)
    plan = solve.solve(asked)
    assert problems.problem_of(plan, PROFILE) == asked
    assert {rank.memory_limit_bytes for rank in plan.prediction.ranks} == {300_000_001}
    assert solve.predict_again(plan, PROFILE)[0] == plan.prediction


def test_the_freedom_that_a_plan_uses_is_granted() -> None:
    plain = problems.problem_of(PLAN, PROFILE)
    assert (plain.recompute, plain.allow) == (NEVER, ("sample",))
    decision = PLAN.decision
    again = replace(decision, stages=tuple(replace(stage, recompute=True) for stage in decision.stages))
    sliced = replace(decision, stages=tuple(replace(stage, sharded=True, zero=2) for stage in decision.stages))
    divides = problems.problem_of(replace(PLAN, decision=sliced), PROFILE)
    assert (divides.shard, divides.zero) == (AUTO, 2)
    layers = {name: replace(placement, cuts={"height": (0, 1, 2)}) for name, placement in decision.layers.items()}
    free: Problem = problems.problem_of(replace(PLAN, decision=replace(again, layers=layers)), PROFILE)
    assert (free.recompute, free.allow) == (AUTO, ("sample", "spatial", "channel"))
    odd = next(name for name in problems.schedule_names() if name not in problems.default_schedules())
    assert odd in problems.problem_of(replace(PLAN, decision=replace(decision, schedule=odd)), PROFILE).schedules


def test_layers_that_share_a_buffer_which_is_written_stay_in_one_stage() -> None:
    first, second, *others = PROFILE.graph.layers
    sharing = [replace(each, attributes={**each.attributes, SHARED_STATE: "seen"}) for each in (first, second)]
    profile = replace(PROFILE, graph=replace(PROFILE.graph, layers=(*sharing, *others)))
    cut = [f"{first.name}=stage:0", f"{second.name}=stage:1"]
    assert solve.solve(problems.make_problem(PROFILE, fix=cut)).decision.layers[second.name].stage == 1
    with pytest.raises((errors.InfeasibleError, errors.UsageError), match="contradict each other"):
        solve.solve(problems.make_problem(profile, fix=cut))
    plan = solve.solve(problems.make_problem(profile, fix=[f"{others[-1].name}=stage:1"]))
    stages = {plan.decision.layers[each.name].stage for each in sharing}
    assert len(stages) == 1
    assert (
        problems.problem_of(plan, profile).fix == problems.make_problem(profile, fix=[f"{others[-1].name}=stage:1"]).fix
    )


@pytest.mark.parametrize("rule", ["l2=stage:1", "*=replicas:1", "l0=device:n0/cpu1"])
def test_side_constraints_are_kept(rule: str) -> None:
    problem = problems.make_problem(PROFILE, fix=[rule])
    plan = solve.solve(problem)
    assert broken(problem.fix, (), plan.decision, PROFILE.cluster) == ()


def test_a_solver_that_knows_nothing_of_a_side_constraint_is_not_believed() -> None:
    problem = problems.make_problem(PROFILE, forbid=["*=replicas:1"])
    with pytest.raises(errors.InfeasibleError, match="no plan of this strategy keeps to the side constraints"):
        solve.solve(problem, "one-device")
    assert "side constraints" in solve.solve_baselines(problem, ["one-device"]).infeasible["one-device"]


def test_baselines_are_asked_one_by_one_and_those_that_do_not_fit_say_why() -> None:
    shown: list[tuple[int, int, str]] = []
    problem = problems.make_problem(PROFILE)
    solved = solve.solve_baselines(problem, ["one-device", "even-split"], lambda *at: shown.append(at))
    assert list(solved.plans) == ["one-device", "even-split"]
    assert shown == [(0, 2, "one-device"), (1, 2, "even-split")]
    assert {"one-device", "data-parallel", "even-split"} <= set(solve.solve_baselines(problem).plans)
    tight = problems.make_problem(chain_profile(4, parameter_bytes=2**20), memory=3 * 2**20)
    assert "no plan fits" in solve.solve_baselines(tight, ["one-device"]).infeasible["one-device"]
    shared = solve.solve_baselines(problem, ["even-split", "one-device"], within_s=6.0)
    assert shared.limits_s["even-split"] <= 3.0
    assert shared.limits_s["one-device"] <= 6.0


def test_an_unknown_solver_or_baseline_is_answered_with_the_nearest() -> None:
    problem = problems.make_problem(PROFILE)
    with pytest.raises(errors.UnknownNameError, match="no solver 'one-devise'") as caught:
        solve.solve(problem, "one-devise")
    assert caught.value.remedies == ("one-device (did you mean that?)",)
    with pytest.raises(errors.UnknownNameError, match="no baseline 'best-first'"):
        solve.solve_baselines(problem, ["best-first"])


def test_a_profile_that_the_plan_was_not_made_from_is_refused(tmp_path: Path) -> None:
    dump(PROFILE, tmp_path / "mine.json")
    dump(chain_profile(4, forward_s=2e-3), tmp_path / "other.json")
    assert plan_files.load_profile(tmp_path / "mine.json", PLAN) == PROFILE
    with pytest.raises(errors.StaleFileError, match="the plan was made for another profile"):
        plan_files.load_profile(tmp_path / "other.json", PLAN)
    shifted = plan_of(PROFILE, chain_decision(PROFILE, ranks=((1,),)))
    assert plan_files.device_names(shifted) == ["not used", "n0/cpu1"]


SMALL = chain_profile(4, parameter_bytes=2**20, activation_bytes=2**18, sizes=(2,))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    dump(SMALL, "profile.json")
    return tmp_path


def done(*arguments: str) -> str:
    """What a verb says."""
    result = call(*arguments)
    assert result.exit_code == 0, result.stderr
    return result.stdout


def test_plans_and_fronts_are_the_same_bytes_whatever_the_number_of_processes(folder: Path) -> None:
    def made(jobs: str) -> dict[str, bytes]:
        asked = ("plan", "profile.json", "--global-batch", "4", "--jobs", jobs)
        done(*asked, "--recompute", "auto", "--pareto", "4", "-o", f"front{jobs}.json")
        done(*asked, "-o", f"one{jobs}.json")
        return {path.name.replace(jobs, "", 1): path.read_bytes() for path in folder.glob(f"*[et]{jobs}*.json")}

    alone = made("1")
    assert len(alone) > 3
    assert made("2") == alone
    asked = {"num_points": 3, "global_batch": 4, "recompute": "auto"}
    assert hp.pareto(SMALL, jobs=2, **asked) == hp.pareto(SMALL, **asked)


def test_strategies_are_the_same_whatever_the_number_of_processes(folder: Path) -> None:
    done("plan", "profile.json", "--global-batch", "4")
    alone, both = (json.loads(done("compare", "plan.json", "--baselines", "--jobs", jobs, "--json")) for jobs in "12")
    assert alone.pop("planning_s").keys() == both.pop("planning_s").keys()
    assert both == alone


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
    with pytest.raises(errors.UsageError, match="0 processes") as caught:
        hp.pareto(SMALL, num_points=num_points, jobs=0)
    assert caught.value.remedies == ("jobs=2",)


def test_an_error_of_a_search_keeps_its_type_and_text() -> None:
    problem = problems.make_problem(SMALL, memory=1000)
    with pytest.raises(errors.InfeasibleError) as alone:
        solve.solve(problem)
    with Jobs(2) as processes, pytest.raises(errors.InfeasibleError) as shared:
        processes.submit(solve.solve, problem)()
    assert str(shared.value) == str(alone.value)


def test_a_process_that_dies_is_an_error_that_says_so() -> None:
    with Jobs(2) as processes, pytest.raises(errors.WorkerDiedError, match="a process of --jobs died"):
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
        first = processes.submit(made.append, 1)
        _ = processes.submit(made.append, 2)
        assert made == []
        first()
        first()
    assert made == [1]


class Clock:
    """Stands in for ``time``: goes on when told to."""

    now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s


def test_a_search_shows_its_first_plan_and_best_bound_and_gap_every_ten_seconds_off_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = Clock()
    monkeypatch.setattr(console, "time", clock)
    monkeypatch.delenv("RANK", raising=False)

    def searched(problem: Problem, name: str, show: Progress) -> Plan:
        for second in range(1, 31):
            clock.now_s = second
            best_s, pipeline = (inf, (0, 0)) if second < 15 else (0.4, (4, 16))
            show(SearchProgress(best_s, 0.3, best_s / 0.3 - 1, 10 * second, float(second), *pipeline))
        return PLAN

    monkeypatch.setattr(solve, "solve", searched)
    assert search_progress.solve(problems.make_problem(PROFILE), "best-first") is PLAN
    assert capsys.readouterr().err.splitlines() == [
        "searching 17 %: no plan yet, bound 300 ms (10.0 s, at most 50.0 s left)",
        "searching: first plan 400 ms, gap 33 %, 4 stages on 16 devices (15.0 s)",
        "searching 33 %: best 400 ms, gap 33 % (20.0 s, at most 40.0 s left)",
        "searching 50 %: best 400 ms, gap 33 % (30.0 s, at most 30.0 s left)",
    ]
