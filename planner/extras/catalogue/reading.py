"""YAML as strictly as JSON: no key twice, no unknown key, no value of another type; all faults in one go.

Quantities as data sheets write them: ``16GiB``, ``900GB/s``, ``25Gbit/s``, ``15.7TFLOP/s``, ``5us``.

Base units inside: bytes, bytes a second, floating-point operations a second, seconds.
"""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from planner.ir.errors import CorruptFileError
from planner.ir.quantities import limits_of
from planner.ir.validation import MOST_DEVICES

BYTES, BYTES_PER_S, FLOP_PER_S, SECONDS = "bytes", "bytes per second", "operations per second", "seconds"

_NUMBER = re.compile(r"(\d+(?:\.\d+)?)\s*(\S*)")
_DECIMAL = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_BINARY = {f"{prefix}I": 1024.0**power for power, prefix in enumerate("KMGT", start=1)}
_BYTE_UNITS = {"": 1.0, **{f"{prefix}B": factor for prefix, factor in {**_DECIMAL, **_BINARY}.items()}}
_BIT_RATES = {f"{prefix}BIT/S": factor / 8 for prefix, factor in _DECIMAL.items()}

_UNITS: Mapping[str, Mapping[str, float]] = {
    BYTES: _BYTE_UNITS,
    BYTES_PER_S: {**{f"{unit}/S": factor for unit, factor in _BYTE_UNITS.items() if unit}, **_BIT_RATES},
    FLOP_PER_S: {f"{prefix}FLOP/S": factor for prefix, factor in _DECIMAL.items()},
    SECONDS: {"S": 1.0, "MS": 1e-3, "US": 1e-6, "µS".upper(): 1e-6, "NS": 1e-9, "MIN": 60.0, "H": 3600.0, "D": 86400.0},
}
_EXAMPLES = {BYTES: "16GiB or 512MB", BYTES_PER_S: "900GB/s or 25Gbit/s", FLOP_PER_S: "15.7TFLOP/s", SECONDS: "5us"}


def parse_quantity(text: str, dimension: str) -> float:
    """The number of base units that ``text`` says; case does not matter, GiB is 1024³ and GB is 1000³.

    Raises:
        ValueError: it is no quantity of that dimension; the text says how to write one.
    """
    match = _NUMBER.fullmatch(text.strip())
    factor = _UNITS[dimension].get(match[2].upper()) if match is not None else None
    if match is None or factor is None:
        raise ValueError(f"{text!r} is no number of {dimension}; write {_EXAMPLES[dimension]}")
    return float(Decimal(match[1]) * Decimal(repr(factor)))


MOST_YAML_BYTES = 2**18
MOST_YAML_NODES = 50_000
"""Values of a document, each alias counted as what it stands for."""

_MOST_FAULTS_SHOWN = 20


def parse_yaml(text: str, source: str) -> Any:
    """What ``text`` says, in plain types.

    Raises:
        CorruptFileError: it is no YAML, or has a key twice; ``source`` names it.
    """
    import yaml  # late: only who reads the catalogue or a cluster file needs it

    class StrictLoader(yaml.SafeLoader):
        """As ``yaml.safe_load``, but a key that comes twice is refused."""

        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
            keys = Counter(key.value for key, _ in node.value if isinstance(key.value, str))
            twice = sorted(key for key, count in keys.items() if count > 1)
            if twice:
                raise yaml.constructor.ConstructorError(
                    "while reading a mapping", node.start_mark, f"{twice[0]} is given twice", node.start_mark
                )
            return super().construct_mapping(node, deep)

    if len(text) > MOST_YAML_BYTES:
        raise CorruptFileError(f"{source} is too large", [f"{len(text)} characters; {MOST_YAML_BYTES} are the most"])
    try:
        loader = StrictLoader(text)
        root = loader.get_single_node()
        _require_small(root, source)
        return loader.construct_document(root) if root is not None else None
    except yaml.YAMLError as error:
        raise CorruptFileError(f"{source} is not YAML", str(error).splitlines()) from None
    except RecursionError:
        raise CorruptFileError(f"{source} is not YAML of ours", ["nested too deeply"]) from None
    except (ArithmeticError, ValueError) as error:
        raise CorruptFileError(f"{source} is not YAML", [str(error)]) from None


def yaml_words(text: str) -> dict[str, tuple[int, str]]:
    """Of a mapping that :func:`parse_yaml` has read: by key its line, from 1, and its value as written, if one word."""
    import yaml

    root = yaml.compose(text, Loader=yaml.SafeLoader)
    pairs = root.value if isinstance(root, yaml.MappingNode) else ()
    return {
        str(key.value): (key.start_mark.line + 1, value.value if isinstance(value, yaml.ScalarNode) else "")
        for key, value in pairs
    }


def _require_small(root: Any, source: str) -> None:
    """Of a composed document, aliases spelled out: few enough nodes, and none inside itself."""
    sizes: dict[int, int] = {}

    def size(node: Any) -> int:
        key = id(node)
        if key not in sizes:
            sizes[key] = -1
            pairs = node.value if not isinstance(node.value, str) else ()
            sizes[key] = 1 + sum(
                size(each) for item in pairs for each in (item if isinstance(item, tuple) else (item,))
            )
        if sizes[key] < 0:
            raise CorruptFileError(f"{source} is not YAML of ours", ["an alias stands inside of what it names"])
        return sizes[key]

    if root is not None and size(root) > MOST_YAML_NODES:
        text = f"with its aliases spelled out it has {size(root):.3g} values; {MOST_YAML_NODES} are the most"
        raise CorruptFileError(f"{source} is too large", [text], ["write it without aliases, with 'count'"])


ABSENT: Any = object()
"""Stands for a required key that is missing: named once, and read as a default without another word."""


_MOST = {
    name: limits_of(ending)[1]
    for name, ending in ((BYTES, "_bytes"), (BYTES_PER_S, "bytes_per_s"), (FLOP_PER_S, "flop_per_s"), (SECONDS, "_s"))
}


@dataclass(slots=True)
class FieldReader:
    """Reads plain values by type, and collects what is wrong instead of stopping at it."""

    faults: list[str] = field(default_factory=list)

    def fault(self, path: str, what: str) -> None:
        """Notes that the value at ``path`` is wrong."""
        self.faults.append(f"{path}: {what}" if path else what)

    def mapping(
        self, value: Any, path: str, required: Iterable[str] = (), optional: Iterable[str] = ()
    ) -> dict[str, Any]:
        """The entries of a mapping that may have these keys alone; ``ABSENT`` for each required one that is missing."""
        needed = tuple(required)
        if not isinstance(value, Mapping):
            if value is not ABSENT:
                self.fault(path, f"should be a mapping, got {_shown(value)}")
            return dict.fromkeys(needed, ABSENT)
        allowed = (*needed, *optional)
        for key in value:
            if key not in allowed:
                self.fault(f"{path}.{key}".lstrip("."), f"unknown key{suggestion(str(key), allowed)}")
        for key in needed:
            if key not in value:
                self.fault(f"{path}.{key}".lstrip("."), "missing")
        return {**dict.fromkeys(needed, ABSENT), **{key: entry for key, entry in value.items() if key in allowed}}

    def items(self, value: Any, path: str) -> Iterator[tuple[str, Any]]:
        """(path, entry) of a list that is not empty."""
        if not isinstance(value, list) or not value:
            if value is not ABSENT:
                self.fault(path, f"should be a list that is not empty, got {_shown(value)}")
            return
        yield from ((f"{path}[{index}]", entry) for index, entry in enumerate(value))

    def text(self, value: Any, path: str, default: str = "") -> str:
        """Text that is not empty."""
        if isinstance(value, str) and value.strip():
            return value.strip()
        if value is not ABSENT:
            self.fault(path, f"should be text, got {_shown(value)}")
        return default

    def count(self, value: Any, path: str) -> int:
        """A positive integer, of things that there are not beyond number of."""
        if isinstance(value, int) and not isinstance(value, bool) and 0 < value <= MOST_DEVICES:
            return value
        if isinstance(value, int) and value > MOST_DEVICES:
            self.fault(path, f"should be at most {MOST_DEVICES}, got {_shown(value)}")
            return 1
        self.fault(path, f"should be a positive integer, got {_shown(value)}")
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
            self.fault(path, f"should be above zero, got {_shown(value)}")
            return 1.0
        most = _MOST[dimension]
        if amount > most:
            self.fault(path, f"should be at most {most:g}, got {_shown(value)}")
            return 1.0
        return amount

    def finish(self, source: str, what: str) -> None:
        """Raises :class:`CorruptFileError` with all faults, if there are any."""
        if self.faults:
            count = f"{len(self.faults)} fault{'s' if len(self.faults) > 1 else ''}"
            shown = self.faults[:_MOST_FAULTS_SHOWN]
            if len(shown) < len(self.faults):
                shown.append(f"... and {len(self.faults) - len(shown)} more")
            raise CorruptFileError(f"{source} is not a valid {what}: {count}", shown)


def suggestion(name: str, candidates: Iterable[str]) -> str:
    """``; did you mean V100-16GB?``, or nothing; case does not matter."""
    names = {candidate.lower(): candidate for candidate in candidates}
    near = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.5)
    return f"; did you mean {names[near[0]]}?" if near else ""


def _shown(value: Any) -> str:
    if isinstance(value, int) and abs(value) >= 10**60:
        return "an integer of more than 60 digits"
    text = "nothing" if value is None else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
