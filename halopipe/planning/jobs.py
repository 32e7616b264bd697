"""Searches that need nothing of one another, in processes of their own: the same answers, whatever the number.

One search is one process: which candidate it looks at next, and whether it looks at it at all, follows from the best
plan so far.  So whole searches are shared out, and each is a function of its arguments alone.
"""

from __future__ import annotations

import functools
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import ParamSpec, TypeVar

from planner.ir.errors import UsageError, WorkerDiedError

P = ParamSpec("P")
R = TypeVar("R")


class Jobs:
    """Calls functions, in as many processes at a time as it is given; a context, at whose end these are gone.

    Of one process the caller's own is used, and each call is made when its result is asked for.

    Args:
        number: of processes.

    Raises:
        UsageError: it is less than one.
    """

    def __init__(self, number: int = 1) -> None:
        if number < 1:
            raise UsageError(f"{number} processes", ["--jobs counts processes: 1 or more"], ["--jobs 2"])
        self.number = number
        self._pool: ProcessPoolExecutor | None = None
        if number > 1:
            context = get_context("spawn")
            end, self._ends = context.Pipe(duplex=False)
            self._pool = ProcessPoolExecutor(number, context, _begin, (end,))

    def __enter__(self) -> Jobs:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, frames: TracebackType | None
    ) -> None:
        if self._pool is not None:
            self._ends.close()
            self._pool.shutdown(cancel_futures=True)

    def submit(self, function: Callable[P, R], *arguments: P.args, **named: P.kwargs) -> Callable[[], R]:
        """What gives the function's result, as often as it is called; it raises what the function does.

        Args:
            function: of a module, as it is pickled by name.
        """
        if self._pool is None:
            return functools.cache(functools.partial(function, *arguments, **named))
        return functools.partial(_result, self._pool.submit(function, *arguments, **named))


def _result(future: Future[R]) -> R:
    try:
        return future.result()
    except BrokenProcessPool as error:
        raise WorkerDiedError(
            "a process of --jobs died",
            ["the system may have been short of memory"],
            ["--jobs 1", "in a script, call it under if __name__ == '__main__': processes import the script"],
        ) from error


def _begin(end: Connection) -> None:
    """A process leaves Ctrl-C to the one that started it, and goes when that closes the pipe or is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_leave, args=(end,), daemon=True).start()


def _leave(end: Connection) -> None:
    wait([end])
    os._exit(1)
