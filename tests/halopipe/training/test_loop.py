"""Training as people do it, by whole plans: data, evaluations, metrics, checkpoints.  Ranks are threads."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset

from benchmarks.robustness import metrics
from halopipe.reports import run
from halopipe.run_spec.result import RunResult
from halopipe.training.checkpointing import Checkpoints
from planner.ir import errors
from planner.ir.plan import Plan, RankPrediction
from planner.ir.profile import ModelSource
from planner.ir.schedule import Action, Op
from planner.ir.timeline import Span
from profiler.source.source import load_model
from runtime.checkpoint import Checkpoint, complete_steps, saving
from runtime.monitor.slow import StepLog
from runtime.rank import STOP
from tests.halopipe import learners
from tests.halopipe.bombs import DOZE_S, TIRING_STEP
from tests.halopipe.plans import mined, plan_of
from tests.halopipe.ranks import run_job

DATA = "tests.halopipe.learners:"
RECIPE = {
    "data": f"{DATA}dataset",
    "optimizer": "AdamW:lr=0.05",
    "scheduler": "CosineAnnealingLR:T_max=5",
    "clip_norm": 0.5,
    "steps": 8,
}
EVALUATION = {"eval_data": f"{DATA}dataset", "eval_every": 4, "eval_metric": f"{DATA}Confusion"}


@cache
def plans() -> dict[str, Plan]:
    return {"one": learners.plan([]), "two": learners.plan(), "four": learners.replicas()}


@cache
def expected() -> RunResult:
    """The recipe on one rank."""
    return run_job(plans()["one"], Path(), **RECIPE, **EVALUATION)


@cache
def whole(name: str) -> tuple[float, ...]:
    """The losses of the recipe by one of the plans."""
    return run_job(plans()[name], Path(), **RECIPE).losses


@pytest.mark.parametrize("way", ["each", "first", "share"])
@pytest.mark.parametrize("name", ["two", "four"])
def test_whoever_reads_the_data_training_is_the_same(tmp_path: Path, name: str, way: str) -> None:
    found = run_job(plans()[name], tmp_path, **RECIPE, **EVALUATION, data_from=way)
    wanted = expected()
    assert found.losses == pytest.approx(wanted.losses, rel=1e-10)
    assert [each.step for each in found.scores] == [4, 8]
    for one, other in zip(found.scores, wanted.scores, strict=True):
        assert (one.step, one.num_samples, one.accuracy) == (other.step, learners.NUM_SAMPLES, other.accuracy)
        assert (one.loss, set(one.metrics)) == (pytest.approx(other.loss, rel=1e-10), {"recall", "order"})
        assert one.metrics == pytest.approx(other.metrics, rel=1e-10)
        assert 0.0 < (one.accuracy or 0.0) < 1.0
    assert wanted.losses == whole("one"), "evaluating changes nothing"


@pytest.mark.parametrize("data", ["loader", "pieces", "stream"])
def test_the_first_rank_reads_iterators_and_loaders_for_all(tmp_path: Path, data: str) -> None:
    micro_batches = {"data": f"{DATA}{data}", "steps": 5}
    found = run_job(plans()["four"], tmp_path, **micro_batches, data_from="first")
    assert found.losses == pytest.approx(run_job(plans()["one"], tmp_path, **micro_batches).losses, rel=1e-10)


@pytest.mark.parametrize(
    ("data", "way"), [("sequences", "first"), ("some_sequences", "share"), ("some_sequences", "first")]
)
def test_batches_of_other_lengths_than_the_example_reach_all_ranks(tmp_path: Path, data: str, way: str) -> None:
    plan = learners.plan_of_taggers()
    options = {"data": f"{DATA}{data}", "steps": 4, "eval_data": f"{DATA}some_sequences"}
    found, wanted = (run_job(plan, tmp_path, **options, data_from=each) for each in (way, "each"))
    assert found.losses == wanted.losses
    assert found.scores == wanted.scores
    assert found.scores[0].accuracy is not None


def test_what_is_asked_for_is_what_one_device_does(tmp_path: Path) -> None:
    recipe = {**RECIPE, "accumulate": 3, "check_numerics": True}
    numerics = run_job(plans()["four"], tmp_path, **recipe).numerics
    assert numerics is not None
    assert set(numerics.worst) == {"loss", "gradient", "parameter"}
    assert max(each.error for each in numerics.worst.values()) < 1e-10


def test_a_plan_of_forward_passes_is_evaluated(tmp_path: Path) -> None:
    plan = learners.plan(schedule="forward")
    found = run_job(plan, tmp_path, data=f"{DATA}dataset", steps=4)
    assert not found.trained
    module = learners.classifier()[0].double().eval()
    inputs, targets = learners.samples()
    with torch.no_grad():
        loss = torch.nn.functional.cross_entropy(module(inputs.double()), targets).item()
    rows = (6, 6, 6, 1)
    mean = sum(each * count for each, count in zip(found.losses, rows, strict=True)) / sum(rows)
    assert mean == pytest.approx(loss, rel=1e-12)
    assert min(found.stage_forward_s) > 0
    assert found.stage_backward_s == (0, 0)
    report = run.RunReport(plan, found, *run.predicted_step(plan)).render()
    assert "mean loss of 4 steps" in report
    assert "forward passes alone, no training" in report


class OfHeads(Dataset[tuple[Tensor, tuple[Tensor, Tensor]]]):
    """Six samples with two targets each."""

    def __init__(self, global_batch: int, input_shape: tuple[int, ...], seed: int) -> None:
        self.inputs, (self.sizes, self.classes) = metrics.batch(7, "heads")

    def __len__(self) -> int:
        return metrics.SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        return self.inputs[index], (self.sizes[index], self.classes[index])


@pytest.mark.parametrize("way", ["each", "first", "share"])
@pytest.mark.parametrize("ranks", [[(0,), (1,)], [(0, 1), (2,)]], ids=str)
def test_whoever_reads_the_data_a_metric_is_called_as_the_loss_function_is(
    tmp_path: Path, way: str, ranks: list[tuple[int, ...]]
) -> None:
    network = metrics.NETWORKS["a loss of two heads"]
    plan = plan_of(network.source, [0.6], (4, 2), ranks=ranks)
    here = f"{__name__}:OfHeads"
    options = {"data": here, "eval_data": here, "eval_metric": "benchmarks.robustness.metrics:OfHeads"}
    found = run_job(plan, tmp_path, steps=1, optimizer="SGD:lr=0.0", data_from=way, **options)
    inputs, targets = metrics.held_out(network)[0]
    expected = metrics.OfHeads()
    with torch.no_grad():
        expected.update(load_model(network.source).module(inputs), targets)
    assert found.scores[-1].metrics == pytest.approx(
        {name: float(value) for name, value in expected.compute().items()}, rel=1e-10
    )


def test_what_a_metric_cannot_be_given_is_refused_before_the_first_step(tmp_path: Path) -> None:
    plan = plan_of(metrics.Network("with_features", metrics.MAE).source, [0.5])
    steps = tmp_path / "m.jsonl"
    options = {"data": f"{DATA}dataset", "metrics": str(steps), "eval_metric": "benchmarks.robustness.metrics:MAE"}
    with pytest.raises(errors.UsageError, match=r"number 1 is left out[\s\S]*name what metrics are to be given"):
        run_job(plan, tmp_path, **options, eval_data=options["data"])
    assert not steps.exists() or not read_metrics(steps)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_metrics_are_written_step_by_step(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "metrics.jsonl"
    found = run_job(plans()["four"], tmp_path, **RECIPE, metrics=str(path), **EVALUATION)
    lines = read_metrics(path)
    steps = [line for line in lines if "loss" in line]
    assert [line["step"] for line in steps] == list(range(1, 9))
    assert [line["epoch"] for line in steps] == [0] * 4 + [1] * 4
    assert tuple(line["loss"] for line in steps) == found.losses
    assert steps[0]["learning_rate"] == 0.05
    assert steps[5]["learning_rate"] == pytest.approx(0.0)
    assert all(line["gradient_norm"] > 0 and line["step_s"] > 0 for line in steps)
    assert steps[0]["samples_per_s"] == pytest.approx(6 / steps[0]["step_s"])
    assert [line["step"] for line in lines if "eval_loss" in line] == [4, 8]
    assert lines[4] == {
        "step": 4,
        "epoch": 0,
        "eval_loss": found.scores[0].loss,
        "eval_accuracy": found.scores[0].accuracy,
        "eval_samples": 19,
        "eval_metrics": found.scores[0].metrics,
    }


def test_a_run_that_fails_keeps_the_metrics_of_all_steps_before(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with pytest.raises(errors.UsageError, match="the data ended after 2 batches"):
        run_job(plans()["two"], tmp_path, data="tests.halopipe.bombs:short", metrics=str(path))
    assert [line["step"] for line in read_metrics(path)] == [1, 2]
    assert all(line["loss"] is not None for line in read_metrics(path))


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the checkpoints and metrics of a run by two stages that ended after 5 of 8 steps."""
    folder = tmp_path_factory.mktemp("half")
    options = {**RECIPE, "steps": 5, "checkpoint": str(folder / "saved"), "checkpoint_every": 2}
    run_job(plans()["two"], folder, **options, metrics=str(folder / "metrics.jsonl"))
    assert complete_steps(folder / "saved") == (2, 4, 5)
    return folder


@pytest.mark.parametrize("step", [5, 4])
@pytest.mark.parametrize(("name", "way"), [("two", "each"), ("one", "each"), ("four", "share"), ("four", "first")])
def test_a_run_goes_on_as_if_it_had_not_stopped(tmp_path: Path, half: Path, name: str, way: str, step: int) -> None:
    folder = Path(shutil.copytree(half / "saved", tmp_path / "saved"))
    for later in complete_steps(folder):
        if later > step:
            shutil.rmtree(folder / f"step-{later}")
    path = Path(shutil.copy(half / "metrics.jsonl", tmp_path))
    saved = {"checkpoint": str(folder), "resume": True, "keep": 2, "seed": 13}  # of no effect: the checkpoint has one
    found = run_job(plans()[name], tmp_path, **RECIPE, **saved, data_from=way, metrics=str(path))
    assert found.first_step == step
    assert found.losses == pytest.approx(expected().losses[step:], rel=1e-10)
    if name == "two":
        assert found.losses == whole("two")[step:]
    assert complete_steps(folder) == (step, 8)
    assert [line["step"] for line in read_metrics(path)] == list(range(1, 9))
    assert "at step 8" in run.RunReport(plans()[name], found, *run.predicted_step(plans()[name])).render()


def test_an_iterator_is_wound_forward(tmp_path: Path) -> None:
    recipe = {**RECIPE, "data": f"{DATA}stream"}
    whole = run_job(plans()["two"], tmp_path, **recipe)
    folder = str(tmp_path / "saved")
    run_job(plans()["two"], tmp_path, **{**recipe, "steps": 3}, checkpoint=folder)
    rest = run_job(plans()["two"], tmp_path, **recipe, checkpoint=folder, resume=True)
    assert rest.losses == whole.losses[3:]


def test_another_models_checkpoint_is_refused_with_both_fingerprints(half: Path, tmp_path: Path) -> None:
    options = {"checkpoint": str(half / "saved"), "resume": True, "steps": 9}
    with pytest.raises(errors.StaleFileError, match="belongs to another model") as caught:
        run_job(learners.plan_of_taggers(), tmp_path, **options)
    assert [line.split(":")[0] for line in caught.value.details] == ["checkpoint", "here"]
    assert (caught.value.code, caught.value.exit_code) == ("H304", 3)
    with pytest.raises(errors.StaleFileError, match="belongs to another model"):
        run_job(plans()["two"], tmp_path, **options, dtype="float32")


def test_nothing_left_to_do_and_nothing_there_are_told(half: Path, tmp_path: Path) -> None:
    saved = {"checkpoint": str(half / "saved"), "resume": True}
    with pytest.raises(errors.UsageError, match="all 5 steps are done") as caught:
        run_job(plans()["two"], tmp_path, **{**RECIPE, "steps": 5}, **saved)
    assert caught.value.remedies == ("--steps 10",)
    with pytest.raises(errors.UsageError, match="lies between updates of 2 steps each"):
        run_job(plans()["two"], tmp_path, **RECIPE, **saved, accumulate=2)
    with pytest.raises(errors.MissingFileError, match="no complete checkpoint"):
        run_job(plans()["two"], tmp_path, **RECIPE, checkpoint=str(tmp_path / "none"), resume=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"data": f"{DATA}loader", "data_from": "share"}, "ranks cannot share what .*loader gives"),
        ({"eval_data": f"{DATA}stream", "data_from": "share", "data": f"{DATA}dataset"}, "ranks cannot share"),
        ({"data": f"{DATA}dataset", "optimizer": "Adam:lr=-1"}, "cannot train with these numbers"),
        ({"scheduler": "StepLR"}, "cannot be made"),
    ],
)
def test_what_shows_only_on_the_ranks_is_an_error_with_its_remedy(
    tmp_path: Path, options: dict[str, object], message: str
) -> None:
    with pytest.raises(errors.UsageError, match=message) as caught:
        run_job(plans()["two"], tmp_path, **options)
    assert caught.value.exit_code == 2


def test_evaluation_may_look_at_some_batches_alone(tmp_path: Path) -> None:
    found = run_job(plans()["two"], tmp_path, steps=2, eval_data=f"{DATA}stream", eval_every=1, eval_batches=3)
    assert [(each.step, each.num_samples) for each in found.scores] == [(1, 18), (2, 18)]
    assert found.scores[0].loss != found.scores[1].loss


def ask_to_end(patch: pytest.MonkeyPatch, rank: int, step: int) -> None:
    """``rank``, and no other, is asked to end when it has done so many steps."""
    stepped = Checkpoints.stepped

    def asked(self: Checkpoints, step_s: float) -> None:
        stepped(self, step_s)
        if (self._context.rank, self._engine.num_steps) == (rank, step):
            self._end.ask("SIGTERM")

    patch.setattr(Checkpoints, "stepped", asked)


@pytest.mark.parametrize(
    ("name", "way", "accumulate", "saved"),
    [("two", "each", 1, 3), ("four", "first", 1, 3), ("four", "share", 1, 3), ("two", "each", 2, 4)],
)
def test_a_job_of_which_one_rank_is_asked_to_end_saves_and_goes_on_as_if_it_had_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, way: str, accumulate: int, saved: int
) -> None:
    recipe = {**RECIPE, "data_from": way, "accumulate": accumulate}
    undisturbed = run_job(plans()[name], tmp_path, **recipe)
    folder = tmp_path / "saved"
    with monkeypatch.context() as patch:
        ask_to_end(patch, rank=1, step=3)
        with pytest.raises(errors.EndedError, match=f"the job ended after {saved} steps") as caught:
            run_job(plans()[name], tmp_path, **recipe, checkpoint=str(folder))
    assert (caught.value.exit_code, caught.value.details) == (7, (f"saved as {folder}/step-{saved}",))
    assert complete_steps(folder) == (saved,)
    Checkpoint.open(folder).verify()
    rest = run_job(plans()[name], tmp_path, **recipe, checkpoint=str(folder), resume=True)
    assert (rest.first_step, rest.losses) == (saved, undisturbed.losses[saved:])


def test_a_job_that_is_asked_before_its_first_step_or_while_it_evaluates_ends_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "saved"
    options = {**RECIPE, **EVALUATION, "checkpoint": str(folder), "checkpoint_every": 4}
    ask_to_end(monkeypatch, rank=0, step=4)  # after which it evaluates
    with pytest.raises(errors.EndedError, match="after 4 steps"):
        run_job(plans()["two"], tmp_path, **options)
    assert complete_steps(folder) == (4,)
    monkeypatch.setattr(Checkpoints, "_wish", lambda self: STOP)  # from the first step on
    with pytest.raises(errors.EndedError, match="after 4 steps"):  # nothing is done since: nothing is saved again
        run_job(plans()["two"], tmp_path, **options, resume=True)
    with pytest.raises(errors.EndedError, match="before its first step") as caught:
        run_job(plans()["two"], tmp_path, **{**options, "checkpoint": str(tmp_path / "other")})
    assert caught.value.details == ("nothing was to be saved",)


@pytest.mark.parametrize(("accumulate", "steps"), [(1, tuple(range(1, 9))), (2, (2, 4, 6, 8))])
def test_all_ranks_save_behind_the_step_that_the_clock_of_one_says(
    tmp_path: Path, accumulate: int, steps: tuple[int, ...]
) -> None:
    recipe = {**RECIPE, "accumulate": accumulate}
    timed = {"checkpoint": str(tmp_path / "saved"), "checkpoint_every": "1us"}
    found = run_job(plans()["four"], tmp_path, **recipe, **timed)
    assert complete_steps(tmp_path / "saved") == steps
    assert found.losses == run_job(plans()["four"], tmp_path, **recipe).losses
    assert (found.saves.number, found.saves.failed) == (len(steps), 0)
    assert found.saves.stood_s > 0
    text = run.RunReport(plans()["four"], found, *run.predicted_step(plans()["four"])).render()
    assert f"\n{len(steps)} checkpoints: " in text
    assert run.RunReport(plans()["four"], found, *run.predicted_step(plans()["four"])).data()["checkpoints"][
        "number"
    ] == len(steps)


def test_auto_goes_on_with_what_it_has_seen_of_failures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("halopipe.training.save_times.FIRST_S", 1e-6)
    options = {**RECIPE, "checkpoint": str(tmp_path / "saved"), "checkpoint_every": "auto"}
    found = run_job(plans()["two"], tmp_path, **{**options, "steps": 5})
    assert found.saves.number >= 2
    assert found.saves.interval_s > 0
    first = Checkpoint.open(tmp_path / "saved", 1)
    assert [first.number(f"run/{name}") for name in ("failures", "ended")] == [0, False]
    assert first.number("run/plan") == "2 stages on 2 ranks, 1f1b, 2 micro-batches"
    shutil.rmtree(tmp_path / "saved" / "step-5")  # it ended in good order; now it did not
    run_job(plans()["two"], tmp_path, **options, resume=True)
    last = Checkpoint.open(tmp_path / "saved")
    assert [last.number(f"run/{name}") for name in ("failures", "ended")] == [1, True]
    assert last.number("run/seconds") > first.number("run/seconds") > 0


def full_at(patch: pytest.MonkeyPatch, *steps: int) -> None:
    """The disk of rank 1 is full at these steps."""
    write_rank = saving.write_rank

    def write(path: Path, step: int, state: object, rank: int, *others: object) -> object:
        if rank == 1 and step in steps:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write_rank(path, step, state, rank, *others)

    patch.setattr(saving, "write_rank", write)


def test_a_full_disk_costs_a_checkpoint_and_no_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    full_at(monkeypatch, 2, 6)
    found = run_job(plans()["two"], tmp_path, **RECIPE, checkpoint=str(tmp_path / "saved"), checkpoint_every=2)
    assert complete_steps(tmp_path / "saved") == (4, 8)
    assert found.losses == whole("two")
    assert (found.saves.number, found.saves.failed) == (4, 2)
    ours = "halopipe.training.checkpointing"
    (said, _) = [each.getMessage() for each in caplog.records if (each.name, each.levelno) == (ours, logging.WARNING)]
    assert said.startswith("the checkpoint of step 2 was not saved")
    assert "rank 1: [Errno 28] No space left on device: rank 1 needs " in said
    assert " are free on the disk of /" in said
    assert said.endswith("the job goes on, and tries again at the next interval")
    full_at(monkeypatch, 8)  # at the end the last good one is kept, and the job fails
    with pytest.raises(errors.CheckpointError, match="the checkpoint of step 8 was not saved"):
        run_job(plans()["two"], tmp_path, **RECIPE, checkpoint=str(tmp_path / "other"), checkpoint_every=3)
    assert complete_steps(tmp_path / "other") == (3,)


def test_a_step_with_nan_ends_the_job_and_the_last_good_checkpoint_stays(tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    with pytest.raises(errors.NotFiniteError, match=r"step 3: the batch has NaN in .*, micro-batch 1"):
        run_job(mined(), tmp_path, data="tests.halopipe.bombs:broken", checkpoint=str(folder), checkpoint_every=1)
    assert 1 in complete_steps(folder)
    assert 3 not in complete_steps(folder)


def test_an_update_that_is_skipped_is_counted_and_told(tmp_path: Path) -> None:
    options = {"data": "tests.halopipe.bombs:broken", "on_nan": "skip", "metrics": str(tmp_path / "m.jsonl")}
    plan = mined()
    found = run_job(plan, tmp_path, **options, optimizer="SGD:lr=0.01")
    assert [each.step for each in found.left_out] == [3]
    assert len(found.losses) == 5
    assert (
        "1 update left out, of steps with NaN or infinity: 3"
        in run.RunReport(plan, found, *run.predicted_step(plan)).render()
    )
    assert json.dumps(run.RunReport(plan, found, *run.predicted_step(plan)).data(), allow_nan=False)
    lines = [json.loads(line) for line in (tmp_path / "m.jsonl").read_text("utf-8").splitlines()]
    assert [line.get("left_out", False) for line in lines] == [False, False, True, False, False, False]
    assert lines[3]["loss"] < lines[1]["loss"]


def as_meant(patch: pytest.MonkeyPatch) -> None:
    """Forwards are noted with the seconds that they mean to take, whatever a busy machine makes of them."""
    note = StepLog.note

    def noted(self: StepLog, number: int, spans: tuple[Span, ...], step_s: float) -> None:
        def seconds(span: Span) -> float:
            action = Action.parse(span.action)
            if action.op not in (Op.FORWARD, Op.BACKWARD, Op.UPDATE):
                return span.stop_s - span.start_s
            is_slow = action.stage == 1 and number > TIRING_STEP
            return (1 + is_slow) * DOZE_S if action.op is Op.FORWARD else 0.0

        note(self, number, tuple(replace(span, stop_s=span.start_s + seconds(span)) for span in spans), step_s)

    patch.setattr(StepLog, "note", noted)


def test_a_rank_that_becomes_slow_is_named_in_result_and_metrics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Takes 4 s: what ranks say of their steps is looked at once a second."""
    as_meant(monkeypatch)
    plan = plan_of(ModelSource("tests.halopipe.bombs:tiring", {}, (4, 3)), [0.5])
    ranks = tuple(RankPrediction(rank, 2 * DOZE_S, 0.0, 0.0, 0, 0) for rank in range(2))
    plan = replace(plan, prediction=replace(plan.prediction, ranks=ranks))
    metrics = tmp_path / "m.jsonl"
    options = {"data": "tests.halopipe.bombs:tires", "optimizer": "SGD:lr=0.0", "steps": 160}
    found = run_job(plan, tmp_path, **options, metrics=str(metrics))
    named = [one for one in found.slow if one.step > TIRING_STEP and (one.rank, one.peer) == (1, None)]
    assert named[0].factor == pytest.approx(2.0, rel=0.01)
    assert named[0].why.startswith("stage 1 forward takes ")
    last = json.loads(metrics.read_text("utf-8").splitlines()[-1])
    assert last["slow"]["rank 1"] in [pytest.approx(one.factor) for one in named]
