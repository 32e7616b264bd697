"""Refusals whose remedy names a command or an option: each remedy, followed to the letter, must work.

    python -m benchmarks.robustness --part refusals --only WORD      # those that have a word in their names

A row is a command line, or a script of Python, that is refused in a folder of files.  What its error prints behind
``try:`` is read as a person would: a command is typed, an option is added to the command line that was refused or put
in place of its own, what is to be left out is left out.  Words in capitals stand for what only the user knows, and are
filled in.  A remedy works if every command that it comes to ends with exit code 0; one of another verb is followed by
the refused command, again.  Which remedies of the product a row follows is in ``remedies.json``; see
:mod:`benchmarks.robustness.remedies`.

Rows are in :mod:`.table`, the folders that they are typed in in :mod:`.folders`; read :mod:`.following` first.
"""

from __future__ import annotations

from benchmarks.robustness.refusals.following import Refusal, alternatives, commands_of, verdict
from benchmarks.robustness.refusals.table import rows

__all__ = ["Refusal", "alternatives", "commands_of", "rows", "verdict"]
