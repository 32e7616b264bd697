from __future__ import annotations

import json
from dataclasses import replace

import pytest

from benchmarks.planner import QUICK, Case, Result, cases, large, main, network, summary, timed
from planner.ir.plan import Plan
from planner.solvers import baselines

CASE = "VGG-16, 4, 1.25 GB/s"


@pytest.fixture(scope="module")
def found() -> tuple[Case, Plan]:
    case = next(cases((64,), 20.0, frozenset({CASE})))
    plan, seconds = timed("best-first", case)
    assert plan is not None
    assert seconds > 0
    return case, plan


def test_a_case_compares_ours_with_every_baseline(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--quick", "--json", "--only", CASE]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert {name for name in baselines() if any(row.startswith(f"{CASE}: {name}") for row in rows)} == set(baselines())
    assert all(row["holds"] for row in rows.values())
    assert rows[f"{CASE}: gap"]["value"] == 0
    assert rows[f"{CASE}: bound"]["value"] == rows[f"{CASE}: step"]["value"]
    assert rows[f"{CASE}: pipedream / ours"]["value"] > 1
    assert rows[f"{CASE}: even-split, plans found"]["value"] == 0  # GPipe without recomputation keeps too much


def test_a_faster_baseline_and_an_open_gap_are_misses(found: tuple[Case, Plan]) -> None:
    case, plan = found
    open_gap = replace(plan, search=replace(plan.search, gap=0.1, status="time limit"))
    step_s = {"pipedream": 0.9 * plan.prediction.step_s}
    result = Result(case, open_gap, step_s, dict.fromkeys(("best-first", *baselines()), 1.0))
    misses = {row.name for row in (*result.rows(), *summary([result])) if not row.holds}
    assert misses == {
        f"{CASE}: gap",
        f"{CASE}: pipedream / ours",
        "cases where a baseline is faster than ours",
        "cases of up to 8 devices with gap 0",
    }


def test_a_baseline_without_a_plan_is_not_beaten(found: tuple[Case, Plan]) -> None:
    case, plan = found
    result = Result(case, plan, {}, dict.fromkeys(("best-first", *baselines()), 1.0))
    rows = {row.name: row for row in (*result.rows(), *summary([result]))}
    assert not [name for name in rows if "/ ours" in name]
    assert rows["pipedream: plans found"].value == 0


def test_the_cases_are_those_that_were_promised() -> None:
    every = {case.name: case for case in cases((64,), 20.0)}
    assert len(every) == 3 * 2 * (3 + 3 + 4)
    assert set(every) >= QUICK
    sizes = [len({device.host for device in case.problem.profile.cluster.devices}) for case in every.values()]
    assert sorted(set(sizes)) == [1, 2, 4]


def test_large_networks_have_unlike_layers_and_given_totals() -> None:
    graph = network(300)
    assert len({node.forward_s for node in graph.nodes}) == 300
    assert sum(node.forward_s + node.backward_s for node in graph.nodes) == pytest.approx(2.0)
    assert sum(node.activation_bytes for node in graph.nodes) == pytest.approx(2e10)
    assert [case.num_devices for case in large().values()] == [16, 24, 1024]
    assert [len(case.problem.profile.graph.layers) - 1 for case in large().values()] == [1500, 300, 1000]
