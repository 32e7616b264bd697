"""What a rank that is lost leaves in the folder of its job."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from halopipe.run_spec.event_log import AttemptRecord, EventLog, event_log_path
from halopipe.run_spec.result import Saves, Score


@pytest.mark.parametrize(
    "line",
    ['{"step": "x"}', "[]", '{"step": 1, "loss": "x"}', '{"score": 1}', '{"saves": {"number": "x"}}', "[" * 10**5],
)
def test_lines_that_no_rank_wrote_are_left_out(tmp_path: Path, line: str) -> None:
    event_log_path(tmp_path, 0).write_text(f'{line}\n{{"step": 3, "loss": 0.5, "step_s": 1.0, "at_s": 5.0}}\n')
    done = AttemptRecord.read(tmp_path)
    assert (done.losses, done.scores, done.saves) == ({3: 0.5}, {}, Saves())


@pytest.mark.timeout(10)
def test_a_pipe_is_no_journal(tmp_path: Path) -> None:
    os.mkfifo(event_log_path(tmp_path, 0))
    with pytest.raises(OSError, match="No such device"):
        EventLog(event_log_path(tmp_path, 0))
    assert AttemptRecord.read(tmp_path).losses == {}


def test_what_all_ranks_had_done_is_read_from_their_journals(tmp_path: Path) -> None:
    journals = [EventLog(event_log_path(tmp_path, rank)) for rank in range(2)]
    for step, loss in ((4, 0.1), (5, float("inf")), (6, 0.3)):
        journals[1].step(step, loss, 0.5)
        if step < 6:
            journals[0].step(step, None, 0.25 * step)
    journals[1].saves(Saves(1, stood_s=0.5))
    journals[1].saves(Saves(2, stood_s=0.75))
    journals[0].score(Score(5, 1.5, 8, 0.25, {"recall": 0.5}))
    with event_log_path(tmp_path, 0).open("a") as file:
        file.write('{"step": 6, "loss": null')
    done = AttemptRecord.read(tmp_path)
    assert done.losses == {4: 0.1, 5: float("inf")}
    assert done.step_seconds == {4: 1.0, 5: 1.25}
    assert done.scores == {5: Score(5, 1.5, 8, 0.25, {"recall": 0.5})}
    assert done.began_s is not None
    assert done.saves == Saves(2, stood_s=0.75)
    assert AttemptRecord.read(tmp_path / "nowhere") == AttemptRecord({}, {}, {})


def test_a_journal_that_the_disk_does_not_take_ends_with_its_last_whole_line(tmp_path: Path) -> None:
    journal = EventLog(event_log_path(tmp_path, 0))
    journal.step(0, 0.5, 1.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "write", lambda file, content: len(content) - 1)
        journal.step(1, 0.5, 1.0)
    journal.step(2, 0.5, 1.0)
    assert list(AttemptRecord.read(tmp_path).losses) == [0]
