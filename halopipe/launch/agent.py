"""What the launcher starts on another host: it starts that host's ranks, and ends them when its launcher is gone.

It reads one line of its standard input, the order, and then waits for its end: a closed connection closes it, so that
ranks that are stopped or hang are ended too.  It answers on its standard output in lines that begin with ``MARK`` (a
login shell may write others).  Nothing is read from or written to files that hosts share.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from halopipe.launch.interfaces import interface_towards, interfaces, is_loopback
from halopipe.launch.processes import Ended, Member, Processes, worker_environment
from halopipe.run_spec.job import REFERENCE, REFERENCE_RANK, Job, failed_path, job_folder
from halopipe.run_spec.options import RunOptions
from halopipe.version import require_same_release
from planner.ir.codec import dumps, loads, plain
from planner.ir.errors import HalopipeError, UsageError
from planner.ir.files import write_text
from planner.ir.plan import Plan

MARK = "halopipe-agent: "
JOB = "job.json"

ROOT = Path(__file__).resolve().parents[2]
_POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class Order:
    """What a host is to do.

    Attributes:
        ranks: to start here.
        address, port: of the launcher's store.
        interface: that the ranks talk over; empty: the one that leads to the store.
        folder: the launcher's working directory, used here too if there is one: models are looked for in it.
        paths: the launcher's ``PYTHONPATH``.
        version: of halopipe; this host must have the same.
    """

    plan: Plan
    options: RunOptions
    ranks: tuple[int, ...]
    address: str
    port: int
    interface: str
    folder: str
    paths: tuple[str, ...]
    version: str

    def to_json(self) -> str:
        """As one line."""
        others = {name: getattr(self, name) for name in self.__slots__ if name not in ("plan", "options")}
        return json.dumps({"plan": dumps(self.plan), "options": plain(self.options), **others})

    @classmethod
    def from_json(cls, text: str) -> Order:
        """What :meth:`to_json` spelled.

        Raises:
            StaleFileError: another release of halopipe spelled it.
        """
        record = json.loads(text)
        require_same_release(record["version"])
        tuples: dict[str, Any] = {name: tuple(record.pop(name)) for name in ("ranks", "paths")}
        plan, options = loads(record.pop("plan"), Plan), RunOptions(**record.pop("options"))
        return cls(plan, options, **tuples, **record)


def main() -> int:
    """Do what the order says until all ranks have ended, or the launcher is gone."""
    return serve(lambda line, folder, gone: _follow(Order.from_json(line), folder, gone))


def serve(follow: Callable[[str, Path, threading.Event], None]) -> int:
    """Read the order and follow it; the exit code says whether it could be followed.

    Args:
        follow: called with the order, a folder for the job, and what is set once the launcher is gone.
    """
    line = sys.stdin.buffer.readline()
    if not line:
        return 1
    gone = threading.Event()
    threading.Thread(target=_await_end, args=(gone,), name="launcher", daemon=True).start()
    try:
        with job_folder() as folder:
            follow(line.decode(), folder, gone)
    except (HalopipeError, OSError) as error:
        _say({"failed": _spell(error)})
        return 1
    return 0


def members_of(folder: Path, names: Mapping[int, str]) -> list[Member]:
    """Workers of the job in ``folder``: by rank, what :mod:`halopipe.launch.worker` calls their part."""
    # -P: the working folder must not hide our packages; the model is looked for there all the same.
    start = (sys.executable, "-P", "-m", "halopipe.launch.worker", str(folder / JOB))
    return [Member(rank, (*start, name)) for rank, name in names.items()]


def environment_of(paths: Sequence[str], interface: str) -> dict[str, str]:
    """For workers of this host."""
    return worker_environment([str(ROOT), *paths], interface)


def _follow(order: Order, folder: Path, gone: threading.Event) -> None:
    if Path(order.folder).is_dir():
        os.chdir(order.folder)
    job = Job(order.plan, order.options, folder, order.address, order.port, os.getpid())
    job.write(folder / JOB)
    environment = environment_of(order.paths, interface_to(order.address, order.interface))
    members = members_of(folder, {rank: str(rank) for rank in order.ranks})
    with contextlib.ExitStack() as stack:
        if job.is_compared and 0 in order.ranks:  # rank 0 tells the others
            one_device = Processes(members_of(folder, {REFERENCE_RANK: REFERENCE}), folder, environment)
            if order.options.check_numerics:
                found = watch(one_device, gone).get(REFERENCE_RANK, Ended(1))
                if not found.result:
                    report(order.ranks[0], found)
                    return
            else:
                stack.enter_context(watched_reference(one_device, job))
        watch(Processes(members, folder, environment), gone, report)


@contextlib.contextmanager
def watched_reference(one_device: Processes, job: Job) -> Iterator[None]:
    """The run on one device, beside the ranks; it ends with them.  If it fails, why is written for rank 0."""

    def ended() -> None:
        while not over.wait(_POLL_S):
            found = one_device.ended().get(REFERENCE_RANK)
            if found is not None:
                if not job.reference_path.exists():
                    write_text(failed_path(job.reference_path), _why(found))
                return

    over, one = threading.Event(), threading.Thread(target=lambda: ended(), name="one device", daemon=True)
    one_device.start()
    try:
        one.start()
        yield
    finally:
        over.set()
        one.join()
        one_device.end()


def _why(ended: Ended) -> str:
    """What a run on one device that failed left behind, as one line."""
    if ended.error:
        return f"one device could not run it: {json.loads(ended.error)['title']}"
    how = f"signal {-ended.code}" if ended.code < 0 else f"exit code {ended.code}"
    return f"the run on one device ended by {how} without a word"


def watch(
    processes: Processes, gone: threading.Event, heard: Callable[[int, Ended], None] = lambda rank, ended: None
) -> dict[int, Ended]:
    """Start the processes and wait for their end, or for the launcher's."""
    known: dict[int, Ended] = {}
    try:
        processes.start()
        while len(known) < len(processes.ranks) and not gone.is_set():
            for rank in processes.ended().keys() - known.keys():
                known[rank] = processes.ended()[rank]
                heard(rank, known[rank])
            time.sleep(_POLL_S)
    finally:
        processes.end()
    return known


def interface_to(address: str, interface: str) -> str:
    """The interface that this host's ranks talk over: the one that is named, or that leads to the store's address."""
    known = interfaces()
    if is_loopback(address):  # then all hosts are this one
        return "lo"
    if interface in known:
        return interface
    if interface not in ("", address):
        raise UsageError(
            f"host {os.uname().nodename} has no interface {interface}",
            [f"it has {', '.join(f'{name} ({address})' for name, address in known.items())}"],
            ["name the launcher's address instead (--interface 10.0.0.1): each host then finds the way to it"],
        )
    return interface_towards(address, several_hosts=True)


def _await_end(gone: threading.Event) -> None:
    sys.stdin.buffer.read()
    gone.set()


def report(rank: int, ended: Ended) -> None:
    """Tell the launcher what a worker that has ended left behind."""
    _say({"rank": rank, **asdict(ended)})


def _say(event: Mapping[str, object]) -> None:
    with contextlib.suppress(OSError):  # the launcher is gone: nobody is left to hear it
        sys.stdout.write(f"{MARK}{json.dumps(event)}\n")
        sys.stdout.flush()


def _spell(error: Exception) -> str:
    from runtime.monitor.failure import write_error  # late: loads torch

    return write_error(error)


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # a thread still waits for the launcher
