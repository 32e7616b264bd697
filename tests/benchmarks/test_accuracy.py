"""The benchmark judges and covers what it says, and its committed results are those of the frozen predictions."""

from __future__ import annotations

import gzip
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.accuracy import __main__ as accuracy
from benchmarks.accuracy.cases import (
    CHOSEN,
    DATA_PARALLEL,
    FASTEST,
    ONE,
    case,
    pipeline,
)
from benchmarks.accuracy.report import Outcome, errors_apart, held_out, kendall_tau, mape, regret, rows, speed_ups_of
from benchmarks.accuracy.runs import Ran
from benchmarks.chains import chain_profile
from benchmarks.devices.ranks import RankStep, Step
from planner.ir.codec import fingerprint
from planner.ir.plan import Plan
from planner.ir.problem import Problem
from planner.ir.profile import SHARING

OUTCOME = Outcome("A", "ResNet-50", "1gbit", CHOSEN, 1.0, 0.9, 1.1, 1.0, ((100, 100),), (1.0, 1.1))
RESULTS = Path(accuracy.__file__).parents[1] / "results"


def outcomes(*seconds: tuple[float, float]) -> list[Outcome]:
    """Of (predicted, measured); the first is the planner's choice."""
    return [
        replace(OUTCOME, plan=CHOSEN if number == 0 else f"plan {number}", predicted_s=predicted, step_s=measured)
        for number, (predicted, measured) in enumerate(seconds)
    ]


def test_errors_order_and_regret_are_relative_to_what_was_measured() -> None:
    assert mape(outcomes((1.1, 1.0), (0.9, 1.0), (2.0, 2.0))) == pytest.approx(0.2 / 3)
    assert kendall_tau(outcomes((1, 1), (2, 2), (3, 3))) == 1.0
    assert kendall_tau(outcomes((3, 1), (2, 2), (1, 3))) == -1.0
    assert kendall_tau(outcomes((1, 1), (3, 2), (2, 3))) == pytest.approx(1 / 3)
    assert kendall_tau(outcomes((1, 1.0), (0.5, 1.005))) is None
    assert regret(outcomes((1, 1.2), (2, 1.0))) == pytest.approx(0.2)
    assert regret(outcomes((1, 0.9), (2, 1.0))) == 0.0


def test_a_network_is_judged_by_the_errors_of_the_others() -> None:
    near = [replace(each, network=name) for name in "abc" for each in outcomes((1.1, 1.0), (1.05, 1.0))]
    far = [replace(each, network="d") for each in outcomes((1.3, 1.0), (1.1, 1.0))]
    assert held_out(near) == 1.0
    assert held_out([*near, *far]) == pytest.approx(7 / 8)
    assert held_out(far) is None


def test_a_goal_that_is_missed_is_said_and_a_plan_that_has_two_names_counts_once() -> None:
    low = replace(OUTCOME, plan="low", peak_bytes=((98, 100), (130, 100)))
    twice = [OUTCOME, replace(OUTCOME, plan="again"), *outcomes((2.0, 1.0))]
    found = {row.name: row for row in rows(twice)}
    assert found["plans"].value == 2
    assert found["MAPE, all plans"].value == pytest.approx(50.0)
    assert not found["MAPE beyond own rounds, all plans"].holds
    assert found["MAPE beyond own rounds, all plans"].value == pytest.approx(45.0)
    assert not found["largest error beyond own rounds"].holds
    assert found["peak memory, MAPE"].holds
    assert found["the same work in another round, mean difference"].value == pytest.approx(10.0)
    found = {row.name: row for row in rows([low, *outcomes((1, 1), (2, 2))])}
    assert found["peak memory, largest under-prediction"].value == pytest.approx(2.0)


def test_an_error_within_what_the_rounds_differ_by_is_the_machines() -> None:
    within, beyond = (replace(OUTCOME, predicted_s=seconds) for seconds in (1.08, 0.7))
    assert within.beyond == 0.0
    assert beyond.beyond == pytest.approx(0.3 - 0.1)
    assert replace(OUTCOME, rounds_s=(1.0, 1.1, 1.0)).apart == pytest.approx(0.2 / 3)
    assert replace(OUTCOME, rounds_s=(1.0,)).apart == 0.0


def test_a_speed_up_is_over_the_turns_of_one_device_beside_the_plans() -> None:
    turns = [(1, ONE, 2.0), (1, "a", 1.0), (1, ONE, 4.0), (1, "b", 2.0), (1, ONE, 4.0), (2, ONE, 9.0), (2, "a", 3.0)]
    assert speed_ups_of(turns) == {"a": (3.0, 3.0), "b": (2.0,)}
    outcome = replace(OUTCOME, speed_up=3.3, speed_ups=(2.0, 3.0, 3.0))
    assert outcome.speed_up_error == pytest.approx(0.1)
    assert not {row.name: row for row in rows([outcome])}["speed-ups over one device, mean error"].holds
    assert replace(outcome, kind=ONE).speed_up_error is None


def test_errors_that_plans_of_a_setting_share_are_not_apart() -> None:
    alone = replace(OUTCOME, kind=ONE, predicted_s=1.2)
    shared = replace(OUTCOME, kind=SHARING, predicted_s=1.2)
    assert errors_apart([alone, shared]) == {(ONE, SHARING): pytest.approx(0.0)}
    assert errors_apart([alone, replace(shared, predicted_s=0.6)]) == {(ONE, SHARING): pytest.approx(math.log(2))}
    assert errors_apart([alone, replace(shared, setting="B")]) == {}


def test_one_device_has_a_turn_before_and_after_every_other_plan_and_every_process_has_a_row() -> None:
    problem = Problem(chain_profile(6, 2), 4)
    cases = [case(problem, name) for name in (CHOSEN, FASTEST, ONE, DATA_PARALLEL, "1f1b/2")]
    assert {len(each.decision.program) for each in cases} == {2}
    names = [turn.case.name for turn in accuracy._turns({"A": cases}, 1)]
    assert names[::2] == [ONE] * len(names[::2])
    others = {fingerprint(each.decision) for each in cases} - {fingerprint(cases[2].decision)}
    assert len(names) == 2 * len(others) + 1


def test_a_run_that_ended_early_goes_on_after_its_last_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever ends it, between any two turns; another question starts anew."""
    problem = Problem(chain_profile(6, 2), 4)
    planned = {"N1": [case(problem, name, pads=False) for name in (CHOSEN, ONE, DATA_PARALLEL)]}
    asked = accuracy.Asked(new=True, only=("N1",))
    ran = []

    def run_here(plan: Plan, steps: int, warm_up: int) -> Ran:
        ran.append(plan.decision)
        if len(ran) == 4:
            raise KeyboardInterrupt
        rank = RankStep(0.0, plan.prediction.step_s, 0.0, 0.0, 0.0, 0.0, (), 1, 0.5)
        return Ran([Step((rank,) * plan.decision.num_ranks)] * steps, [])

    monkeypatch.setattr(accuracy, "RESULTS", tmp_path)
    monkeypatch.setattr(accuracy, "run_here", run_here)
    monkeypatch.setattr(accuracy, "predict", lambda _asked, _settings: planned)
    with pytest.raises(KeyboardInterrupt):
        accuracy.measure(asked)
    monkeypatch.setattr(accuracy, "predict", lambda _asked, _settings: pytest.fail("predicted again"))
    found = {row.name: row.value for row in accuracy.measure(asked)}
    turns = len(list(accuracy._turns(planned, 1)))
    assert len(ran) == accuracy.HOST_ROUNDS * turns + 1  # one was cut short
    assert found["speed-ups over one device, largest error"] == pytest.approx(0.0, abs=1e-2)
    assert found["MAPE, all plans"] == pytest.approx(0.0, abs=1e-2)
    assert not accuracy.unfinished(asked).exists()
    measured = json.loads((tmp_path / "new" / "measured.json").read_text())
    predicted = json.loads((tmp_path / "new" / "predictions.json").read_text())
    assert measured["predictions_sha256"] == accuracy.digest_of(predicted)


@pytest.mark.parametrize("schedule", ["gpipe", "interleaved", "zb-v", "greedy"])
def test_pipelines_use_every_device_once_or_twice(schedule: str) -> None:
    found = pipeline(Problem(chain_profile(12, 3, speeds=(1.0, 0.5, 1.0)), 4), schedule, 1)
    assert set(found.groups) == {(0,), (1,), (2,)}
    assert found.stage_of == tuple(sorted(found.stage_of))
    work = [found.stage_of.count(stage) for stage in range(found.num_stages)]
    assert min(work) >= 1
    assert found.num_stages != 3 or work[1] < work[0]  # the slow one has less


def test_the_committed_results_are_of_the_committed_predictions() -> None:
    predicted = json.loads((RESULTS / "accuracy" / "predictions.json").read_text())
    measured = json.loads((RESULTS / "accuracy" / "measured.json").read_text())
    assert accuracy.digest_of(predicted) == measured["predictions_sha256"]
    plans = {name: [each["plan"] for each in plans] for name, plans in predicted.items()}
    assert plans == {name: list(plans) for name, plans in measured["settings"].items()}
    shown = {row["name"]: row["value"] for row in json.loads((RESULTS / "accuracy.json").read_text())}
    assert shown["plans"] == sum(len({each["decision"] for each in plans}) for plans in predicted.values())
    for setting in predicted:
        profile = gzip.decompress((RESULTS / "accuracy" / f"{setting}.profile.json.gz").read_bytes())
        assert json.loads(profile)["halopipe"] == "profile"
