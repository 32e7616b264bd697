from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.chains import chain_profile
from halopipe.launch import run as launch_run
from halopipe.reports import explain, run
from halopipe.run_spec.options import RunOptions
from halopipe.run_spec.result import RunProgress, RunResult, Score
from planner.ir.codec import dumps, loads
from planner.ir.errors import NumericsError
from planner.ir.timeline import LeftOut, Restart, Slow, Span, Timeline, TimelineFile
from tests.planner.factories import chain_decision, plan_of

PROFILE = chain_profile(3)
PLAN = plan_of(PROFILE, chain_decision(PROFILE, cuts=(2,)), step_s=0.010)
SPANS = (Span(0, "0F0", 0.0, 0.002), Span(0, "0B0", 0.002, 0.005), Span(1, "1F0", 0.002, 0.003))
RESULT = RunResult(
    losses=(2.3026, 2.0, 1.5),
    step_seconds=(0.020, 0.011, 0.011),
    warmup=1,
    timeline=Timeline("measured", 0.011, SPANS),
    stage_forward_s=(0.002, 0.001),
    stage_backward_s=(0.003, 0.0),
    peak_bytes=(1, 1),
)


def test_a_run_is_reported_beside_its_prediction() -> None:
    lines = run.RunReport(PLAN, RESULT, run.predicted_timeline(PLAN)).render().splitlines()
    assert lines[0] == "3 steps, 11.0 ms a step (median), 364 samples/s"
    assert lines[2].split() == ["step", "10.0", "ms", "11.0", "ms", "+10", "%"]
    assert lines[3].split() == ["stage", "0", "forward", "–", "2.00", "ms", "–"]
    assert lines[5].split() == ["stage", "0", "compute", "10.0", "ms", "5.00", "ms", "-50", "%"]
    assert lines[6].split() == ["stage", "0", "idle", "0", "s", "6.00", "ms", "–"]
    assert "measured:" in lines
    assert "predicted:" not in lines
    assert lines[-1] == "loss 2.3026 at step 1, 1.5000 at step 3"


def test_the_losses_of_longer_runs_are_averaged() -> None:
    losses = (*[2.0] * 5, 1.7, *[1.0] * 5)
    result = replace(RESULT, losses=losses)
    assert "mean of the first 5 2.0000, of the last 5 1.0000" in run.RunReport(PLAN, result, RESULT.timeline).render()


def test_a_run_is_plain_data() -> None:
    found = run.RunReport(PLAN, RESULT, RESULT.timeline).data()
    assert found["losses"] == [2.3026, 2.0, 1.5]
    assert found["measured"]["error"] == pytest.approx(0.1)
    assert found["numerics"] is None


def test_a_run_that_went_on_counts_all_steps_and_tells_its_evaluations() -> None:
    result = replace(RESULT, first_step=4, scores=(Score(7, 0.5, 8, 0.25), Score(8, 0.25, 8)))
    lines = run.RunReport(PLAN, result, RESULT.timeline).render().splitlines()[-3:]
    assert lines == [
        "loss 2.3026 at step 5, 1.5000 at step 7",
        "evaluation after step 7: loss 0.5000, 25 % right (8 samples)",
        "evaluation after step 8: loss 0.2500 (8 samples)",
    ]


def test_a_job_that_was_started_again_says_so_wherever_it_is_told() -> None:
    lost = Restart(5, (1,), "rank 1 ended by signal SIGKILL without a word", "H501", 4, 1, 0.8)
    result = replace(RESULT, restarts=(lost,))
    line = "started again after step 4 (1 step again, 800 ms): rank 1 ended by signal SIGKILL without a word"
    assert line in run.RunReport(PLAN, result, RESULT.timeline).render().splitlines()
    assert run.RunReport(PLAN, result, RESULT.timeline).data()["restarts"][0]["resumed_step"] == 4
    assert loads(dumps(result.timeline_file(PLAN, RESULT.timeline)), TimelineFile).restarts == (lost,)


def run_with(monkeypatch: pytest.MonkeyPatch, result: RunResult | None) -> RunResult | None:
    def run_plan(plan: object, options: object, progress: launch_run.Progress, replanner: object) -> RunResult | None:
        progress(RunProgress(0, 3, None, 0.0))
        progress(RunProgress(1, 3, 2.3, 0.011))
        return result

    monkeypatch.setattr(launch_run, "run_plan", run_plan)
    return run.train(PLAN, RunOptions(steps=3))


def test_a_run_gives_its_result_on_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_with(monkeypatch, RESULT) is RESULT
    assert run_with(monkeypatch, None) is None


def test_a_loss_that_is_not_a_number_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NumericsError, match="the loss is nan from step 2 on"):
        run_with(monkeypatch, replace(RESULT, losses=(2.3, float("nan"), float("nan"))))


def test_a_run_over_another_transport_is_shown_without_a_difference() -> None:
    plan = replace(PLAN, prediction=replace(PLAN.prediction, transport="shared memory"))
    same = run.RunReport(plan, replace(RESULT, transport="shared memory"), RESULT.timeline).render()
    assert "samples/s, over shared memory" in same
    assert "difference" in same
    other = run.RunReport(plan, replace(RESULT, transport="gloo"), RESULT.timeline).render()
    assert "difference" not in other
    assert "%" not in other.split("loss")[0]
    assert "predicted for messages over shared memory, run over gloo" in other
    measured = replace(plan, measured=replace(RESULT, transport="gloo").measured(plan.prediction))
    text = explain.explain(measured)
    assert "over gloo" in text
    assert "difference" not in text


def test_what_is_slow_or_left_out_is_told_once_and_stands_in_the_report(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    slow = (Slow(2, 1.31, 40, "stage 2 backward takes 12 ms a step"), Slow(1, 8.0, 50, "held up", 0))
    left_out = (LeftOut(3, "step 3: NaN first in layer fc"),)

    def run_plan(plan: object, options: object, progress: launch_run.Progress, replanner: object) -> RunResult:
        progress(RunProgress(3, 60, None, 0.0, (), left_out))
        progress(RunProgress(40, 60, 2.3, 0.011, slow[:1], left_out))
        progress(RunProgress(41, 60, 2.3, 0.011, slow[:1], left_out))
        return replace(RESULT, slow=(*slow, Slow(2, 1.0, 60, "it has recovered")), left_out=left_out)

    monkeypatch.setattr(launch_run, "run_plan", run_plan)
    result = run.train(PLAN, RunOptions(steps=60))
    lines = [line for line in capsys.readouterr().err.splitlines() if "step" in line]
    slow_rank = "rank 2 is slow: 1.31 times the seconds of what the plan predicts, beside the other ranks, at step 40; "
    assert lines == [
        "no update after step 3: step 3: NaN first in layer fc",
        f"{slow_rank}stage 2 backward takes 12 ms a step",
        "the link from rank 0 to rank 1 is slow: 8.00 times the seconds of what is usual, at step 50; held up",
        "rank 2: it has recovered, at step 60",
    ]
    report = run.RunReport(PLAN, result, RESULT.timeline).render()
    assert "1 update left out, of steps with NaN or infinity: 3" in report
    assert lines[1] in report
    assert run.RunReport(PLAN, result, RESULT.timeline).data()["slow"][1] == {
        "rank": 1,
        "factor": 8.0,
        "step": 50,
        "why": "held up",
        "peer": 0,
    }
