"""One job a folder: a lock file that says who writes the checkpoints there, and whether it still does.

    FOLDER/.halopipe.lock    {"host": "node7", "place": "...", "pid": 4242, "started": 1838, "job": "slurm 118", ...}

The kernel's own locks end with their process, but are not told to other hosts by every shared file system.  So the file
says which process it is, of which boot of which machine.  In the same place, a process is alive or is not; of another
host, the file's time is looked at, which its owner renews: both times compared are those of the file server.

Who may write into the folder may put anything there: a lock is a regular file, read without a wait, or is refused.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import socket
import stat
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from cuda_ops.device.host import process_state
from planner.ir.codec import from_json
from planner.ir.errors import MissingFileError, UsageError
from planner.ir.files import open_plain, read_plain
from runtime.checkpoint.folders import make
from runtime.transport.segments import boot_id

LOCK = ".halopipe.lock"

BEAT_S = 10.0
"""Between two renewals of the file's time."""

STALE_S = 60.0
"""A lock of another host whose time is older than this has lost its owner."""

_MOST_BYTES = 4096
_LATEST_S = 2.0**35  # the year 3058
_TURN_S = 0.02
_PATIENCE_S = 2.0  # for another that takes a lock away, which is done in milliseconds
_ENDED = ("Z", "X")  # a zombie holds nothing, until its parent asks for its exit code or for ever
_NOBODY = "a process that is not known"

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LockOwner:
    """Who holds a folder.

    Attributes:
        place: where process numbers mean the same: a boot of a machine, and the namespace of its processes; empty
            where the system does not say.
        started: when the process was, in the kernel's ticks: numbers of processes come again.
        since_s: when it took the folder, in seconds of the epoch, for people.
        job: what its launcher calls the job, which may start again on another host; empty where nobody says.
    """

    host: str
    place: str
    pid: int
    started: int
    since_s: float
    job: str = ""

    def __post_init__(self) -> None:
        """A file may say anything: a time that is none raises ValueError."""
        if not 0.0 <= self.since_s <= _LATEST_S:
            raise ValueError(f"{self.since_s:g} s is no time of a job")

    @classmethod
    def here(cls, environment: Mapping[str, str] = os.environ) -> LockOwner:
        """This process."""
        step = environment.get("SLURM_STEP_ID", "batch")
        pid = os.getpid()
        run = environment.get("TORCHELASTIC_RUN_ID", "none")
        job = environment.get("SLURM_JOB_ID", "")
        # torchrun says "none" where nobody named the run
        name = f"torchrun {run}" if run != "none" else f"slurm {job}.{step}" if job else ""
        return cls(socket.gethostname(), _place(), pid, _started(pid), time.time(), name)

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since_s))
        return f"process {self.pid} on {self.host}" + (f" ({self.job})" if self.job else "") + f", since {since}"


@contextlib.contextmanager
def held(folder: Path) -> Iterator[None]:
    """Holds ``folder``, made where it is missing, for this process, and nobody else does; if it stays empty, it goes.

    Raises:
        UsageError: another job holds it.
        MissingFileError: nothing can be written there.
    """
    path = folder / LOCK
    mine = LockOwner.here()
    with _gone_if_empty(folder):
        try:
            make(folder)
            _take(path, mine)
        except OSError as error:
            remedies = ["another folder for checkpoints"]
            raise MissingFileError(f"cannot write into {folder}", [error.strerror or str(error)], remedies) from None
        over = threading.Event()
        beating = threading.Thread(target=_beat, args=(path, mine, over), name="lock", daemon=True)
        beating.start()
        try:
            yield
        finally:
            over.set()
            beating.join(BEAT_S)
            with contextlib.suppress(OSError):
                if _owner(path) == mine:
                    path.unlink()


@contextlib.contextmanager
def _gone_if_empty(folder: Path) -> Iterator[None]:
    """Removes ``folder`` and those around it that are missing now and hold nothing in the end, as after a failure."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # the first that holds something
            for path in missing:
                path.rmdir()


def _take(path: Path, mine: LockOwner) -> None:
    """Makes ``path`` the lock of ``mine``; a lock that has lost its owner makes way."""
    ends_s = time.monotonic() + _PATIENCE_S
    while not _made(path, mine):
        with contextlib.suppress(FileNotFoundError):  # it is gone by now
            _remove_stale(path, mine, is_late=time.monotonic() > ends_s)


def _made(path: Path, mine: LockOwner) -> bool:
    """Makes the file, which says who has done so; False where there is one, on every file system."""
    try:
        with open(path, "x", encoding="utf-8") as file:
            try:
                file.write(json.dumps(asdict(mine)))
                file.flush()
            except OSError:  # as on a full disk, where an empty file would hold the folder
                path.unlink()
                raise
        return True
    except FileExistsError:
        return False


def _remove_stale(path: Path, mine: LockOwner, *, is_late: bool) -> None:
    """Takes away a lock that has lost its owner, as one process at a time does.

    Raises:
        UsageError: it has not; or another takes it away, and is not done although ``is_late``.
        MissingFileError: it is no file.
        FileNotFoundError: it is gone.
    """
    _require_stale(path, mine)
    turn = path.with_name(f"{LOCK}.taking")
    if not _made(turn, mine):
        _require_file(turn)
        if _why_stale(_owner(turn), mine, _age_s(turn)):
            _remove_turn(turn, mine)
        elif is_late:
            raise _refused(turn, _owner(turn), mine, _age_s(turn))
        time.sleep(_TURN_S)
        return
    try:
        owner, why = _require_stale(path, mine)  # again: now nobody else takes it away
        path.unlink()
    finally:
        turn.unlink()
    _log.warning("the folder %s is taken over from %s: %s", path.parent, owner or _NOBODY, why)


def _remove_turn(turn: Path, mine: LockOwner) -> None:
    """Takes away the file of one that ended while it took a lock away; no other that has its place by now."""
    handle = open_plain(turn)
    try:
        with contextlib.suppress(OSError):  # on a file system without locks two may do so at once
            fcntl.flock(handle, fcntl.LOCK_EX)
        if os.path.samestat(os.fstat(handle), turn.lstat()) and _why_stale(_owner(turn), mine, _age_s(turn)):
            turn.unlink()
    finally:
        os.close(handle)


def _require_stale(path: Path, mine: LockOwner) -> tuple[LockOwner | None, str]:
    """Whose lock it was and why it holds no more; raises as :func:`_remove_stale`."""
    _require_file(path)
    owner = _owner(path)
    age_s = _age_s(path)
    why = _why_stale(owner, mine, age_s)
    if not why:
        raise _refused(path, owner, mine, age_s)
    return owner, why


def _require_file(path: Path) -> None:
    """Refuses at once what stands in a lock's place and is none."""
    if not stat.S_ISREG(path.lstat().st_mode):
        what = "it is no regular file, as a lock is"
        raise MissingFileError(
            f"cannot write into {path.parent}: {path.name} is in the way", [what], [f"remove {path}"]
        )


def _age_s(path: Path) -> float:
    """How long ago the file was renewed, by the clock of the file server."""
    probe = path.with_name(f"{LOCK}.{uuid.uuid4().hex}")
    probe.touch()
    try:
        return probe.stat().st_mtime - path.stat().st_mtime
    finally:
        probe.unlink()


def _why_stale(owner: LockOwner | None, mine: LockOwner, age_s: float) -> str:
    """Why a lock holds no more; empty: it does."""
    if owner is not None and owner.place and owner.place == mine.place:
        return "" if _started(owner.pid) == owner.started != 0 else "it has ended"
    if owner is not None and owner.job and owner.job == mine.job:
        return "it is the same job, which was started again"
    return f"nothing was heard of it for {age_s:.0f} s" if age_s > STALE_S else ""


def _refused(path: Path, owner: LockOwner | None, mine: LockOwner, age_s: float) -> UsageError:
    remedies = ["wait until it ends", "another folder for checkpoints"]
    if owner is None or owner.place != mine.place:
        remedies.insert(1, f"if that job is gone: start again in {max(1.0, STALE_S - age_s):.0f} s, or remove {path}")
    details = [f"{owner or _NOBODY} holds it", f"it was heard of {max(0.0, age_s):.0f} s ago"]
    return UsageError(f"another job writes its checkpoints into {path.parent}", details, remedies)


def _beat(path: Path, mine: LockOwner, over: threading.Event) -> None:
    """Renews the lock; one that was taken over, as of a job that was stopped for long, is told."""
    while not over.wait(BEAT_S):
        try:
            os.utime(path, follow_symlinks=False)
        except OSError as error:
            _log.warning("the lock %s cannot be renewed: %s", path, error)
        other = _owner(path)
        if other is not None and other != mine:
            _log.warning("%s has taken over the folder %s; end one of the two jobs", other, path.parent)
            return


def _owner(path: Path) -> LockOwner | None:
    """Who holds it; None where the file is gone, or says nothing."""
    try:
        return from_json(read_plain(path, _MOST_BYTES), LockOwner)
    except (OSError, ValueError):
        return None


def _place() -> str:
    try:
        return f"{socket.gethostname()} {boot_id()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _started(pid: int) -> int:
    """When a process of this place was started, in ticks since the boot; 0: there is none, or it has ended."""
    process = process_state(pid)
    return 0 if process is None or process.state in _ENDED else process.started
