"""How a field of a list of options is asked for: help, default, limits, how its text is read, what a shell offers.

The command line, the calls of ``hp`` and job files are made of dataclasses whose fields :func:`option` makes
(:mod:`halopipe.run_spec.schema` reads them); what may be asked of a plan stands in :class:`planner.ir.problem.Request`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

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
        least, most: limits of a number; None: as :func:`halopipe.run_spec.schema.limits` has them.
        kind: ``path``: a file or folder, kept as absolute; ``metrics``: the same, perhaps after ``tb:``; ``factory``:
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


def option(
    default: Any,
    help: str = "",
    metavar: str = "",
    panel: str = "",
    *,
    in_files: Mapping[str, Any] = MappingProxyType({}),
    **others: Any,
) -> Any:
    """A field of a list of options.

    Args:
        help, metavar, panel, others: as of :class:`OptionSpec`.
        in_files: of a field that is kept in files, what :mod:`planner.ir.codec` reads of it.
    """
    spec = OptionSpec(help, metavar, panel, **others)
    return dataclasses.field(default=default, metadata={_OPTION: spec, **in_files})


def spec(field: dataclasses.Field[Any]) -> OptionSpec:
    """How the field is asked for; one that no :func:`option` made is not."""
    asked_for: OptionSpec = field.metadata.get(_OPTION, _NOT_ASKED)
    return asked_for


_NOT_ASKED = OptionSpec("")


def asked_as(group: type[Any], name: str, *, default: Any = dataclasses.MISSING) -> Any:
    """A field of another list that is asked for as the field ``name`` of ``group``, perhaps with another default."""
    field = next(each for each in dataclasses.fields(group) if each.name == name)
    own = field.default if default is dataclasses.MISSING else default
    return dataclasses.field(default=own, metadata={_OPTION: spec(field)})
