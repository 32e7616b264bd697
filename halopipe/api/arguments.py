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

from planner.ir.errors import HalopipeError, UsageError
from planner.ir.plan import Plan
from planner.ir.profile import Profile

P = ParamSpec("P")
R = TypeVar("R")

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
    "micro_batch_sizes": "micro_batch",
    "schedule": "schedules",
    "ranks": "num_ranks",
    "time_limit": "time_limit_s",
    "deadline": "deadline_s",
    "rate": "rate_per_s",
    "workers": "cluster",
    "input": "input_shape",
    "local_loss": "local_losses",
    "processes": "num_processes",
}
"""Options whose argument has another name."""


def checked(call: Callable[P, R]) -> Callable[P, R]:
    """``call``, whose arguments are looked at first.

    Raises, when called:
        UsageError: there is no such keyword, or a value is of another type.
    """
    name = f"hp.{call.__name__}"

    @functools.wraps(call)
    def looked_at(*args: P.args, **kwargs: P.kwargs) -> R:
        takes = _takes(call)
        positional: list[Any] = list(args)
        named: dict[str, Any] = dict(kwargs)
        try:
            for place, value in enumerate(args):
                if place < len(takes.places):
                    key = takes.places[place]
                    positional[place] = taken(name, key, value, takes.known[key])
                elif takes.more_places is not None:
                    positional[place] = taken(name, takes.more_places[0], value, takes.more_places[1])
            for key, value in kwargs.items():
                if key not in takes.known and takes.more is None:
                    raise _unknown(name, key, takes.known)
                named[key] = taken(name, key, value, takes.known.get(key, takes.more))
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
            flag, value = match[1].replace("-", "_"), match[2]
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


def taken(call: str, name: str, value: Any, hint: Any) -> Any:
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
        places: names of those that may be given without them, in order.
        more_places: of ``*others``, their name and what each may be; None: there are no others.
        more: the same of ``**others``, where those are of any name.
    """

    known: Mapping[str, Any]
    places: tuple[str, ...]
    more_places: tuple[str, Any] | None = None
    more: Any = None


@functools.cache
def _takes(call: Callable[..., Any]) -> _Takes:
    hints: dict[str, Any] = {}
    places: list[str] = []
    more_places, more = None, None
    for name, each in inspect.signature(call).parameters.items():
        hint = _evaluated(each.annotation, call)
        if each.kind is each.VAR_POSITIONAL:
            more_places = name, hint
        elif each.kind is not each.VAR_KEYWORD:
            hints[name] = hint
            places += [name] if each.kind is not each.KEYWORD_ONLY else []
        elif get_origin(hint) is Unpack:
            hints |= get_type_hints(get_args(hint)[0])
        else:
            more = hint
    return _Takes(hints, tuple(places), more_places, more)


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


def _unknown(call: str, name: str, parameters: Mapping[str, Any]) -> UsageError:
    near = get_close_matches(name, parameters, 1, 0.6)
    remedies = [f"{near[0]} (did you mean that?)"] if near else []
    return UsageError(f"{call} knows no {name!r}", [f"it takes: {', '.join(parameters)}"], remedies)


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
