"""Options that several verbs have, spelled once."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from halopipe.cli import completion
from halopipe.cli.usage import require_word
from halopipe.run_spec.options import (
    ASKED,
    DURATION,
    INTERVAL,
    METRICS,
    PATH,
    SIZE,
    WORD,
    asked_in,
    flag,
    flag_of,
    option_of,
    spec,
)
from planner.ir.errors import HalopipeError


def a_number(value: float) -> float:
    """Callback of options that compare with limits, which NaN passes."""
    if math.isnan(value):
        raise typer.BadParameter("NaN is no number")
    return value


def _from_job(context: typer.Context, path: Path) -> Path:
    """Of a job file the plan that it names; its options become the defaults of those of the command line."""
    from halopipe.run_spec import job_file
    from halopipe.terminal import console

    if context.resilient_parsing or path.suffix not in job_file.SUFFIXES:
        return path
    try:
        job = job_file.read(path)
    except HalopipeError as error:
        raise typer.Exit(console.report(error)) from None
    defaults = {name: _spelled(name, value) for name, value in job.options.items()}
    context.default_map = {**(context.default_map or {}), **defaults}
    context.meta[_JOB] = path
    return job.plan


def job_of(context: typer.Context) -> Path | None:
    """The job file that the command line names, which is read before the verb begins; None where it names a plan."""
    return context.meta.get(_JOB)


def given_options(context: typer.Context) -> dict[str, Any]:
    """By field, what the command line or its job file says of a run."""
    sources = {name: context.get_parameter_source(name) for name in ASKED}
    explicit = [name for name, source in sources.items() if source and source.name != "DEFAULT"]
    return {name: _meant(name, context.params[name]) for name in explicit}


_JOB = f"{__name__}.job"
_ALONE = "alone"
"""The value of an option that has none."""


def with_words(arguments: Sequence[str]) -> list[str]:
    """The command line with ``--resume auto`` in one piece, and with a word for none behind ``--resume`` alone.

    A parser takes whatever follows such an option for its value; here only a word that the option knows is one.

    Raises:
        UsageError: what follows is nearly such a word.
    """
    choices = {flag_of(name): option_of(name).choices for name in ASKED if option_of(name).kind == WORD}
    joined, rest = list[str](), list(arguments)
    while rest:
        each = rest.pop(0)
        if each == "--":
            return [*joined, each, *rest]
        if each in choices:
            if rest and rest[0] not in choices[each]:
                require_word(each, rest[0], choices[each])
            each = f"{each}={rest.pop(0) if rest and rest[0] in choices[each] else _ALONE}"
        joined.append(each)
    return joined


def _spelled(name: str, value: Any) -> Any:
    """Of a job file, as the command line has it."""
    if option_of(name).kind != WORD or isinstance(value, str):
        return value
    return _ALONE if value else ""


def _meant(name: str, value: Any) -> Any:
    """Of the command line, as a job file has it."""
    return _word(value) if option_of(name).kind == WORD else value


def _word(value: str) -> bool | str:
    """Of an option that has a word or none: whether it was given, or the word."""
    return value != "" if value in ("", _ALONE) else value


JobPath = Annotated[
    Path,
    typer.Argument(
        metavar="PLAN|JOB",
        help="A plan file, or a job file (.yaml) that names one and options of this command; flags override them.",
        is_eager=True,
        autocompletion=completion.jobs,
        callback=_from_job,
    ),
]
PlanPath = Annotated[
    Path,
    typer.Argument(metavar="PLAN", help="A plan file, as written by 'halopipe plan'.", autocompletion=completion.plans),
]
ProfileOption = Annotated[
    Path | None,
    typer.Option(
        "--profile",
        metavar="PROFILE",
        help="The profile that the plan was made from; if it is profile.json beside the plan, it is found.",
        autocompletion=completion.profiles,
    ),
]
ClusterOption = Annotated[
    Path | None,
    typer.Option(
        "--cluster",
        metavar="FILE",
        help="Machines one does not have (YAML); see 'halopipe devices'.",
        autocompletion=completion.clusters,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Write the result alone, as JSON, to stdout.")]
HostsOption = Annotated[
    Path | None,
    typer.Option(
        "--hosts",
        metavar="FILE",
        help="Starts nothing: shows the torchrun command for each host in FILE, whose lines are 'NAME slots=N'.",
        rich_help_panel="Several hosts",
    ),
]


def with_options(verb: Callable[..., None]) -> Callable[..., None]:
    """``verb``, with an option of the command line for each field of its parameters that are lists of options.

    Such a list is a dataclass of fields that :func:`halopipe.run_spec.options.option` made.
    """
    parameters = inspect.signature(verb, eval_str=True).parameters
    groups = {name: asked_in(each.annotation) for name, each in parameters.items() if _is_list(each.annotation)}

    @functools.wraps(verb)
    def called(**arguments: Any) -> None:
        made = {
            name: parameters[name].annotation(
                **{each: _value(field, arguments.pop(each)) for each, field in group.items()}
            )
            for name, group in groups.items()
        }
        verb(**made, **arguments)

    flattened: list[inspect.Parameter] = []
    for name, parameter in parameters.items():
        if name in groups:
            hints = get_type_hints(parameter.annotation)
            offers = completion.LISTS[parameter.annotation.__name__]
            flattened += [_parameter(field, hints[each], offers.get(each)) for each, field in groups[name].items()]
        else:
            flattened.append(parameter.replace(kind=inspect.Parameter.POSITIONAL_OR_KEYWORD))
    called.__signature__ = inspect.Signature(flattened)  # type: ignore[attr-defined]  # which typer reads
    called.__annotations__ = {each.name: each.annotation for each in flattened}
    return called


def _is_list(annotation: object) -> bool:
    return isinstance(annotation, type) and dataclasses.is_dataclass(annotation)


_REPEATED = {tuple[int, ...]: list[int] | None, tuple[str, ...]: list[str] | None}
"""Types of options that may be given several times, as typer takes them."""

_NUMBERS = (int, float, int | None, list[int] | None)


def _parameter(field: dataclasses.Field[Any], kind: Any, offered: Any) -> inspect.Parameter:
    """The field as typer takes it; ``offered`` completes its value."""
    default, option, name = field.default, spec(field), flag(field)
    if kind is bool:
        name = f"{name}/--no-{name.removeprefix('--')}" if default else name
    if kind in _REPEATED:
        kind, default = _REPEATED[kind], None
    if option.kind == PATH:
        kind, default = Path | None, Path(str(default)) if default else None
    elif option.kind in (SIZE, WORD):
        kind, default = str, ""
    elif option.kind in (DURATION, INTERVAL):
        kind, default = str, str(default) if option.kind == INTERVAL else f"{default:g}s"
    shown = typer.Option(
        *([name, option.short] if option.short else [name]),
        metavar=option.metavar or None,
        help=option.help,
        min=option.least if kind in _NUMBERS else None,
        max=option.most,
        callback=a_number if kind is float else None,
        rich_help_panel=option.panel or None,
        autocompletion=offered,
    )
    return inspect.Parameter(
        field.name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default, annotation=Annotated[kind, shown]
    )


def _value(field: dataclasses.Field[Any], value: Any) -> Any:
    """What was given, as the field has it."""
    kind = spec(field).kind
    if isinstance(field.default, tuple):
        return tuple(value or ())
    if kind == PATH:
        return "" if value is None else str(value.absolute())
    if kind == METRICS:
        from halopipe.run_spec.job_file import located

        return located(kind, value, Path.cwd())
    if kind in (SIZE, DURATION, INTERVAL):
        from halopipe.terminal import units

        parse: Callable[[str], Any] = {
            SIZE: units.parse_size,
            DURATION: units.parse_seconds,
            INTERVAL: units.parse_interval,
        }[kind]
        return parse(value) if value else 0
    return _word(value) if kind == WORD else value
