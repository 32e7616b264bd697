"""Planners beside one another, plans at scale, layouts, published runs, and systems that split in one more way."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import planner as planners
from benchmarks import scale
from benchmarks.known_answers import known
from benchmarks.layouts import EVERYTHING, SPACE, measure_case
from benchmarks.layouts import Case as LayoutCase
from benchmarks.planner import QUICK, Case, Result, cases, large, network, summary, timed
from benchmarks.published.__main__ import A100, main, measure
from benchmarks.published.runs import read, t4
from benchmarks.published.sailor import rows as sailor_rows
from benchmarks.seeds import parareal, terapipe
from benchmarks.seeds.branches import Network, best_plan
from benchmarks.seeds.jobs import adjoints
from benchmarks.seeds.schedules import predicted
from planner.extras.token_slices.search import best_slices
from planner.ir.codec import fingerprint
from planner.ir.plan import Plan
from planner.solvers import baselines
from tests.planner.networks import priced, residual

CASE = "VGG-16, 4, 1.25 GB/s"
DATA = Path("benchmarks/published/data")
SCALED = scale.Case(50, 64, 1, 5.0)
RESULT = scale.Result(SCALED, step_s=0.47, bound_s=0.42, status="time limit", seconds=5.4, peak_bytes=10**9)


@pytest.fixture(scope="module")
def found() -> tuple[Case, Plan]:
    case = next(cases((64,), 20.0, frozenset({CASE})))
    plan, _ = timed("best-first", case)
    assert plan is not None
    return case, plan


def test_a_case_compares_ours_with_every_baseline(capsys: pytest.CaptureFixture[str]) -> None:
    assert planners.main(["--quick", "--json", "--only", CASE]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert {name for name in baselines() if any(row.startswith(f"{CASE}: {name}") for row in rows)} == set(baselines())
    assert all(row["holds"] for row in rows.values())
    assert rows[f"{CASE}: gap"]["value"] == 0
    assert rows[f"{CASE}: bound"]["value"] == rows[f"{CASE}: step"]["value"]
    assert rows[f"{CASE}: pipedream / ours"]["value"] > 1
    assert rows[f"{CASE}: even-split, plans found"]["value"] == 0  # GPipe without recomputation keeps too much


def test_a_faster_baseline_and_an_open_gap_are_misses_and_one_without_a_plan_is_not_beaten(
    found: tuple[Case, Plan],
) -> None:
    case, plan = found
    cpu_s = dict.fromkeys(("best-first", *baselines()), 1.0)
    open_gap = replace(plan, search=replace(plan.search, gap=0.1, status="time limit"))
    result = Result(case, open_gap, {"pipedream": 0.9 * plan.prediction.step_s}, cpu_s)
    assert {row.name for row in (*result.rows(), *summary([result])) if not row.holds} == {
        f"{CASE}: gap",
        f"{CASE}: pipedream / ours",
        "cases where a baseline is faster than ours",
        "cases of up to 8 devices with gap 0",
    }
    alone = Result(case, plan, {}, cpu_s)
    rows = {row.name: row for row in (*alone.rows(), *summary([alone]))}
    assert not [name for name in rows if "/ ours" in name]
    assert rows["pipedream: plans found"].value == 0


def test_the_cases_are_those_that_were_promised_and_large_networks_have_given_totals() -> None:
    every = {case.name: case for case in cases((64,), 20.0)}
    assert len(every) == 3 * 2 * (3 + 3 + 4)
    assert set(every) >= QUICK
    graph = network(300)
    assert len({node.forward_s for node in graph.nodes}) == 300
    assert sum(node.forward_s + node.backward_s for node in graph.nodes) == pytest.approx(2.0)
    assert [(case.num_devices, len(case.problem.profile.graph.layers) - 1) for case in large().values()] == [
        (16, 1500),
        (24, 300),
        (1024, 1000),
    ]


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("changes", "missed"),
    [
        ({}, set()),
        ({"seconds": 5.6}, {"time"}),
        ({"peak_bytes": 3 * 2**30}, {"memory of the process"}),
        ({"bound_s": 0.40}, {"gap"}),
        ({"step_s": 1.01 * scale.BY_HAND_S, "bound_s": 0.45}, {"beside a plan by hand"}),
    ],
)
def test_each_goal_is_missed_by_what_misses_it(changes: dict[str, float], missed: set[str]) -> None:
    rows = replace(RESULT, **changes).rows()
    assert {row.name.rpartition(": ")[2] for row in rows if not row.holds} == missed


def test_more_devices_are_held_against_the_best_on_fewer() -> None:
    few, some, many = (replace(RESULT, case=replace(SCALED, devices=count)) for count in (8, 16, 64))
    steps = (replace(few, step_s=0.3), replace(some, step_s=0.5), replace(many, step_s=0.33))
    (row,) = scale.worse([steps[2], steps[0], steps[1], replace(RESULT, case=scale.Case(50, 8, 2, 5.0))])
    assert (row.name, row.holds) == ("50 layers, 5 s: worse with more devices, by", False)
    assert row.value == pytest.approx(100 * (0.5 / 0.3 - 1))
    (row,) = scale.worse([replace(few, step_s=0.5), replace(many, step_s=0.5)])
    assert row.holds


def test_networks_are_as_much_work_however_many_layers_the_same_each_time_and_planned() -> None:
    few = scale.scale_profile(50, 16, 2)
    many = scale.scale_profile(1000, 16, 2)
    assert fingerprint(few) == fingerprint(scale.scale_profile(50, 16, 2))
    kinds = [device.kind for device in few.cluster.devices]
    assert kinds == [kinds[0]] * 8 + [kinds[-1]] * 8
    assert kinds[0] != kinds[-1]
    work_s = [sum(m.forward_s for m in profile.measurements[kinds[0]] if m.samples == 1) for profile in (few, many)]
    assert work_s[1] == pytest.approx(work_s[0], rel=0.2)
    every = list(scale.cases(quick=False))
    assert len(every) == len(set(map(str, every))) == 3 * 5 * 2 * 4 + 6
    assert set(scale.cases(quick=True)) <= set(every)
    result = scale.planned(scale.Case(4, 8, 1, 20.0))
    assert (result.status, result.bound_s) == ("proven", pytest.approx(result.step_s))


@pytest.mark.parametrize("case", [LayoutCase(4, 4, SPACE), LayoutCase(4, 2, EVERYTHING, 6)])
def test_nothing_is_better_than_the_exact_layouts(case: LayoutCase) -> None:
    rows = list(measure_case(case, priced(*residual(), speeds=(1.0,) * 4)))
    ratios = [row for row in rows if row.unit == "ratio"]
    assert ratios
    assert all(row.holds for row in ratios)
    assert any(row.unit == "ms (proven)" for row in rows)


def test_published_runs_are_predicted_and_only_those_of_licensed_sources_ship() -> None:
    rows = {row.name: row for row in measure(quick=True)}
    assert rows[f"{A100}: mean error"].value < 4
    assert rows[f"{A100}: largest error"].holds
    assert rows["memory, Megatron on A100: mean error of memory"].holds
    assert rows["memory, Megatron-LM's tests, networks of 7e9 weights: mean error of the peak"].value < 2
    assert rows["memory, Megatron-LM's tests, all: mean error of the peak"].value < 7
    assert rows["Sailor, unlike GPUs: mean error"].holds
    assert rows["Sailor, GH200: mean error of memory"].holds
    assert rows["Alpa, 8 V100: mean error"].value < 5
    one = "Megatron on A100, gpt3-175B-selective"
    step_s = rows[f"{one}: predicted"].value
    measured_s = rows[f"{one}: measured"].value
    assert rows[f"{one}: error"].value == pytest.approx(100 * (step_s / measured_s - 1))
    assert "DS3Lab" not in "".join(path.read_text("utf-8") for path in DATA.glob("*.csv"))
    assert not list(DATA.glob("amp*"))


def test_sailors_clusters_are_planned_below_its_own_plans_by_both_models() -> None:
    rows = list(sailor_rows())
    judged = [row for row in rows if row.goal and "processor time" not in row.name]
    assert len(judged) == 9
    assert all(row.holds for row in judged)
    assert all(row.value <= 1e-6 for row in rows if "proven gap" in row.name)


def test_rows_of_a_folder_are_added_and_public_ones_show_errors_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    header = "micro_batch,tensor_parallel,data_parallel,pipeline,stage_boundaries,rank_map,amp_predicted_s,measured_s"
    stages = "0 4 6 8 10 12 14 16 18 19 20 21 22 23 24 25 30"
    plans = ["1,1,16,1,0 30,,9,1.0", f"32,1,1,16,{stages},,9,inf", "4,2,8,1,0 30,,9,2.0"]
    costs = [f"gpt2,G4,{tensor},{layer},0.004" for tensor in (1, 2) for layer in range(30)]
    for name, lines in {
        "published_runs.csv": (DATA / "published_runs.csv").read_text("utf-8").splitlines(),
        "amp_homogeneous.csv": [header, *plans],
        "amp_layer_costs.csv": ["model,instance,tensor_parallel,layer,forward_backward_or_forward_s", *costs],
    }.items():
        (tmp_path / name).write_text("\n".join([*lines, ""]), "utf-8")
    first, second, third = t4(read(tmp_path / "amp_homogeneous.csv"), read(tmp_path / "amp_layer_costs.csv"))
    assert [(each.ran, each.fits) for each in (first, second)] == [(True, True), (False, False)]
    assert third.error != first.error
    assert main(["--json", "--quick", "--data", str(tmp_path), "--public"]) == 0
    names = [row["name"] for row in json.loads(capsys.readouterr().out)]
    ours = [name for name in names if name.startswith("16 T4, ")]
    assert ours
    assert all(name.endswith(": error") for name in ours)


def test_predicted_gains_are_the_closed_forms() -> None:
    rows = [*predicted(), *(row for slices in (2, 5) for count in (1, 4) for row in parareal.predicted(slices, count))]
    assert len(rows) == 16 + 8
    assert [row.name for row in rows if not row.holds] == []
    assert all(row.value > 1.1 for row in rows)
    assert parareal.planned(2).value > 1.2


def test_branches_side_by_side_are_faster_than_their_best_chain() -> None:
    branches = Network((2, 2), 1, 64, 1e-3)
    side_by_side, chain = (best_plan(branches, (16,), is_chain=each, num_devices=3) for each in (False, True))
    assert side_by_side.search.status == chain.search.status == "proven"
    assert side_by_side.prediction.step_s < chain.search.bound_s
    one = best_plan(branches, (16,), is_chain=False, num_devices=1)
    assert one.prediction.step_s == pytest.approx(128 * 5 * 3e-3, rel=1e-3)


def test_token_slices_gain_most_on_the_largest_model_as_published() -> None:
    largest = terapipe.SETTINGS[-1]
    slices, formula_s = best_slices(terapipe.slice_times(largest).both, largest.stages, largest.samples)
    whole_s, step_s = (terapipe.step_s(largest, each) for each in ((terapipe.TOKENS,), slices))
    assert sum(slices) == terapipe.TOKENS
    assert step_s >= 0.999 * formula_s  # messages come on top
    assert whole_s / step_s > largest.published


def test_the_adjoints_of_random_exchanges_are_exact() -> None:
    row = adjoints(4)
    assert row.holds
    assert row.value > 0  # something was compared


@pytest.mark.parametrize("peer", ["pipedream", "sparsepipe"])
def test_every_known_answer_holds(peer: str) -> None:
    rows = [question.row() for question in known(peer, quick=True)]
    assert len(rows) > 5
    assert [row.name for row in rows if not row.holds] == []
