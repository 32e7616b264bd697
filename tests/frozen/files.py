"""Frozen values as JSON files, one each, and how two of them are compared."""

from __future__ import annotations

import datetime
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "data" / "frozen"
REASONS = FOLDER / "reasons.md"
ROUNDING = 1e-9
"""By which numbers may differ: the order of a sum is no behaviour."""


def read(kind: str, name: str) -> Any:
    """What is frozen of ``name``; None if nothing is."""
    path = _path(kind, name)
    return json.loads(path.read_text("utf-8")) if path.exists() else None


def differences(was: Any, now: Any, place: str = "") -> Iterator[str]:
    """One line for each value that differs, with its place and both values."""
    if isinstance(was, Mapping) and isinstance(now, Mapping):
        for key in dict.fromkeys((*was, *now)):
            yield from differences(was.get(key), now.get(key), f"{place}.{key}" if place else key)
    elif isinstance(was, list) and isinstance(now, list) and len(was) == len(now):
        for index, pair in enumerate(zip(was, now, strict=True)):
            yield from differences(*pair, f"{place}[{index}]")
    elif not _same(was, now):
        yield f"{place}: {_short(was)} -> {_short(now)}"


def freeze(kind: str, values: Mapping[str, Callable[[], Any]], why: str) -> list[str]:
    """Write the files of what differs from them, delete those of no name, and keep the reason; gives the names."""
    changed = []
    for name, make in values.items():
        now = json.loads(json.dumps(make()))
        if any(differences(read(kind, name), now)):
            path = _path(kind, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(now, indent=1, ensure_ascii=False) + "\n", "utf-8")
            changed.append(name)
    for path in (FOLDER / kind).glob("*.json"):
        if path.stem not in values:
            path.unlink()
            changed.append(path.stem)
    note(kind, why, changed)
    return changed


def note(kind: str, why: str, changed: Sequence[str]) -> None:
    """Keep why something was frozen anew, where anything was."""
    if changed:
        names = ", ".join(changed) if len(changed) <= 20 else f"{len(changed)} of them"
        with REASONS.open("a", encoding="utf-8") as file:
            file.write(f"- {datetime.date.today()} {kind}: {why} ({names})\n")


def _path(kind: str, name: str) -> Path:
    return FOLDER / kind / f"{name}.json"


def _same(was: Any, now: Any) -> bool:
    if isinstance(was, float) or isinstance(now, float):
        numbers = isinstance(was, int | float) and isinstance(now, int | float)
        return numbers and math.isclose(was, now, rel_tol=ROUNDING, abs_tol=1e-15)
    return type(was) is type(now) and was == now


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 200 else f"{text[:200]}..."
