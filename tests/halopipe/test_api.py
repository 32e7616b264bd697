"""The calls of ``hp``: what they give, what files stand for, and what scripts give them by mistake."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import halopipe as hp
from benchmarks.chains import chain_profile
from halopipe.api.arguments import checked
from halopipe.planning.options import ProfileOptions
from halopipe.planning.problem import make_problem
from halopipe.planning.solve import solve
from halopipe.run_spec.options import RunOptions
from halopipe.terminal import console
from halopipe.training.check_options import require_consistent
from planner.ir.codec import dump
from planner.ir.errors import CorruptFileError, StaleFileError, UsageError
from planner.ir.plan import Plan
from planner.ir.profile import ModelSource, Profile
from tests.planner.factories import chain_decision, plan_of

HOME = Path(__file__).resolve().parents[2]
PROFILE = chain_profile(5, latency_s=1e-4)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return hp.plan(PROFILE, global_batch=8)


def test_a_plan_is_explained(plan: Plan) -> None:
    assert "Step (predicted)" in hp.explain(plan, PROFILE)
    text = hp.explain(plan)  # which remembers its profile
    assert text == hp.explain(plan, PROFILE)
    assert "Not shown without the profile" not in text


def test_what_is_saved_is_loaded_and_files_stand_for_what_they_hold(plan: Plan, tmp_path: Path) -> None:
    hp.save(PROFILE, tmp_path / "p.json")
    hp.save(plan, tmp_path / "plan.json")
    assert (hp.load(tmp_path / "p.json"), hp.load(str(tmp_path / "plan.json"))) == (PROFILE, plan)
    assert hp.plan(tmp_path / "p.json", global_batch=8) == plan
    assert hp.explain(str(tmp_path / "plan.json"), tmp_path / "p.json") == hp.explain(plan)
    assert "best-first" in hp.compare(tmp_path / "plan.json", *hp.baselines(tmp_path / "p.json")[:1]).plans
    with pytest.raises(UsageError, match="a list is not kept in a file"):
        hp.save([plan], tmp_path / "list.json")
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(CorruptFileError, match="is not a halopipe file"):
        hp.load(tmp_path / "other.json")


def test_a_plan_of_a_file_has_the_profile_beside_it_or_says_that_it_needs_one(tmp_path: Path) -> None:
    profile = chain_profile(3, latency_s=2e-4)
    hp.save(profile, tmp_path / "p.json")
    dump(solve(make_problem(profile, global_batch=8)), tmp_path / "plan.json")  # as by another process
    with pytest.raises(UsageError, match="needs the profile") as caught:
        hp.what_if(tmp_path / "plan.json", "devices=1")
    assert "no profile.json beside" in caught.value.details[0]
    with pytest.raises(StaleFileError, match="made for another profile"):
        hp.prices(tmp_path / "plan.json", PROFILE)
    assert hp.what_if(tmp_path / "plan.json", tmp_path / "p.json", "devices=1").other is not None
    (tmp_path / "p.json").rename(tmp_path / "profile.json")
    assert hp.what_if(hp.load(tmp_path / "plan.json"), "devices=1").other is not None
    assert "Not shown without the profile" not in hp.explain(tmp_path / "plan.json")


def test_plans_are_compared_as_a_frame(plan: Plan) -> None:
    frame = hp.compare(plan, *hp.baselines(PROFILE)).frame()
    assert frame.index[0] == "best-first"
    assert {"one-device", "data-parallel", "even-split"} <= set(frame.index)
    assert frame["step_s"].min() == frame.loc["best-first", "step_s"]


def test_what_may_be_asked_of_a_plan_may_be_asked_here(plan: Plan) -> None:
    assert hp.what_if(plan, "devices=3").other is not None
    assert str(hp.why_not(plan, PROFILE, "one-device")).startswith("one-device: ")
    assert len(hp.prices(plan, PROFILE, time_limit_s=10).prices) == 3
    frame = hp.pareto(PROFILE, num_points=2, global_batch=8).frame()
    assert frame["step_s"].is_monotonic_increasing


def test_plans_of_one_solver_get_names_of_their_own(plan: Plan) -> None:
    assert list(hp.compare(plan, plan, mine=plan).plans) == ["best-first", "best-first 2", "mine"]


def test_importing_is_light_and_an_unknown_name_is_an_attribute_error() -> None:
    code = "import sys, halopipe; print(sorted({'pydantic', 'rich', 'numpy', 'torch'} & set(sys.modules)))"
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, cwd=HOME, capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"
    with pytest.raises(AttributeError, match="no attribute 'profle'"):
        hp.profle  # noqa: B018  # the access is the test


def test_a_profile_is_measured_as_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[ModelSource] = []

    def measure(source: ModelSource, how: ProfileOptions, **others: object) -> Profile:
        asked.append(source)
        return PROFILE

    monkeypatch.setattr("halopipe.planning.measure.measure", measure)
    assert hp.profile("a.b:c", input_shape=(8, 3), autocast="bfloat16") is PROFILE
    assert asked == [ModelSource("a.b:c", {}, (8, 3), "float32", "bfloat16")]


SMALL = chain_profile(4, latency_s=1e-4)
PLAN = plan_of(SMALL, chain_decision(SMALL, cuts=(2,), micro_batches=(2, 2)))


@pytest.mark.parametrize(
    ("call", "lines"),
    [
        (lambda: hp.plan(SMALL, global_bach=8), ["hp.plan knows no 'global_bach'", "global_batch (did you mean"]),
        (lambda: hp.plan(SMALL, qqq=1), ["hp.plan knows no 'qqq'", "help(hp.plan) says what may be given"]),
        (lambda: hp.plan(SMALL, schedule="1f1b"), ["hp.plan knows no 'schedule'", "schedules (did you mean"]),
        (lambda: hp.plan(SMALL, schedules="1f1b"), ["schedules is '1f1b'", "a list of text", "schedules=['1f1b']"]),
        (lambda: hp.plan(SMALL, micro_batch=4), ["micro_batch is 4", "whole numbers", "micro_batch=[4]"]),
        (lambda: hp.plan(SMALL, micro_batch=["4"]), ["micro_batch is ['4']"]),
        (lambda: hp.plan(SMALL, global_batch="8"), ["global_batch is '8'", "global_batch=8, without quotes"]),
        (lambda: hp.plan(SMALL, global_batch=8.0), ["global_batch is 8.0", "try: global_batch=8"]),
        (lambda: hp.plan(SMALL, global_batch=8.5), ["global_batch is 8.5", "try: help(hp.plan)"]),
        (lambda: hp.plan(SMALL, calibration=1), ["calibration is 1", "True or False"]),
        (lambda: hp.plan(PLAN), ["profile is of type Plan", "hp.profile(...) makes a profile"]),
        (lambda: hp.plan(None), ["profile is None"]),
        (lambda: hp.explain(SMALL), ["plan is of type Profile", "hp.plan(profile) makes a plan"]),
        (lambda: hp.compare(PLAN, SMALL), ["plans is of type Profile"]),
        (lambda: hp.compare(), ["nothing to compare"]),
        (lambda: hp.compare(a=SMALL), ["a is of type Profile"]),
        (lambda: hp.why_not(PLAN), ["a question about a plan is text"]),
        (lambda: hp.load(None), ["path is None"]),
        (lambda: hp.profile(None), ["model is None"]),
        (lambda: hp.profile("a:b", sizes=4), ["sizes is 4", "sizes=[4]"]),
        (lambda: hp.profile("a:b", arguments=["width"]), ["arguments is ['width']", "a dict"]),
        (lambda: hp.profile("a:b", optimizer=3), ["optimizer is 3"]),
        (lambda: hp.parallelize(None, plan=PLAN, clipnorm=1), ["knows no 'clipnorm'", "clip_norm (did you mean"]),
        (lambda: hp.parallelize("a:b", plan=SMALL), ["plan is of type Profile"]),
        (lambda: hp.parallelize("a:b", plan=PLAN, seed="0"), ["seed is '0'"]),
        (lambda: hp.execute(PLAN, clip_nrom=1.0), ["hp.execute knows no 'clip_nrom'", "clip_norm (did you mean"]),
        (lambda: hp.serve(PLAN, deadline=3), ["hp.serve knows no 'deadline'", "deadline_s (did you mean"]),
    ],
)
def test_what_a_call_does_not_take_is_named(call: Callable[[], Any], lines: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        call()
    assert [line for line in lines if line not in str(caught.value)] == [], str(caught.value)


def test_numbers_of_numpy_and_any_sequence_are_taken() -> None:
    sizes = np.array([1, 2])
    plan = hp.plan(SMALL, global_batch=np.int64(4), micro_batch=sizes, schedules=("1f1b",), gap=np.float32(0), memory=0)
    assert isinstance(plan, Plan)
    assert plan.decision.global_batch == 4
    assert plan == hp.plan(SMALL, global_batch=4, micro_batch=[1, 2], schedules=["1f1b"])


@pytest.mark.parametrize("name", [name for name in hp.__all__ if inspect.isfunction(getattr(hp, name, None))])
def test_every_call_describes_what_it_takes_and_raises(name: str) -> None:
    call = getattr(hp, name)
    text = inspect.getdoc(call) or ""
    if len(inspect.signature(call).parameters) > 2:
        assert "Args:" in text, name
    assert re.search(r"Raises:|[Rr]aises as|see :", text) or name == "on_cluster", name


def test_errors_that_the_command_line_shares_name_arguments_here() -> None:
    @checked
    def plan(*, schedules: Sequence[str] = (), batch_statistics: str = "", global_batch: int = 0) -> None:
        raise UsageError(
            f"--global-batch is {global_batch}",
            ["--schedule and --token-slices"],
            ["--global-batch 32", "--schedule 1f1b,gpipe", "--batch-statistics micro", "halopipe plan --schedule x"],
        )

    with pytest.raises(UsageError) as caught:
        plan()
    assert caught.value.title == "global_batch is 0"
    assert caught.value.details == ("schedules and --token-slices",)
    assert caught.value.remedies == (
        "global_batch=32",
        "schedules=['1f1b', 'gpipe']",
        "batch_statistics='micro'",
        "halopipe plan --schedule x",
    )


@pytest.mark.parametrize("number", [10**23, -(10**23), 10**5000], ids=["23 digits", "-23 digits", "5,000 digits"])
def test_numbers_that_nobody_means_are_refused_with_their_limit(number: int) -> None:
    profile = chain_profile(3)
    with pytest.raises(UsageError, match="global_batch is ") as caught:
        hp.plan(profile, global_batch=number)
    assert any(line.startswith("the ") for line in caught.value.details)
    with pytest.raises(UsageError, match="micro_batch is "):
        hp.plan(profile, micro_batch=[number])
    with pytest.raises(UsageError, match="--seed is "):
        require_consistent(plan_of(profile, chain_decision(profile, (2,))), RunOptions(seed=number))


def test_a_remedy_is_no_number_that_is_refused_next() -> None:
    with pytest.raises(UsageError, match="is larger than the global batch") as caught:
        hp.plan(chain_profile(3), micro_batch=[2**30])
    assert [remedy for remedy in caught.value.remedies if "global_batch" in remedy] == []


def test_plans_and_profiles_are_shown_in_a_line() -> None:
    profile = SMALL
    assert re.fullmatch(r"Profile\(.*: \d+ layers, \d+ devices, \d+ costs\)", repr(profile))
    for shape, asked in (
        ("data parallel on 2 devices", {"solver": "data-parallel"}),
        ("a pipeline of 2 stages on 2 devices", {"solver": "even-split"}),
        ("one device", {"num_ranks": 1}),
    ):
        shown = str(hp.plan(profile, global_batch=2, **asked))
        assert re.fullmatch(rf"Plan\(.*: {shape}, .*, \d micro-batch(es)? of \d, .* ms a step, .*\)", shown)
    cut = hp.plan(profile, global_batch=2, solver="data-parallel")
    layers = {name: replace(each, cuts={"height": (0, 1, 2)}) for name, each in cut.decision.layers.items()}
    assert replace(cut.decision, layers=layers).shape_text() == "layers cut along height on 2 devices"


def test_a_search_shows_how_far_it_is_unless_it_is_told_not_to(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(console, "_LINE_EVERY_S", 0.0)
    hp.plan(SMALL, global_batch=2)
    assert capsys.readouterr().err.startswith("searching: first plan ")
    hp.plan(SMALL, global_batch=2, quiet=True)
    hp.plan(SMALL, global_batch=2, progress=lambda at: None)
    assert capsys.readouterr() == ("", "")
