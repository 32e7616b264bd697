from __future__ import annotations

import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from cuda_ops.device.fork_server import Process, Server, start
from halopipe.launch import ahead

ROOT = Path(__file__).resolve().parents[3]
THIS = "tests.halopipe.launch.test_ahead"


def begin(name: str, output: int, server: Server, files: Sequence[int] = ()) -> Process:
    """A process that calls a function of this file."""
    call, arguments = ahead.continued(f"{THIS}:{name}", [])
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "GREETING": "again"}
    return start(call, arguments, environment=environment, output=output, files=files, loads=[], server=server)


def sleep() -> None:
    time.sleep(60)


def leave() -> None:
    raise SystemExit(3)


def learn(done: str, deed: str) -> Callable[[], None]:
    """What is done ahead: processes are to begin with it, unless it cannot be parted by a fork."""
    global _learned
    _learned = f"{deed} in {os.getpid()}"
    sys.path.append("/learned")
    os.environ["LEARNED"] = "yes"
    os.environ.pop("GREETING")
    if deed == "thread":
        threading.Thread(target=time.sleep, args=[60], daemon=True).start()
    elif deed == "file":
        _kept.append(open(done, "ab"))  # noqa: SIM115 - it is to stay open
    elif deed == "folder":
        os.chdir("/")
    elif deed == "error":
        raise ValueError("no such thing")
    elif deed == "late":
        time.sleep(60)
    elif deed == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    return Path(done).touch


_learned = ""
_kept: list[object] = []


def recite(file: int) -> None:
    os.write(file, f"{_learned}, {sys.path[-1]}, {os.environ['LEARNED']}, {os.environ.get('GREETING')}\n".encode())


def learned(done: Path, deed: str, output: int, deadline_s: float = 60.0) -> Server | None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "GREETING": "again"}
    return ahead.begun(
        f"{THIS}:learn",
        [str(done), deed],
        environment=environment,
        output=output,
        loads=[],
        num_processes=2,
        deadline_s=deadline_s,
    )


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs Linux 5.3")
def test_processes_begin_with_what_one_has_done_before_them_which_it_then_forgets(tmp_path: Path) -> None:
    done = tmp_path / "done"
    with tempfile.TemporaryFile("w+") as output:
        server = learned(done, "nothing more", output.fileno())
        assert server is not None
        reads, writes = os.pipe()
        assert begin("recite", output.fileno(), files=[writes], server=server).wait(60) == 0
        assert not done.exists()
        assert begin("recite", output.fileno(), files=[writes], server=server).wait(60) == 0
        process = begin("sleep", output.fileno(), server=server)
        os.close(writes)
        with open(reads) as file:
            first, second = file.readlines()
        assert first == second
        assert first.startswith("nothing more in ")
        assert first.endswith(", /learned, yes, None\n")
        assert done.exists()
        server.end()
        assert process.wait(60) == -signal.SIGKILL
        assert begin("leave", output.fileno(), server=server).wait(60) == 3  # as if there had been none


def test_who_is_stopped_while_it_does_that_is_continued(tmp_path: Path) -> None:
    with tempfile.TemporaryFile("w+") as output:
        server = learned(tmp_path / "done", "stopped", output.fileno())
        assert server is not None
        server.end()


@pytest.mark.parametrize("deed", ["thread", "file", "folder", "error", "late"])
def test_what_cannot_be_parted_by_a_fork_is_left_to_each_process(deed: str, tmp_path: Path) -> None:
    with tempfile.TemporaryFile("w+") as output:
        assert learned(tmp_path / "done", deed, output.fileno(), 0.5 if deed == "late" else 60.0) is None
        output.seek(0)
        assert ("ValueError: no such thing" in output.read()) is (deed == "error")
