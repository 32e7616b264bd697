"""What the shell offers for a value (``halopipe --install-completion``) that is no file: names that are known.

Each is asked while somebody waits with a finger on a key: none loads torch.  Of what nothing is offered here the shell
completes files.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import typer

from planner.ir.files import parse_json

_MOST_BYTES = 2**24
"""Of a plan whose layers are offered."""


def offered(names: Sequence[str], *, listed: bool = False) -> Callable[[str], list[str]]:
    """Offers these names; of a list with commas the next of those that are not in it.

    Args:
        names: or ``package.module:name`` of what holds or gives them, which is imported once somebody asks.
    """

    def complete(incomplete: str) -> list[str]:
        before, comma, last = incomplete.rpartition(",") if listed else ("", "", incomplete)
        rest = [name for name in _known(names) if name not in before.split(",")]
        return [f"{before}{comma}{name}" for name in rest if name.startswith(last)]

    return complete


def _known(names: Sequence[str]) -> Iterable[str]:
    if not isinstance(names, str):
        return names
    held = pkgutil.resolve_name(names)
    listed: Iterable[str] = held() if callable(held) else held
    return listed


def layers(context: typer.Context, incomplete: str) -> list[str]:
    """Offers the layers of the plan that was typed before; it is not parsed where an option still lacks its value."""
    for path in [Path(str(word)) for word in (context.params.get("plan"), *context.args) if word]:
        try:
            if path.stat().st_size <= _MOST_BYTES:
                names = parse_json(path.read_text("utf-8"))["decision"]["layers"]
                return [name for name in names if name.startswith(incomplete)]
        except (KeyError, OSError, TypeError, ValueError):
            continue
    return []
