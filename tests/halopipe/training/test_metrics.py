from __future__ import annotations

import csv
import importlib.util
import json
import math
from pathlib import Path

import pytest
import torch.distributed as dist

from halopipe.run_spec.result import Score
from halopipe.training.metrics import COLUMNS, Metrics, folder_of, require_writer
from planner.ir.errors import MissingFileError, UsageError
from runtime.engine import StepResult


def result(loss: float | None, rates: tuple[float, ...] = ()) -> StepResult:
    return StepResult(loss, 0.5, (), None, rates)


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_line_waits_for_its_loss_and_no_step_for_the_line(tmp_path: Path) -> None:
    path, store = tmp_path / "m.jsonl", dist.HashStore()
    with Metrics(str(path), store, 0, 1, 0) as first, Metrics(str(path), store, 1, 1, 0) as teller:
        first.step(1, 0, 4, result(None))
        assert lines(path) == []
        teller.step(1, 0, 4, result(2.5, (0.1, 0.1)))
        first.step(2, 0, 4, result(None, (0.2, 0.4)))
        assert [(each["step"], each["loss"], each["learning_rate"]) for each in lines(path)] == [(1, 2.5, 0.1)]
        assert lines(path)[0]["samples_per_s"] == 8
        teller.step(2, 0, 4, result(math.nan, (0.1,)))
    assert [(each["loss"], each["learning_rate"]) for each in lines(path)] == [(2.5, 0.1), ("nan", [0.2, 0.4])]
    assert store.num_keys() <= 1  # what was read is gone; a HashStore counts a key of its own


def test_steps_whose_loss_never_comes_are_written_without(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    metrics = Metrics(str(path), dist.HashStore(), 0, 1, 0)
    metrics.step(1, 0, 4, result(None))
    metrics.__exit__(ValueError, ValueError("the run failed"), None)
    assert [(each["step"], each["loss"]) for each in lines(path)] == [(1, None)]


def test_a_run_that_goes_on_keeps_the_lines_of_the_steps_that_count(tmp_path: Path) -> None:
    path, store = tmp_path / "m.jsonl", dist.HashStore()
    with Metrics(str(path), store, 0, 0, 0) as metrics:
        for step in range(1, 5):
            metrics.step(step, 0, 4, result(step))
        metrics.score(0, Score(4, 1.0, 8))
    with open(path, "a") as file:
        file.write('{"step": 5, "lo')  # a crash
    with Metrics(str(path), store, 0, 0, 3) as metrics:
        metrics.step(4, 0, 4, result(9.0))
    assert [(each["step"], each["loss"]) for each in lines(path)] == [(1, 1), (2, 2), (3, 3), (4, 9.0)]
    with Metrics(str(path), store, 0, 0, 0):
        assert lines(path) == []


def test_ranks_that_know_nothing_do_nothing(tmp_path: Path) -> None:
    path, store = tmp_path / "m.jsonl", dist.HashStore()
    with Metrics(str(path), store, 2, 1, 0) as metrics:
        metrics.step(1, 0, 4, result(None))
        metrics.score(0, Score(1, 1.0, 8))
    assert not path.exists()
    with Metrics("", store, 0, 0, 0) as metrics:
        metrics.step(1, 0, 4, result(1.0))
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_written_is_an_error_at_once(tmp_path: Path) -> None:
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
