"""Options that several verbs have, spelled once."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from halopipe.cli import completion
from halopipe.run_spec.options import ASKED, flag_of, option_of
from halopipe.run_spec.schema import WRITTEN, asked_in, default_text, flag, from_text, limit_faults
from halopipe.terminal import console
from planner.ir.errors import HalopipeError, UsageError
from planner.ir.options import METRICS, NAMES, PATH, WORD, spec


def _from_job(context: typer.Context, path: Path) -> Path:
    """Of a job file the plan that it names; its options become the defaults of those of the command line."""
    from halopipe.run_spec import job_file

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
    return {
        name: _word(context.params[name]) if option_of(name).kind == WORD else context.params[name]
        for name in explicit(context, ASKED)
    }


def explicit(context: typer.Context, names: Iterable[str]) -> list[str]:
    """Those of the options that the command line, or its job file, says something of."""
    sources = {name: context.get_parameter_source(name) for name in names}
    return [name for name, source in sources.items() if source is not None and source.name != "DEFAULT"]


_JOB = f"{__name__}.job"
_ALONE = "alone"
"""The value of an option that has none."""


def with_words(arguments: Sequence[str]) -> list[str]:
    """The command line with ``--resume auto`` in one piece, and with a word for none after ``--resume`` alone.

    A parser takes whatever follows such an option for its value; here only a word that the option knows is one.

    Raises:
        UsageError: what follows is nearly such a word.
    """
    choices = {flag_of(name): option_of(name).choices for name in ASKED if option_of(name).kind == WORD}
    joined = list[str]()
    rest = list(arguments)
    while rest:
        each = rest.pop(0)
        if each == "--":
            return [*joined, each, *rest]
        if each in choices:
            if rest and rest[0] not in choices[each]:
                _require_word(each, rest[0], choices[each])
            each = f"{each}={rest.pop(0) if rest and rest[0] in choices[each] else _ALONE}"
        joined.append(each)
    return joined


def _require_word(name: str, word: str, choices: Sequence[str]) -> None:
    near = get_close_matches(word, choices, 1)
    if near and not word.startswith("-") and not Path(word).exists():
        raise UsageError(
            f"{name} knows no {word!r}",
            [f"it stands alone, or before: {', '.join(choices)}"],
            [f"{name} {near[0]} (did you mean that?)"],
        )


def _spelled(name: str, value: Any) -> Any:
    """Of a job file, as the command line has it."""
    if option_of(name).kind != WORD or isinstance(value, str):
        return value
    return _ALONE if value else ""


def _word(value: str) -> bool | str:
    """Of an option that has a word or none: whether it was given, or the word."""
    return value != "" if value in ("", _ALONE) else value


JobPath = Annotated[
    Path,
    typer.Argument(
        metavar="PLAN|JOB",
        help="A plan file, or a job file (.yaml) that names one and options of this command; flags override them.",
        is_eager=True,
        callback=_from_job,
    ),
]
PlanPath = Annotated[
    Path,
    typer.Argument(metavar="PLAN", help="A plan file, as written by 'halopipe plan'."),
]
ProfileOption = Annotated[
    Path | None,
    typer.Option(
        "--profile",
        metavar="PROFILE",
        help="Profile that the plan was made from; if not given, profile.json beside the plan.",
    ),
]
ClusterOption = Annotated[
    Path | None,
    typer.Option(
        "--cluster",
        metavar="FILE",
        help="Cluster file (YAML) of machines that are not here; see 'halopipe devices'.",
    ),
]
FileOption = Annotated[Path, typer.Option("-o", "--output", help="File to write.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Write the result alone, as JSON, to stdout.")]
HostsOption = Annotated[
    Path | None,
    typer.Option(
        "--hosts",
        metavar="FILE",
        help="Show the torchrun command for each host in FILE (lines 'NAME slots=N'), and start nothing.",
        rich_help_panel="Several hosts",
    ),
]


def with_options(verb: Callable[..., None]) -> Callable[..., None]:
    """``verb``, with an option of the command line for each field of its parameters that are lists of options.

    Such a list is a dataclass of fields that :func:`planner.ir.options.option` made.
    """
    parameters = inspect.signature(verb, eval_str=True).parameters
    groups = {
        name: asked_in(each.annotation)
        for name, each in parameters.items()
        if isinstance(each.annotation, type) and dataclasses.is_dataclass(each.annotation)
    }

    @functools.wraps(verb)
    def called(**arguments: Any) -> None:
        made = {
            name: parameters[name].annotation(
                **{each: _value(field, arguments.pop(each)) for each, field in group.items()}
            )
            for name, group in groups.items()
        }
        for fault in chain.from_iterable(map(limit_faults, made.values())):
            raise fault
        verb(**made, **arguments)

    flattened: list[inspect.Parameter] = []
    for name, parameter in parameters.items():
        if name in groups:
            hints = get_type_hints(parameter.annotation)
            flattened += [_parameter(field, hints[each]) for each, field in groups[name].items()]
        else:
            flattened.append(parameter.replace(kind=inspect.Parameter.POSITIONAL_OR_KEYWORD))
    called.__signature__ = inspect.Signature(flattened)  # type: ignore[attr-defined]  # which typer reads
    called.__annotations__ = {each.name: each.annotation for each in flattened}
    return called


def _parameter(field: dataclasses.Field[Any], hint: Any) -> inspect.Parameter:
    """The field as typer takes it, with limits of its values where they are numbers."""
    default = field.default
    option = spec(field)
    name = flag(field)
    kind = hint if default is None else type(default)
    is_number = kind in (int, float) or hint in (int | None, Sequence[int])
    if default is True:
        name, default = (name, False) if name.startswith("--no-") else (f"{name}/--no-{name.removeprefix('--')}", True)
    if option.kind == PATH:
        kind = Path | None
        default = None
    elif option.kind in WRITTEN:
        kind = str
        default = default_text(field)
        is_number = False
    elif option.kind == WORD:
        kind = str
        default = ""
    elif isinstance(default, tuple):
        kind = list[int] | None if hint == Sequence[int] else list[str] | None
        default = None
    names = option.choices or option.offers
    offers = names if callable(names) else completion.offered(names, listed=option.kind == NAMES) if names else None
    shown = typer.Option(
        *([name, option.short] if option.short else [name]),
        metavar=option.metavar or None,
        help=option.help,
        min=option.least if is_number else None,
        max=option.most,
        rich_help_panel=option.panel or None,
        autocompletion=offers,
    )
    return inspect.Parameter(
        field.name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default, annotation=Annotated[kind, shown]
    )


def _value(field: dataclasses.Field[Any], value: Any) -> Any:
    """What was given, as the field has it."""
    kind = spec(field).kind
    if kind in WRITTEN:
        return from_text(field, value)
    if isinstance(field.default, tuple):
        return tuple(value or ())
    if kind == PATH:
        return "" if value is None else str(value.absolute())
    if kind == METRICS:
        from halopipe.run_spec.job_file import located

        return located(kind, value, Path.cwd())
    if kind == WORD:
        return _word(value)
    return not value if field.default is True and flag(field).startswith("--no-") else value
