"""What a quantity may be, judged by its name, which ends in its unit: not negative, and not beyond any machine."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

SECONDS = (0.0, 1e9)
BYTES = (0.0, 2.0**60)
_LEAST_RATE = 1e-3

Fault = tuple[str, str]
"""Path, and what is wrong there."""

_ROUNDING = 1e-9
_LIMITS: Mapping[str, tuple[float, float]] = {
    "bytes_per_s": (_LEAST_RATE, 1e18),
    "flop_per_s": (_LEAST_RATE, 1e21),
    "samples_per_s": (0.0, 1e18),
    "_s": SECONDS,
    "_seconds": SECONDS,
    "_bytes": BYTES,
}
"""By how a field's name ends, the first that fits: least and most."""

_OF_FIELDS: Mapping[str, tuple[float, float]] = {
    "seconds": SECONDS,
    "num_bytes": BYTES,
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
    "time_limit_s": SECONDS,
    "clocks": (0.0, 1e15),
    "forward": BYTES,
    "backward": BYTES,
    "backward_input": BYTES,
    "backward_weight": BYTES,
    "left": BYTES,
    "outputs_saved": BYTES,
    "inputs_saved": BYTES,
    "gradients_left": BYTES,
    "inputs_kept": BYTES,
    "shared_buffers": BYTES,
    "gradients_made": BYTES,
    "inputs_left": BYTES,
    "gradients_left_from": BYTES,
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
