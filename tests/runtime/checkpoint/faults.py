"""A file system that fails, or a process that dies, at one chosen change or look of all those that a save makes."""

from __future__ import annotations

import builtins
import contextlib
import gc
import io
import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any

NAMES = ("mkdir", "rename", "fsync", "unlink", "rmdir", "open", "listdir")


class Faults:
    """Counts operations from 0; at ``first`` calls ``fail``, and from then on again where ``lasting`` and it writes."""

    def __init__(self, first: int | None, fail: Callable[[], None], *, lasting: bool = False) -> None:
        self.count = 0
        self._first = first
        self._fail = fail
        self._lasting = lasting

    def meet(self, *, writes: bool = True) -> bool:
        """One operation; true if it is one to fail."""
        number = self.count
        self.count = self.count + 1
        return self._first is not None and (
            number == self._first or (self._lasting and writes and number > self._first)
        )

    def fail(self) -> None:
        self._fail()


@contextlib.contextmanager
def installed(faults: Faults) -> Iterator[Faults]:
    """Within this, all operations of this process go through ``faults``."""
    system = {name: getattr(os, name) for name in NAMES}
    open_file = io.open

    def guarded(name: str) -> Callable[..., Any]:
        def operation(*arguments: Any, **options: Any) -> Any:
            if faults.meet(writes=name in ("mkdir", "fsync")):
                faults.fail()
            # Only a loss of power shows what is not on disk, and forcing it there takes its time.
            return None if name == "fsync" else system[name](*arguments, **options)

        return operation

    def opened(path: Any, mode: str = "r", *arguments: Any, **options: Any) -> Any:
        if faults.meet(writes="r" not in mode):
            faults.fail()
        file = open_file(path, mode, *arguments, **options)
        return file if "r" in mode else _Written(file, faults)

    try:
        for name in NAMES:
            setattr(os, name, guarded(name))
        io.open = builtins.open = opened
        yield faults
    finally:
        for name, operation in system.items():
            setattr(os, name, operation)
        io.open = builtins.open = open_file


class _Written:
    """A file whose writes may fail half way: the first, second, fourth, eighth ... of them count."""

    def __init__(self, file: Any, faults: Faults) -> None:
        self._file = file
        self._faults = faults
        self._num_writes = 0

    def write(self, data: Any) -> int:
        self._num_writes += 1
        if not self._num_writes & (self._num_writes - 1) and self._faults.meet():
            self._file.write(memoryview(data)[: len(data) // 2])
            self._file.flush()
            self._faults.fail()
        return self._file.write(data)

    def __enter__(self) -> _Written:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def die() -> None:
    """As if killed: nothing is cleaned up."""
    os._exit(9)


def raising(code: int) -> Callable[[], None]:
    """Raises the system's error of that number."""

    def fail() -> None:
        raise OSError(code, os.strerror(code))

    return fail


def in_child(run: Callable[[], None]) -> int:
    """Exit code of a forked process that runs ``run``."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of a fork beside torch's threads
        child = os.fork()
    if not child:
        gc.freeze()  # as in tests.forks
        try:
            run()
            os._exit(0)
        except BaseException:  # noqa: BLE001 - the parent sees the code
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
