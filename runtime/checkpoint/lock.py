"""One job a folder: a lock file that says who writes the checkpoints there, and whether it still does.

    FOLDER/.halopipe.lock    {"host": "node7", "place": "...", "pid": 4242, "started": 1838, "job": "slurm 118", ...}

The kernel's own locks end with their process, but are not told to other hosts by every shared file system.  So the file
says which process it is, of which boot of which machine.  In the same place, a process is alive or is not; of another
host, the file's time is looked at, which its owner renews: both times compared are those of the file server.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from cuda_ops.device.host import process_state
from planner.ir.errors import MissingFileError, UsageError
from runtime.checkpoint.folders import make
from runtime.transport.segments import boot_id

LOCK = ".halopipe.lock"

BEAT_S = 10.0
"""Between two renewals of the file's time."""

STALE_S = 60.0
"""A lock of another host whose time is older than this has lost its owner."""

_MOST_BYTES = 4096
_TURN_S = 0.02
_NOBODY = "a process that is not known"

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Owner:
    """Who holds a folder.

    Attributes:
        place: where process numbers mean the same: a boot of a machine, and the namespace of its processes.
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

    @classmethod
    def here(cls, environment: Mapping[str, str] = os.environ) -> Owner:
        """This process."""
        step, pid = environment.get("SLURM_STEP_ID", "batch"), os.getpid()
        run, job = environment.get("TORCHELASTIC_RUN_ID", "none"), environment.get("SLURM_JOB_ID", "")
        # torchrun says "none" where nobody named the run
        name = f"torchrun {run}" if run != "none" else f"slurm {job}.{step}" if job else ""
        return cls(socket.gethostname(), _place(), pid, _started(pid), time.time(), name)

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since_s))
        return f"process {self.pid} on {self.host}" + (f" ({self.job})" if self.job else "") + f", since {since}"


@contextlib.contextmanager
def held(folder: Path) -> Iterator[None]:
    """Holds ``folder``, which is made where it is missing, for this process; nobody else does meanwhile.

    Raises:
        UsageError: another job holds it.
        MissingFileError: nothing can be written there.
    """
    path, mine = folder / LOCK, Owner.here()
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


def _take(path: Path, mine: Owner) -> None:
    """Makes ``path`` the lock of ``mine``; a lock that has lost its owner makes way."""
    while True:
        try:
            with open(path, "x", encoding="utf-8") as file:  # fails where there is one, on every file system
                file.write(json.dumps(asdict(mine)))
            return
        except FileExistsError:
            with contextlib.suppress(FileNotFoundError):  # it is gone by now
                _remove_stale(path, mine)


def _remove_stale(path: Path, mine: Owner) -> None:
    """Takes away a lock that has lost its owner, as one process at a time does.

    Raises:
        UsageError: it has not.
        FileNotFoundError: it is gone.
    """
    _require_stale(path, mine)
    turn = path.with_name(f"{LOCK}.taking")
    try:
        turn.touch(exist_ok=False)
    except FileExistsError:
        if _age_s(turn) > STALE_S:  # whoever had it ended just then
            turn.unlink()
        time.sleep(_TURN_S)
        return
    try:
        owner, why = _require_stale(path, mine)  # again: now nobody else takes it away
        path.unlink()
    finally:
        turn.unlink()
    _log.warning("the folder %s is taken over from %s: %s", path.parent, owner or _NOBODY, why)


def _require_stale(path: Path, mine: Owner) -> tuple[Owner | None, str]:
    """Whose lock it was and why it holds no more; raises as :func:`_remove_stale`."""
    owner, age_s = _owner(path), _age_s(path)
    why = _why_stale(owner, mine, age_s)
    if not why:
        raise _refused(path, owner, mine, age_s)
    return owner, why


def _age_s(path: Path) -> float:
    """How long ago the file was renewed, by the clock of the file server."""
    probe = path.with_name(f"{LOCK}.{uuid.uuid4().hex}")
    probe.touch()
    try:
        return probe.stat().st_mtime - path.stat().st_mtime
    finally:
        probe.unlink()


def _why_stale(owner: Owner | None, mine: Owner, age_s: float) -> str:
    """Why a lock holds no more; empty: it does."""
    if owner is not None and owner.place == mine.place:
        return "" if _started(owner.pid) == owner.started != 0 else "it has ended"
    if owner is not None and owner.job and owner.job == mine.job:
        return "it is the same job, which was started again"
    return f"nothing was heard of it for {age_s:.0f} s" if age_s > STALE_S else ""


def _refused(path: Path, owner: Owner | None, mine: Owner, age_s: float) -> UsageError:
    remedies = ["wait until it ends", "another folder for checkpoints"]
    if owner is None or owner.place != mine.place:
        remedies.insert(1, f"if that job is gone: start again in {max(1.0, STALE_S - age_s):.0f} s, or remove {path}")
    details = [f"{owner or _NOBODY} holds it", f"it was heard of {max(0.0, age_s):.0f} s ago"]
    return UsageError(f"another job writes its checkpoints into {path.parent}", details, remedies)


def _beat(path: Path, mine: Owner, over: threading.Event) -> None:
    """Renews the lock; one that was taken over, as of a job that was stopped for long, is told."""
    while not over.wait(BEAT_S):
        try:
            os.utime(path)
        except OSError as error:
            _log.warning("the lock %s cannot be renewed: %s", path, error)
        other = _owner(path)
        if other is not None and other != mine:
            _log.warning("%s has taken over the folder %s; end one of the two jobs", other, path.parent)
            return


def _owner(path: Path) -> Owner | None:
    """Who holds it; None where the file is gone, or says nothing."""
    try:
        with open(path, "rb") as file:
            return Owner(**json.loads(file.read(_MOST_BYTES)))
    except (OSError, ValueError, TypeError):
        return None


def _place() -> str:
    try:
        return f"{socket.gethostname()} {boot_id()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


def _started(pid: int) -> int:
    """When a process of this place was started, in ticks since the boot; 0: there is none."""
    found = process_state(pid)
    return 0 if found is None else found.started
