"""Quantities as people write and read them: seconds, bytes, shares, shapes.  Inside, everything is in base units.

Names that people type: known ones pass, others are answered with the nearest.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from planner.ir.errors import UnknownNameError, UsageError

T = TypeVar("T")


def names_in(text: str) -> list[str]:
    """Those that commas divide."""
    return [part.strip() for part in text.split(",") if part.strip()]


def require_known(what: str, wanted: Iterable[str], names: Sequence[str]) -> None:
    """Raises :class:`UnknownNameError`, with the nearest name, for the first of ``wanted`` that is not known."""
    for name in wanted:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
            remedies = [f"{near[0]} (did you mean that?)"] if near else [] if any(names) else ["leave it out"]
            listed = ", ".join(filter(None, names)) or "none"
            raise UnknownNameError(f"no {what} {name!r}", [f"known: {listed}"], remedies)


_TIME_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))
_MOST_DIGITS = 18
AUTO_INTERVAL = "auto"
"""In place of an interval: the best one is found."""

_BINARY_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def seconds(value_s: float) -> str:
    """Three digits and the unit that fits: ``412 ms``, ``1.53 s``, ``8.1 µs``."""
    if value_s == 0:
        return "0 s"
    if abs(value_s) >= 100:
        return f"{value_s:.0f} s"
    for factor, unit in _TIME_UNITS:
        if abs(value_s) >= factor * 0.9995:
            return f"{_three_digits(value_s / factor)} {unit}"
    return f"{value_s:.1e} s"


def known_seconds(value_s: float | None) -> str:
    """As :func:`seconds`; a dash where it is not known."""
    return "–" if value_s is None else seconds(value_s)


_LONG_UNITS = ((86400.0, 48 * 3600.0, "days"), (3600.0, 100 * 60.0, "h"), (60.0, 100.0, "min"))


def duration(value_s: float) -> str:
    """As :func:`seconds`, of what lasts longer in minutes, hours or days: ``25 min``, ``7.5 h``, ``12 days``."""
    for factor, least_s, unit in _LONG_UNITS:
        if value_s >= least_s:
            return f"{_three_digits(value_s / factor) if unit == 'h' else round(value_s / factor)} {unit}"
    return seconds(value_s)


def seconds_within(value_s: float, low_s: float, high_s: float) -> str:
    """``1.23 s (1.20-1.27)``: a time and a range, in the same unit; the time alone where the range is empty."""
    if not 0 < low_s < high_s or value_s <= 0:
        return seconds(value_s)
    shown, unit = seconds(value_s).split(" ")
    factor = {name: scale for scale, name in _TIME_UNITS}.get(unit, 1.0)
    digits = len(shown.partition(".")[2])
    return f"{shown} {unit} ({low_s / factor:.{digits}f}-{high_s / factor:.{digits}f})"


def size(num_bytes: float) -> str:
    """Three digits and the binary unit that fits: ``1.25 GiB``, ``312 KiB``."""
    value = float(num_bytes)
    unit = 0
    while abs(value) >= 999.5 and unit < len(_BINARY_UNITS) - 1:
        value = value / 1024
        unit = unit + 1
    return f"{value:.0f} B" if unit == 0 else f"{_three_digits(value)} {_BINARY_UNITS[unit]}"


def percent(fraction: float) -> str:
    """``12 %``; one digit after the point below ten."""
    value = 100 * fraction
    return f"{value:.0f} %" if abs(value) >= 9.95 else f"{value:.1f} %"


def signed_percent(fraction: float) -> str:
    """``+12 %`` or ``-3.4 %``."""
    text = percent(fraction)
    return text if text.startswith("-") else f"+{text}"


def rate(per_s: float) -> str:
    """``19.4`` (samples a second), three digits."""
    return _three_digits(per_s) if per_s < 100 else f"{per_s:,.0f}"


def number(value: int | float) -> str:
    """As one would type it; of a whole number that nobody would, how long it is."""
    if isinstance(value, float):
        return f"{value:g}"
    return str(value) if abs(value) < 10**30 else f"a number of {int(value.bit_length() * math.log10(2)) + 1} digits"


def count(number: int, word: str, plural: str = "") -> str:
    """``1 stage``, ``2 stages``; ``plural`` where it is another."""
    return f"{number} {word}" if number == 1 else f"{number} {plural or f'{word}s'}"


def micro_batches(sizes: tuple[int, ...]) -> str:
    """``4 micro-batches of 2``, or with a smaller last one ``3 micro-batches: 4 + 3 + 3``."""
    if len(set(sizes)) == 1:
        return f"{count(len(sizes), 'micro-batch') if len(sizes) == 1 else f'{len(sizes)} micro-batches'} of {sizes[0]}"
    return f"{len(sizes)} micro-batches: {' + '.join(map(str, sizes))}"


def token_slices(lengths: tuple[int, ...]) -> str:
    """``, each in 3 token slices: 5 + 4 + 3``; nothing where there are none."""
    return f", each in {count(len(lengths), 'token slice')}: {' + '.join(map(str, lengths))}" if lengths else ""


def parse_sum(text: str, what: str) -> tuple[int, ...]:
    """The terms of ``256+192+64``.

    Raises:
        UsageError: they are no whole numbers.
    """
    try:
        return tuple(whole(part.strip(), least=0) for part in text.split("+"))
    except ValueError:
        remedies = [f"{what} 256+192+64"]
        raise UsageError(f"{what} {text}", ["whole numbers with + between are needed"], remedies) from None


def parse_size(text: str) -> int:
    """Bytes of ``2GiB``, ``512MB`` or ``1048576``; GiB is 1024³, GB is 1000³.

    Raises:
        UsageError: it is not a size.
    """
    from planner.ir.quantities import BYTES, parse_quantity

    try:
        num_bytes = int(parse_quantity(text, BYTES))
    except (OverflowError, ValueError):
        num_bytes = 0
    if num_bytes < 1:
        raise UsageError(f"{text!r} is not a size", [], ["write a number and a unit: 2GiB, 512MB"])
    return num_bytes


def parse_seconds(text: str) -> float:
    """Seconds of ``30s``, ``10min``, ``6h``, ``2d`` or ``300``.

    Raises:
        UsageError: it is no time.
    """
    from planner.ir.quantities import SECONDS, parse_quantity

    try:
        return parse_quantity(f"{text}s" if text.strip().replace(".", "", 1).isdecimal() else text, SECONDS)
    except (OverflowError, ValueError):
        raise UsageError(f"{text!r} is no time", [], ["write a number and a unit: 30s, 10min, 6h"]) from None


def parse_interval(text: str) -> int | str:
    """How often: a number of steps, or as it is written ``auto`` or a time such as ``10min``.

    Raises:
        UsageError: it is none of these.
    """
    if text.strip().isdecimal() and len(text) <= _MOST_DIGITS:
        return int(text)
    try:
        if text != AUTO_INTERVAL and not parse_seconds(text) > 0:
            raise UsageError("")
    except UsageError:
        remedies = ["write a number of steps (50), a time (10min, 300s), or auto"]
        raise UsageError(f"{text!r} does not say how often", [], remedies) from None
    return text


def parse_integers(text: str, what: str, example: str) -> tuple[int, ...]:
    """Positive integers with commas between them; nothing gives none.

    Raises:
        UsageError: an entry is not a positive integer.
    """
    try:
        return tuple(whole(part.strip()) for part in text.split(",")) if text.strip() else ()
    except ValueError:
        remedies = [f"write it like {example}"]
        raise UsageError(f"{what} {text!r} is not a list of positive integers", [], remedies) from None


def whole(text: str, least: int = 1) -> int:
    """A whole number of at least ``least``.

    Raises:
        ValueError: it is none.
    """
    if not text.isdecimal() or len(text) > _MOST_DIGITS or int(text) < least:
        raise ValueError(text)
    return int(text)


def parse_pair(entry: str) -> tuple[str, str]:
    """Name and value of ``name=value``.

    Raises:
        ValueError: it is none, or one of the two is missing.
    """
    name, _, value = (piece.strip() for piece in entry.partition("="))
    if not name or not value:
        raise ValueError(entry)
    return name, value


def parse_pairs(text: str, parse: Callable[[str, str], T], fault: str, example: str) -> dict[str, T]:
    """Values by name of ``name=value,name=value``.

    Args:
        parse: the value of a name, of its text; raises KeyError or ValueError where that is none.
        fault: of an entry that is none, as said after it: ``is no size``.
        example: of how to write them.

    Raises:
        UsageError: an entry is none, or gives a name again.
    """
    values: dict[str, T] = {}
    for entry in names_in(text):
        try:
            name, value = parse_pair(entry)
            if name in values:
                raise UsageError(f"{name} is given twice", [f"in {text}"], [f"keep {name}={value}, or the other"])
            values[name] = parse(name, value)
        except (KeyError, ValueError):
            raise UsageError(f"{entry} {fault}", [f"in {text}"], [f"write it like {example}"]) from None
    return values


def parse_arguments(pairs: Iterable[str]) -> dict[str, Any]:
    """Values of ``key=value`` pairs by key; a value that is not JSON is a string.

    Raises:
        UsageError: a pair has no ``=``, its key is no Python name, or a key is given twice.
    """
    arguments: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key.isidentifier():
            raise UsageError(f"--arg {pair!r} is not key=value", [], ["write it like --arg num_classes=10"])
        if key in arguments:
            raise UsageError(f"--arg {key} is given twice", [], [f"keep one of {arguments[key]} and {value}"])
        try:
            arguments[key] = json.loads(value, parse_constant=_refuse)
        except (ValueError, RecursionError):
            arguments[key] = value
    return arguments


def _refuse(word: str) -> None:
    """NaN and infinities are no JSON, though Python reads them."""
    raise ValueError(word)


def _three_digits(value: float) -> str:
    if abs(value) >= 99.95:
        return f"{value:.0f}"
    return f"{value:.1f}" if abs(value) >= 9.995 else f"{value:.2f}"
