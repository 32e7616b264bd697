from __future__ import annotations

from dataclasses import replace

from benchmarks.chains import chain_profile
from halopipe.reports import explain
from halopipe.reports.predicted_vs_measured import timeline_table
from planner.ir.plan import Alternative, Measured, Plan, RankPrediction, Rejected, Search
from planner.ir.profile import ModelSource
from planner.ir.timeline import Span, Timeline
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
    one, several = with_uncut("l1 and l3"), with_uncut("l1 and l3", "l2 and l4", "l2 and l5")
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

    assert "\n  gap       16 % (time limit)" in first_lines(gap=0.15625)
    assert "\n  gap       0.0 % (proven)" in first_lines(status="proven", gap=0.0)
    assert "\n  gap       461 % (searched)" in first_lines(status="searched", gap=4.61)
    assert "\n  gap       not known: made by a rule" in first_lines(status="heuristic", bound_s=0.0)
    assert "all of the searched space was looked at" in explain.explain(
        replace(plan(0.0925), search=replace(SEARCH, status="searched"))
    )
    assert repr(replace(plan(0.0925), search=replace(SEARCH, gap=0.15625))).endswith("a step, time limit, gap 15.6%)")


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
    lines = timeline_table(predicted, measured, 1.32, [(0,)]).splitlines()
    assert [line.split()[-2:] for line in lines[1:4]] == [["+20", "%"], ["+25", "%"], ["+0.0", "%"]]
    assert lines[4].split() == ["stage", "0", "compute", "1.00", "s", "1.10", "s", "+10", "%"]
    assert lines[5].split() == ["stage", "0", "idle", "100", "ms", "200", "ms", "+100", "%"]
    unknown = timeline_table(Timeline("predicted", 1.0, ()), measured, 1.2, [(0,)]).splitlines()
    assert unknown[2].split() == ["stage", "0", "forward", "–", "500", "ms", "–"]
    said = (RankPrediction(0, 0.9, 0.06, 0.0, 1, 1, 0.04),)
    lines = timeline_table(Timeline("predicted", 1.0, ()), measured, 1.2, [(0,)], said).splitlines()
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
