"""Steps are resumed, errors are rows, and what hangs is ended."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.first_gpu.frame import Bench, Outcome, Results, run_steps
from benchmarks.report import Row
from tests.benchmarks.first_gpu import steps


def run(folder: Path, step: str, **options: float) -> Results:
    results = Results(Bench(folder, rehearses=True), ["before", step])
    run_steps({step: f"{steps.__name__}:{step}"}, results, **options)
    return results


def rows_in(folder: Path) -> list[Row]:
    return [Row(**row) for row in json.loads((folder / "first_gpu.json").read_text("utf-8"))]


def test_what_is_done_is_written_and_not_done_again(tmp_path: Path) -> None:
    bench = Bench(tmp_path, rehearses=True)
    Results(bench, ["three"]).add(Outcome("three", "b", "cpu", rows=(Row("b: before", 2.0, "s"),)))
    run(tmp_path, "three")
    assert steps.ran(bench) == ["a", "c"]
    shown = {row.name: row.value for row in rows_in(tmp_path) if not row.name.endswith("took")}
    assert shown == {"three: b: before": 2.0, "three: a: one": 1.0, "three: c: one": 1.0}
    run(tmp_path, "three")
    assert steps.ran(bench) == ["a", "c"]


def test_a_rehearsal_does_not_count_for_the_gpu(tmp_path: Path) -> None:
    Results(Bench(tmp_path, rehearses=True), []).add(Outcome("three", "b", "cpu"))
    assert Results(Bench(tmp_path), []).done() == set()


def test_an_error_or_a_death_is_a_row_and_the_next_parts_go_on_in_this_call_and_the_failed_in_the_next(
    tmp_path: Path,
) -> None:
    bench = Bench(tmp_path, rehearses=True)
    results = run(tmp_path, "faulty")
    assert steps.ran(bench) == ["first", "raises", "between", "dies", "last"]
    failed = {row.name: row for row in rows_in(tmp_path) if not row.holds}
    raised, died = failed
    assert raised.startswith("faulty: raises: KeyError: 'on purpose'")
    assert died.startswith("faulty: dies: ")
    assert "signal 9" in died or "SIGKILL" in died or "killed" in died
    assert results.done() == {("faulty", name) for name in ("first", "between", "last")}
    run(tmp_path, "faulty")
    assert steps.ran(bench)[5:] == ["raises", "dies"]
    assert "Traceback" in (tmp_path / "log.txt").read_text("utf-8")


def test_a_step_that_hangs_is_ended_and_what_it_had_found_is_kept(tmp_path: Path) -> None:
    results = run(tmp_path, "endless", limit_s=1.0)
    assert results.done() <= {("endless", "quick")}
    (outcome,) = [each for each in results.outcomes.values() if each.error]
    assert outcome.error == "ended at its limit of 1 s"


def test_a_step_without_parts_says_why(tmp_path: Path) -> None:
    results = run(tmp_path, "without_parts")
    (outcome,) = results.outcomes.values()
    assert "no parts today" in outcome.error


@pytest.mark.parametrize("error", ["", "so"])
def test_outcomes_are_rows_under_the_name_of_their_step(error: str) -> None:
    shown = list(Outcome("plans", "one", "cuda", 3.0, error, (Row("ResNet: step", 1.0, "ms"),)).shown())
    assert [row.name for row in shown if row.holds] == ["plans: ResNet: step", "plans: one: took"]
    assert [row.name for row in shown if not row.holds] == (["plans: one: so"] if error else [])
