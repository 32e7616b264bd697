"""What several processes would do alike, done once before them: they are forked from the process that did it.

A process of the fork server calls a function (:func:`begun`), and is a server then; its processes begin with what that
function has left, where their calls are :func:`continued`.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import pkgutil
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing import connection
from typing import Any

from cuda_ops.device.fork_server import Server, serve, start

_LOOK_S = 1.0
_MOMENT_S = 0.2


def begun(
    call: str,
    arguments: Sequence[Any],
    *,
    environment: Mapping[str, str],
    output: int,
    loads: Sequence[str],
    num_processes: int,
    deadline_s: float,
    leaves: str = "",
) -> Server | None:
    """A server that has called ``module:function(*arguments)``, and whose processes begin with what that has left.

    None, so that each does it itself, where the function raises or takes longer than ``deadline_s``, and where what it
    has left cannot be parted by a fork: threads, open files (whose place in them would be shared), another folder.

    Args:
        call: gives a function that forgets what is left, which the server calls once ``num_processes`` were started.
        environment, output, loads, leaves: as of :func:`cuda_ops.device.fork_server.start`; the folder is that of all
            its processes.
    """
    if not hasattr(os, "pidfd_open"):
        return None
    near, far = socket.socketpair()
    with far:
        process = start(
            f"{__name__}:begin",
            [call, num_processes, *arguments],
            environment=environment,
            output=output,
            files=[far.fileno()],
            loads=loads,
            leaves=leaves,
        )
    server = Server(near, process)
    try:
        with contextlib.suppress(ConnectionError):  # it has ended
            for _ in range(round(deadline_s / _LOOK_S)):
                if connection.wait([near], _LOOK_S):
                    if near.recv(1):
                        return server
                    break
                server.resume()
        process.kill()
    except BaseException:
        process.kill()
        raise
    server.end()
    return None


def continued(call: str, arguments: Sequence[Any]) -> tuple[str, list[Any]]:
    """The call for such a server's process that calls ``module:function(*arguments)``, and its arguments."""
    return f"{__name__}:go_on", [call, *arguments]


@dataclass(slots=True)
class _Left:
    """What a call has changed for the processes that begin with it: import path, and variables (None: it is gone)."""

    paths: list[str] = field(default_factory=list)
    variables: dict[str, str | None] = field(default_factory=dict)


_left = _Left()


def begin(call: str, num_processes: int, *rest: Any) -> int:
    """A process of a server that becomes one itself, once it has called what its processes are to begin with."""
    *arguments, handle = rest
    os.set_inheritable(handle, False)
    folder = os.getcwd()
    paths = list(sys.path)
    variables = dict(os.environ)
    open_files = _open_files()
    forget = pkgutil.resolve_name(call)(*arguments)
    if _open_files() != open_files or os.getcwd() != folder or not _is_single_threaded():
        return 1
    _left.paths += [each for each in sys.path if each not in paths]
    changed = set(variables.items()) ^ set(os.environ.items())
    _left.variables |= {name: os.environ.get(name) for name, _ in changed}
    sys.stdout.flush()
    sys.stderr.flush()
    num_started = 0

    def then() -> None:
        """Once all were started, gives back the memory of what they began with."""
        nonlocal num_started
        num_started += 1
        if num_started == num_processes:
            forget()
            gc.collect()
            with contextlib.suppress(OSError, AttributeError):
                ctypes.CDLL(None).malloc_trim(0)

    os.write(handle, b"+")
    serve(handle, (), then)
    return 0


def go_on(call: str, *arguments: Any) -> Any:
    """A process that begins with what was left."""
    sys.path[:] = dict.fromkeys([*sys.path, *_left.paths])
    for variable, value in _left.variables.items():
        os.environ.pop(variable, None)
        os.environ.update({} if value is None else {variable: value})
    return pkgutil.resolve_name(call)(*arguments)


def _is_single_threaded() -> bool:
    """Whether no other thread is left; one that was joined needs a moment to go."""
    end_s = time.monotonic() + _MOMENT_S
    while len(os.listdir("/proc/self/task")) > 1:
        if time.monotonic() > end_s:
            return False
        time.sleep(1e-3)
    return True


def _open_files() -> set[tuple[int, int, int]]:
    """By number, and which file it is: one that was closed may have given its number to another."""
    files = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the folder itself
            status = os.fstat(int(name))
            files.add((int(name), status.st_dev, status.st_ino))
    return files
