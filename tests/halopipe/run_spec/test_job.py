"""The folder of a job, and what a rank that is lost leaves in it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from halopipe.run_spec.job import Done, Journal, job_folder, journal_path, sweep
from halopipe.run_spec.result import Saves, Score


def test_the_folder_of_a_job_whose_owner_was_killed_is_removed_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with job_folder() as mine:
        (mine / "job.json").touch()
        dead = tmp_path / "halopipe-job-dead"
        shutil.copytree(mine, dead)  # whose lock nobody holds
        foreign = tmp_path / "halopipe-job-foreign"
        foreign.mkdir()
        (foreign / "owner-of-another-host").touch()
        sweep()
        assert sorted(tmp_path.iterdir()) == sorted([mine, foreign])
        assert (mine / "job.json").exists()
        shutil.copytree(mine, dead)
    assert list(tmp_path.iterdir()) != [foreign]
    with job_folder() as other:
        assert sorted(tmp_path.iterdir()) == sorted([other, foreign])


def test_what_all_ranks_had_done_is_read_from_their_journals(tmp_path: Path) -> None:
    journals = [Journal(journal_path(tmp_path, rank)) for rank in range(2)]
    for step, loss in ((4, 0.1), (5, float("inf")), (6, 0.3)):
        journals[1].step(step, loss, 0.5)
        if step < 6:
            journals[0].step(step, None, 0.25 * step)
    journals[1].saves(Saves(1, stood_s=0.5))
    journals[1].saves(Saves(2, stood_s=0.75))
    journals[0].score(Score(5, 1.5, 8, 0.25, {"recall": 0.5}))
    with journal_path(tmp_path, 0).open("a") as file:
        file.write('{"step": 6, "loss": null')
    done = Done.read(tmp_path)
    assert done.losses == {4: 0.1, 5: float("inf")}
    assert done.step_seconds == {4: 1.0, 5: 1.25}
    assert done.scores == {5: Score(5, 1.5, 8, 0.25, {"recall": 0.5})}
    assert done.began_s is not None
    assert done.saves == Saves(2, stood_s=0.75)
    assert Done.read(tmp_path / "nowhere") == Done({}, {}, {})


def test_a_journal_that_the_disk_does_not_take_ends_with_its_last_whole_line(tmp_path: Path) -> None:
    journal = Journal(journal_path(tmp_path, 0))
    journal.step(0, 0.5, 1.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "write", lambda file, content: len(content) - 1)
        journal.step(1, 0.5, 1.0)
    journal.step(2, 0.5, 1.0)
    assert list(Done.read(tmp_path).losses) == [0]
