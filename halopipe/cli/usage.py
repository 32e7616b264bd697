"""What is wrong with a command line, as an error of ours: the option and its value, what it may be, what was meant.

    error[H200] halopipe plan has no option --rank
      try: --ranks (did you mean that?)
      try: halopipe plan --help

The parser raises errors of its own, of click or of what typer has in its place; they are known here by what they have
(``ctx``, ``param``, ``option_name``) and by their class's name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from planner.ir.errors import UsageError

_GIVEN = "halopipe.given"
"""Under which a verb's context keeps what its command line says, as text, by parameter."""

_LIMITS = (
    (re.compile(r"Input should be greater than or equal to (\S+)"), "the least is {}"),
    (re.compile(r"Input should be less than or equal to (\S+)"), "the most is {}"),
    (re.compile(r"\S+ is not in the range x>=(\S+)\."), "the least is {}"),
    (re.compile(r"Input should be a valid integer|is not a valid int(?:eger)?"), "a whole number is needed"),
    (re.compile(r"Input should be a valid number|is not a valid float"), "a number is needed"),
)
"""What the parser says of a value, and how that is said here."""

_CLOSE = 0.6
"""Likeness from which a word may have been meant for another one."""


def is_usage_error(error: Exception) -> bool:
    """Whether it is one of the parser's own."""
    return hasattr(error, "format_message") and hasattr(error, "exit_code")


def is_help(error: Exception) -> bool:
    """Whether it is no error but the help, shown where a command line says nothing at all."""
    return type(error).__name__ == "NoArgsIsHelpError"


def note(context: Any, values: Mapping[str, Any], order: Iterable[Any]) -> None:
    """Keeps what the command line says, for :func:`usage_error`, once nothing is said twice.

    Args:
        values: texts by the names of parameters.
        order: parameters as often as they were given.

    Raises:
        UsageError: an option that has one value was given several times: which of them is meant, nobody knows.
    """
    names: set[str] = set()
    for param in order:
        is_flag = getattr(param, "is_flag", False) or getattr(param, "count", False)
        if param.param_type_name != "option" or is_flag or param.multiple:
            continue
        if param.name in names:
            raise UsageError(
                f"{_flag(param)} is given more than once",
                [f"{context.command_path} takes one; the last was {values[param.name]}"],
                [f"keep one of them: {_flag(param)} {values[param.name]}"],
            )
        names.add(param.name)
    context.meta[_GIVEN] = dict(values)


def require_word(flag: str, word: str, choices: Sequence[str]) -> None:
    """Raises :class:`UsageError` where ``word``, behind an option that stands alone or has a word, is nearly it."""
    near = get_close_matches(word, choices, 1, _CLOSE)
    if near and not word.startswith("-") and not Path(word).exists():
        raise UsageError(
            f"{flag} knows no {word!r}",
            [f"it stands alone, or before: {', '.join(choices)}"],
            [f"{flag} {near[0]} (did you mean that?)"],
        )


def usage_error(error: Any, verbs: Sequence[str] = ()) -> UsageError:
    """The parser's error as one of ours.

    Args:
        verbs: that the program has.
    """
    context = getattr(error, "ctx", None)
    path = "halopipe" if context is None else context.command_path
    manual, kind, param = f"{path} --help", type(error).__name__, getattr(error, "param", None)
    if kind == "NoSuchOption":
        near = get_close_matches(error.option_name, () if context is None else _flags(context), 2, _CLOSE)
        return UsageError(
            f"{path} has no option {error.option_name}",
            [],
            [*(f"{each} (did you mean that?)" for each in near), manual],
        )
    if kind == "MissingParameter" and param is not None:
        name = _flag(param) if param.param_type_name == "option" else param.metavar or str(param.name).upper()
        return UsageError(f"{path} needs {name}", [_usage(context)], [manual])
    if param is not None:
        return _of_value(param, error.message, (context.meta if context is not None else {}).get(_GIVEN, {}), manual)
    text = error.format_message()
    extra = re.match(r"Got unexpected extra arguments? ?(?:\(s\))? ?\((.*)\)", text)
    if extra is not None:
        return UsageError(f"{path} does not know what {extra[1]!r} is for", [_usage(context)], [manual])
    unknown = re.match(r"No such command '([^']*)'", text)
    if unknown is not None:
        near = get_close_matches(unknown[1], verbs, 1, _CLOSE)
        verb_list = [f"known: {', '.join(verbs)}"]
        return UsageError(
            f"{path} has no verb {unknown[1]!r}",
            verb_list,
            [*(f"{path} {each} (did you mean that?)" for each in near), manual],
        )
    return UsageError(text.rstrip("."), [], [manual])


def _of_value(param: Any, message: str, values: Mapping[str, Any], manual: str) -> UsageError:
    """Of an option, or argument, whose value is none."""
    value = values.get(param.name)
    texts = [str(each) for each in value] if isinstance(value, (list, tuple)) else [] if value is None else [str(value)]
    name = _flag(param) if param.param_type_name == "option" else str(param.name).upper()
    why, remedies = message.rstrip("."), [manual]
    for pattern, sentence in _LIMITS:
        match = pattern.search(message)
        if match is not None:
            why = sentence.format(*match.groups())
            if match.groups():
                remedies = [f"{name} {match[1]}", manual]
            break
    parts = [part.strip() for text in texts for part in re.split("[,; ]", text) if part.strip()]
    if getattr(param, "multiple", False) and len(parts) > len(texts):
        remedies = [" ".join(f"{name} {part}" for part in parts), manual]
    return UsageError(f"{name} is {' '.join(texts)}" if texts else name, [why], remedies)


def _flag(param: Any) -> str:
    """The option as it is written out."""
    return str(max(param.opts, key=len))


def _flags(context: Any) -> list[str]:
    params = context.command.get_params(context)
    return [each for param in params for each in (*param.opts, *param.secondary_opts) if each.startswith("--")]


def _usage(context: Any) -> str:
    """``usage: halopipe plan [OPTIONS] PROFILE``."""
    pieces = [piece.strip() for piece in context.command.collect_usage_pieces(context)]
    shown = [
        piece if piece.startswith("[") else piece.replace("{", "").replace("}...", "").replace("}", "")
        for piece in pieces
    ]
    return f"usage: {' '.join([context.command_path, *shown])}"
