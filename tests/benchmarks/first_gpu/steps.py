"""Steps for the tests of the frame: each part notes that it ran in a file of the results."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial

from benchmarks.first_gpu.frame import Bench, Parts
from benchmarks.report import Row


def three(bench: Bench) -> Parts:
    """All well."""
    return {name: partial(_part, bench, name, _nothing) for name in ("a", "b", "c")}


def faulty(bench: Bench) -> Parts:
    """The second raises, the fourth dies."""
    deeds = {"first": _nothing, "raises": _raise, "between": _nothing, "dies": _die, "last": _nothing}
    return {name: partial(_part, bench, name, deed) for name, deed in deeds.items()}


def endless(bench: Bench) -> Parts:
    """The second never ends."""
    return {name: partial(_part, bench, name, deed) for name, deed in {"quick": _nothing, "slow": _sleep}.items()}


def without_parts(bench: Bench) -> Parts:
    raise ValueError("no parts today")


def ran(bench: Bench) -> list[str]:
    """The parts that ran, in order."""
    return bench.file("ran").read_text("utf-8").split() if bench.file("ran").exists() else []


def _part(bench: Bench, name: str, deed: Callable[[], None]) -> Iterator[Row]:
    with bench.file("ran").open("a", encoding="utf-8") as file:
        file.write(f"{name}\n")
    deed()
    yield Row(f"{name}: one", 1.0, "s")


def _nothing() -> None:
    pass


def _raise() -> None:
    raise KeyError("on purpose")


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _sleep() -> None:
    while True:
        time.sleep(60.0)
