"""Real limits: memory that the kernel refuses or takes a process for, and a disk that is full.

*Memory.*  A rank that asks for more than its address space may be is refused by the kernel, and torch raises.  A rank
that is in a control group of little memory is killed by the kernel (the group is one of this process's own group, by
version 1 of the interface, where this process may make one).  Nobody else is in that group.

*Disk.*  The checkpoints lie on a file system of their own in memory, of 2 MiB, which something else fills at a random
moment of training, or while a checkpoint is being written.  Later the room is free again, and the job ends well, with
a line that says which disk it was; or it is not, and the job ends with H505 and the last good checkpoint, from which it
goes on when there is room.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.faults import victim
from benchmarks.faults.jobs import EVERY, STEPS, Outcome, left, memory, own_folder
from halopipe.launch.run import run_plan
from halopipe.run_spec.options import IF_ANY, RunOptions
from halopipe.run_spec.result import RunProgress, RunResult
from planner.ir.errors import CheckpointError, HalopipeError
from planner.ir.plan import Plan
from runtime.checkpoint import Checkpoint, complete_steps

FULL = "disk full"
FOR_A_WHILE = "free again"
TO_THE_END = "to the end"
FULL_S = 0.5
"""How long a disk is full that is free again; a step takes :data:`PAUSE_S` or more."""
PAUSE_S = 0.15

_DISK_BYTES = 2 << 20
_GROUP_BYTES = 64 << 20
_GROUPS = Path("/sys/fs/cgroup/memory")
_LOOK_S = 0.0005


@contextlib.contextmanager
def small_group() -> Iterator[Path | None]:
    """A control group of little memory, gone afterwards; None where it cannot be made."""
    try:
        lines = Path("/proc/self/cgroup").read_text("ascii").splitlines()
        own = next(line.split(":", 2)[2] for line in lines if ":memory:" in line)
        group = _GROUPS / own.strip("/") / f"halopipe-faults-{os.getpid()}"
        group.mkdir()
    except (OSError, StopIteration):
        yield None
        return
    try:
        (group / "memory.limit_in_bytes").write_text(str(_GROUP_BYTES))
        yield group
    finally:
        end_s = time.monotonic() + 5.0
        while group.exists():
            try:
                group.rmdir()
            except OSError as error:
                if error.errno != errno.EBUSY or time.monotonic() > end_s:
                    raise
                time.sleep(0.05)  # the process that was killed is not gone yet


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """A file system of little room at ``folder``, gone afterwards.

    Raises:
        OSError: it cannot be made.
    """
    folder.mkdir()
    options = f"size={_DISK_BYTES},mode=700"
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "halopipe-faults", folder], capture_output=True, text=True, check=False
    )
    if made.returncode:
        raise OSError(made.stderr.strip())
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def no_small_disk() -> str:
    """Why there can be none here; empty if there can."""
    with own_folder() as folder:
        try:
            with small_disk(folder / "disk"):
                return ""
        except OSError as error:
            return str(error)


@dataclass(frozen=True, slots=True)
class DiskTrial:
    """One job whose disk is filled.

    Attributes:
        moment: when it is filled: at any time, or while a checkpoint is being written.
        until: :data:`FOR_A_WHILE` or :data:`TO_THE_END`.
        at: when, as the share of the time of training or of its saves.
    """

    plan: str
    moment: str
    until: str
    at: float
    deed: str = FULL

    def __str__(self) -> str:
        return f"{self.deed} {self.until}, from {self.moment} on, {self.plan}"


def drawn(count: int, seed: int, plans: tuple[str, ...], moments: tuple[str, str]) -> Iterator[DiskTrial]:
    """Trials; ``moments`` are any time, and a save."""
    numbers = random.Random(f"disks {seed}")
    for number in range(count):
        until = (FOR_A_WHILE, TO_THE_END)[number % 2]
        yield DiskTrial(numbers.choice(plans), numbers.choice(moments), until, numbers.random())


def tried(trial: DiskTrial, plan: Plan, expected: RunResult, options: RunOptions, is_save: bool) -> Outcome:
    """The job on a disk that is filled, and started again where that ended it.

    Args:
        options: of the undisturbed job; the folder of checkpoints is another one.
        is_save: whether the disk is filled while a checkpoint is written.
    """
    with own_folder() as folder, small_disk(folder / "saved"):
        before = memory()
        saved = folder / "saved"
        said = list[str]()
        victim.slow_data(folder, PAUSE_S)
        options = replace(options, checkpoint=str(saved), resume=IF_ANY, restarts=0)
        over = threading.Event()
        filling = threading.Thread(target=_fill, args=(trial, folder, is_save, over), daemon=True)
        filling.start()

        def hear(at: RunProgress) -> None:
            if at.word:
                said.append(at.word)

        try:
            result = run_plan(plan, options, hear)
            ended: HalopipeError | None = None
        except HalopipeError as error:
            result = None
            ended = error
        finally:
            over.set()
            filling.join()
        wrong = _wrong_end(trial, saved, ended, said)
        if not wrong and ended is not None:
            _filler(saved).unlink()
            kept = max(complete_steps(saved), default=0)
            result = run_plan(plan, options)
            if result is not None and result.first_step != kept:
                wrong = f"it went on after step {result.first_step}, step {kept} was saved"
        if not wrong:
            losses = () if result is None else result.losses
            if result is None or losses != expected.losses[result.first_step :]:
                wrong = f"other losses: {losses} for {expected.losses}"
        return Outcome(trial, wrong or left(folder, before))


def _wrong_end(trial: DiskTrial, saved: Path, ended: HalopipeError | None, said: list[str]) -> str:
    """What is wrong with how the first start ended; empty: nothing."""
    told = [*said, *([ended.title, *ended.details] if ended else [])]
    if trial.until == FOR_A_WHILE:
        if ended is not None:
            return f"the job ended: {ended.title}"
        if STEPS not in complete_steps(saved):
            return f"steps {complete_steps(saved)} were saved"
    elif not isinstance(ended, CheckpointError):
        return f"the disk was full, and the job ended by {ended}"
    if trial.until == TO_THE_END and not any(str(saved) in line and "free" in line for line in told):
        return f"nobody says which disk is full: {told}"
    for step in complete_steps(saved):
        Checkpoint.open(saved, step).verify()
    return ""


def _filler(saved: Path) -> Path:
    return saved / "somebody-elses-data"


def _fill(trial: DiskTrial, folder: Path, is_save: bool, over: threading.Event) -> None:
    """Fills the disk when it is time, and makes room again where that belongs to the trial."""
    saved = folder / "saved"
    at_s = 0.0
    number = EVERY * (1 + int(trial.at * (STEPS // EVERY - 2)))
    while not (at_s and time.monotonic() >= at_s) and not (is_save and any(saved.glob(f"step-{number}*"))):
        if not at_s and not is_save and victim.has_begun(folder):
            at_s = time.monotonic() + trial.at * 0.6 * STEPS * PAUSE_S
        if over.wait(_LOOK_S):
            return
    with contextlib.suppress(OSError), _filler(saved).open("wb", buffering=0) as file:
        while True:  # whatever somebody gives back is taken as well
            try:
                file.write(bytes(4096))
            except OSError:
                if trial.until == FOR_A_WHILE:
                    break
                if over.wait(_LOOK_S):
                    return
    if not over.wait(FULL_S):
        _filler(saved).unlink()
