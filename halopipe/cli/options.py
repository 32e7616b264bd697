"""Options that several verbs have, spelled once."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from halopipe.run_spec.options import FIELDS, PATH, SIZE, RunOptions, flag_of, option_of


def a_number(value: float) -> float:
    """Callback of options that compare with limits, which NaN passes."""
    if math.isnan(value):
        raise typer.BadParameter("NaN is no number")
    return value


PlanPath = Annotated[Path, typer.Argument(metavar="PLAN", help="A plan file, as written by 'halopipe plan'.")]
ProfileOption = Annotated[
    Path | None,
    typer.Option(
        "--profile",
        metavar="PROFILE",
        help="The profile that the plan was made from; if it is profile.json beside the plan, it is found.",
    ),
]
ClusterOption = Annotated[
    Path | None,
    typer.Option("--cluster", metavar="FILE", help="Machines one does not have (YAML); see 'halopipe devices'."),
]
Json = Annotated[bool, typer.Option("--json", help="Write the result alone, as JSON, to stdout.")]
HostsOption = Annotated[Path | None, typer.Option("--hosts", hidden=True)]
"""Of former times: answered with the commands of torchrun that take its place."""


def with_run_options(verb: Callable[..., None]) -> Callable[..., None]:
    """``verb``, whose parameter ``options`` stands for one option of the command line a field of RunOptions."""
    parameters = inspect.signature(verb, eval_str=True).parameters
    hints = get_type_hints(RunOptions)
    names = [name for name in FIELDS if option_of(name).help]

    @functools.wraps(verb)
    def called(**given: Any) -> None:
        chosen = {name: _value(name, given.pop(name)) for name in names}
        verb(options=RunOptions(**chosen), **given)

    found: list[inspect.Parameter] = []
    for name, parameter in parameters.items():
        found += [_parameter(each, hints[each]) for each in names] if name == "options" else [parameter]
    called.__signature__ = inspect.Signature(found)  # type: ignore[attr-defined]  # which typer reads
    called.__annotations__ = {each.name: each.annotation for each in found}
    return called


def _parameter(name: str, kind: Any) -> inspect.Parameter:
    """The field as typer takes it."""
    field, option = FIELDS[name], option_of(name)
    default, flag = field.default, flag_of(name)
    if kind is bool:
        flag = f"{flag}/--no-{flag.removeprefix('--')}" if default else flag
    if option.kind == PATH:
        kind, default = Path | None, None
    elif option.kind == SIZE:
        kind, default = str, ""
    least = option.least if kind in (int, float) else None
    check = a_number if kind is float else None
    shown = typer.Option(flag, metavar=option.metavar or None, help=option.help, min=least, callback=check)
    return inspect.Parameter(
        name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default, annotation=Annotated[kind, shown]
    )


def _value(name: str, given: Any) -> Any:
    """What was given, as the field has it."""
    kind = option_of(name).kind
    if kind == PATH:
        return "" if given is None else str(given.absolute())
    if kind == SIZE:
        from halopipe.terminal import units

        return units.parse_size(given) if given else 0
    return given
