"""A function in a fresh process of its own: pinned, alone with its allocator, and gone when the parent goes.

Nothing of the parent's state is inherited but its import path; modules are loaded once for all such processes (see
:mod:`cuda_ops.device.fork_server`).  What the child prints is kept, and shown if it dies.
"""

from __future__ import annotations

import multiprocessing
import os
import pkgutil
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Generator
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

from cuda_ops import prepare_process
from cuda_ops.device import fork_server
from planner.ir.errors import DeadlineError, HalopipeError, WorkerDiedError, WorkerError

Report = Callable[[object], None]
"""What a function in a child is given first: sends something to the parent while it runs."""

_MOST_LINES_SHOWN = 12


class Child:
    """Runs ``module:function(report, *arguments)`` in a new process; a context, at whose end the process is dead.

    Args:
        function: ``module:function``; what it takes, reports and returns is pickled.
        core: that the process is pinned to, or several.
    """

    def __init__(self, function: str, *arguments: Any, core: int | Collection[int] | None) -> None:
        self._name = function
        self._printed = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115 - closed at exit
        self._pipe, far = multiprocessing.Pipe()
        self._process = fork_server.start(
            "profiler.measure.child_process:serve",
            environment=_environment(),
            output=self._printed.fileno(),
            files=[far.fileno()],
            loads=[*fork_server.CAPTURE, function.partition(":")[0]],
        )
        far.close()
        self._pipe.send((function, arguments, core))

    def __enter__(self) -> Child:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, frames: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()
        self._pipe.close()
        self._printed.close()

    def reports(self, deadline_s: float) -> Generator[Any, None, Any]:
        """What the function reports; the generator's value, at its end, is what the function returns.

        Raises:
            HalopipeError: the function's own.
            WorkerError: it raised something else.
            WorkerDiedError: the process ended without a word.
            DeadlineError: there was no word for ``deadline_s``.
        """
        while True:
            if not self._pipe.poll(deadline_s):
                raise DeadlineError(f"{self._name} said nothing for {deadline_s:.0f} s", self._last_lines())
            try:
                what, value = self._pipe.recv()
            except (EOFError, ConnectionResetError):
                raise self._death() from None
            if what == "result":
                return value
            if what == "error":
                raise value
            yield value

    def result(self, deadline_s: float) -> Any:
        """What the function returns; its reports are dropped.  Raises as ``reports``."""
        end_s = time.monotonic() + deadline_s

        def look_at_the_time(_: object) -> None:
            if time.monotonic() > end_s:
                raise DeadlineError(f"{self._name} took longer than {deadline_s:.0f} s", self._last_lines())

        return self.finish(deadline_s, look_at_the_time)

    def finish(self, silence_s: float, take: Callable[[Any], None]) -> Any:
        """What the function returns; ``take`` is called with each of its reports.  Raises as ``reports``."""
        stream = self.reports(silence_s)
        while True:
            try:
                take(next(stream))
            except StopIteration as stop:
                return stop.value

    def _death(self) -> WorkerDiedError:
        code = self._process.wait()
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        remedies = ["it may have run out of memory: a smaller --input"] if code == -signal.SIGKILL else []
        return WorkerDiedError(f"the process of {self._name} died", [how, *self._last_lines()], remedies)

    def _last_lines(self) -> list[str]:
        self._printed.seek(0)
        return self._printed.read().splitlines()[-_MOST_LINES_SHOWN:]


def warm() -> None:
    """Lets torch be loaded for the first child, while this process does something else."""
    fork_server.warm(_environment())


def _environment() -> dict[str, str]:
    return {**os.environ, **fork_server.SETTINGS, "GLOO_SOCKET_IFNAME": "lo"}


def serve(handle: int) -> None:
    """The child's side: waits for a function, runs it, sends what came of it."""
    pipe = Connection(handle)
    function, arguments, core = pipe.recv()
    prepare_process(core)

    def report(value: object) -> None:
        pipe.send(("report", value))

    try:
        answer = "result", pkgutil.resolve_name(function)(report, *arguments)
    except HalopipeError as error:
        answer = "error", error
    except Exception as error:  # noqa: BLE001 - whatever it is, the parent shows it
        lines = traceback.format_exception(error)
        answer = "error", WorkerError(f"{function} raised {type(error).__name__}: {error}", lines[-3:])
    pipe.send(answer)
    pipe.close()
