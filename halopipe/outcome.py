"""How a verb ends: what it raises becomes text on stderr and an exit code.

0 ok, 1 bug, 2 usage, 3 bad or stale input file, 4 no feasible plan, 5 a worker failed, 6 a check failed, 130 Ctrl-C.
"""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable
from typing import ParamSpec

import typer

from halopipe.console import remark

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
