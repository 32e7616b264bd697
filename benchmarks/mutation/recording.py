"""Which functions of ours each file of tests enters: a plugin of pytest, and what its child processes load.

Started by :func:`benchmarks.mutation.selection.record_tests`, which names the folder of the record in the environment.
It imports neither pytest nor anything of ours, since child processes load it too.  The profiler of the standard library
counts calls in C, which costs little; each thread has its own.  Functions are named ``planner/ir/box.py::Box.size``.
What a file calls while it is imported counts as entered by it; what an earlier file left in a cache does not, nor what
a killed process entered.

PYTEST_DONT_REWRITE, since the plugin is loaded before pytest is.
"""

from __future__ import annotations

import atexit
import cProfile
import json
import os
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

FOLDER, FILE, ROOT = "MUTATION_FOLDER", "MUTATION_FILE", "MUTATION_ROOT"
PACKAGES = ("planner", "runtime", "cuda_ops", "profiler", "halopipe")


class Recorder:
    """Writes a line ``{"file", "functions", "seconds"}`` whenever another file of tests begins."""

    def __init__(self) -> None:
        self._file = os.environ.get(FILE, "")
        self._profile = cProfile.Profile(builtins=False)
        self._of_threads: list[tuple[str, threading.Thread, cProfile.Profile]] = []
        self._since = time.perf_counter()
        self._pytest = 0  # the process whose time is a file's
        self._codes = tuple(os.path.join(os.environ[ROOT], package, "") for package in PACKAGES)

    def start(self) -> None:
        """Count from now on, in threads to come as well."""
        threading.setprofile(self._thread_begins)
        self._profile.enable()

    def _thread_begins(self, frame: FrameType, event: str, argument: object) -> None:
        profile = cProfile.Profile(builtins=False)
        self._of_threads.append((self._file, threading.current_thread(), profile))
        profile.enable()

    def switch(self, file: str) -> None:
        """What follows belongs to this file of tests."""
        self._pytest = os.getpid()
        if file != self._file:
            self.write()
            self._file = os.environ[FILE] = file

    def write(self) -> None:
        """Append what was entered since the last time."""
        self._profile.disable()
        seconds = time.perf_counter() - self._since if os.getpid() == self._pytest else 0.0
        self._append(self._file, self._profile, seconds)
        alive = []
        for file, thread, profile in self._of_threads:
            self._append(file, profile, 0.0)
            if thread.is_alive():
                alive.append((file, thread, profile))
        self._of_threads, self._since = alive, time.perf_counter()
        self._profile = cProfile.Profile(builtins=False)
        self._profile.enable()

    def _append(self, file: str, profile: cProfile.Profile, seconds: float) -> None:
        codes = [entry.code for entry in profile.getstats() if not isinstance(entry.code, str)]
        root = len(os.environ.get(ROOT, "")) + 1
        names = {f"{c.co_filename[root:]}::{c.co_qualname}" for c in codes if c.co_filename.startswith(self._codes)}
        functions = sorted(name for name in names if not name.endswith("::<module>"))
        if file and (functions or seconds):
            line = {"file": file, "functions": functions, "seconds": seconds}
            path = Path(os.environ[FOLDER]) / f"{os.getpid()}.jsonl"
            with path.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps(line) + "\n")


recorder: Recorder | None = None


def watch_process() -> None:
    """Record this process, if its parent is recorded; called as the interpreter starts."""
    global recorder
    if FOLDER not in os.environ:
        return
    recorder = Recorder()
    atexit.register(recorder.write)
    leave = os._exit

    def write_and_leave(code: int) -> None:  # as ranks and forked processes end
        if recorder is not None and os.path.isdir(os.environ.get(FOLDER, "")):
            recorder.write()
        leave(code)

    os._exit = write_and_leave  # type: ignore[assignment]
    recorder.start()


def pytest_collectstart(collector: Any) -> None:
    """A file is about to be imported; pytest calls this."""
    path = getattr(collector, "path", None)
    if recorder is not None and path is not None and path.suffix == ".py":
        recorder.switch(path.relative_to(collector.config.rootpath).as_posix())


def pytest_runtest_logstart(nodeid: str) -> None:
    """A test begins; pytest calls this."""
    if recorder is not None:
        recorder.switch(nodeid.partition("::")[0])
