"""Tables of command lines: each row is judged in a folder of its own, and those that are not good are named."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol, TypeVar


class Named(Protocol):
    """A row of a table."""

    @property
    def name(self) -> str:
        """What people call it."""


R = TypeVar("R", bound=Named)


def faults(asked: Sequence[R], verdict: Callable[[R, Path], str]) -> dict[str, str]:
    """By name, what is wrong with those of the rows that are not good."""
    bad = {}
    for row in asked:
        with tempfile.TemporaryDirectory(prefix="halopipe-row-") as folder:
            if fault := verdict(row, Path(folder)):
                bad[row.name] = fault
    return bad


def main(description: str, rows: Sequence[R], verdict: Callable[[R, Path], str], good: str) -> int:
    """Prints the rows that are not good, or those of them that have a word of the command line in their names."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("words", nargs="*", metavar="WORD", help="those that have a word in their names; none: all")
    named = parser.parse_args().words
    asked = [row for row in rows if not named or any(word in row.name for word in named)]
    bad = faults(asked, verdict)
    for name, fault in bad.items():
        sys.stdout.write(f"{name}: {fault}\n")
    sys.stdout.write(f"{len(asked) - len(bad)} of {len(asked)} {good}\n")
    return 0 if not bad else 1
