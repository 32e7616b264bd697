"""Processes that begin with torch loaded: forked from a server that has loaded it once.

A process that imports torch and what ``torch.export`` needs spends 4-6 s of a core before it does anything; four ranks
on two cores waited 12 s for it.  Here one process loads them for all that are started after it:

    this process                      server, one for each environment         process
    start(call, ...)  -- request -->  imports the module of the call,
                                      forks  ------------------------------->  own session, output and environment:
                      <-- its pid --                                           module:function(*arguments, *files)
    wait(), poll()    <-- its code -- reaps it  <----------------------------  exits with what the function returns

The server only imports: it has no thread, and has initialised neither autograd nor CUDA, where it forks.  It ends when
this process does, and its processes with it.  What several processes would do alike, one of its processes can do before
them, and then serve them (:mod:`halopipe.launch.ahead`): memory that none of them writes to is there once.  Where the
operating system has no file for a process (``pidfd_open``, Linux 5.3), and where the caller wants a process without a
past, the interpreter is started anew.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import pkgutil
import selectors
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import connection
from typing import Any, NoReturn, Protocol

from cuda_ops.device import compiling
from cuda_ops.device.host import die_with_parent, keep_pages

OURS = ("cuda_ops", "halopipe", "planner", "profiler", "runtime")
"""Packages whose modules the server imports itself; others are left to the process that asks for them."""

CAPTURE = ("torch.export._trace",)
"""What every process of ours loads to capture a model, most of the 4-6 s; torch loads it late."""

SETTINGS = {"OMP_NUM_THREADS": "1", "KINETO_LOG_LEVEL": "99"}
"""Variables of such processes: one thread an operator, and a quiet profiler."""

_LATE = ("PYTHONPATH", "PYTEST_CURRENT_TEST", "OLDPWD", "PWD", "TMPDIR", "GLOO_SOCKET_IFNAME")
"""Variables that are read when they are used: processes of one server may have different ones."""

_NUMBER = struct.Struct("=i")  # of a process, or its exit code
_MOST_FILES = 8
_KILLED = -int(signal.SIGKILL)
_SERVE = "import sys; sys.path[:] = {path!r}; from cuda_ops.device.fork_server import serve; serve({handle}, {loads})"
_CALL = "import sys; sys.path[:] = {path!r}; from cuda_ops.device.fork_server import answer; answer({handle}, {parent})"


class Process(Protocol):
    """A process that was started; ``subprocess.Popen`` is one.

    Attributes:
        pid: its number.
    """

    pid: int

    def poll(self) -> int | None:
        """Its exit code (negative: the signal that ended it), None while it runs."""

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code, once it has ended; subprocess.TimeoutExpired if it still runs after ``timeout`` seconds."""

    def terminate(self) -> None:
        """Ask it to end, by SIGTERM."""

    def kill(self) -> None:
        """End it at once."""


def start(
    call: str,
    arguments: Sequence[Any] = (),
    *,
    environment: Mapping[str, str],
    variables: Mapping[str, str] | None = None,
    output: int,
    files: Sequence[int] = (),
    loads: Sequence[str] = CAPTURE,
    afresh: bool = False,
    leaves: str = "",
    server: Server | None = None,
) -> Process:
    """Start a process that calls ``module:function(*arguments, *files)`` and exits with the code that this returns.

    It is in a session of its own (Ctrl-C does not reach it), reads nothing, and is killed when this process ends.

    Args:
        arguments: whatever JSON holds.
        environment: all of it; modules are looked for in its ``PYTHONPATH``, then in this process's ``sys.path``.
        variables: besides, of this process alone: which rank it is.
        output: the open file that its standard output and error go to.
        files: open files that are given to the function, under numbers of the new process.
        loads: modules that the function will need, which the server loads once for all.
        afresh: a new interpreter, not a fork of the server.
        leaves: a folder of this job alone, which the server removes if this process is killed and cannot do so.
        server: that it is forked from if that is alive; None: one that has loaded modules alone.
    """
    paths = _paths(environment)
    request = {
        "call": call,
        "loads": list(loads),
        "arguments": list(arguments),
        "environment": {**environment, **(variables or {})},
        "path": paths,
        "folder": os.getcwd(),
        "leaves": leaves if server is None else "",  # the folder is that of its server
    }
    with tempfile.TemporaryFile() as written:
        written.write(json.dumps(request).encode())
        written.flush()
        if afresh or not hasattr(os, "pidfd_open"):
            return _anew(written.fileno(), {**environment, **(variables or {})}, output, files, paths)
        with contextlib.suppress(EOFError):  # it was killed; once more, by another
            return (server or _server_for(environment, paths)).start([written.fileno(), output, *files])
        return _server_for(environment, paths).start([written.fileno(), output, *files])


def warm(environment: Mapping[str, str], loads: Sequence[str] = CAPTURE) -> None:
    """Let the server of such processes begin to load, while this process does something else."""
    if hasattr(os, "pidfd_open"):
        _server_for(environment, _paths(environment), loads)


def _paths(environment: Mapping[str, str]) -> list[str]:
    paths = [*filter(None, environment.get("PYTHONPATH", "").split(os.pathsep)), *sys.path]
    return list(dict.fromkeys(paths))


def _anew(request: int, environment: Mapping[str, str], output: int, files: Sequence[int], path: list[str]) -> Process:
    os.lseek(request, 0, os.SEEK_SET)
    handles = [request, *files]
    return subprocess.Popen(
        [sys.executable, "-c", _CALL.format(path=path, handle=handles, parent=os.getpid())],
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        pass_fds=handles,
        start_new_session=True,
    )


def answer(handles: Sequence[int], parent: int) -> None:
    """A process that was started anew: does what the request says, and exits."""
    die_with_parent(parent)
    request, *files = handles
    _call(_read(request), files)


@dataclass(slots=True, eq=False)
class _Forked:
    """A process of the server.

    Attributes:
        pid: its number.
        exit_pipe: where the server writes the exit code.
        handle: the process as a file, which signals are sent through.
        server: whose process it is.
    """

    pid: int
    exit_pipe: int
    handle: int
    server: Server
    code: int | None = None

    def poll(self) -> int | None:
        return self._look(0.0)

    def wait(self, timeout: float | None = None) -> int:
        code = self._look(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return code

    def terminate(self) -> None:
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        self._send(signal.SIGKILL)

    def _send(self, number: int) -> None:
        if self.code is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.handle, number)

    def _look(self, timeout_s: float | None) -> int | None:
        if self.code is None:
            if not connection.wait([self.handle], timeout_s):
                return None
            self.server.resume()
            if not connection.wait([self.exit_pipe], timeout_s):
                return None
            answer = os.read(self.exit_pipe, _NUMBER.size)
            self.code = _NUMBER.unpack(answer)[0] if answer else _KILLED  # nothing: the server ended, and it with it
            os.close(self.exit_pipe)
            os.close(self.handle)
        return self.code

    def __del__(self) -> None:
        if self.code is None:
            for file in (self.exit_pipe, self.handle):
                with contextlib.suppress(OSError):
                    os.close(file)


class Server:
    """This process's end of a server."""

    def __init__(self, link: socket.socket, process: Process) -> None:
        self._socket = link
        self._process = process
        self._lock = threading.Lock()

    @classmethod
    def launched(cls, environment: Mapping[str, str], path: Sequence[str], loads: Sequence[str]) -> Server:
        """An interpreter that loads modules."""
        near, far = socket.socketpair()
        with far:
            process = subprocess.Popen(
                [sys.executable, "-c", _SERVE.format(path=list(path), handle=far.fileno(), loads=list(loads))],
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # what an import has to say, its process says again
                pass_fds=(far.fileno(),),
                start_new_session=True,
            )
        return cls(near, process)

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def resume(self) -> None:
        """Let it go on if somebody has stopped it: else it neither starts a process nor tells of the end of one."""
        if self.is_alive:
            os.kill(self._process.pid, signal.SIGCONT)

    def start(self, files: Sequence[int]) -> Process:
        """The process that the request in the first of ``files`` asks for."""
        self.resume()
        exit_pipe, tells = os.pipe()
        try:
            with self._lock:
                socket.send_fds(self._socket, [b"+"], [*files, tells])
                answer, handles, _, _ = socket.recv_fds(self._socket, _NUMBER.size, 1, socket.MSG_CMSG_CLOEXEC)
        except OSError:
            answer = b""
            handles = []
        finally:
            os.close(tells)
        if not handles:
            os.close(exit_pipe)
            self.end()
            raise EOFError("the server of processes has ended")
        return _Forked(_NUMBER.unpack(answer)[0], exit_pipe, handles[0], self)

    def end(self) -> None:
        """End the server and all its processes."""
        self._socket.close()
        try:
            self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


_servers: dict[frozenset[tuple[str, str]], Server] = {}
_owner = os.getpid()
_lock = threading.Lock()


def _server_for(environment: Mapping[str, str], path: Sequence[str], loads: Sequence[str] = ()) -> Server:
    """The server that was started with these variables, but for those that are read late."""
    global _owner
    key = frozenset(item for item in environment.items() if item[0] not in _LATE)
    with _lock:
        if _owner != os.getpid():  # a fork of the process that the servers belong to
            _servers.clear()
            _owner = os.getpid()
        if key not in _servers or not _servers[key].is_alive:
            for other in [name for name, server in _servers.items() if not server.is_alive]:
                _servers.pop(other).end()
            _servers[key] = Server.launched(environment, path, loads)
        return _servers[key]


def end_servers() -> None:
    """End all servers of this process, and what they started."""
    with _lock:
        while _servers:
            server = _servers.popitem()[1]
            if _owner == os.getpid():
                server.end()


atexit.register(end_servers)


def serve(handle: int, loads: Sequence[str], then: Callable[[], object] = os.getpid) -> None:
    """The server: forks a process for each request, and tells of its end, until the other side closes.

    Args:
        then: is called after each process that was started.
    """
    keep_pages()
    link = socket.socket(fileno=handle)
    link.set_inheritable(False)
    _load(loads)
    ends: dict[int, tuple[int, int]] = {}
    left: set[str] = set()
    with selectors.DefaultSelector() as selector:
        selector.register(link, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is link:
                    try:
                        request, files, _, _ = socket.recv_fds(link, 1, _MOST_FILES)
                    except OSError:  # it ended before it had read an answer
                        request = b""
                    if not request:
                        _end(ends, left)
                    pid, tells = _fork(files, left, [link.fileno(), *(file for file, _ in ends.values()), *ends])
                    watched = os.pidfd_open(pid)
                    ends[watched] = tells, pid
                    selector.register(watched, selectors.EVENT_READ)
                    # With its handle: the process may have ended, and its number gone, before it is looked up.
                    try:
                        socket.send_fds(link, [_NUMBER.pack(pid)], [watched])
                    except OSError:  # it ended meanwhile
                        _end(ends, left)
                    then()
                else:
                    watched = key.fd
                    tells, pid = ends.pop(watched)
                    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                    with contextlib.suppress(BrokenPipeError):
                        os.write(tells, _NUMBER.pack(code))
                    selector.unregister(watched)
                    os.close(watched)
                    os.close(tells)


def _end(ends: Mapping[int, tuple[int, int]], left: Collection[str]) -> NoReturn:
    for watched in ends:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(watched, signal.SIGKILL)
    for _, pid in ends.values():
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)  # it may be writing
    for folder in left:
        shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


def _fork(handles: Sequence[int], left: set[str], private: Sequence[int]) -> tuple[int, int]:
    request, output, *files, tells = handles
    wanted = _read(request)
    left.update(filter(None, [wanted["leaves"]]))
    _import(wanted)
    server = os.getpid()
    pid = os.fork()
    if pid:
        for file in (request, output, *files):
            os.close(file)
        return pid, tells
    try:
        die_with_parent(server)
        os.setsid()
        for file in (request, tells, *private):
            os.close(file)
        for number in (1, 2):
            os.dup2(output, number)
        os.close(output)
        os.environ.clear()
        os.environ.update(wanted["environment"])
        os.chdir(wanted["folder"])
        tempfile.tempdir = None  # found again in this environment
        sys.path[:] = wanted["path"]
        importlib.invalidate_caches()
        _call(wanted, files)
    except BaseException:  # noqa: BLE001  # nothing of the server's may go on in this process
        traceback.print_exc()
    os._exit(1)


def _import(wanted: Mapping[str, Any]) -> None:
    """Load what a call needs for this process and all later ones; why that fails, the process says itself."""
    called = wanted["call"].partition(":")[0]
    ours = [called] if called.partition(".")[0] in OURS else []
    sys.path[:] = wanted["path"]
    _load([*ours, *wanted["loads"]])


def _load(modules: Sequence[str]) -> None:
    """Imports what is not there yet; nothing that modules make is garbage, looking for it takes a sixth of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    for module in modules:
        if module not in sys.modules:
            with contextlib.suppress(Exception):
                importlib.import_module(module)
    if was_enabled:
        gc.enable()


def _read(request: int) -> dict[str, Any]:
    os.lseek(request, 0, os.SEEK_SET)
    with open(request, "rb", closefd=False) as file:
        fields: dict[str, Any] = json.loads(file.read())
    return fields


def _call(wanted: Mapping[str, Any], files: Sequence[int]) -> None:
    """Call what was asked for, and exit with its code: at once, whatever threads there are."""
    code = 1
    try:
        code = int(pkgutil.resolve_name(wanted["call"])(*wanted["arguments"], *files) or 0)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001  # shown, as the interpreter does
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        with contextlib.suppress(Exception):
            compiling.remove_own_folders()
        os._exit(code)
