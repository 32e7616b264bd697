"""What a run tells of itself: metrics of its steps as lines, rows or events, and stages timed alone, unnoticed."""

from __future__ import annotations

import csv
import importlib.util
import json
import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from halopipe.run_spec.job import RankResult
from halopipe.run_spec.options import RunOptions
from halopipe.run_spec.result import RunResult, Score
from halopipe.training import isolated_timing
from halopipe.training.isolated_timing import LEAST_PASSES, MOST_PASSES, IsolatedTimer, budget_s
from halopipe.training.metrics import COLUMNS, Metrics, folder_of, require_writer
from planner.ir.errors import MissingFileError, UsageError
from planner.ir.plan import Plan, RankPrediction
from planner.ir.timeline import LonePasses
from profiler.source.source import load_model
from runtime.checkpoint import Checkpoint
from runtime.engine import StepResult
from runtime.stage.alone import LoneStage
from tests.captures import capture
from tests.halopipe import learners
from tests.halopipe.plans import RESNET, plan_of
from tests.halopipe.ranks import run_job
from tests.runtime.divided import divided as decide_divided


def result(loss: float | None, rates: tuple[float, ...] = ()) -> StepResult:
    return StepResult(loss, 0.5, (), None, rates)


def rows(path: Path, *names: str) -> list[tuple[object, ...]]:
    """Of each line the values of these names."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [tuple(line[name] for name in names) for line in lines]


def test_a_line_waits_for_its_loss_and_no_step_for_the_line(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    store = dist.HashStore()
    with Metrics(str(path), store, 0, 1, 0) as first, Metrics(str(path), store, 1, 1, 0) as teller:
        first.step(1, 0, 4, result(None))
        assert rows(path) == []
        teller.step(1, 0, 4, result(2.5, (0.1, 0.1)))
        first.step(2, 0, 4, result(None, (0.2, 0.4)))
        assert rows(path, "step", "loss", "learning_rate", "samples_per_s") == [(1, 2.5, 0.1, 8)]
        teller.step(2, 0, 4, result(math.nan, (0.1,)))
    assert rows(path, "loss", "learning_rate") == [(2.5, 0.1), ("nan", [0.2, 0.4])]
    assert store.num_keys() <= 1  # what was read is gone; a HashStore counts a key of its own


def test_steps_whose_loss_never_comes_are_written_without(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    metrics = Metrics(str(path), dist.HashStore(), 0, 1, 0)
    metrics.step(1, 0, 4, result(None))
    metrics.__exit__(ValueError, ValueError("the run failed"), None)
    assert rows(path, "step", "loss") == [(1, None)]


def test_a_run_that_goes_on_keeps_the_lines_of_the_steps_that_count(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    store = dist.HashStore()
    with Metrics(str(path), store, 0, 0, 0) as metrics:
        for step in range(1, 5):
            metrics.step(step, 0, 4, result(step))
        metrics.score(0, Score(4, 1.0, 8))
    with open(path, "a") as file:
        file.write('{"step": 5, "lo')  # a crash
    with Metrics(str(path), store, 0, 0, 3) as metrics:
        metrics.step(4, 0, 4, result(9.0))
    assert rows(path, "step", "loss") == [(1, 1), (2, 2), (3, 3), (4, 9.0)]
    with Metrics(str(path), store, 0, 0, 0):
        assert rows(path) == []


def test_ranks_that_know_nothing_do_nothing_and_a_file_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    for place, rank in ((str(tmp_path / "m.jsonl"), 2), ("", 0)):
        with Metrics(place, dist.HashStore(), rank, 1 if rank else 0, 0) as metrics:
            metrics.step(1, 0, 4, result(None if rank else 1.0))
            metrics.score(0, Score(1, 1.0, 8))
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(MissingFileError, match="cannot write the metrics"):
        Metrics(str(tmp_path / "file" / "m.jsonl"), dist.HashStore(), 0, 0, 0)


def train(place: str, steps: range, first_step: int = 0) -> None:
    """A run of these steps, with an evaluation at its end."""
    with Metrics(place, dist.HashStore(), 0, 0, first_step) as metrics:
        for step in steps:
            metrics.step(step, 0, 4, result(float(step), (0.1, 0.2)))
        metrics.score(0, Score(steps[-1], 1.5, 8, 0.25, {"dice": 0.5, "recall": 0.75}))


def test_a_table_has_a_row_a_record_and_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "m.csv"
    train(str(path), range(1, 5))
    with open(path, "a") as file:
        file.write("5,0,")  # a crash
    train(str(path), range(4, 6), first_step=3)
    with open(path, newline="") as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == COLUMNS
    assert [(row["step"], row["loss"], row["eval_loss"]) for row in rows] == [
        ("1", "1.0", ""),
        ("2", "2.0", ""),
        ("3", "3.0", ""),
        ("4", "4.0", ""),
        ("5", "5.0", ""),
        ("5", "", "1.5"),
    ]
    assert rows[0]["learning_rate"] == "0.1 0.2"
    assert rows[-1]["eval_metrics"] == "dice=0.5 recall=0.75"


def test_a_row_with_a_comma_in_a_name_is_kept_where_a_run_goes_on(tmp_path: Path) -> None:
    place = str(tmp_path / "m.csv")
    with Metrics(place, dist.HashStore(), 0, 0, 0) as metrics:
        metrics.score(0, Score(2, 1.5, 8, 0.25, {"recall, macro": 0.75}))
    train(place, range(3, 4), first_step=2)
    with open(place, newline="") as file:
        assert next((row["step"], row["eval_metrics"]) for row in csv.DictReader(file)) == ("2", "recall, macro=0.75")


def test_tensorboard_reads_what_was_written_and_steps_done_again_count_once(tmp_path: Path) -> None:
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for steps, first_step in ((range(1, 5), 0), (range(3, 6), 2)):
        train(f"tb:{tmp_path / 'events'}", steps, first_step)
    events = accumulators.EventAccumulator(str(tmp_path / "events")).Reload()
    assert {"train/loss", "train/learning_rate/1", "eval/loss", "eval/accuracy", "eval/dice"} <= set(
        events.Tags()["scalars"]
    )
    assert [(each.step, each.value) for each in events.Scalars("train/loss")] == [(n, float(n)) for n in range(1, 6)]


def test_a_folder_or_a_prefix_means_tensorboard_and_needs_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert folder_of(str(tmp_path)) == folder_of(f"tb:{tmp_path}") == tmp_path
    assert folder_of("new/") == Path("new")
    assert folder_of("m.csv") is folder_of("m.jsonl") is folder_of("") is None
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match="need the package tensorboard") as caught:
        require_writer("tb:logs")
    assert "pip install 'halopipe[tensorboard]'" in caught.value.remedies
    require_writer("m.csv")


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


def test_a_pass_leaves_the_generators_of_torch_as_they_were_and_has_the_samples_of_its_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = []
    plain = LoneStage.pass_s

    def watched(stage: LoneStage) -> float:
        before = torch.get_rng_state()
        seconds = plain(stage)
        states.append(torch.equal(before, torch.get_rng_state()))
        return seconds

    monkeypatch.setattr(LoneStage, "pass_s", watched)
    found = run_job(learners.replicas(), tmp_path, lone_passes="on")
    assert len(states) >= 2 * LEAST_PASSES
    assert all(states)
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
