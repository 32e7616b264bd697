"""What became of a trial: how it is judged, what may not be left behind, and the rows of all trials."""

from __future__ import annotations

import contextlib
import os
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from benchmarks.report import Row, at_least, at_most
from cuda_ops.device.host import process_state

STEPS, EVERY = 12, 3
"""Of a job, and between its checkpoints."""

RECOVERY_S, BEYOND_S = 6.0, 2.0
"""Goals: from the loss of ranks to the first step of their successors; from the deadline to the end of all others."""


class Trial(Protocol):
    """A job with a fault; its text says what happens, and where."""

    @property
    def plan(self) -> str: ...
    @property
    def deed(self) -> str: ...
    @property
    def moment(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a trial.

    Attributes:
        wrong: why it did not end as it should; empty if it did.
        recoveries_s: of each restart by halopipe.
        repeated: steps done again.
        beyond_s: from the deadline after the fault to the end of the last process that was left, where all had to end.
    """

    trial: Trial
    wrong: str
    recoveries_s: tuple[float, ...] = ()
    repeated: int = 0
    beyond_s: float | None = None


def rows(found: Sequence[Outcome]) -> Iterator[Row]:
    """What is asked of all."""
    good = [each for each in found if not each.wrong]
    yield Row("trials", len(found), "")
    yield at_least("ended as they should", len(good), "", len(found))
    for name, of in (("fault", lambda t: t.deed), ("moment", lambda t: t.moment), ("plan", lambda t: t.plan)):
        counts, well = Counter(of(each.trial) for each in found), Counter(of(each.trial) for each in good)
        for kind, count in sorted(counts.items()):
            yield Row(f"{name} {kind}: trials", count, "")
            yield at_least(f"{name} {kind}: as they should", well[kind], "", count)
    recoveries = [s for each in found for s in each.recoveries_s]
    if recoveries:
        yield Row("restarts", len(recoveries), "")
        yield at_most("recovery, median", statistics.median(recoveries), "s", RECOVERY_S)
        yield Row("recovery, largest", max(recoveries), "s")
    yield at_most("steps repeated, most", max((each.repeated for each in found), default=0), "steps", 3 * EVERY)
    beyond: dict[str, list[float]] = {}
    for each in found:
        if each.beyond_s is not None:
            beyond.setdefault(each.trial.deed, []).append(each.beyond_s)
    for deed, seconds in sorted(beyond.items()):
        yield at_most(f"fault {deed}: ended beyond the deadline, latest", max(seconds), "s", BEYOND_S)
    if beyond:
        yield at_most("ended beyond the deadline, latest", max(max(each) for each in beyond.values()), "s", BEYOND_S)


@contextlib.contextmanager
def own_folder() -> Iterator[Path]:
    """A temporary directory of its own, for this process and those that it starts."""
    with tempfile.TemporaryDirectory() as name:
        before = os.environ.get("TMPDIR")
        os.environ["TMPDIR"], tempfile.tempdir = name, None
        try:
            yield Path(name)
        finally:
            tempfile.tempdir = None
            if before is None:
                del os.environ["TMPDIR"]
            else:
                os.environ["TMPDIR"] = before


def left(folder: Path, before: set[str]) -> str:
    """Processes of the job, files of it, memory, as one line; empty: nothing is left.

    Args:
        before: memory that was there before the job.
    """
    end_s = time.monotonic() + 2.0
    while (processes := workers()) and time.monotonic() < end_s:
        time.sleep(0.05)
    files = [path.name for path in folder.glob("halopipe-*")]
    more = sorted(memory() - before)
    return "; ".join(
        f"{what} left: {', '.join(map(str, each))}"
        for what, each in (("processes", processes), ("folders", files), ("memory", more))
        if each
    )


def workers() -> list[int]:
    """Processes that the forking servers of this process have forked."""
    numbers = [int(each.name) for each in Path("/proc").iterdir() if each.name.isdecimal()]
    parents = {number: state.parent for number in numbers if (state := process_state(number)) is not None}
    mine = {number for number, parent in parents.items() if parent == os.getpid()}
    return [number for number, parent in parents.items() if parent in mine]


def memory() -> set[str]:
    """Names of what processes of this machine share."""
    shared = Path("/dev/shm")
    return {path.name for path in shared.iterdir()} if shared.is_dir() else set()
