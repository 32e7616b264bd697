"""The command line: ``profile``, ``plan``, ``run``, and the verbs that read their files.

Each verb lives in ``halopipe/cli/`` or in an extra, is loaded when it is asked for, and imports what it needs when it
is called: ``--help`` is quick, and only ``run``, ``checkpoint``, ``doctor`` and ``demo`` load torch;
``profile`` leaves that to the processes that measure, unless MODEL is a file of torch's.
"""

from __future__ import annotations

import functools
import itertools
import os
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import typer
import typer.main
from typer.core import TyperCommand, TyperGroup

from halopipe.cli.options import with_words
from halopipe.extra import FaceExtra
from halopipe.terminal.console import INTERRUPTED, emit, open_streams, report, reported, screen_columns
from planner.ir.errors import MissingFileError, UsageError
from planner.ir.extras import Additions, extras, joined

_FRAMED = 80
"""Columns that the framed help needs; narrower, it would cut the names of options."""

_COLUMNS = screen_columns() or _FRAMED
_MARKUP: Literal["rich"] | None = "rich" if _COLUMNS >= _FRAMED else None


class _Command(TyperCommand):
    """A verb; in a narrow terminal its help has a name and below it what it is, and cuts nothing."""

    def make_parser(self, ctx: Any) -> Any:
        parser: Any = super().make_parser(ctx)
        parse = parser.parse_args

        def parse_args(args: list[str]) -> Any:
            values, rest, order = parse(with_words(args) if self.name == "run" else args)
            if not ctx.resilient_parsing:
                _require_once(values, order)
            return values, rest, order

        parser.parse_args = parse_args
        return parser

    def format_options(self, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                panel = getattr(param, "rich_help_panel", None)
                section = panel or ("Arguments" if param.param_type_name == "argument" else "Options")
                sections.setdefault(section, []).append(record)
        _write(formatter, sections)


_VERBS = {
    "10 profile": "halopipe.cli.profile:profile",
    "15 plan": "halopipe.cli.plan:plan",
    "20 explain": "halopipe.cli.explain:explain",
    "25 compare": "halopipe.cli.compare:compare",
    "30 check": "halopipe.cli.check:check",
    "35 run": "halopipe.cli.run:run",
    "50 checkpoint": "halopipe.cli.checkpoint:checkpoint",
    "55 merge": "halopipe.cli.merge:merge",
    "80 schema": "halopipe.cli.schema:schema",
    "85 doctor": "halopipe.cli.doctor:doctor",
    "90 demo": "halopipe.cli.demo:demo",
}
"""By place in the help and name; extras add theirs between them (``FaceExtra.verbs``), in the same form."""


def added_verbs() -> Additions:
    """Those that extras add."""
    return joined(extra.verbs for extra in extras(FaceExtra))


class _Loaded(Mapping[str, Any]):
    """The verbs as commands, by name; each is loaded when it is first asked for."""

    def __init__(self) -> None:
        self._verbs = Additions(_VERBS), added_verbs()
        self._places = {key.split()[1]: key for key in sorted(itertools.chain(*self._verbs))}
        self._made: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._made:
            place = self._places[name]
            core, added = self._verbs
            verb = core[place] if place in _VERBS else added[place]
            alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=_MARKUP)
            alone.command(name, cls=_Command)(reported(verb))
            self._made[name] = typer.main.get_command(alone)
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


class _Verbs(TyperGroup):
    """All verbs, with their first lines uncut."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = cast("Any", _Loaded())

    def main(self, *args: Any, standalone_mode: bool = True, **settings: Any) -> Any:
        """As the parser's own, with its errors as ours."""
        parse: Any = functools.partial(super().main, standalone_mode=False)
        if not standalone_mode:
            return parse(*args, **settings)
        try:
            code = parse(*args, **settings)
        except (KeyboardInterrupt, typer.Abort):
            sys.exit(INTERRUPTED)
        except Exception as error:  # noqa: BLE001  # as in reported: nothing is left to explain it
            if type(error).__name__ == "NoArgsIsHelpError":  # the help, which is shown
                sys.exit(cast("Any", error).exit_code)
            sys.exit(report(_usage_error(error) if hasattr(error, "format_message") else error))
        sys.exit(code if isinstance(code, int) else 0)

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        for word in args:
            _require_utf8(word)
        return super().parse_args(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        verbs = ((name, self.get_command(ctx, name)) for name in self.list_commands(ctx))
        _write(formatter, {"Commands": [(name, verb.get_short_help_str(1000)) for name, verb in verbs if verb]})


def _require_utf8(word: str) -> None:
    """Raises :class:`UsageError` for bytes that are no text: what a file names could not be written, nor read again."""
    try:
        word.encode("utf-8")
    except UnicodeEncodeError:
        raise UsageError(f"{word!a} is not UTF-8", [], ["a name in UTF-8"]) from None


def _require_once(values: Mapping[str, Any], order: Sequence[Any]) -> None:
    """Raises :class:`UsageError` where an option of one value is given twice: which is meant, nobody knows.

    Args:
        values: texts by the names of parameters.
        order: parameters as often as they were given.
    """
    single = [each for each in order if each.param_type_name == "option" and not (each.multiple or each.is_flag)]
    for place, param in enumerate(single):
        if param in single[:place]:
            name = max(param.opts, key=len)
            last = f"{name} {values[param.name]}"
            raise UsageError(f"{name} is given more than once", [f"the last: {last}"], [f"keep one of them: {last}"])


def _usage_error(error: Any) -> UsageError:
    """What the parser says is wrong, and how the verb is used."""
    context = error.ctx
    path, lines = ("halopipe", []) if context is None else (context.command_path, [context.get_usage()])
    return UsageError(
        error.format_message().rstrip("."), [" ".join(text.split()) for text in lines], [f"{path} --help"]
    )


def _write(formatter: Any, sections: dict[str, list[tuple[str, str]]]) -> None:
    for section, records in sections.items():
        with formatter.section(section):
            for name, text in records:
                formatter.write_text(name)
                with formatter.indentation():
                    formatter.write_text(text)


app = typer.Typer(
    cls=_Verbs,
    name="halopipe",
    help="Plan how to train a neural network on the devices there are, then train it that way.",
    epilog="MODEL -> profile.json -> plan.json -> timeline.json. Start with: halopipe demo",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=_MARKUP,
    context_settings={
        "help_option_names": ["-h", "--help"],
        **({"terminal_width": max(_COLUMNS, 20)} if _COLUMNS < _FRAMED else {}),
    },
)


def _show_version(wanted: bool) -> None:
    """Of the source tree, by its ``pyproject.toml``, or of the installed package."""
    if not wanted:
        return
    project = Path(__file__).resolve().parents[2] / "pyproject.toml"
    if project.is_file():
        version = tomllib.loads(project.read_text(encoding="utf-8"))["project"]["version"]
    else:
        version = metadata.version("halopipe")
    emit(f"halopipe {version}")
    raise typer.Exit


@app.callback()
def _options(
    _version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and end.")
    ] = False,
) -> None:
    """Options before the verb."""


def main() -> int:
    """Runs the command line; returns the exit code."""
    open_streams()
    try:
        os.getcwd()
    except OSError as error:
        why = error.strerror or str(error)
        return report(MissingFileError("the working folder is gone", [why], ["cd to a folder that is there"]))
    try:
        app()
    except KeyboardInterrupt:
        return INTERRUPTED
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0
