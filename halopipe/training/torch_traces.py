"""Steps as ``torch.profiler`` sees them: a Chrome trace a rank, with the plan's actions around what they call.

    torch-traces/rank-0.json    operators, kernels, and ranges step 3, 0F0, 0B0, waiting for data, ...

A rank says what it does (:class:`runtime.monitor.activity.Activity`); while a step is traced, that is a range, too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from halopipe.run_spec.options import RunOptions
from planner.ir.errors import MissingFileError, UsageError
from runtime.monitor.activity import Activity

FOLDER = "torch-traces"
"""Unless another is named."""

_WRITING_S = 600.0  # a trace of large steps takes minutes to write


def steps_of(options: RunOptions) -> range:
    """The steps to trace, counted from 1; none if none are asked for.

    Raises:
        UsageError: that is not FIRST:LAST, or not within the run.
    """
    text = options.profile_steps
    if not text:
        return range(0)
    match = re.fullmatch(r"([1-9]\d{0,9})(?::([1-9]\d{0,9}))?", text)
    first, last = (int(match[1]), int(match[2] or match[1])) if match is not None else (1, 0)
    if first > last:
        raise UsageError(
            f"--profile-steps {text} is no range of steps",
            ["steps are counted from 1, and the last is traced, too"],
            ["--profile-steps 3:5", "--profile-steps 4, for one"],
        )
    if last > options.steps:
        raise UsageError(
            f"--profile-steps {text} is beyond the last step",
            [f"--steps is {options.steps}"],
            [f"--steps {last}", f"--profile-steps {min(first, options.steps)}:{options.steps}"],
        )
    return range(first, last + 1)


class TorchTraces:
    """Traces the steps of one rank that ``options`` ask for.

    Args:
        num_done: steps done before.

    Raises:
        UsageError: those to trace are among them.
    """

    def __init__(self, options: RunOptions, rank: int, activity: Activity, num_done: int) -> None:
        self._steps = steps_of(options)
        self._rank = rank
        self._activity = activity
        self._path = Path(options.profile_folder or FOLDER) / f"rank-{rank}.json"
        self._profile: profile | None = None
        self._range: record_function | None = None
        if self._steps and self._steps[0] <= num_done:
            raise UsageError(
                f"--profile-steps {options.profile_steps} are done already",
                [f"the checkpoint that the run goes on from is of step {num_done}"],
                [f"--profile-steps {num_done + 1}:{num_done + len(self._steps)}"],
            )

    def traces(self, number: int) -> bool:
        """Whether step ``number``, counted from 1, is traced."""
        return number in self._steps

    @contextmanager
    def around(self, number: int) -> Iterator[None]:
        """Step ``number`` is taken inside; after the last one, the trace is written.

        Raises:
            MissingFileError: it cannot be.
        """
        if not self.traces(number):
            yield
            return
        if self._profile is None:
            kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
            self._profile = profile(activities=kinds, acc_events=True)
            self._profile.start()
        self._activity.listener = self._begin
        try:
            with record_function(f"step {number}"):
                yield
                self._begin("")
        except BaseException:
            self._profile.stop()
            raise
        finally:
            self._activity.listener = None
        if number == self._steps[-1]:
            self._write(self._profile)

    def _begin(self, what: str) -> None:
        """A range ends where the next begins."""
        if self._range is not None:
            self._range.__exit__(None, None, None)
        self._range = record_function(what) if what else None
        if self._range is not None:
            self._range.__enter__()  # type: ignore[no-untyped-call]  # torch says no types of it

    def _write(self, tracer: profile) -> None:
        before_s = self._activity.deadline_s
        self._activity.begin("writing a trace")
        self._activity.deadline_s = _WRITING_S
        tracer.stop()
        tracer.add_metadata_json("rank", str(self._rank))
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            tracer.export_chrome_trace(str(self._path))
        except OSError as error:
            raise MissingFileError(
                f"cannot write {self._path}", [error.strerror or str(error)], ["--profile-folder another"]
            ) from error
        self._activity.deadline_s = before_s
