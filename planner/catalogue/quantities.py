"""Quantities as data sheets write them: ``16GiB``, ``900GB/s``, ``25Gbit/s``, ``15.7TFLOP/s``, ``5us``.

Base units inside: bytes, bytes a second, floating-point operations a second, seconds.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Decimal

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
    SECONDS: {"S": 1.0, "MS": 1e-3, "US": 1e-6, "µS".upper(): 1e-6, "NS": 1e-9},
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
