"""Progress on stderr: a bar on a terminal, a line every ten seconds elsewhere, nothing on ranks other than 0."""

from __future__ import annotations

import os
import sys
import time
from types import TracebackType
from typing import Self

from halopipe.terminal import units
from halopipe.terminal.console import visible

_LINE_EVERY_S = 10.0


class Reporter:
    """Shows how far a task is; use as a context.

    ``update`` may be called often: it draws only when there is something new to show.
    """

    def __init__(self, what: str, *, quiet: bool = False) -> None:
        self._what = what
        self._quiet = quiet or os.environ.get("RANK", "0") != "0"
        self._start_s = self._line_s = time.monotonic()
        self._bar = None if self._quiet or not sys.stderr.isatty() else _Bar(what)

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, done: float, total: float | None, numbers: str, eta_s: float | None = None) -> None:
        """``numbers`` are what people care about just now: the layer and its milliseconds, the step and its loss."""
        numbers = visible(numbers)
        if self._bar is not None:
            self._bar.update(done, total, numbers)
        elif not self._quiet and time.monotonic() - self._line_s >= _LINE_EVERY_S:
            self._line_s = time.monotonic()
            self._line(done, total, numbers, eta_s)

    def _line(self, done: float, total: float | None, numbers: str, eta_s: float | None) -> None:
        elapsed_s = time.monotonic() - self._start_s
        if eta_s is None and total and done:
            eta_s = elapsed_s * (total - done) / done
        share = f" {units.percent(done / total)}" if total else ""
        left = f", {units.seconds(eta_s)} left" if eta_s is not None else ""
        sys.stderr.write(f"{self._what}{share}: {numbers} ({units.seconds(elapsed_s)}{left})\n")
        sys.stderr.flush()


class _Bar:
    """A rich progress bar on stderr."""

    def __init__(self, what: str) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[numbers]}", markup=False),
            console=Console(stderr=True),
            transient=True,
        )
        self._task = self._progress.add_task(what, total=None, numbers="")

    def start(self) -> None:
        """Begins to draw."""
        self._progress.start()

    def stop(self) -> None:
        """Clears the bar."""
        self._progress.stop()

    def update(self, done: float, total: float | None, numbers: str) -> None:
        """Moves the bar."""
        self._progress.update(self._task, completed=done, total=total, numbers=numbers)
