"""Where a run begins that goes on from what there is."""

from __future__ import annotations

import functools
import shutil
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist

from halopipe.run_spec.options import RunOptions
from halopipe.training.resuming import ResumePoint, resume_point, resume_point_by_rank_0, said_by_rank_0
from planner.ir.errors import CorruptFileError, NewerFileError, StaleFileError
from planner.ir.plan import Plan
from runtime.checkpoint import complete_steps
from tests.halopipe import learners
from tests.halopipe.plans import mined
from tests.halopipe.ranks import run_job
from tests.runtime.checkpoint.cases import forge


@functools.cache
def whole_plan() -> Plan:
    return mined()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of a run of six steps: 2, 4 and 6."""
    folder = tmp_path_factory.mktemp("saved")
    run_job(whole_plan(), folder, checkpoint=str(folder), checkpoint_every=2)
    assert complete_steps(folder) == (2, 4, 6)
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A copy of them."""
    return Path(shutil.copytree(saved, tmp_path / "saved"))


def begin(folder: Path, plan: Plan | None = None, **options: object) -> ResumePoint:
    plan = plan or whole_plan()
    return resume_point(plan, RunOptions(**{"steps": 8, "checkpoint": str(folder), "resume": "auto", **options}))


def damage(path: Path) -> None:
    """Flip a bit in the middle of the data of rank 1."""
    data = path / "rank-1" / "tensors.safetensors"
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)


def test_a_run_that_goes_on_from_what_there_is_begins_anew_where_there_is_nothing(tmp_path: Path) -> None:
    start = begin(tmp_path / "none")
    assert (start.options.resume, start.step, start.skipped, start.is_end) == (False, 0, (), False)


def test_what_was_asked_for_in_so_many_words_is_left_as_it_is(folder: Path) -> None:
    for resume in (False, True):
        assert begin(folder, resume=resume).options.resume is resume


def test_damaged_checkpoints_are_passed_over_with_a_word_each(folder: Path) -> None:
    start = begin(folder)
    assert (start.options.resume, start.options.resume_step, start.step, start.skipped) == (True, 6, 6, ())
    damage(folder / "step-6")
    shutil.rmtree(folder / "step-4" / "rank-0")
    start = begin(folder)
    assert (start.options.resume_step, start.step) == (2, 2)
    newest, older = start.skipped
    assert newest.startswith(f"checkpoint {folder}/step-6 is damaged and passed over: rank-1/tensors.safetensors")
    assert older.startswith(f"checkpoint {folder}/step-4 is damaged and passed over: rank-0")
    damage(folder / "step-2")
    with pytest.raises(CorruptFileError) as caught:
        begin(folder)
    assert caught.value.title == f"no checkpoint in {folder} is sound"
    assert len(caught.value.details) == 3


def test_a_checkpoint_of_a_newer_release_is_not_passed_over(folder: Path) -> None:
    forge(folder / "step-6", lambda text: text.replace('"version": 3', '"version": 99'))
    with pytest.raises(NewerFileError):
        begin(folder)


def test_a_run_all_of_whose_steps_are_done_is_at_its_end_if_they_were_those_of_its_model(folder: Path) -> None:
    start = begin(folder, steps=6)
    assert (start.is_end, start.end) == (True, f"all 6 steps are done: {folder}/step-6")
    assert begin(folder, steps=5).is_end
    assert begin(folder).lines == (f"going on from {folder}/step-6",)
    assert start.lines == ()
    other = replace(whole_plan(), inputs=replace(whole_plan().inputs, model_fingerprint="sha256:other"))
    with pytest.raises(StaleFileError, match="belongs to another model"):
        begin(folder, other, steps=6)


def test_it_goes_on_as_if_it_had_not_stopped_also_after_a_damaged_one(folder: Path, tmp_path: Path) -> None:
    damage(folder / "step-6")
    whole = run_job(whole_plan(), tmp_path, steps=8).losses
    rest = run_job(whole_plan(), tmp_path, **_options(begin(folder)))
    assert (rest.first_step, rest.losses) == (4, whole[4:])


def _options(start: ResumePoint) -> dict[str, object]:
    options = start.options
    return {name: getattr(options, name) for name in ("steps", "checkpoint", "resume", "resume_step")}


def test_a_run_by_other_micro_batches_is_told_what_changes_before_its_first_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved = {"checkpoint": str(tmp_path), "data": "tests.halopipe.learners:stream"}
    run_job(learners.plan(), tmp_path, steps=1, **saved)
    run_job(learners.plan(micro_batches=(2, 2, 2)), tmp_path, steps=2, resume=True, **saved)
    (word,) = [text for name, _, text in caplog.record_tuples if name.startswith("halopipe")]
    assert " was saved by 2 micro-batches of 3, this plan has 3 micro-batches of 2: " in word


def test_rank_0_looks_for_all_and_what_it_raises_all_raise(folder: Path) -> None:
    options = RunOptions(8, checkpoint=str(folder), resume="auto")
    store, found = dist.HashStore(), dict[int, ResumePoint]()

    def look(rank: int) -> None:
        found[rank] = resume_point_by_rank_0(whole_plan(), options, store, rank)

    other = threading.Thread(target=look, args=(1,))
    other.start()
    damage(folder / "step-6")
    look(0)
    other.join()
    assert found[0] == found[1]
    assert (found[1].step, len(found[1].skipped)) == (4, 1)
    for step in (2, 4):
        damage(folder / f"step-{step}")
    store = dist.HashStore()
    for rank in range(2):
        with pytest.raises(CorruptFileError, match="is sound"):
            resume_point_by_rank_0(whole_plan(), options, store, rank)
    assert said_by_rank_0(dist.HashStore(), "key", 0, lambda: "word") == "word"
