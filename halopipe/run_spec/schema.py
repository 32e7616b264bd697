"""One schema of options: a field has its type, default, limits, help, and what a shell offers for it.

The command line, the calls of ``hp`` and job files are made of dataclasses whose fields :func:`option` makes; what a
verb may be asked stands in one of them, and nowhere else.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from halopipe.terminal import units
from planner.ir.errors import UsageError
from planner.ir.quantities import limits_of

PATH = "path"
METRICS = "metrics"
FACTORY = "factory"
WORD = "word"
SIZE = "size"
DURATION = "duration"
INTERVAL = "interval"
NAMES = "names"
INTEGERS = "integers"
SUM = "sum"

MOST_WHOLE = 2**31 - 1
"""Of what is counted, and no option limits otherwise: steps, samples, ranks, processes."""

MOST_JOBS = 1024
"""Processes that share out work on this machine."""

MOST_PLANS = 10_000
"""Of a front of step and memory."""

_OPTION = "option"


@dataclass(frozen=True, slots=True)
class OptionSpec:
    """How a field is asked for.

    Attributes:
        help: for the command line; empty: it is no option there.
        metavar: stands for its value.
        panel: heading in the help.
        flag: on the command line; empty: the field's name.  One of a field that is true begins with ``--no-``.
        short: the same, one letter.
        least, most: limits of a number; None: as :func:`limits` has them.
        kind: ``path``: a file or folder, kept as absolute; ``metrics``: the same, perhaps behind ``tb:``; ``factory``:
            the name of one may begin with a path; ``size``: bytes, written such as ``2GiB``; ``duration``: seconds,
            written such as ``10min``; ``interval``: a number of steps, or text: a duration, or ``auto``; ``names`` and
            ``integers``: several with commas between them; ``sum``: integers with + between them; ``word``: a flag
            (True), which one of ``choices`` may follow.
        offers: what a shell offers for it: names; or ``package.module:name`` of what holds or gives them,
            imported once somebody asks; or what typer asks for them.  Of none it offers files.
    """

    help: str
    metavar: str = ""
    panel: str = ""
    flag: str = ""
    short: str = ""
    least: float | None = None
    most: float | None = None
    kind: str = ""
    choices: tuple[str, ...] = ()
    offers: Sequence[str] | Callable[..., list[str]] = ()


def option(default: Any, help: str = "", metavar: str = "", panel: str = "", **others: Any) -> Any:
    """A field of a list of options; ``help``, ``metavar``, ``panel`` and ``others`` as of :class:`OptionSpec`."""
    return dataclasses.field(default=default, metadata={_OPTION: OptionSpec(help, metavar, panel, **others)})


def asked_in(group: type[Any]) -> Mapping[str, dataclasses.Field[Any]]:
    """The fields of a list of options that the command line knows, by name, in its order."""
    return {each.name: each for each in dataclasses.fields(group) if spec(each).help}


def spec(field: dataclasses.Field[Any]) -> OptionSpec:
    """How the field is asked for."""
    option: OptionSpec = field.metadata[_OPTION]
    return option


def flag(field: dataclasses.Field[Any]) -> str:
    """What the field is called on the command line."""
    return spec(field).flag or f"--{field.name.replace('_', '-')}"


def limits(field: dataclasses.Field[Any], kind: type) -> tuple[float, float]:
    """Least and most of a number that the field may be, as its option says, else by its name and ``kind``."""
    option = spec(field)
    highest = limits_of(field.name)[1]
    if kind is int and not field.name.endswith("_bytes"):
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
