"""What scripts give by mistake to the calls of ``hp`` is refused before anything is done with it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

import halopipe as hp
from benchmarks.chains import chain_profile
from halopipe.api.arguments import checked
from planner.ir.errors import UsageError
from planner.ir.plan import Plan
from tests.planner.factories import chain_decision, plan_of

PROFILE = chain_profile(4, latency_s=1e-4)
PLAN = plan_of(PROFILE, chain_decision(PROFILE, cuts=(2,), micro_batches=(2, 2)))


@pytest.mark.parametrize(
    ("call", "lines"),
    [
        (lambda: hp.plan(PROFILE, global_bach=8), ["hp.plan knows no 'global_bach'", "global_batch (did you mean"]),
        (lambda: hp.plan(PROFILE, qqq=1), ["hp.plan knows no 'qqq'", "help(hp.plan) says what may be given"]),
        (lambda: hp.plan(PROFILE, schedule="1f1b"), ["hp.plan knows no 'schedule'", "schedules (did you mean"]),
        (lambda: hp.plan(PROFILE, schedules="1f1b"), ["schedules is '1f1b'", "a list of text", "schedules=['1f1b']"]),
        (lambda: hp.plan(PROFILE, micro_batch=4), ["micro_batch is 4", "whole numbers", "micro_batch=[4]"]),
        (lambda: hp.plan(PROFILE, micro_batch=["4"]), ["micro_batch is ['4']"]),
        (lambda: hp.plan(PROFILE, global_batch="8"), ["global_batch is '8'", "global_batch=8, without quotes"]),
        (lambda: hp.plan(PROFILE, global_batch=8.0), ["global_batch is 8.0", "try: global_batch=8"]),
        (lambda: hp.plan(PROFILE, global_batch=8.5), ["global_batch is 8.5", "try: help(hp.plan)"]),
        (lambda: hp.plan(PROFILE, calibration=1), ["calibration is 1", "True or False"]),
        (lambda: hp.plan(PLAN), ["profile is of type Plan", "hp.profile(...) makes a profile"]),
        (lambda: hp.plan(None), ["profile is None"]),
        (lambda: hp.explain(PROFILE), ["plan is of type Profile", "hp.plan(profile) makes a plan"]),
        (lambda: hp.compare(PLAN, PROFILE), ["plans is of type Profile"]),
        (lambda: hp.compare(), ["nothing to compare"]),
        (lambda: hp.compare(a=PROFILE), ["a is of type Profile"]),
        (lambda: hp.why_not(PLAN), ["a question about a plan is text"]),
        (lambda: hp.load(None), ["path is None"]),
        (lambda: hp.profile(None), ["model is None"]),
        (lambda: hp.profile("a:b", sizes=4), ["sizes is 4", "sizes=[4]"]),
        (lambda: hp.profile("a:b", arguments=["width"]), ["arguments is ['width']", "a dict"]),
        (lambda: hp.profile("a:b", optimizer=3), ["optimizer is 3"]),
        (lambda: hp.parallelize(None, plan=PLAN, clipnorm=1), ["knows no 'clipnorm'", "clip_norm (did you mean"]),
        (lambda: hp.parallelize("a:b", plan=PROFILE), ["plan is of type Profile"]),
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
    plan = hp.plan(
        PROFILE, global_batch=np.int64(4), micro_batch=sizes, schedules=("1f1b",), gap=np.float32(0), memory=0
    )
    assert isinstance(plan, Plan)
    assert plan.decision.global_batch == 4
    assert plan == hp.plan(PROFILE, global_batch=4, micro_batch=[1, 2], schedules=["1f1b"])


def test_a_call_is_shown_as_it_is_written() -> None:
    assert list(inspect.signature(hp.plan).parameters)[:2] == ["profile", "cluster"]
    assert hp.plan.__doc__ is not None


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


def test_plans_and_profiles_are_shown_in_a_line() -> None:
    profile = PROFILE
    assert re.fullmatch(r"Profile\(.*: \d+ layers, \d+ devices, \d+ costs\)", repr(profile))
    found = hp.plan(profile, global_batch=2)
    assert re.fullmatch(
        r"Plan\(.*: \d stages on \d devices, .*, \d micro-batches of \d, .* ms a step, .*\)", str(found)
    )
