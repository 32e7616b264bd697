"""Jobs that lose ranks: what is started again, where it goes on, and that its curve is that of a run without a loss."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest

from halopipe.launch import restart
from halopipe.launch.restart import Decide, EventLogs, History, LostAttempt, may_pass, supervised
from halopipe.launch.run import run_plan
from halopipe.run_spec.event_log import EventLog, event_log_path
from halopipe.run_spec.options import RunOptions
from halopipe.run_spec.result import RunProgress, RunResult, Saves, Score
from halopipe.training.resuming import newest_sound
from planner.ir import errors
from planner.ir.plan import Plan
from planner.ir.timeline import Timeline
from tests.forks import forked
from tests.halopipe.launch.jobs import plan_of_deeds
from tests.halopipe.plans import mined
from tests.halopipe.ranks import run_job
from tests.runtime.checkpoint.cases import alone, save_all, whole

STEPS = {"steps": 12, "warmup": 0, "data": "tests.halopipe.bombs:noise", "check_first_step": False}
CODES = {"memory": "H506", "stop": "H503"}


@pytest.mark.parametrize("deeds", [("exit", "memory", "segfault", "abort"), ("stop",)], ids=str)
def test_the_curve_of_a_job_that_lost_ranks_is_bit_for_bit_that_of_one_that_did_not(
    tmp_path: Path, deeds: tuple[str, ...]
) -> None:
    """Each deed at a later call than the one before, so that each attempt has one: at its first, second, ... step."""
    seen: list[RunProgress] = []
    once = [f"once:{deed}:{3 + 2 * number}:{tmp_path / deed}" for number, deed in enumerate(deeds)] + [""] * 3
    places = {0: (1, "B"), 1: (0, "F"), 2: (0, "B"), 3: (1, "F")}
    plan = plan_of_deeds((once[1], once[2]), (once[3], once[0]))
    deadline_s = 2.0 if "stop" in deeds else 20.0  # on a busy machine others must not be late too
    saved = {"checkpoint": str(tmp_path / "saved"), "checkpoint_every": 2, "deadline_s": deadline_s}
    result = run_plan(plan, RunOptions(**STEPS, **saved, restarts=len(deeds)), seen.append)
    assert result is not None
    (undisturbed,) = forked(1, lambda _: run_job(plan_of_deeds(("", ""), ("", "")), tmp_path, **STEPS).losses)
    assert result.losses == undisturbed
    assert (result.first_step, len(result.step_seconds), len(result.restarts)) == (0, 12, len(deeds))
    begun = 0
    words = []
    for number, (deed, lost) in enumerate(zip(deeds, result.restarts, strict=True)):
        assert (lost.ranks, lost.code) == ((places[number][0],), CODES.get(deed, "H501")), lost
        assert lost.step == lost.resumed_step + lost.repeated_steps == begun + 1 + number
        assert lost.resumed_step in (0, 2, 4, 6, 8)
        assert 0.0 < lost.recovery_s < 60.0
        begun = lost.resumed_step
        where = f"after step {begun}" if begun else "from the beginning"
        words.append(f"{lost.error}; started again {where} ({number + 1} of at most {len(deeds)})")
    assert [at.word for at in seen if at.word] == words


class Attempts:
    """In place of processes: each attempt does steps, saves every two of them, and ends as it is told."""

    def __init__(self, *ends: tuple[int, Exception | None], damages: bool = False) -> None:
        """``damages``: whether a disk spoils what the first attempt saves."""
        self.ends = ends
        self.damages = damages
        self.asked = list[tuple[Plan, RunOptions]]()

    def __call__(self, plan: Plan, options: RunOptions, progress: object, folder: Path) -> RunResult:
        assert not list(folder.glob("journal-*")), "the attempt before has left something"
        stop, error = self.ends[len(self.asked)]
        self.asked.append((plan, options))
        first = options.resume_step if options.resume else 0
        for rank in range(2):
            journal = EventLog(event_log_path(folder, rank))
            for step in range(first, stop):
                journal.step(step, None if rank == 0 else float(step), 0.1)
            journal.score(Score(first + 1, 0.5, 8))
            journal.saves(Saves(1 + rank, stood_s=0.25 + rank))
        with event_log_path(folder, 1).open("a") as file:
            file.write('{"step": 99, "lo')  # where it was killed
        for step in range(first + 2, stop + 1, 2):
            saved = save_all(Path(options.checkpoint), step, [alone(whole(), {"run/step": step})])
            if self.damages and len(self.asked) == 1:
                (saved / "manifest.sha256").write_text("0" * 64)
        if error is not None:
            raise error
        losses = tuple(map(float, range(first, stop)))
        seconds = (0.2,) * (stop - first)
        result = RunResult(losses, seconds, 0, Timeline("measured", 0.2, ()), (), (), (), first_step=first)
        return replace(result, saves=Saves(3, last_s=0.5))


Run = Callable[..., tuple[RunResult, Attempts, list[str]]]


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs eight steps in such attempts; gives the result, what was asked of them, and what was said."""
    plan = mined()
    numbers = count()

    def run(*ends: tuple[int, Exception | None], decide: Decide | None = None, **options: object) -> object:
        damages = bool(options.pop("damages", False))
        attempts = Attempts(*ends, damages=damages)
        said = list[RunProgress]()
        monkeypatch.setattr(restart, "spawn", attempts)
        folder = str(tmp_path / f"job-{next(numbers)}")
        asked = RunOptions(8, **{"checkpoint": folder, "restarts": 3, **options})
        result = supervised(plan, asked, said.append, decide)
        return result, attempts, [at.word for at in said]

    return run


def lost(
    title: str = "rank 1 is gone", kind: type[errors.HalopipeError] = errors.WorkerDiedError, rank: int = 1
) -> errors.HalopipeError:
    error = kind(title)
    error.ranks = (rank,)
    return error


def test_attempts_are_one_run(job: Run) -> None:
    losses: list[LostAttempt] = []
    ends = ((5, lost()), (4, lost("rank 0 hangs", errors.DeadlineError, 0)), (7, lost()), (8, None))
    result, attempts, said = job(*ends, decide=losses.append)
    assert result.losses == tuple(map(float, range(8)))
    assert result.step_seconds == (0.1,) * 6 + (0.2,) * 2
    assert result.first_step == 0
    assert result.saves == Saves(3 * 2 + 3, stood_s=3 * 1.25, last_s=0.5)
    assert [score.step for score in result.scores] == [1, 5]
    steps = [(each.step, each.resumed_step, each.repeated_steps) for each in result.restarts]
    assert steps == [(5, 4, 1), (4, 4, 0), (7, 6, 1)]
    assert [options.resume_step for _, options in attempts.asked] == [-1, 4, 4, 6]
    timed = replace(result, step_seconds=tuple(map(float, range(8))), warmup=1)
    assert timed.timed_seconds == (1.0, 2.0, 3.0, 5.0, 7.0)  # attempts begin with steps 0, 4, 4 and 6
    assert timed.timeline_file(mined(), timed.timeline).timed_seconds == timed.timed_seconds
    later = replace(timed, first_step=4, step_seconds=(4.0, 5.0, 6.0, 7.0))
    assert later.timed_seconds == later.timeline_file(mined(), later.timeline).timed_seconds == (5.0, 7.0)
    assert said[1] == "rank 0 hangs; started again after step 4 (2 of at most 3)"
    assert [(loss.number, loss.ranks, loss.devices, loss.hosts) for loss in losses] == [
        (0, (1,), ("n0/cpu1",), ("n0",)),
        (1, (0,), ("n0/cpu0",), ("n0",)),
        (2, (1,), ("n0/cpu1",), ("n0",)),
    ]
    assert losses[2].before == (losses[0], losses[1])


def test_a_loss_behind_the_last_checkpoint_leaves_nothing_to_do(job: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("halopipe.training.resuming._require_model", lambda saved, mine: None)
    result, attempts, _ = job((8, lost()))
    assert (len(attempts.asked), result.losses, result.first_step) == (1, tuple(map(float, range(8))), 0)
    assert result.end.startswith("all 8 steps are done: ")


def test_a_job_that_began_anew_begins_anew_where_none_of_its_checkpoints_is_sound(job: Run, tmp_path: Path) -> None:
    result, attempts, said = job((5, lost()), (8, None), damages=True)
    assert result.losses == tuple(map(float, range(8)))
    assert [(each.step, each.resumed_step, each.repeated_steps) for each in result.restarts] == [(5, 0, 5)]
    assert [options.resume for _, options in attempts.asked] == [False, False]
    saved = tmp_path / "job-0"
    assert said[0] == "rank 1 is gone; started again from the beginning (1 of at most 3)"
    assert [word.rpartition("; ")[2] for word in said[1:]] == [
        f"it is kept as {saved}/step-{step}.damaged-1" for step in (4, 2)
    ]
    assert newest_sound(saved)[0] is not None
    for path in saved.glob("step-?"):
        (path / "manifest.sha256").write_text("0" * 64)
    with pytest.raises(errors.CorruptFileError, match="is sound"):  # of an earlier job, whose state would be lost
        job(checkpoint=str(saved), resume="auto")


def test_a_job_that_went_on_from_an_earlier_one_does_not_begin_anew(job: Run, tmp_path: Path) -> None:
    saved = save_all(tmp_path / "earlier", 2, [alone(whole(), {"run/step": 2})])

    def spoil(loss: LostAttempt) -> None:
        (saved / "manifest.sha256").write_text("0" * 64)

    with pytest.raises(errors.CorruptFileError, match="is sound") as caught:
        job((3, lost()), (3, lost()), decide=spoil, checkpoint=str(saved.parent), resume="auto")
    assert caught.value.remedies == ("--checkpoint FOLDER --resume auto: another folder, to begin anew",)
    assert saved.exists()


def note(event_logs: EventLogs, error: errors.HalopipeError) -> None:
    """An attempt that ends by this error."""
    with pytest.raises(type(error)), event_logs.noted():
        raise error


def test_attempts_of_torchrun_are_told_as_one_run_by_what_they_leave(tmp_path: Path) -> None:
    """The second is lost without a word of why; another job knows nothing of them."""
    options = RunOptions(8, checkpoint=str(tmp_path), resume="auto")
    plan = mined()

    def attempt(first: int, stop: int, saved: int = 0) -> tuple[EventLogs, int]:
        journals = EventLogs(tmp_path, "one job")
        start = journals.resume_point(plan, options)
        for rank, journal in enumerate([journals.event_log(rank) for rank in range(2)]):
            assert journal is not None
            for step in range(first, stop):
                journal.step(step, float(step) if rank else None, 0.1)
            journal.saves(Saves(1, stood_s=0.25))
        if saved:
            save_all(tmp_path, saved, [alone(whole(), {"run/step": saved})])
        return journals, start.step

    first, begun = attempt(0, 5, saved=4)
    note(first, lost("rank 0 hangs", errors.DeadlineError, 0))
    _, resumed = attempt(4, 6)
    last, again = attempt(4, 8)
    assert (begun, resumed, again) == (0, 4, 4)
    found = RunResult((4.0, 5.0, 6.0, 7.0), (0.2,) * 4, 0, Timeline("measured", 0.2, ()), (), (), (), first_step=4)
    result = last.whole(found)
    assert (result.losses, result.first_step) == (tuple(map(float, range(8))), 0)
    assert result.saves == Saves(2, stood_s=0.5)
    hangs, silent = result.restarts
    assert (hangs.error, hangs.code, hangs.ranks) == ("rank 0 hangs", "H503", (0,))
    assert (hangs.step, hangs.resumed_step) == (5, 4)
    assert (silent.error, silent.ranks, silent.repeated_steps) == ("ranks were lost after step 6", (), 2)
    assert not last.folder.exists()
    attempt(4, 6)
    other = EventLogs(tmp_path, "another job")
    note(other, lost("the folder is held"))
    assert not (other.folder / "error.json").exists()
    assert other.resume_point(plan, options).step == 4
    assert other.history == History()
    nameless = EventLogs(tmp_path / "new", "")  # of attempts that cannot know one another
    assert nameless.resume_point(plan, replace(options, checkpoint=str(tmp_path / "new"))).step == 0
    note(nameless, lost("rank 0 hangs", errors.DeadlineError, 0))
    assert nameless.event_log(0) is None
    assert not nameless.folder.exists()


@pytest.mark.timeout(10)
@pytest.mark.parametrize("name", ["history.json", "error.json", "journal-0.jsonl"])
@pytest.mark.parametrize("text", ["", "[]", '{"job": "one job"}', '{"job": "one job", "history": {"steps": 1}}', "{}"])
def test_what_no_attempt_left_there_is_taken_for_nothing(tmp_path: Path, name: str, text: str) -> None:
    journals = EventLogs(tmp_path, "one job")
    journals.resume_point(mined(), RunOptions(8, checkpoint=str(tmp_path), resume="auto"))
    (journals.folder / name).unlink(missing_ok=True)
    (journals.folder / name).write_text(text) if text else os.mkfifo(journals.folder / name)
    options = RunOptions(8, checkpoint=str(tmp_path), resume="auto")
    assert EventLogs(tmp_path, "one job").resume_point(mined(), options).step == 0
    assert [path.name for path in journals.folder.iterdir()] == ["history.json"]


def test_a_link_in_the_place_of_their_folder_is_not_followed(tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    private = tmp_path / "private"
    saved.mkdir()
    private.mkdir()
    (private / "letter").touch()
    journals = EventLogs(saved, "one job")
    journals.folder.symlink_to(private)
    journals.resume_point(mined(), RunOptions(8, checkpoint=str(saved), resume="auto"))
    assert [path.name for path in private.iterdir()] == ["letter"]


def test_the_plan_of_the_next_attempt_is_what_was_decided(job: Run) -> None:
    other = mined(-1, "other")
    _, attempts, _ = job((3, lost()), (8, None), decide=lambda loss: other)
    assert [plan == other for plan, _ in attempts.asked] == [False, True]

    def refuse(loss: LostAttempt) -> Plan | None:
        raise errors.InfeasibleError("nothing fits")

    with pytest.raises(errors.InfeasibleError, match="nothing fits"):
        job((3, lost()), decide=refuse)


def test_when_no_restart_is_left_the_last_loss_is_told_with_those_before_and_how_to_go_on(job: Run) -> None:
    with pytest.raises(errors.WorkerDiedError) as caught:
        job((3, lost("first")), (5, lost("second")), restarts=1)
    assert caught.value.title == "second"
    assert caught.value.details == ("the job was started again 1 time before", "attempt 1 ended after step 3: first")
    with pytest.raises(errors.WorkerDiedError) as caught:
        job((3, lost("first")), restarts=0)
    assert caught.value.remedies[-1].startswith("--resume, to go on from step ")
    assert caught.value.remedies[-1].endswith("; --restarts N does so by itself")
    with pytest.raises(errors.StageFailedError) as failed:
        job((3, errors.StageFailedError("layer fc raised")), restarts=0)
    assert failed.value.remedies[-1].startswith("once that is mended: --resume, to go on from step ")
    with pytest.raises(errors.CheckpointError) as unsaved:  # --restarts would not help
        job((3, errors.CheckpointError("the disk is full")), restarts=0)
    assert unsaved.value.remedies[-1].startswith("once that is mended: --resume, to go on from step ")


def test_what_a_rank_names_twice_at_the_same_step_is_not_tried_again(job: Run) -> None:
    bomb = [errors.StageFailedError("rank 1 stopped at step 4: the bomb went off") for _ in range(2)]
    with pytest.raises(errors.StageFailedError, match="the bomb went off") as caught:
        job((4, bomb[0]), (4, bomb[1]))
    assert "it came twice at the same step: to start again would not help" in caught.value.details
    later = errors.StageFailedError(bomb[0].title)
    assert len(job((4, bomb[0]), (5, later), (8, None))[1].asked) == 3


PASSING = (
    errors.WorkerDiedError,
    errors.WorkerError,
    errors.StageFailedError,
    errors.DeadlineError,
    errors.OutOfMemoryError,
    errors.TransportError,
)
STAYING = (
    errors.CheckpointError,
    errors.NumericsError,
    errors.UsageError,
    errors.StaleFileError,
    errors.InfeasibleError,
    errors.FactoryError,
)


def test_only_what_may_not_come_again_is_tried_again(job: Run) -> None:
    assert all(may_pass(kind("x")) for kind in PASSING)
    for kind in STAYING:
        assert not may_pass(kind("x"))
        with pytest.raises(kind):
            job((0 if kind is errors.FactoryError else 3, kind("x")))
    assert may_pass(errors.FactoryError("data raised"), num_done=3), (
        "a user's own data may fail for once if they have worked"
    )


def test_a_job_of_torchrun_is_restarted_by_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(errors.UsageError) as caught:
        run_plan(mined(), RunOptions(checkpoint="saved", restarts=3))
    assert caught.value.remedies == ("torchrun --max-restarts 3 ... halopipe run PLAN --resume auto",)
