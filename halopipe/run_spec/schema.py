"""Lists of options as the command line, the calls of ``hp`` and job files take them: flags, limits, text to values.

They are dataclasses whose fields ``planner.ir.options.option`` makes: type, default, limits, help, and what a shell
offers; what a verb may be asked stands in one of them, and nowhere else.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from halopipe.terminal import units
from planner.ir.errors import UsageError
from planner.ir.options import DURATION, INTEGERS, INTERVAL, NAMES, SIZE, SUM, spec
from planner.ir.quantities import BYTES_LIMITS, limits_of

MOST_WHOLE = 2**31 - 1
"""Of what is counted, and no option limits otherwise: steps, samples, ranks, processes."""

MOST_JOBS = 1024
"""Processes that share out work on this machine."""

MOST_PLANS = 10_000
"""Of a front of step and memory."""


def asked_in(group: type[Any]) -> Mapping[str, dataclasses.Field[Any]]:
    """The fields of a list of options that the command line knows, by name, in its order."""
    return {each.name: each for each in dataclasses.fields(group) if spec(each).help}


def flag(field: dataclasses.Field[Any]) -> str:
    """What the field is called on the command line."""
    return spec(field).flag or f"--{field.name.replace('_', '-')}"


def limits(field: dataclasses.Field[Any], kind: type) -> tuple[float, float]:
    """Least and most of a number that the field may be, as its option says, else by its name and ``kind``."""
    option = spec(field)
    highest = BYTES_LIMITS[1] if option.kind == SIZE else limits_of(field.name)[1]
    if kind is int and option.kind != SIZE:
        highest = min(MOST_WHOLE, int(highest))
    most = highest if option.most is None else option.most
    return -most if option.least is None else option.least, most


def limit_faults(group: Any) -> Iterator[UsageError]:
    """What of a list of options is a number beyond its limits, or none."""
    for field in dataclasses.fields(group):
        yield from field_faults(field, getattr(group, field.name))


def field_faults(field: dataclasses.Field[Any], value: Any) -> Iterator[UsageError]:
    """The same of the value of one of them; of several values, each."""
    for number in value if isinstance(value, (tuple, list)) else (value,):
        if not isinstance(number, (int, float)) or isinstance(number, bool):
            continue
        least, most = limits(field, type(number))
        if not least <= number <= most:
            word, bound = ("most", most) if number > most else ("least", least)
            is_stated = number <= most or spec(field).most is not None  # else the bound is what no machine does
            yield UsageError(
                f"{flag(field)} is {units.number(number)}",
                [f"the {word} is {units.number(bound)}"],
                [f"{flag(field)} {units.number(bound)}" if is_stated else f"leave {flag(field)} out"],
            )


def from_text(field: dataclasses.Field[Any], text: str) -> Any:
    """What was typed for a field of one of the kinds that are ``WRITTEN``, as the field has it.

    Raises:
        UsageError: it is nothing of that kind.
    """
    if text:
        return WRITTEN[spec(field).kind](text, flag(field))
    return () if isinstance(field.default, tuple) else 0


def default_text(field: dataclasses.Field[Any]) -> str:
    """The field's default as one would type it; empty for none."""
    kind: str = spec(field).kind
    default: Any = field.default
    if kind == NAMES:
        return ",".join(default)
    return f"{default:g}s" if kind == DURATION else str(default) if kind == INTERVAL else ""


WRITTEN: Mapping[str, Callable[[str, str], Any]] = {
    SIZE: lambda text, name: units.parse_size(text),
    DURATION: lambda text, name: units.parse_seconds(text),
    INTERVAL: lambda text, name: units.parse_interval(text),
    NAMES: lambda text, name: tuple(units.names_in(text)),
    INTEGERS: lambda text, name: units.parse_integers(text, name, "1,2,4,8"),
    SUM: units.parse_sum,
}
"""How text becomes a value, by kind, of the text and of what the option is called."""
