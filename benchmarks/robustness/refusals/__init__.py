"""Refusals whose remedy names a command or an option: each remedy, followed to the letter, must work.

    python -m benchmarks.robustness.refusals [WORD...]      # those that have a word in their names

A row is a command line, or a script of Python, that is refused in a folder of files.  What its error prints behind
``try:`` is read as a person would: a command is typed, an option is added to the command line that was refused or put
in place of its own, what is to be left out is left out.  Words in capitals stand for what only the user knows, and are
filled in.  A remedy works if every command that it comes to ends with exit code 0; one of another verb is followed by
the refused command, again.  Which remedies of the product a row follows is in ``remedies.json``; see
:mod:`benchmarks.robustness.remedies`.

Read :mod:`.following` first; rows are in :mod:`.planning`, :mod:`.plans`, :mod:`.other_files`, :mod:`.profiling`,
:mod:`.running`, :mod:`.checkpoints`, :mod:`.serving` and :mod:`.scripts`; their folders in :mod:`.folders`.
"""

from __future__ import annotations

from benchmarks.robustness.refusals import (
    checkpoints,
    other_files,
    planning,
    plans,
    profiling,
    running,
    scripts,
    serving,
)
from benchmarks.robustness.refusals.following import Refusal, commands_of, verdict

__all__ = ["Refusal", "commands_of", "rows", "verdict"]


def rows() -> tuple[Refusal, ...]:
    """All of them, by subject."""
    subjects = (planning, plans, other_files, profiling, running, checkpoints, serving, scripts)
    return tuple(row for subject in subjects for row in subject.rows())
