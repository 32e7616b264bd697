"""Plain values of YAML by type: no unknown key, no value of another type; all faults in one go."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from planner.ir.errors import CorruptFileError
from planner.ir.quantities import BYTES, BYTES_PER_S, FLOP_PER_S, SECONDS, limits_of, parse_quantity
from planner.ir.strict_yaml import cut, shown, suggestion
from planner.ir.validation import MOST_DEVICES

_MOST_FAULTS_SHOWN = 20

ABSENT: Any = object()
"""Stands for a required key that is missing: named once, and read as a default without another word."""


_MOST = {
    name: limits_of(ending)[1]
    for name, ending in ((BYTES, "_bytes"), (BYTES_PER_S, "bytes_per_s"), (FLOP_PER_S, "flop_per_s"), (SECONDS, "_s"))
}


@dataclass(slots=True)
class FieldReader:
    """Reads plain values by type, and collects what is wrong instead of stopping at it.

    Attributes:
        faults: the first of them, which are shown.
        num_faults: of all.
    """

    faults: list[str] = field(default_factory=list)
    num_faults: int = 0

    def fault(self, path: str, what: str, name: str = "", candidates: Iterable[str] = ()) -> None:
        """Notes that the value at ``path`` is wrong; of a name that is none, with the nearest of ``candidates``."""
        self.num_faults += 1
        if len(self.faults) < _MOST_FAULTS_SHOWN:
            near = suggestion(name, candidates) if name else ""
            self.faults.append(f"{path}: {what}{near}" if path else f"{what}{near}")

    def mapping(
        self, value: Any, path: str, required: Iterable[str] = (), optional: Iterable[str] = ()
    ) -> dict[str, Any]:
        """The entries of a mapping that may have these keys alone; ``ABSENT`` for each required one that is missing."""
        needed = tuple(required)
        if not isinstance(value, Mapping):
            if value is not ABSENT:
                self.fault(path, f"should be a mapping, got {shown(value)}")
            return dict.fromkeys(needed, ABSENT)
        allowed = (*needed, *optional)
        for key in value:
            if key not in allowed:
                self.fault(f"{path}.{cut(key)}".lstrip("."), "unknown key", key, allowed)
        for key in needed:
            if key not in value:
                self.fault(f"{path}.{key}".lstrip("."), "missing")
        return {**dict.fromkeys(needed, ABSENT), **{key: entry for key, entry in value.items() if key in allowed}}

    def items(self, value: Any, path: str) -> Iterator[tuple[str, Any]]:
        """(path, entry) of a list that is not empty."""
        if not isinstance(value, list) or not value:
            if value is not ABSENT:
                self.fault(path, f"should be a list that is not empty, got {shown(value)}")
            return
        yield from ((f"{path}[{index}]", entry) for index, entry in enumerate(value))

    def text(self, value: Any, path: str, default: str = "") -> str:
        """Text that is not empty."""
        if isinstance(value, str) and value.strip():
            return value.strip()
        if value is not ABSENT:
            self.fault(path, f"should be text, got {shown(value)}")
        return default

    def count(self, value: Any, path: str) -> int:
        """A positive integer, of things that there are not beyond number of."""
        if isinstance(value, int) and not isinstance(value, bool) and 0 < value <= MOST_DEVICES:
            return value
        if isinstance(value, int) and value > MOST_DEVICES:
            self.fault(path, f"should be at most {MOST_DEVICES}, got {shown(value)}")
            return 1
        self.fault(path, f"should be a positive integer, got {shown(value)}")
        return 1

    def quantity(self, value: Any, path: str, dimension: str) -> float:
        """A quantity with its unit, in base units; zero is none, but for seconds."""
        if value is ABSENT:
            return 1.0
        try:
            amount = parse_quantity(str(value), dimension)
        except ValueError as error:
            self.fault(path, str(error))
            return 1.0
        if amount <= 0 and dimension != "seconds":
            self.fault(path, f"should be above zero, got {shown(value)}")
            return 1.0
        most = _MOST[dimension]
        if amount > most:
            self.fault(path, f"should be at most {most:g}, got {shown(value)}")
            return 1.0
        return amount

    def finish(self, source: str, what: str) -> None:
        """Raises :class:`CorruptFileError` with all faults, if there are any."""
        if self.faults:
            count = f"{self.num_faults} fault{'s' if self.num_faults > 1 else ''}"
            left = self.num_faults - len(self.faults)
            more = [f"... and {left} more"] if left else []
            raise CorruptFileError(f"{source} is not a valid {what}: {count}", [*self.faults, *more])
