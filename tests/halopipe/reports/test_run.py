"""Reports of runs and explanations of plans: what is said of each."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from benchmarks.chains import chain_profile
from halopipe.launch import run as launch_run
from halopipe.reports import explain, run
from halopipe.reports.predicted_vs_measured import timeline_cells
from halopipe.run_spec.options import RunOptions
from halopipe.run_spec.result import RunProgress, RunResult, Score
from halopipe.terminal.tables import table
from planner.ir.codec import dumps, loads
from planner.ir.errors import NumericsError
from planner.ir.plan import Alternative, Measured, Plan, RankPrediction, Rejected, Search
from planner.ir.profile import ModelSource
from planner.ir.timeline import LeftOut, Restart, Slow, Span, Timeline, TimelineFile
from tests.planner.factories import chain_decision, plan_of

PROFILE = chain_profile(6, latency_s=1e-4, parameter_bytes=2**20, activation_bytes=2**16, update_s=5e-4)
SEARCH = Search(
    method="best-first over cuts",
    solver="best-first",
    status="time limit",
    bound_s=0.080,
    gap=0.15,
    num_simulated=12,
    num_candidates=3400,
    bounds_s={"bottleneck stage": 0.080, "root": 0.070},
    binding=("stage 1 computes 79 % of the step",),
    rejected=(Rejected("8 micro-batches of 1", "bound 95 ms"),),
)
ALTERNATIVES = (Alternative("one-device", 0.15, 2**24, "62 % slower: no parallelism"),)


def plan(step_s: float = 0.0925) -> Plan:
    made = plan_of(PROFILE, chain_decision(PROFILE, cuts=(3,), micro_batches=(2, 2, 2, 2)), step_s)
    return replace(made, search=SEARCH, alternatives=ALTERNATIVES)


def test_with_its_profile_a_plan_is_drawn_and_its_hand_overs_are_shown() -> None:
    shown = explain.explain(plan(), PROFILE)
    assert "2 stages on 2 devices, schedule 1f1b, 4 micro-batches of 2" in shown
    assert "  rank 0  n0/cpu0  F0░" in shown
    assert "128 KiB to stage 1" in shown
    assert "6.00 ms  12.0 ms    3.00 MiB" in shown
    assert "8.25 MiB of 942 MiB" in shown
    assert "Not shown" not in shown


def test_recomputation_and_layouts_are_shown_where_there_are_any() -> None:
    assert "recompute" not in explain.explain(plan(), PROFILE)
    made = plan()
    shared = chain_decision(PROFILE, micro_batches=(4,), ranks=((0, 1),), shares=((2, 2),))
    stages = tuple(replace(stage, recompute=True) for stage in shared.stages)
    layers = {**shared.layers, "l2": replace(shared.layers["l2"], cuts={"feature": (0, 1, 2)})}
    shown = explain.explain(replace(made, decision=replace(shared, stages=stages, layers=layers)))
    assert "in flight  recompute" in shown
    assert "stage 0 divides 6 layers by samples 2:2, 1 layer by feature 1:1" in shown


def test_the_headline_says_between_which_layers_no_cut_was_looked_at() -> None:
    def with_uncut(*pairs: str) -> Plan:
        rejected = tuple(Rejected(f"no cut between {pair}", "they share parameters") for pair in pairs)
        return replace(plan(), search=replace(SEARCH, rejected=(*SEARCH.rejected, *rejected)))

    assert "uncut" not in explain.headline(plan())
    one = with_uncut("l1 and l3")
    several = with_uncut("l1 and l3", "l2 and l4", "l2 and l5")
    assert "\n  uncut     no cut between l1 and l3: they share parameters" in explain.headline(one)
    assert "no cut between l1 and l3 (and 2 more places): they share parameters" in explain.headline(several)
    assert "no cut between l2 and l5" in explain.explain(several)


def test_the_headline_says_along_which_dims_layers_are_divided() -> None:
    shared = chain_decision(PROFILE, micro_batches=(4,), ranks=((0, 1),), shares=((2, 2),))
    made = replace(plan(), decision=shared)
    assert "divided" not in explain.headline(made)
    rows = {name: replace(shared.layers[name], cuts={"height": (0, 4, 8)}) for name in ("l1", "l2")}
    layers = {**shared.layers, **rows, "l3": replace(shared.layers["l3"], cuts={})}
    cut = replace(made, decision=replace(shared, layers=layers))
    assert "\n  divided   4 layers along samples, 2 layers along height, 1 layer not" in explain.headline(cut)


def test_the_headline_names_another_objective() -> None:
    assert "objective" not in explain.headline(plan())
    assert "  objective memory: 1.00 MiB on the fullest rank" in explain.headline(plan(), objective="memory")
    assert explain.headline(plan(), objective="latency").endswith("  objective latency")


def test_a_schedule_that_changes_the_optimisation_says_so_and_what_it_takes_without_a_flush() -> None:
    assert "optimisation" not in explain.explain(plan(), PROFILE)
    decision = chain_decision(PROFILE, cuts=(3,), micro_batches=(2,) * 8, schedule="pipedream-2bw")
    shown = explain.explain(replace(plan(), decision=decision), PROFILE)
    assert "changes   the optimisation: pipedream-2bw updates within a step, on weights up to 1 update old" in shown
    assert "Without the flush between steps a step would take" in shown


def test_losses_of_blocks_are_said_to_change_the_optimisation() -> None:
    made = plan()
    inputs = replace(made.inputs, model=replace(made.inputs.model, local_losses=3))
    line = "  changes   the optimisation: each of 3 blocks is trained by its own loss, no gradient passes between them"
    assert line in explain.explain(replace(made, inputs=inputs), PROFILE).splitlines()


def test_how_costs_are_known_is_said_unless_all_were_measured() -> None:
    def shown(evidence: str) -> str:
        return explain.explain(replace(plan(), prediction=replace(plan().prediction, evidence=evidence)))

    assert "Costs:" not in shown("measured")
    assert "Costs: some layers are read between the sizes" in shown("interpolated")
    assert "by a model of what was measured of layers like them" in shown("family")
    assert "--measure-missing" in shown("family")
    assert "a datasheet's" in shown("datasheet")


def test_without_a_profile_what_is_missing_is_said() -> None:
    shown = explain.explain(plan())
    assert "rank 0  n0/cpu0" not in shown
    assert "Not shown without the profile: the Gantt chart" in shown


def test_the_certificate_is_in_words() -> None:
    shown = explain.explain(plan(0.0925))
    assert "the time limit ended the search; this is the best so far" in shown
    assert "bound 80.0 ms a step: the plan is at most 16 % above the best" in shown
    assert "the largest of: bottleneck stage 80.0 ms, root 70.0 ms" in shown
    assert "3,400 partial plans looked at, 12 plans simulated" in shown
    proven = replace(plan(0.080), search=replace(SEARCH, status="proven"))
    assert "the plan is at the bound" in explain.explain(proven)


def test_the_first_lines_say_the_gap_and_what_ended_the_search() -> None:
    def first_lines(**search: object) -> str:
        return explain.headline(replace(plan(0.0925), search=replace(SEARCH, **search)))

    space = "samples, one stage a device)"
    assert f"\n  gap       16 % (time limit: {space}" in first_lines(gap=0.15625)
    assert f"\n  gap       0.0 % (proven best of: {space}" in first_lines(status="proven", gap=0.0)
    assert f"\n  gap       461 % (searched: {space}" in first_lines(status="searched", gap=4.61)
    assert "\n  gap       not known: made by a rule" in first_lines(status="heuristic", bound_s=0.0)
    assert "all of the searched space was looked at" in explain.explain(
        replace(plan(0.0925), search=replace(SEARCH, status="searched"))
    )
    assert repr(replace(plan(0.0925), search=replace(SEARCH, gap=0.15625))).endswith("a step, time limit, gap 15.6%)")


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("asked", "best_of", "named", "not_named"),
    [
        ({}, "samples, one stage a device", ("--schedule interleaved;", "--schedule zb-h1;"), ("recompute", "spatial")),
        ({"allow": ("sample", "channel")}, "samples, channels, one stage a device", ("zb-h1",), ("--allow",)),
        (
            {"schedules": ("interleaved", "zb-h1")},
            "samples, one or several stages a device",
            ("--allow",),
            ("--schedule",),
        ),
        ({"schedules": ("interleaved",)}, "samples, several stages a device", ("zb-h1",), ("--schedule interleaved",)),
        ({"chunks": "auto"}, "samples, one or several stages a device", ("zb-h1",), ("--schedule interleaved",)),
        ({"schedules": ("chimera",)}, "equal shares of a micro-batch on like devices", ("zb-h1",), ("interleaved",)),
        ({"objective": "memory"}, "samples, one stage a device", ("--recompute auto",), ("spatial",)),
        ({"num_ranks": 1}, "proven", (), ("--",)),
    ],
)
def test_what_a_plan_is_proven_the_best_of_is_named_where_one_may_ask_for_more(
    asked: dict[str, Any], best_of: str, named: tuple[str, ...], not_named: tuple[str, ...]
) -> None:
    made = plan(0.080)
    request = replace(made.inputs.request, **asked)
    proven = replace(made, inputs=replace(made.inputs, request=request), search=replace(SEARCH, status="proven"))
    shown = explain.headline(proven, profile=PROFILE)
    assert best_of in shown
    assert all(text in shown for text in named)
    assert not named or best_of in "\n".join(explain.certificate(proven, proven.prediction))
    assert not any(text in shown for text in not_named)
    without_profile = explain.headline(proven)
    assert ("--allow sample,spatial,channel" in without_profile) == asked.keys().isdisjoint({"allow", "num_ranks"})


def test_what_binds_and_the_alternatives_are_listed() -> None:
    shown = explain.explain(plan())
    assert "  - stage 1 computes 79 % of the step" in shown
    assert "  one-device            150 ms     16.0 MiB  62 % slower: no parallelism" in shown
    assert "  8 micro-batches of 1       –            –  bound 95 ms" in shown


def test_a_decision_edited_by_hand_is_predicted_again() -> None:
    assert "the plan file says 40.0 ms a step; its decision was edited" in explain.explain(plan(0.040), PROFILE)
    assert "edited" not in explain.explain(plan(0.040))


def test_what_was_measured_stands_beside() -> None:
    measured = Measured(0.1, 0.02, 18, (0.006, 0.006), (0.012, 0.012), (1, 1), 0.08)
    shown = explain.explain(replace(plan(0.0925), measured=measured))
    assert "step    92.5 ms    100 ms      +8.1 %" in shown
    assert "median of 18 steps, spread 2.0 %" in shown


def test_predicted_and_measured_are_compared_by_stage() -> None:
    predicted = Timeline("predicted", 1.1, (Span(0, "0F0", 0.0, 0.4), Span(0, "0B0", 0.4, 1.0)))
    measured = Timeline("measured", 1.3, (Span(0, "0F0", 0.0, 0.5), Span(0, "0B0", 0.5, 1.1)))
    lines = table(*timeline_cells(predicted, measured, 1.32, [(0,)])).splitlines()
    assert [line.split()[-2:] for line in lines[1:4]] == [["+20", "%"], ["+25", "%"], ["+0.0", "%"]]
    assert lines[4].split() == ["stage", "0", "compute", "1.00", "s", "1.10", "s", "+10", "%"]
    assert lines[5].split() == ["stage", "0", "idle", "100", "ms", "200", "ms", "+100", "%"]
    unknown = table(*timeline_cells(Timeline("predicted", 1.0, ()), measured, 1.2, [(0,)])).splitlines()
    assert unknown[2].split() == ["stage", "0", "forward", "–", "500", "ms", "–"]
    said = (RankPrediction(0, 0.9, 0.06, 0.0, 1, 1, 0.04),)
    lines = table(*timeline_cells(Timeline("predicted", 1.0, ()), measured, 1.2, [(0,)], said)).splitlines()
    assert [line.split()[:5] for line in lines[4:]] == [
        ["stage", "0", "compute", "900", "ms"],
        ["stage", "0", "communication", "60.0", "ms"],
        ["stage", "0", "bubble", "40.0", "ms"],
        ["stage", "0", "idle", "0", "s"],
    ]


def test_the_deciles_of_a_step_stand_behind_it() -> None:
    prediction = replace(plan(0.0925).prediction, p10_s=0.0911, p90_s=0.0954)
    shown = explain.explain(replace(plan(0.0925), prediction=prediction))
    assert "predicted 92.5 ms (91.1-95.4) a step" in shown
    assert "predicted 92.5 ms a step" in explain.explain(plan(0.0925))


def test_a_model_is_named_with_its_precision() -> None:
    source = ModelSource("a.b:c", {"width": "4"}, (8, 3), "float32", "bfloat16")
    assert explain.model_text(source) == "a.b:c(width=4), input 8x3, float32 with autocast to bfloat16"
    assert explain.model_text(replace(source, autocast="")) == "a.b:c(width=4), input 8x3, float32"


def test_where_a_rank_s_time_goes_is_told_as_parts_of_the_step() -> None:
    made = plan(0.08)
    first, *others = made.prediction.ranks
    rank = replace(first, compute_s=0.06, communication_s=0.012, bubble_s=0.006, idle_s=0.002)
    shown = explain.explain(replace(made, prediction=replace(made.prediction, ranks=(rank, *others))))
    row = next(line.split() for line in shown.splitlines() if "n0/cpu0" in line and "%" in line)
    assert row[2:10] == ["75", "%", "15", "%", "7.5", "%", "2.5", "%"]


CHAIN = chain_profile(3)
PLAN = plan_of(CHAIN, chain_decision(CHAIN, cuts=(2,)), step_s=0.010)
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
    lines = run.RunReport(PLAN, RESULT, *run.predicted_step(PLAN), has_details=True).render().splitlines()
    assert lines[0] == "3 steps, 11.0 ms a step (median), 364 samples/s"
    assert lines[2].split() == ["step", "10.0", "ms", "11.0", "ms", "+10", "%"]
    assert lines[3].split() == ["stage", "0", "forward", "–", "2.00", "ms", "–"]
    assert lines[5].split() == ["stage", "0", "compute", "10.0", "ms", "5.00", "ms", "-50", "%"]
    assert lines[6].split() == ["stage", "0", "idle", "0", "s", "6.00", "ms", "–"]
    assert "measured:" in lines
    assert "predicted:" not in lines
    assert lines[-1] == "loss 2.3026 at step 1, 1.5000 at step 3"


def test_a_run_that_is_not_asked_for_details_is_summed_up_in_a_few_lines() -> None:
    within = replace(PLAN, prediction=replace(PLAN.prediction, p10_s=0.009, p90_s=0.012))
    assert run.RunReport(within, RESULT, *run.predicted_step(within)).render().splitlines() == [
        "3 steps, 11.0 ms a step (median), 364 samples/s",
        "predicted 10.0 ms (9.0-12.0), +10 % measured",
        "loss 2.3026 at step 1, 1.5000 at step 3",
    ]


def test_communication_inside_layers_is_predicted_as_of_a_rank_and_measured_with_the_computing_around_it() -> None:
    ranks = (RankPrediction(0, 0.7, 0.3, 0.0, 1, 1), RankPrediction(1, 0.7, 0.3, 0.0, 1, 1))
    both = tuple(Span(rank, "0F0", 0.0, 1.0) for rank in (0, 1))
    predicted, measured = (Timeline(source, 1.0, both) for source in ("predicted", "measured"))

    def parts(predicted: Timeline, ranks: tuple[RankPrediction, ...]) -> list[str]:
        lines = table(*timeline_cells(predicted, measured, 1.0, [(0, 1)], ranks)).splitlines()
        return [" ".join(line.split()[2:]) for line in lines if "com" in line]

    shown = ["compute 700 ms – –", "communication 300 ms – –", "compute + communication 1.00 s 1.00 s +0.0 %"]
    assert parts(predicted, ranks) == shown
    assert parts(Timeline("predicted", 1.0, ()), ranks) == shown, "without the profile it is not known where"
    apart = tuple(replace(each, compute_s=1.0, communication_s=0.0) for each in ranks)
    assert parts(predicted, apart) == ["compute 1.00 s 1.00 s +0.0 %"]


def test_the_losses_of_longer_runs_are_averaged() -> None:
    losses = (*[2.0] * 5, 1.7, *[1.0] * 5)
    result = replace(RESULT, losses=losses)
    assert (
        "mean of the first 5 2.0000, of the last 5 1.0000"
        in run.RunReport(PLAN, result, PLAN.prediction, RESULT.timeline).render()
    )


def test_a_run_is_plain_data() -> None:
    found = run.RunReport(PLAN, RESULT, PLAN.prediction, RESULT.timeline).data()
    assert found["losses"] == [2.3026, 2.0, 1.5]
    assert found["measured"]["error"] == pytest.approx(0.1)
    assert found["numerics"] is None


def test_a_run_that_went_on_counts_all_steps_and_tells_its_evaluations() -> None:
    result = replace(RESULT, first_step=4, scores=(Score(7, 0.5, 8, 0.25), Score(8, 0.25, 8)))
    lines = run.RunReport(PLAN, result, PLAN.prediction, RESULT.timeline).render().splitlines()[-3:]
    assert lines == [
        "loss 2.3026 at step 5, 1.5000 at step 7",
        "evaluation after step 7: loss 0.5000, 25 % right (8 samples)",
        "evaluation after step 8: loss 0.2500 (8 samples)",
    ]


def test_a_job_that_was_started_again_says_so_wherever_it_is_told() -> None:
    lost = Restart(5, (1,), "rank 1 ended by signal SIGKILL without a word", "H501", 4, 1, 0.8)
    result = replace(RESULT, restarts=(lost,))
    line = "started again after step 4 (1 step again, 800 ms): rank 1 ended by signal SIGKILL without a word"
    assert line in run.RunReport(PLAN, result, PLAN.prediction, RESULT.timeline).render().splitlines()
    assert run.RunReport(PLAN, result, PLAN.prediction, RESULT.timeline).data()["restarts"][0]["resumed_step"] == 4
    assert loads(dumps(result.timeline_file(PLAN, RESULT.timeline)), TimelineFile).restarts == (lost,)


def run_with(monkeypatch: pytest.MonkeyPatch, result: RunResult | None) -> RunResult | None:
    def run_plan(plan: object, options: object, progress: launch_run.ShowRun, replanner: object) -> RunResult | None:
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

    def report(transport: str, *, has_details: bool) -> str:
        ran = replace(RESULT, transport=transport)
        return run.RunReport(plan, ran, plan.prediction, RESULT.timeline, has_details=has_details).render()

    same, other = (report(transport, has_details=True) for transport in ("shared memory", "gloo"))
    assert "samples/s, over shared memory" in same
    assert "difference" in same
    assert "difference" not in other
    assert ", +10 % measured" in report("shared memory", has_details=False)
    for words in (other, report("gloo", has_details=False)):
        assert "%" not in words.split("loss")[0]
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

    def run_plan(plan: object, options: object, progress: launch_run.ShowRun, replanner: object) -> RunResult:
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
    report = run.RunReport(PLAN, result, PLAN.prediction, RESULT.timeline).render()
    assert "1 update left out, of steps with NaN or infinity: 3" in report
    assert lines[1] in report
    assert run.RunReport(PLAN, result, PLAN.prediction, RESULT.timeline).data()["slow"][1] == {
        "rank": 1,
        "factor": 8.0,
        "step": 50,
        "why": "held up",
        "peer": 0,
    }
