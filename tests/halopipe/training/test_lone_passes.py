"""Stages timed alone, in whole runs: nothing that trains notices, and a run that cannot do it goes on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from halopipe.run_spec.job import RankResult
from halopipe.run_spec.options import RunOptions
from halopipe.run_spec.result import RunResult
from halopipe.training import isolated_timing
from halopipe.training.isolated_timing import LEAST_PASSES, MOST_PASSES, IsolatedTimer, budget_s
from planner.ir.plan import Plan, RankPrediction
from planner.ir.timeline import LonePasses
from profiler.source.source import load_model
from runtime.checkpoint import Checkpoint
from runtime.stage.alone import LoneStage
from tests.captures import capture
from tests.halopipe import learners
from tests.halopipe.plans import RESNET, plan_of
from tests.halopipe.ranks import run_job
from tests.runtime.divided import divided as decide_divided


@pytest.fixture(autouse=True)
def few_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    monkeypatch.setattr(isolated_timing, "LONGEST_S", 0.05)


@cache
def divided(dim: str) -> Plan:
    """Two ranks that divide all layers that can be divided along a dim; batches are normalised together."""
    cuts = {"height": {"height": (0, 8, 16)}, "channel": {"channel": (0, 2, 4)}}[dim]
    plan = plan_of(RESNET, [])
    return replace(plan, decision=decide_divided(capture(load_model(RESNET)).graph, cuts))


PLANS: dict[str, Callable[[], Plan]] = {
    "dropout, two stages": learners.plan,
    "sizes that vary": learners.plan_of_taggers,
    "two ranks a stage": learners.replicas,
    "running statistics": lambda: plan_of(RESNET, [0.5]),
    "running statistics, split backwards": lambda: plan_of(RESNET, [0.5], schedule="zb-h1"),
    "weight versions": lambda: plan_of(RESNET, [0.5], (2, 2, 2), schedule="pipedream"),
    "height": lambda: divided("height"),
}


def trained(plan: Plan, folder: Path, lone: str, accumulate: int) -> tuple[RunResult, Checkpoint]:
    folder.mkdir()
    options = {"steps": 4, "warmup": 1, "optimizer": "SGD:lr=0.05,momentum=0.9", "accumulate": accumulate}
    found = run_job(plan, folder, lone_passes=lone, checkpoint=str(folder / "saved"), **options)
    return found, Checkpoint.open(folder / "saved")


@pytest.mark.parametrize("name", PLANS)
def test_what_is_trained_is_the_same_to_the_last_bit(tmp_path: Path, name: str) -> None:
    """Losses, parameters, buffers, momenta; also gradients that wait for those of the next step."""
    plan = PLANS[name]()
    accumulate = 1 if name == "weight versions" else 2
    (plain, before), (timed, after) = (trained(plan, tmp_path / lone, lone, accumulate) for lone in ("off", "on"))
    assert (plain.isolated_passes, plain.why_not_isolated, timed.why_not_isolated) == ((), "", "")
    assert timed.losses == plain.losses
    assert sorted(before.tensors()) == sorted(after.tensors())
    for key in before.tensors():
        assert torch.equal(before.read(key), after.read(key)), key
    wanted = [(rank, number) for number, stage in enumerate(plan.decision.stages) for rank in stage.ranks]
    assert sorted((each.rank, each.stage) for each in timed.isolated_passes) == sorted(wanted)
    for each in timed.isolated_passes:
        assert len(each.before_s) >= LEAST_PASSES - 1
        assert len(each.after_s) >= LEAST_PASSES - 1
        assert min(*each.before_s, *each.after_s) > 0


def test_a_pass_leaves_the_generators_of_torch_as_they_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    states = []
    plain = LoneStage.pass_s

    def watched(stage: LoneStage) -> float:
        before = torch.get_rng_state()
        seconds = plain(stage)
        states.append(torch.equal(before, torch.get_rng_state()))
        return seconds

    monkeypatch.setattr(LoneStage, "pass_s", watched)
    run_job(learners.plan([]), tmp_path, lone_passes="on")
    assert len(states) >= 2 * LEAST_PASSES
    assert all(states)


def test_samples_are_those_that_the_rank_has(tmp_path: Path) -> None:
    found = run_job(learners.replicas(), tmp_path, lone_passes="on")
    assert {each.rank: each.samples for each in found.isolated_passes} == {0: 2, 1: 1, 2: 1, 3: 2}
    assert {each.samples for each in run_job(divided("height"), tmp_path, lone_passes="on").isolated_passes} == {1}


def test_a_stage_that_cannot_be_run_alone_says_why_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = run_job(divided("channel"), tmp_path, lone_passes="on")
    assert (parts.isolated_passes, len(parts.losses)) == ((), 6)
    assert parts.why_not_isolated == "stage 0 is not timed alone: its ranks have parts of its parameters"
    monkeypatch.setattr(LoneStage, "pass_s", lambda stage: 1 / 0)
    failed = run_job(learners.plan(), tmp_path, lone_passes="on")
    assert (failed.isolated_passes, failed.why_not_isolated) == ((), "ZeroDivisionError: division by zero")
    assert failed.losses == run_job(learners.plan(), tmp_path, lone_passes="off").losses


def test_long_runs_time_their_stages_and_give_it_a_twentieth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolated_timing, "LONGEST_S", 2.0)
    plan = plan_of(RESNET, [0.5])
    ranks = tuple(RankPrediction(rank, 0.8, 0.0, 0.0, 0, 0) for rank in (0, 1))
    plan = replace(plan, prediction=replace(plan.prediction, step_s=1.0, ranks=ranks))

    def seconds(num_steps: int, lone: str = "auto") -> float:
        return budget_s(plan, RunOptions(lone_passes=lone), num_steps)

    assert seconds(19) == 0.0, "a short run"
    assert seconds(20) == 0.0, "0.5 s are too few for 4 passes of 0.4 s"
    assert seconds(80) == 0.0, "2 s in all"
    fast = replace(plan, prediction=replace(plan.prediction, step_s=0.1, ranks=(replace(ranks[0], compute_s=0.08),)))
    assert budget_s(fast, RunOptions(), 100) == pytest.approx(100 * 0.1 * 0.05 / 2)
    assert budget_s(fast, RunOptions(), 10**6) == 1.0
    assert (seconds(3, "on"), seconds(10**6, "off")) == (1.0, 0.0)


def test_passes_end_with_their_time_or_number(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(isolated_timing.time, "perf_counter", lambda: now[0])
    timer = IsolatedTimer(None, (), 1.0)

    def lasting(seconds: float) -> int:
        def pass_s() -> float:
            now[0] += seconds
            return seconds

        return len(timer._repeated(pass_s, 1.0))

    assert (lasting(10.0), lasting(0.1), lasting(1e-4)) == (LEAST_PASSES - 1, 10, MOST_PASSES - 1)


def test_passes_travel_with_the_result_of_a_rank() -> None:
    lone = (LonePasses(0, 1, 4, (0.1, 0.2), (0.3,)),)
    result = RankResult(0, (), (), {}, 0, (), isolated_passes=lone, why_not_isolated="")
    assert RankResult.from_json(result.to_json()) == result
