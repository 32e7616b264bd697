"""What a script saves and loads; the ranks are threads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from halopipe.training.session import Execution
from planner.ir.errors import CorruptFileError, StaleFileError, UnknownNameError, UsageError
from runtime.checkpoint.lock import LOCK, held
from tests.halopipe import learners
from tests.halopipe.plans import plan_of
from tests.halopipe.training.sessions import CALM_PLANS, adamw, batch, lone, loss_of, one_device, steps, together


def test_what_is_saved_is_loaded_under_another_plan(tmp_path: Path) -> None:
    whole = loss_of(together(lone(), steps(0, 5), clip_norm=0.7))

    def first(execution: Execution) -> None:
        steps(0, 3)(execution)
        execution.save(tmp_path)

    def rest(execution: Execution) -> list[float]:
        assert execution.load(tmp_path) == execution.num_steps == 3
        return steps(3, 5)(execution)

    together(learners.replicas(), first, clip_norm=0.7)
    assert loss_of(together(learners.plan(), rest, clip_norm=0.7)) == pytest.approx(whole[3:], rel=1e-10)
    with pytest.raises(UsageError, match="was drawn from another seed") as caught:
        together(lone(), rest, seed=3)
    assert caught.value.remedies == ("execute(..., seed=0)",)
    with pytest.raises(StaleFileError, match="belongs to another model"):
        together(learners.plan_of_taggers(), rest)


def test_a_script_goes_on_from_the_newest_sound_checkpoint_if_there_is_any(tmp_path: Path) -> None:
    def begun(execution: Execution) -> list[float]:
        assert execution.load(tmp_path, step="auto") == execution.num_steps == 0
        losses = steps(0, 2)(execution)
        execution.save(tmp_path)
        losses += steps(2, 4)(execution)
        execution.save(tmp_path)
        return losses

    def rest(execution: Execution) -> list[float]:
        assert execution.load(tmp_path, step="auto") == 2
        return steps(2, 4)(execution)

    losses = loss_of(together(learners.plan(), begun))
    (tmp_path / "step-4" / "rank-1" / "tensors.safetensors").unlink()
    assert loss_of(together(learners.plan(), rest)) == losses[2:]
    (tmp_path / "step-2" / "manifest.sha256").write_text("0" * 64)
    with pytest.raises(CorruptFileError, match="sound"):
        together(learners.plan(), rest)
    with pytest.raises(UnknownNameError, match="no checkpoint 'newest'"):
        together(lone(), lambda execution: execution.load(tmp_path, step="newest"))


def test_a_script_saves_into_no_folder_that_another_job_writes_to_and_goes_on(tmp_path: Path) -> None:
    def refused(execution: Execution) -> list[float]:
        losses = steps(0, 2)(execution)
        with pytest.raises(UsageError) as caught:
            execution.save(tmp_path / "theirs")
        who = "another job writes its checkpoints into" if execution.rank == 0 else "rank 0 cannot write into"
        assert caught.value.title == f"{who} {tmp_path / 'theirs'}"
        execution.save(tmp_path / "own")
        assert (tmp_path / "own" / LOCK).exists()
        return losses + steps(2, 3)(execution)

    with held(tmp_path / "theirs"):
        losses = loss_of(together(learners.plan(), refused))
    assert losses == loss_of(together(learners.plan(), steps(0, 3)))
    assert [path.name for path in (tmp_path / "own").iterdir()] == ["step-2"], "the lock is gone with the run"


def test_who_goes_on_by_other_micro_batches_hears_what_changes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def saves(folder: Path) -> Callable[[Execution], None]:
        return lambda execution: execution.save(folder)

    def loads(folder: Path) -> Callable[[Execution], object]:
        return lambda execution: execution.load(folder)

    def said() -> list[str]:
        return [text for name, _, text in caplog.record_tuples if name.startswith("halopipe")]

    together(learners.plan(), saves(tmp_path / "draws"))
    together(learners.plan([]), loads(tmp_path / "draws"))
    assert said() == [], "stages and ranks change nothing"
    together(learners.plan(micro_batches=(2, 2, 2)), loads(tmp_path / "draws"))
    (word,) = said()
    was = f"{tmp_path}/draws/step-0 was saved by 2 micro-batches of 3, this plan has 3 micro-batches of 2: "
    assert word.startswith(f"{was}random draws or statistics of layer 2 go by micro-batch")
    assert word.endswith("to keep them: halopipe plan --micro-batch 3")
    together(learners.plan_of_taggers(), saves(tmp_path / "none"))
    other = learners.plan_of_taggers()
    micro_batches = replace(plan_of(other.inputs.model, [0.5], (4,)), inputs=other.inputs)
    together(micro_batches, loads(tmp_path / "none"))
    assert said() == [word], "this network draws nothing"


def test_a_checkpoint_of_a_step_is_never_overwritten(tmp_path: Path) -> None:
    def twice(execution: Execution) -> None:
        execution.save(tmp_path)
        execution.save(tmp_path)

    with pytest.raises(UsageError, match="there is a checkpoint of step 0"):
        together(lone(), twice)


def test_nothing_is_saved_or_loaded_between_updates(tmp_path: Path) -> None:
    def save_between(execution: Execution) -> None:
        execution.save(tmp_path)
        execution.step(batch(6, 0))
        execution.save(tmp_path / "other")

    def load_between(execution: Execution) -> None:
        execution.step(batch(6, 0))
        execution.load(tmp_path)

    for deed in (save_between, load_between):
        with pytest.raises(UsageError) as caught:
            together(lone(), deed, accumulate=2)
        assert "gradients wait for the update" in str(caught.value)


def test_a_checkpoint_brings_the_users_schedule_back(tmp_path: Path) -> None:
    def first(execution: Execution) -> None:
        steps(0, 2)(execution)
        execution.save(tmp_path)

    def rest(execution: Execution) -> list[float]:
        execution.load(tmp_path)
        return steps(2, 4)(execution)

    expected, _ = one_device(adamw, 4)
    plan = CALM_PLANS["two stages"]()
    together(plan, first, make=adamw)
    assert loss_of(together(plan, rest, make=adamw)) == pytest.approx(expected[2:], rel=1e-10)
