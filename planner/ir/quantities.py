"""Quantities as data sheets write them (``16GiB``, ``900GB/s``, ``25Gbit/s``, ``5us``), and what they may be.

What one may be is judged by its name, which ends in its unit: not negative, and not beyond any machine.  Base units
inside: bytes, bytes a second, floating-point operations a second, seconds.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any

SECONDS_LIMITS = (0.0, 1e9)
BYTES_LIMITS = (0.0, 2.0**60)
_LEAST_RATE = 1e-3

Fault = tuple[str, str]
"""Path, and what is wrong there."""

_ROUNDING = 1e-9
_LIMITS: Mapping[str, tuple[float, float]] = {
    "bytes_per_s": (_LEAST_RATE, 1e18),
    "flop_per_s": (_LEAST_RATE, 1e21),
    "samples_per_s": (0.0, 1e18),
    "_s": SECONDS_LIMITS,
    "_seconds": SECONDS_LIMITS,
    "_bytes": BYTES_LIMITS,
}
"""By how a field's name ends, the first that fits: least and most."""

_OF_FIELDS: Mapping[str, tuple[float, float]] = {
    "seconds": SECONDS_LIMITS,
    "num_bytes": BYTES_LIMITS,
    "rows": (0.0, 2.0**40),
    "core_share": (0.0, 1.0),
    "occupancy": (0.0, 1.0),
    "spread": (0.0, 1e9),
    "process_spread": (0.0, 1e9),
    "run_delay": (0.0, 1e9),
    "state_bytes_per_parameter_byte": (0.0, 1e3),
    "num_runs": (0.0, 1e12),
    "num_steps": (0.0, 1e12),
    "warmup": (0.0, 1e12),
    "num_plans": (0.0, 1e9),
    "num_simulated": (0.0, 1e18),
    "num_candidates": (0.0, 1e18),
    "factor": (1e-6, 1e6),
    "bubble_fraction": (0.0, 1.0),
    "memory_margin": (0.0, 1.0),
    "halo_depth": (0.0, 1e6),
    "speeds": (0.0, 1e6),
    "time_limit_s": SECONDS_LIMITS,
    "clocks": (0.0, 1e15),
    "forward": BYTES_LIMITS,
    "backward": BYTES_LIMITS,
    "backward_input": BYTES_LIMITS,
    "backward_weight": BYTES_LIMITS,
    "left": BYTES_LIMITS,
    "outputs_saved": BYTES_LIMITS,
    "inputs_saved": BYTES_LIMITS,
    "gradients_left": BYTES_LIMITS,
    "inputs_kept": BYTES_LIMITS,
    "shared_buffers": BYTES_LIMITS,
    "gradients_made": BYTES_LIMITS,
    "inputs_left": BYTES_LIMITS,
    "gradients_left_from": BYTES_LIMITS,
}
_ANY = (-1e18, 1e18)


def out_of_limits(value: Any, path: str, name: str) -> Iterator[Fault]:
    """Quantities outside of what their names allow."""
    if isinstance(value, (bool, str)) or value is None:
        return
    if isinstance(value, (int, float)):
        low, high = limits_of(name)
        slack = 0.0 if name in _OF_FIELDS else _ROUNDING
        if not low - slack <= value <= high:
            yield path, _out_of_range(value, low, high)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from out_of_limits(getattr(value, field.name), f"{path}.{field.name}".lstrip("."), field.name)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from out_of_limits(item, f"{path}.{key}", name)
    elif isinstance(value, tuple):
        if value and all(type(item) in (int, float) for item in value):
            low, high = limits_of(name)
            if low - _ROUNDING <= min(value) and max(value) <= high:
                return
        for index, item in enumerate(value):
            yield from out_of_limits(item, f"{path}[{index}]", name)


def limits_of(name: str) -> tuple[float, float]:
    """Least and most that a field of that name may be."""
    if name in _OF_FIELDS:
        return _OF_FIELDS[name]
    return next((limits for ending, limits in _LIMITS.items() if name.endswith(ending)), _ANY)


def _out_of_range(value: int | float, low: float, high: float) -> str:
    is_long = isinstance(value, int) and abs(value) > 10**18
    shown = f"an integer of {len(str(value))} digits" if is_long else f"{value:g}"
    if value > high:
        return f"{shown} is more than {high:g}, beyond any machine"
    return f"{shown} is not above 0" if low == _LEAST_RATE else f"{shown} is less than {low:g}"


BYTES = "bytes"
BYTES_PER_S = "bytes per second"
FLOP_PER_S = "operations per second"
SECONDS = "seconds"

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
