"""Where words go: results to stdout, progress and remarks to stderr.

Names come from files, and a terminal obeys control characters: what is not a character to be seen is written as its
escape of JSON, here and nowhere else.  So is what the encoding of stdout does not have (``LC_ALL``,
``PYTHONIOENCODING``), but for our own signs, which have another in ASCII.

Progress on stderr: a bar on a terminal, a line every ten seconds elsewhere, nothing on ranks other than 0; what is
known for the first time is a line of its own on both.

How a verb ends: what it raises becomes text on stderr and an exit code.

0 ok, 1 bug, 2 usage, 3 bad or stale input file, 4 no feasible plan, 5 a worker failed, 6 a check failed, 7 ended when
asked to, 130 Ctrl-C.
"""

from __future__ import annotations

import codecs
import contextlib
import errno
import functools
import json
import os
import re
import resource
import shlex
import shutil
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, ParamSpec, Protocol, Self

import typer

from cuda_ops.device.torch_versions import TorchVersionError
from halopipe.terminal import units
from planner.ir.errors import HalopipeError, MissingFileError, UsageError

_LINE_EVERY_S = 10.0
_PACES = 64  # of the last updates
_ROOM_FOR_BAR = _LINE_COLUMNS = 80


def screen_columns() -> int | None:
    """How wide lines for people may be: as ``COLUMNS`` says, or the terminal; None: as wide as they are."""
    asked = os.environ.get("COLUMNS", "")
    if asked.isdecimal() and int(asked):
        return int(asked)
    is_screen = sys.stdout is not None and sys.stdout.isatty()  # None: it is closed
    return shutil.get_terminal_size().columns if is_screen else None


class Reporter:
    """Shows how far a task is; use as a context.

    ``update`` may be called often: it draws only when there is something new to show.

    What is left is told by the pace between updates, without the slowest: a pause that comes once, such as the
    comparison of the first step, says nothing of the rest, and neither does the time before the first update.
    """

    def __init__(self, what: str, *, quiet: bool = False) -> None:
        self._what = what
        self._quiet = quiet or os.environ.get("RANK", "0") != "0"
        self._start_s = self._line_s = time.monotonic()
        self._last: tuple[float, float] | None = None
        self._share = 0.0
        self._paces: deque[tuple[float, float]] = deque(maxlen=_PACES)
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

    def update(
        self, done: float, total: float | None, numbers: str, eta_s: float | None = None, *, at_most: bool = False
    ) -> None:
        """``numbers`` are what people care about just now: the layer and its milliseconds, the step and its loss.

        The share that is shown never falls, as where a job begins again at its last checkpoint, nor exceeds 100 %.

        Args:
            eta_s: seconds left; None: by the pace so far.
            at_most: it may well be less.
        """
        numbers = visible(numbers)
        if total:
            self._share = max(self._share, min(1.0, done / total))
            done = self._share * total
        if eta_s is None and total:
            eta_s = self._left_s(done, total)
        left = f"{'at most ' if at_most else ''}{units.seconds(eta_s)} left" if eta_s is not None else ""
        if self._bar is not None:
            self._bar.update(done, total, numbers, left)
        elif not self._quiet and time.monotonic() - self._line_s >= _LINE_EVERY_S:
            self._line_s = time.monotonic()
            self._line(done, total, numbers, left)

    def note(self, numbers: str) -> None:
        """A line of its own, now, on a terminal too."""
        if not self._quiet:
            self._line(0.0, None, visible(numbers), "")

    def _line(self, done: float, total: float | None, numbers: str, left: str) -> None:
        elapsed = units.seconds(time.monotonic() - self._start_s)
        share = f" {units.percent(done / total)}" if total else ""
        head = f"{self._what}{share}: "
        tail = f" ({elapsed}{', ' if left else ''}{left})"
        sys.stderr.write(f"{head}{_fitted(numbers, _LINE_COLUMNS - len(head) - len(tail))}{tail}\n")
        sys.stderr.flush()

    def _left_s(self, done: float, total: float) -> float | None:
        now_s = time.monotonic()
        if self._last is None or done > self._last[1]:
            if self._last is not None:
                self._paces.append((now_s - self._last[0], done - self._last[1]))
            self._last = (now_s, done)
        if len(self._paces) < 2:
            return None
        paces = sorted(self._paces, key=lambda pace: pace[0] / pace[1])[:-1]
        pace_s = sum(took_s for took_s, _ in paces) / sum(steps for _, steps in paces)
        return max(0.0, pace_s * (total - self._last[1]) - min(now_s - self._last[0], pace_s))


def _fitted(numbers: str, room: int) -> str:
    """As many of the numbers as there is room for, the first ones."""
    while len(numbers) > room and ", " in numbers:
        numbers = numbers.rpartition(", ")[0]
    return numbers if len(numbers) <= room else f"{numbers[: room - 1]}…"


class _Bar:
    """A rich progress bar on stderr, and below it the numbers; where that is too wide, the bar is left out."""

    def __init__(self, what: str) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn, TimeElapsedColumn
        from rich.table import Column
        from rich.text import Text

        screen = Console(stderr=True)
        folded = Column(overflow="fold", no_wrap=False)
        columns: list[ProgressColumn] = [
            TextColumn("{task.description}{task.fields[share]}"),
            BarColumn(bar_width=24),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}", table_column=folded),
        ]
        if screen.width < _ROOM_FOR_BAR:
            text = "{task.description}{task.fields[share]}, {task.elapsed:.0f} s{task.fields[after]}"
            columns = [TextColumn(text, markup=False, table_column=folded)]

        class WithNumbers(Progress):
            def get_renderables(self) -> Iterator[Any]:
                yield from super().get_renderables()
                yield Text(self.tasks[0].fields["numbers"] if self.tasks else "", overflow="fold")

        self._progress = WithNumbers(*columns, console=screen, transient=True)
        self._task = self._progress.add_task(what, total=None, numbers="", left="", after="", share="")

    def start(self) -> None:
        """Begins to draw."""
        self._progress.start()

    def stop(self) -> None:
        """Clears the bar."""
        self._progress.stop()

    def update(self, done: float, total: float | None, numbers: str, left: str) -> None:
        """Moves the bar."""
        share = f" {units.percent(done / total)}" if total else ""
        after = f", {left}" if left else ""
        self._progress.update(
            self._task, completed=done, total=total or None, numbers=numbers, left=left, after=after, share=share
        )


_UNSEEN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufeff]")
"""Control characters but for tab and line feed, what changes the direction of writing, and halves of characters."""


def visible(text: str) -> str:
    """``text`` with the escapes of what a terminal would obey and nobody would see; those are JSON's, too."""
    return _UNSEEN.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


_IN_ASCII = str.maketrans("µ–…·░▒▓", "u-~.-=#")
"""Our own signs where they cannot be written, each as wide."""


def _encodable(text: str, encoding: str) -> str:
    """``text``, with the escapes of JSON for what ``encoding`` does not have."""

    def escaped(error: UnicodeError) -> tuple[str, int]:
        if not isinstance(error, UnicodeEncodeError):
            raise error
        return json.dumps(error.object[error.start : error.end])[1:-1], error.end

    codecs.register_error("halopipe", escaped)
    return text.encode(encoding, "halopipe").decode(encoding)


def open_streams() -> None:
    """Has something in the place of standard streams that are closed (``>&-``), before another file gets their numbers.

    What is written to standard error is then lost; to standard output, it is an error of :func:`emit`; who reads there
    or writes much asks :func:`require_streams`.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:  # the lowest that is free: this one
            os.open(os.devnull, os.O_WRONLY if name == "stderr" else os.O_RDONLY)
            _closed.append(name)
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w" if number else "r", encoding="utf-8", closefd=False))  # noqa: SIM115 - stays open


_closed: list[str] = []
"""Standard streams that were closed when the program began."""


def require_streams() -> None:
    """Raises :class:`MissingFileError` unless standard input and output were open when the program began."""
    if not {"stdin", "stdout"}.isdisjoint(_closed):
        raise MissingFileError("standard input or output is closed", [], ["< requests > answers"])


def emit(text: str) -> None:
    """Writes a result to stdout; a reader that has had enough (``| head``) is no error.

    Raises:
        MissingFileError: it cannot be written there, as where standard output goes to a full disk.
    """
    shown = visible(text)
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"  # None: a stream of somebody's own
    try:
        shown.encode(encoding)
    except UnicodeEncodeError:
        shown = _encodable(shown.translate(_IN_ASCII), encoding)
    try:
        sys.stdout.write(shown if shown.endswith("\n") else f"{shown}\n")
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so that the flush at exit is silent too
        if error.errno != errno.EPIPE:
            raise MissingFileError("cannot write to standard output", [error.strerror or str(error)]) from None


def emit_json(value: Any) -> None:
    """Writes plain data to stdout as JSON; beyond ASCII by escapes, unless stdout is for UTF-8."""
    is_utf8 = (getattr(sys.stdout, "encoding", None) or "utf-8").lower().replace("-", "") == "utf8"
    emit(json.dumps(value, indent=2, ensure_ascii=not is_utf8, allow_nan=False))


class Answer(Protocol):
    """What a question comes to, for people and for programs."""

    def render(self) -> str:
        """The answer in words."""

    def data(self) -> Any:
        """The answer as plain data."""


def show(answer: Answer, *, as_json: bool) -> None:
    """Writes an answer to stdout, in words or as JSON."""
    emit_json(answer.data()) if as_json else emit(answer.render())


def remark(text: str) -> None:
    """Writes a line for people to stderr."""
    sys.stderr.write(f"{visible(text)}\n")
    sys.stderr.flush()


def command(*arguments: object) -> str:
    """A command of ours that can be pasted into a shell, whatever its paths are called."""
    return shlex.join(["halopipe", *map(str, arguments)])


def wrote(path: str | Path, next_step: str = "") -> None:
    """Says what file was written, and what may be done with it."""
    remark(f"wrote {path}" + (f"; next: {next_step}" if next_step else ""))


INTERRUPTED = 130

_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
"""Set by torchrun for each rank: a file whose form is that of ``torch.distributed.elastic.multiprocessing.errors``."""

_OF_FILES = (errno.EMFILE, errno.ENFILE)
"""Of calls of the system that find no number for one more file."""

_OF_DISKS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
"""Of calls of the system that fail for want of room, not by a mistake of ours."""

_OF_NAMES = (errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR, errno.EACCES)
"""Of calls of the system that fail for what somebody calls a file, or for what is there."""

P = ParamSpec("P")


def reported(verb: Callable[P, None]) -> Callable[P, None]:
    """``verb``, with every error turned into its text and exit code."""

    @functools.wraps(verb)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            verb(*args, **kwargs)
        except typer.Exit:
            raise
        except KeyboardInterrupt:
            remark("interrupted")
            raise typer.Exit(INTERRUPTED) from None
        except Exception as error:  # noqa: BLE001  # the last place where an error can be explained
            code = report(error)
            sys.last_value = SystemExit(code)  # as after an error that python prints: what runs at its end asks for it
            raise typer.Exit(code) from None

    return run


def report(error: Exception) -> int:
    """Writes what went wrong to stderr; returns the exit code."""
    if isinstance(error, OSError) and error.errno in _OF_DISKS:
        what = f"cannot write {error.filename}" if error.filename else "a disk cannot be written"
        error = MissingFileError(what, [error.strerror or str(error)], ["make room there, or name another place"])
    if isinstance(error, OSError) and error.errno in _OF_FILES:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        error = MissingFileError("no more files can be opened", [f"{limit} are allowed"], ["ulimit -n 1024"])
    if isinstance(error, OSError) and error.errno in _OF_NAMES:
        error = MissingFileError(f"cannot use {str(error.filename)[:200]}", [error.strerror or str(error)])
    if isinstance(error, TorchVersionError):
        error = UsageError(error.title, [error.tested], [error.remedy])
    if isinstance(error, ModuleNotFoundError) and ".extras." in (error.name or ""):
        error = UsageError(f"{error.name} is missing", ["this needs it"], ["install halopipe again, with all extras"])
    if isinstance(error, HalopipeError):
        return _reported(error.render(), error.exit_code)
    bug = HalopipeError(
        f"{type(error).__name__}: {error}", ["this is a bug in halopipe; please report it with what follows"]
    )
    return _reported(f"{bug.render()}\n{''.join(traceback.format_exception(error))}", bug.exit_code)


def _reported(text: str, exit_code: int) -> int:
    """Writes it to stderr, and where torchrun looks for what became of a rank, whose last words it then is."""
    remark(text)
    path = os.environ.get(_ERROR_FILE)
    if path:
        extra = {"py_callstack": f"\n{visible(text)}", "timestamp": str(int(time.time()))}
        message = {"message": visible(text), "extraInfo": extra, "errorCode": exit_code}
        with contextlib.suppress(OSError):
            Path(path).write_text(json.dumps({"message": message}), encoding="utf-8")
    return exit_code
