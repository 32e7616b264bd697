"""Where words go: results to stdout, progress and remarks to stderr.

Names come from files, and a terminal obeys control characters: what is not a character to be seen is written as its
escape of JSON, here and nowhere else.

How a verb ends: what it raises becomes text on stderr and an exit code.

0 ok, 1 bug, 2 usage, 3 bad or stale input file, 4 no feasible plan, 5 a worker failed, 6 a check failed, 130 Ctrl-C.
"""

from __future__ import annotations

import errno
import functools
import json
import os
import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec

import typer

_UNSEEN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufeff]")
"""Control characters but for tab and line feed, what changes the direction of writing, and halves of characters."""


def visible(text: str) -> str:
    """``text`` with the escapes of what a terminal would obey and nobody would see; those are JSON's, too."""
    return _UNSEEN.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def emit(text: str) -> None:
    """Writes a result to stdout; a reader that has had enough (``| head``) is no error."""
    shown = visible(text)
    try:
        sys.stdout.write(shown if shown.endswith("\n") else f"{shown}\n")
        sys.stdout.flush()
    except OSError as error:
        if error.errno != errno.EPIPE:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so that the flush at exit is silent too


def emit_json(value: Any) -> None:
    """Writes plain data to stdout as JSON."""
    emit(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False))


def remark(text: str) -> None:
    """Writes a line for people to stderr."""
    sys.stderr.write(f"{visible(text)}\n")
    sys.stderr.flush()


def wrote(path: str | Path, next_step: str = "") -> None:
    """Says what file was written, and what may be done with it."""
    remark(f"wrote {path}" + (f"; next: {next_step}" if next_step else ""))


INTERRUPTED = 130

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
            raise typer.Exit(report(error)) from None

    return run


def report(error: Exception) -> int:
    """Writes what went wrong to stderr; returns the exit code."""
    from planner.ir.errors import HalopipeError

    if isinstance(error, HalopipeError):
        remark(error.render())
        return error.exit_code
    bug = HalopipeError(
        f"{type(error).__name__}: {error}", ["this is a bug in halopipe; please report it with what follows"]
    )
    remark(bug.render())
    remark("".join(traceback.format_exception(error)))
    return bug.exit_code
