"""Profile, plan, run on one and on two GPUs: the losses are one device's."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import halopipe as hp
from halopipe.launch.run import run_plan
from halopipe.run_spec.options import RunOptions
from planner.ir.plan import Plan
from planner.ir.profile import Profile
from tests.halopipe.plans import RESNET, plan_of

pytestmark = pytest.mark.cuda
TWO = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="it takes two GPUs")
GPT = "profiler.models.gpt:gpt"
ARGUMENTS = {"vocabulary": 64, "width": 64, "layers": 2, "heads": 4}


def profile_on(count: int) -> Profile:
    return hp.profile(
        GPT, input_shape=(8, 32), arguments=ARGUMENTS, cluster=count, device="cuda", dtype="float64", quick=True
    )


def on_gpus(plan: Plan) -> Plan:
    stages = tuple(
        replace(stage, devices=tuple(f"n0/gpu{rank}" for rank in stage.ranks)) for stage in plan.decision.stages
    )
    return replace(plan, decision=replace(plan.decision, stages=stages))


@pytest.mark.parametrize("count", [1, pytest.param(2, marks=TWO)])
def test_what_is_profiled_and_planned_on_gpus_trains_on_them_as_on_one_device(count: int) -> None:
    plan = hp.plan(profile_on(count))
    assert {name for stage in plan.decision.stages for name in stage.devices} <= {f"n0/gpu{n}" for n in range(count)}
    result = run_plan(plan, RunOptions(steps=6, check_numerics=True))
    assert len(result.losses) == 6
    assert result.numerics is not None  # a difference beyond rounding would have been an error
    memory = torch.cuda.get_device_properties(0).total_memory
    assert all(0 < peak <= memory for peak in result.peak_bytes)


@TWO
@pytest.mark.parametrize("data_from", ["each", "first"])
@pytest.mark.parametrize(
    ("cuts", "options"),
    [([0.5], {}), ([], {"ranks": [(0, 1)], "shares": [(1, 1)]}), ([0.5], {"schedule": "zb-h1"})],
    ids=["pipeline", "replicas", "zero-bubble"],
)
def test_plans_over_nccl_compute_what_one_device_does(
    cuts: list[float], options: dict[str, object], data_from: str
) -> None:
    plan = on_gpus(plan_of(RESNET, cuts, **options))
    result = run_plan(plan, RunOptions(steps=4, dtype="float64", check_numerics=True, data_from=data_from))
    assert result.numerics is not None


def test_a_plan_for_one_gpu_runs_on_the_processor_if_asked_and_loses_nothing() -> None:
    plan = on_gpus(plan_of(RESNET, []))
    there, here = (run_plan(plan, RunOptions(steps=3, dtype="float64", device=device)).losses for device in ("", "cpu"))
    assert there == pytest.approx(here, rel=1e-9)
