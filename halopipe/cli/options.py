"""Options that several verbs have, spelled once."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from halopipe.cli import completion
from halopipe.run_spec.options import ASKED, METRICS, PATH, SIZE, WORD, RunFiles, RunOptions, flag_of, option_of


def a_number(value: float) -> float:
    """Callback of options that compare with limits, which NaN passes."""
    if math.isnan(value):
        raise typer.BadParameter("NaN is no number")
    return value


def _from_job(context: typer.Context, path: Path) -> Path:
    """Of a job file the plan that it names; its options become the defaults of those of the command line."""
    from halopipe.run_spec import job_file
    from halopipe.terminal import console
    from planner.ir.errors import HalopipeError

    if context.resilient_parsing or path.suffix not in job_file.SUFFIXES:
        return path
    try:
        job = job_file.read(path)
    except HalopipeError as error:
        raise typer.Exit(console.report(error)) from None
    told = {name: _spelled(name, value) for name, value in job.options.items()}
    context.default_map = {**(context.default_map or {}), **told}
    return job.plan


def given_options(context: typer.Context) -> dict[str, Any]:
    """By field, what the command line or its job file says of a run."""
    sources = {name: context.get_parameter_source(name) for name in ASKED}
    given = [name for name, source in sources.items() if source and source.name != "DEFAULT"]
    return {name: _meant(name, context.params[name]) for name in given}


_ALONE = "alone"
"""The value of an option that has none."""


def with_words(arguments: Sequence[str]) -> list[str]:
    """The command line with ``--resume auto`` in one piece, and with a word for none behind ``--resume`` alone.

    A parser takes whatever follows such an option for its value; here only a word that the option knows is one.
    """
    words = {flag_of(name): option_of(name).words for name in ASKED if option_of(name).kind == WORD}
    found, rest = list[str](), list(arguments)
    while rest:
        each = rest.pop(0)
        if each == "--":
            return [*found, each, *rest]
        if each in words:
            each = f"{each}={rest.pop(0) if rest and rest[0] in words[each] else _ALONE}"
        found.append(each)
    return found


def _spelled(name: str, value: Any) -> Any:
    """Of a job file, as the command line has it."""
    if option_of(name).kind != WORD or isinstance(value, str):
        return value
    return _ALONE if value else ""


def _meant(name: str, given: Any) -> Any:
    """Of the command line, as a job file has it."""
    if option_of(name).kind != WORD:
        return given
    return given != "" if given in ("", _ALONE) else given


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


def with_run_options(verb: Callable[..., None]) -> Callable[..., None]:
    """``verb``, with an option of the command line for each field of its parameters of these two classes."""
    parameters = inspect.signature(verb, eval_str=True).parameters
    groups: dict[str, type] = {
        name: each.annotation for name, each in parameters.items() if each.annotation in (RunOptions, RunFiles)
    }
    fields = {name: [field for field in get_type_hints(group) if field in ASKED] for name, group in groups.items()}

    @functools.wraps(verb)
    def called(**given: Any) -> None:
        made = {
            name: group(**{field: _value(field, given.pop(field)) for field in fields[name]})
            for name, group in groups.items()
        }
        verb(**made, **given)

    found: list[inspect.Parameter] = []
    for name, parameter in parameters.items():
        hints = get_type_hints(groups[name]) if name in groups else {}
        found += [_parameter(each, hints[each]) for each in fields[name]] if name in groups else [parameter]
    called.__signature__ = inspect.Signature(found)  # type: ignore[attr-defined]  # which typer reads
    called.__annotations__ = {each.name: each.annotation for each in found}
    return called


def _parameter(name: str, kind: Any) -> inspect.Parameter:
    """The field as typer takes it."""
    field, option = ASKED[name], option_of(name)
    default, flag = field.default, flag_of(name)
    if kind is bool:
        flag = f"{flag}/--no-{flag.removeprefix('--')}" if default else flag
    if option.kind == PATH:
        kind, default = Path | None, Path(str(default)) if default else None
    elif option.kind in (SIZE, WORD):
        kind, default = str, ""
    shown = typer.Option(
        *([flag, option.short] if option.short else [flag]),
        metavar=option.metavar or None,
        help=option.help,
        min=option.least if kind in (int, float) else None,
        callback=a_number if kind is float else None,
        rich_help_panel=option.panel or None,
        autocompletion=completion.RUN.get(name),
    )
    return inspect.Parameter(
        name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default, annotation=Annotated[kind, shown]
    )


def _value(name: str, given: Any) -> Any:
    """What was given, as the field has it."""
    kind = option_of(name).kind
    if kind == PATH:
        return "" if given is None else str(given.absolute())
    if kind == METRICS:
        from halopipe.run_spec.job_file import located

        return located(kind, given, Path.cwd())
    if kind == SIZE:
        from halopipe.terminal import units

        return units.parse_size(given) if given else 0
    return _meant(name, given)
