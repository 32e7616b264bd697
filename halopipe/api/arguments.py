"""What a script gives to the calls of ``hp``, looked at before anything is done with it.

A call that is :func:`checked` refuses keywords that it does not have, with the nearest one that it has, and values that
are of another type than its signature says: text where a list of names is asked for (its letters would be taken for
names), a plan where a profile is, a number as text.  Types that only a type checker sees, such as those of torch, are
left to those who use them.
"""

from __future__ import annotations

import functools
import inspect
import numbers
import re
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, Union, Unpack, get_args, get_origin, get_type_hints

from halopipe.planning.options import PlanOptions, ProfileOptions
from halopipe.run_spec.options import RunOptions
from halopipe.run_spec.schema import asked_in, flag
from planner.ir.errors import HalopipeError, UsageError
from planner.ir.plan import Plan
from planner.ir.profile import Profile

P = ParamSpec("P")
R = TypeVar("R")
A = TypeVar("A")

_MADE_BY = {
    Profile: "hp.profile(...) makes a profile, hp.load('profile.json') reads one",
    Plan: "hp.plan(profile) makes a plan, hp.load('plan.json') reads one",
}
_MOST_SHOWN = 60

_PROGRAMS = ("halopipe", "torchrun", "mpiexec")
_OPTION = re.compile(r"(?<![\w-])--([a-z][a-z0-9-]*)(?: ([^\s,;:()]+(?:,[^\s,;:()]+)*))?")
"""An option of the command line, and its value."""

_HELP = re.compile(r"(the )?--help of the command")

_OTHERWISE = {
    **{
        flag(field).removeprefix("--").replace("-", "_"): name
        for group in (PlanOptions, ProfileOptions, RunOptions)
        for name, field in asked_in(group).items()
    },
    "micro_batch_sizes": "micro_batch",
    "workers": "cluster",
    "local_loss": "local_losses",
}
"""What an option is called as an argument."""


def call_of(options: Callable[P, A]) -> Callable[[Callable[[A], R]], Callable[P, R]]:
    """A call of ``hp`` whose arguments are the fields of ``options``, a dataclass: their names, types and defaults.

    So type checkers, editors and ``help`` know what a list of options holds, and it stands in one place.
    """

    def decorated(call: Callable[[A], R]) -> Callable[P, R]:
        @functools.wraps(call)
        def called(*args: P.args, **kwargs: P.kwargs) -> R:
            return call(options(*args, **kwargs))

        signature = inspect.signature(options)
        hints = get_type_hints(options)
        typed = [each.replace(annotation=hints[each.name]) for each in signature.parameters.values()]
        returned = inspect.signature(call).return_annotation
        shown = signature.replace(parameters=typed, return_annotation=returned)
        called.__signature__ = shown  # type: ignore[attr-defined]  # which inspect reads
        return checked(called)

    return decorated


def checked(call: Callable[P, R]) -> Callable[P, R]:
    """``call``, whose arguments are looked at first.

    Raises, when called:
        UsageError: there is no such keyword, or a value is of another type.
    """
    name = f"hp.{call.__name__}"

    @functools.wraps(call)
    def looked_at(*args: P.args, **kwargs: P.kwargs) -> R:
        takes = _takes(call)
        places = [*takes.places, *[takes.others] * len(args)]
        try:
            for key in kwargs:
                if key not in takes.known and takes.named is None:
                    near = get_close_matches(key, takes.known, 1)
                    remedies = [f"{each} (did you mean that?)" for each in near]
                    raise UsageError(f"{name} knows no {key!r}", [f"it takes: {', '.join(takes.known)}"], remedies)
            positional: list[Any] = [taken(name, *place, value) for place, value in zip(places, args, strict=False)]
            named: dict[str, Any] = {
                key: taken(name, key, takes.known.get(key, takes.named), value) for key, value in kwargs.items()
            }
            return call(*positional, **named)
        except HalopipeError as error:
            _name_arguments(error, name, takes.known)
            raise

    return looked_at


def _name_arguments(error: HalopipeError, call: str, hints: Mapping[str, Any]) -> None:
    """An error of what the command line shares names its options; here they become the call's arguments.

    Commands stay as they are, and options that the call has not; the help is the call's.
    """

    def named(text: str, *, with_value: bool) -> str:
        if any(f"{program} " in text for program in _PROGRAMS):
            return text

        def argument(match: re.Match[str]) -> str:
            flag = match[1].replace("-", "_")
            value = match[2]
            name = next((each for each in (flag, _OTHERWISE.get(flag, "")) if each in hints), "")
            if not name:
                return match[0]
            if value is None or not with_value:
                return name + match[0].removeprefix(f"--{match[1]}")
            is_several = any(get_origin(each) is Sequence for each in _members(hints[name]))
            return f"{name}={_literal(value.split(',') if is_several else value)}"

        return _OPTION.sub(argument, text)

    error.title = named(error.title, with_value=False)
    error.details = tuple(named(each, with_value=False) for each in error.details)
    remedies = (_HELP.sub(f"help({call})", each) for each in error.remedies or error.usual)
    error.remedies = tuple(named(each, with_value=True) for each in remedies)


def _literal(value: str | list[str]) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_literal, value))}]"
    return value if re.fullmatch(r"-?\d+(\.\d+)?", value) else repr(value)


def taken(call: str, name: str, hint: Any, value: Any) -> Any:
    """The value, with numbers of other libraries (numpy's) as Python's own.

    Args:
        call, name: of the function and of its argument, for errors.
        hint: the argument's annotation.

    Raises:
        UsageError: the value is none that the annotation allows.
    """
    if _fits(value, hint):
        return value if hint is Any else _plain(value, hint)
    wanted = next((each for each in _members(hint) if each in _MADE_BY), None)
    remedies = [_MADE_BY[wanted]] if wanted is not None else []
    element = next((get_args(each)[0] for each in _members(hint) if get_origin(each) is Sequence), None)
    if element is not None and _fits(value, element):
        remedies = [f"{name}=[{value!r}]"]
    elif str(value).startswith("torch.") and str in _members(hint):
        remedies = [f"{name}={str(value).removeprefix('torch.')!r}"]
    elif isinstance(value, float) and value.is_integer() and int in _members(hint):
        remedies = [f"{name}={int(value)}"]
    elif isinstance(value, str) and any(each in (int, float) for each in _members(hint)):
        remedies = [f"{name}={value}, without quotes"]
    raise UsageError(f"{call}: {name} is {_shown(value)}", [f"it takes {_text(hint)}"], remedies or [f"help({call})"])


@dataclass(frozen=True, slots=True)
class _Takes:
    """What a call takes.

    Attributes:
        known: by name, what each argument may be.
        places: name and hint of those that may be given without them, in order.
        others: the same of all that may come after them.
        named: of ``**others`` of any name, what each may be; None: there are none.
    """

    known: Mapping[str, Any]
    places: tuple[tuple[str, Any], ...]
    others: tuple[str, Any]
    named: Any = None


@functools.cache
def _takes(call: Callable[..., Any]) -> _Takes:
    parameters = inspect.signature(call).parameters.values()
    of_kind = {kind: {p.name: _evaluated(p.annotation, call) for p in parameters if p.kind is kind} for kind in _KINDS}
    several, by_place, by_name, rest = (of_kind[kind] for kind in _KINDS)
    more = next(iter(rest.values()), None)
    unpacked = get_type_hints(get_args(more)[0]) if get_origin(more) is Unpack else {}
    others = next(iter(several.items()), ("", Any))
    return _Takes({**by_place, **by_name, **unpacked}, tuple(by_place.items()), others, None if unpacked else more)


_KINDS = (
    inspect.Parameter.VAR_POSITIONAL,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
    inspect.Parameter.KEYWORD_ONLY,
    inspect.Parameter.VAR_KEYWORD,
)


def _evaluated(annotation: Any, call: Callable[..., Any]) -> Any:
    """The annotation as a type; Any of one that is imported for type checkers alone."""
    try:
        own = inspect.unwrap(call).__globals__
        return eval(annotation, own) if isinstance(annotation, str) else annotation  # of our own source
    except NameError:
        return Any


def _members(hint: Any) -> tuple[Any, ...]:
    """The types that a union is of."""
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _fits(value: Any, hint: Any) -> bool:
    members = _members(hint)
    if len(members) > 1:
        return any(_fits(value, each) for each in members)
    origin = get_origin(hint)
    if hint is Any or hint is inspect.Parameter.empty:
        return True
    if hint is None or hint is type(None):
        return value is None
    if hint is int:
        return isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if hint is float:
        return isinstance(value, numbers.Real) and not isinstance(value, bool)
    if origin is Callable or hint is Callable:
        return callable(value)
    if origin is Sequence:
        return _is_several(value) and all(_fits(each, get_args(hint)[0]) for each in value)
    if origin is Mapping:
        return isinstance(value, Mapping)
    return isinstance(value, hint) if isinstance(hint, type) else True


def _plain(value: Any, hint: Any) -> Any:
    if isinstance(value, (int, float)):
        return value
    if isinstance(value, numbers.Real):
        return int(value) if isinstance(value, numbers.Integral) else float(value)
    of = next((get_args(each)[0] for each in _members(hint) if get_origin(each) is Sequence), None)
    return value if of is None or not _is_several(value) else tuple(_plain(each, of) for each in value)


def _is_several(value: Any) -> bool:
    return isinstance(value, Iterable) and not isinstance(value, (str, bytes, Mapping, Path))


def _shown(value: object) -> str:
    kind = type(value).__name__
    if isinstance(value, type):
        return f"the class {value.__name__}"
    text = repr(value)
    is_plain = isinstance(value, (bool, numbers.Number, str, list, tuple, Mapping)) and len(text) <= _MOST_SHOWN
    return "None" if value is None else f"{text}, of type {kind}" if is_plain else f"of type {kind}"


def _text(hint: Any) -> str:
    """A type in words."""
    names: list[str] = []
    for each in _members(hint):
        if get_origin(each) is Sequence:
            names.append(f"a list of {_text(get_args(each)[0]).replace('a whole number', 'whole numbers')}")
        elif each in (type(None), None):
            names.append("None")
        elif get_origin(each) is Mapping:
            names.append("a dict")
        elif get_origin(each) is Callable or each is Callable:
            names.append("a function")
        else:
            plain = {int: "a whole number", float: "a number", str: "text", bool: "True or False", Path: "a path"}
            names.append(plain.get(each, getattr(each, "__name__", str(each))))
    return " or ".join(dict.fromkeys(names))
