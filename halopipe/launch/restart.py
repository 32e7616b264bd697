"""A job that loses ranks and is started again: attempts, one after the other, until one reaches the last step.

    attempt 0     steps 0 1 2 3 4 5 x          rank 1 is killed: all others end at once
                          ^ checkpoint: steps 0 and 1 are done
    decide(LostAttempt)  the plan of the next attempt, by default the same
    attempt 1           steps 2 3 4 5 6 7 8    from the newest sound checkpoint, as ``--resume auto`` does

What the attempts did is told as one run: a loss for each step, whichever attempt computed it, and a
:class:`planner.ir.timeline.Restart` for each loss of ranks.  Attempts share nothing but the folder of checkpoints: each
has processes, a store and random numbers of its own, so that its steps are bit for bit those of a run that nobody
disturbed.

Under torchrun there is no such process, and its agents start the ranks again (``--max-restarts``); with
``--resume auto`` each attempt goes on as here, and tells of those before by what they left (:class:`EventLogs`).
"""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from halopipe.launch.combine import nothing_left
from halopipe.launch.spawn import spawn
from halopipe.run_spec.event_log import AttemptRecord, EventLog, cleared, event_log_path
from halopipe.run_spec.options import IF_ANY, RunOptions
from halopipe.run_spec.result import RunProgress, RunResult, Saves, Score, ShowRun
from halopipe.terminal import units
from halopipe.training.resuming import ResumePoint, resume_point
from planner.ir.codec import from_json, plain
from planner.ir.errors import (
    CheckpointError,
    FactoryError,
    HalopipeError,
    MissingFileError,
    StageFailedError,
    WorkerDiedError,
    WorkerError,
)
from planner.ir.files import read_plain, write_text
from planner.ir.plan import Plan
from planner.ir.scratch import scratch_folder
from planner.ir.timeline import Restart
from runtime.checkpoint.folders import complete_steps, make
from runtime.monitor.failure import also, blame


@dataclass(frozen=True, slots=True)
class LostAttempt:
    """Why an attempt of a job ended before its last step.

    Attributes:
        plan: that it ran.
        number: of the attempt, 0 for the first: how many restarts were made before.
        error: what ended it; such that starting again may help, see :func:`may_pass`.
        ranks: whose failure it is: those that died, or where a chain of waits ends; empty where nobody knows.
        step: steps that are kept, after which the next attempt goes on; 0: it begins anew.
        num_done: steps that were complete on all ranks.
        before: the lost attempts before this one, the first of them first.
    """

    plan: Plan
    number: int
    error: HalopipeError
    ranks: tuple[int, ...]
    step: int
    num_done: int
    before: tuple[LostAttempt, ...] = ()

    @property
    def devices(self) -> tuple[str, ...]:
        """Those of the lost ranks, as the plan calls them: ``n0/cpu1``."""
        return tuple(self.plan.decision.device_of(rank) for rank in self.ranks)

    @property
    def hosts(self) -> tuple[str, ...]:
        """Those of these devices: ``n0``."""
        return tuple(dict.fromkeys(device.rpartition("/")[0] for device in self.devices))

    @property
    def is_repeated(self) -> bool:
        """Whether a rank says the same at the same step as in the attempt before: so it will once more."""
        last = self.before[-1] if self.before else None
        return (
            last is not None
            and not blame(self.error)
            and (last.error.title, last.num_done) == (self.error.title, self.num_done)
        )


Decide = Callable[[LostAttempt], Plan | None]
"""Asked between attempts, when no process of the last one is left: the plan of the next one; None: the same again.

A HalopipeError that it raises ends the job in place of what ended the attempt.
"""


def may_pass(error: HalopipeError, num_done: int = 0) -> bool:
    """Whether starting again may help: what a worker met may not come again, a wrong file or option is there to stay.

    Nor does it help where a checkpoint cannot be saved: its disk is as full as before.  The user's own data, metric or
    optimiser may fail for once, as where a file server does, if they have worked for ``num_done`` steps.
    """
    if isinstance(error, FactoryError):
        return num_done > 0
    return isinstance(error, WorkerError) and not isinstance(error, CheckpointError)


def supervised(
    plan: Plan, options: RunOptions, progress: ShowRun | None = None, decide: Decide | None = None
) -> RunResult:
    """Runs all ranks on this host, again after each of up to ``options.restarts`` lost attempts; no process is left.

    Raises:
        HalopipeError: what ended the last attempt, with those before; or what ``decide`` raised.
    """
    with scratch_folder("job") as folder:
        return _Attempts(plan, options, progress, decide or (lambda attempt: None), folder).run()


@dataclass(slots=True)
class History:
    """What the attempts of a job have done so far, to be told as one run.

    Attributes:
        began_anew: whether the first of them had no checkpoint to go on from.
        steps: loss and seconds of those that count, whichever attempt did them.
        scores: evaluations, by the steps done before.
        saves: of the attempts that have ended.
        lost_s: ``time.time()`` when the last of them had.
    """

    began_anew: bool = False
    steps: dict[int, tuple[float, float]] = field(default_factory=dict)
    scores: dict[int, Score] = field(default_factory=dict)
    restarts: list[Restart] = field(default_factory=list)
    saves: Saves = field(default_factory=Saves)
    lost_s: float = 0.0

    def note(self, done: AttemptRecord) -> None:
        """Keeps what the attempt did, before its folder is cleared."""
        self.steps |= {step: (loss, done.step_seconds[step]) for step, loss in done.losses.items()}
        self.scores |= done.scores
        if self.restarts and not self.restarts[-1].recovery_s:
            began_s = time.time() if done.began_s is None else done.began_s
            self.restarts[-1] = replace(self.restarts[-1], recovery_s=began_s - self.lost_s)

    def lost(self, done: AttemptRecord, at_s: float) -> None:
        """Keeps what an attempt did that ended before its last step."""
        self.note(done)
        self.saves = self.saves.then(done.saves)
        self.lost_s = at_s

    def num_done(self, start: ResumePoint) -> int:
        """Steps that were complete, before the next attempt begins at ``start``."""
        return max(start.step, max(self.steps, default=-1) + 1)

    def restarted(self, start: ResumePoint, error: str, code: str, ranks: tuple[int, ...]) -> None:
        """The next attempt begins at ``start``: what was done after it does not count."""
        num_done = self.num_done(start)
        self.restarts.append(Restart(num_done, ranks, error, code, start.step, num_done - start.step))
        self.steps = {step: each for step, each in self.steps.items() if step < start.step}
        self.scores = {step: each for step, each in self.scores.items() if step <= start.step}

    def whole(self, result: RunResult) -> RunResult:
        """The result of the last attempt, with the steps of those before."""
        first = result.first_step
        before = list[tuple[float, float]]()
        while first - 1 in self.steps:
            first -= 1
            before.insert(0, self.steps[first])
        scores = [score for step, score in sorted(self.scores.items()) if first < step <= result.first_step]
        return replace(
            result,
            losses=(*(loss for loss, _ in before), *result.losses),
            step_seconds=(*(seconds for _, seconds in before), *result.step_seconds),
            first_step=first,
            scores=(*scores, *result.scores),
            restarts=tuple(self.restarts),
            saves=self.saves.then(result.saves),
        )


@dataclass(slots=True)
class _Attempts:
    plan: Plan
    options: RunOptions
    progress: ShowRun | None
    decide: Decide
    folder: Path
    lost_attempts: tuple[LostAttempt, ...] = ()
    history: History = field(default_factory=History)

    def run(self) -> RunResult:
        start = resume_point(self.plan, self.options)
        self.history.began_anew = not start.options.resume
        while True:
            for line in start.skipped if self.lost_attempts else start.lines:
                self._say(start.step, line)
            try:
                if start.is_end:
                    return self.history.whole(nothing_left(start))
                result = spawn(self.plan, start.options, self.progress, self.folder)
            except HalopipeError as error:
                self.history.lost(AttemptRecord.read(self.folder), time.time())
                if not may_pass(error, len(self.history.steps)) or len(self.lost_attempts) >= self.options.restarts:
                    self._tell_the_way_on(error)
                    if self.lost_attempts:
                        raise self._with_history(error) from error
                    raise
                start = self._after(error)
            else:
                self.history.note(AttemptRecord.read(self.folder))
                return self.history.whole(result)

    def _after(self, error: HalopipeError) -> ResumePoint:
        """Where the attempt after this one begins; its plan is decided.

        Raises:
            HalopipeError: there is to be none.
        """
        start = resume_point(self.plan, replace(self.options, resume=IF_ANY), began_anew=self.history.began_anew)
        num_done = self.history.num_done(start)
        cleared(self.folder)
        ranks = tuple(rank for rank in error.ranks if rank >= 0)
        before = self.lost_attempts
        attempt = LostAttempt(self.plan, len(before), error, ranks, start.step, num_done, before)
        plan = self.decide(attempt) or self.plan
        if plan == self.plan and attempt.is_repeated:
            raise also(error, ["it came twice at the same step: to start again would not help"])
        self.plan = plan
        self.lost_attempts = (*before, attempt)
        progress = f"after step {start.step}" if start.step else "from the beginning"
        progress += f" ({len(self.lost_attempts)} of at most {self.options.restarts})"
        self._say(start.step, f"{error.title}; started again {progress}")
        self.history.restarted(start, error.title, error.code, ranks)
        return start

    def _tell_the_way_on(self, error: HalopipeError) -> None:
        """Adds to what helps where the job's checkpoints can be gone on from."""
        steps = complete_steps(Path(self.options.checkpoint)) if self.options.checkpoint else ()
        if steps and isinstance(error, WorkerError):
            by_itself = "" if self.options.restarts else "; --restarts N does so by itself"
            remedy = f"--resume, to go on from step {steps[-1]}{by_itself}"
            if isinstance(error, (StageFailedError, CheckpointError)):  # that comes again
                remedy = f"once that is mended: --resume, to go on from step {steps[-1]}"
            error.remedies = (*(error.remedies or error.usual), remedy)

    def _with_history(self, error: HalopipeError) -> HalopipeError:
        history = [
            f"attempt {attempt.number + 1} ended after step {attempt.num_done}: {attempt.error.title}"
            for attempt in self.lost_attempts
        ]
        return also(error, [f"the job was started again {units.count(len(history), 'time')} before", *history])

    def _say(self, step: int, word: str) -> None:
        if self.progress is not None:
            self.progress(RunProgress(step, self.options.steps, None, 0.0, word=word))


class EventLogs:
    """What the attempts of a job of torchrun leave for one another, in the folder of its checkpoints.

        FOLDER/.halopipe.attempts/history.json       what the attempts before have done, by rank 0
                                  error.json         what the present one ended by, if rank 0 could say
                                  journal-RANK.jsonl what each of its ranks has done

    Torchrun's agents start ranks again and have no memory.  Their store has, so that an attempt knows whether it is one
    of the same job as those before.

    Args:
        job: a name that no other job has; empty: attempts leave nothing, since they cannot know that they are of one.
    """

    def __init__(self, checkpoints: Path, job: str) -> None:
        self.folder = checkpoints / ".halopipe.attempts"
        self._job = job
        self._history = self.folder / "history.json"
        self._error = self.folder / "error.json"
        self.history = History()
        self._is_begun = False

    def resume_point(self, plan: Plan, options: RunOptions) -> ResumePoint:
        """Where this attempt begins; rank 0 asks, before the others write anything.

        Raises:
            CorruptFileError: no checkpoint is sound, and the job did not begin by itself.
        """
        if not self._job:
            return resume_point(plan, options)
        kept = _read(self._history, _JobRecord)
        self._is_begun = True
        if kept.job != self._job:
            start = resume_point(plan, options)
            self.history = History(not start.options.resume)
        else:
            end = _read(self._error, _End)
            self.history = kept.history
            self.history.lost(AttemptRecord.read(self.folder), end.at_s or time.time())
            start = resume_point(plan, options, began_anew=self.history.began_anew)
            ended = end.error or f"ranks were lost after step {self.history.num_done(start)}"
            self.history.restarted(start, ended, end.code, end.ranks)
        with contextlib.suppress(OSError, MissingFileError):  # as on a full disk: the next attempt tells its own steps
            if self.folder.is_symlink():  # somebody's, whose files are not to be removed
                self.folder.unlink()
            make(self.folder)
            for path in self.folder.iterdir():
                path.unlink()
            write_text(self._history, json.dumps(plain(_JobRecord(self._job, self.history))))
        return start

    def event_log(self, rank: int) -> EventLog | None:
        """Of a rank of this attempt, once rank 0 has asked where it begins; None where none can be written."""
        if not self._job:
            return None
        try:
            return EventLog(event_log_path(self.folder, rank))
        except OSError:
            return None

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Notes what this attempt ends by, unless it has not even begun, as where another job holds the folder."""
        try:
            yield
        except HalopipeError as error:
            end = _End(error.title, error.code, error.ranks, time.time())
            if self._is_begun:
                with contextlib.suppress(OSError, MissingFileError):
                    write_text(self._error, json.dumps(plain(end)))
            raise

    def whole(self, result: RunResult) -> RunResult:
        """The result of the last attempt as that of the job, of which nothing is left there."""
        if not self._is_begun:
            return result
        self.history.note(AttemptRecord.read(self.folder))
        shutil.rmtree(self.folder, ignore_errors=True)
        return self.history.whole(result)


@dataclass(frozen=True, slots=True)
class _JobRecord:
    """What the attempts of a job have done."""

    job: str = ""
    history: History = field(default_factory=History)


@dataclass(frozen=True, slots=True)
class _End:
    """What an attempt ended by, and when; nothing where rank 0 could not say."""

    error: str = ""
    code: str = WorkerDiedError.code
    ranks: tuple[int, ...] = ()
    at_s: float = 0.0


T = TypeVar("T")


def _read(path: Path, kind: type[T]) -> T:
    """What a file of this folder says; nothing where it is not there, not whole, or somebody else's."""
    try:
        return from_json(read_plain(path), kind)
    except (OSError, ValueError):
        return kind()
