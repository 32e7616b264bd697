"""Python values that a module and its loss read: a captured graph has them as they were, whatever a script does later.

    for epoch in range(10):
        module.tau = max(0.5, 1 - 0.1 * epoch)      # read by forward
        beta = min(1.0, epoch / 5)                  # read by loss_fn, a variable of the script
        ...

In a loop of one's own such a schedule acts on the next step.  Here the graph was captured before, and ranks may have
modules of their own, so that it would be lost in silence.  Looked at are numbers, texts and flags: attributes of a
module's parts, and variables of the script or of an outer function, that the code of ``forward`` or ``loss_fn``
mentions.  What that code writes itself, a counter say, is its own affair: the capture has compared a second call.
"""

from __future__ import annotations

import dis
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import CodeType, FunctionType, MethodType
from typing import Any

from torch import nn

from planner.ir.errors import UsageError

_PLAIN = (bool, int, float, complex, str, type(None))
_OF_ALL_MODULES = frozenset((*vars(nn.Module()), "training"))
_SHOWN = 4
_MISSING = object()


class ScriptValues:
    """The values that are read, as they were when this was made.

    Args:
        owned: the module, and the loss where it is one too (:func:`profiler.source.model.owners`).
        loss_fn: as the user has it; None: there is none.
    """

    def __init__(self, owned: Mapping[str, nn.Module], loss_fn: Any = None) -> None:
        self._reading = _Reading()
        parts = [(prefix + name, each) for prefix, module in owned.items() for name, each in module.named_modules()]
        for _, part in parts:
            if not _is_torchs(type(part)):
                self._reading.method(type(part), "forward")
        if loss_fn is not None and not isinstance(loss_fn, nn.Module):
            self._reading.callable(loss_fn)
        self._places: list[tuple[str, Callable[[], Any]]] = []
        for name, part in parts:
            self._note(f" of {name}" if name else " of the module", part)
        if hasattr(loss_fn, "__dict__") and not isinstance(loss_fn, nn.Module | FunctionType):
            self._note(" of loss_fn", loss_fn)
        self._places += [(name, read) for name, read in self._reading.variables() if _is_plain(read())]
        self._before = [read() for _, read in self._places]

    def require_same(self) -> None:
        """Raises :class:`UsageError` where the script has changed a value since."""
        now = [read() for _, read in self._places]
        changed = [
            f"{name}: {_shown(was)} then, {_shown(value)} now"
            for (name, _), was, value in zip(self._places, self._before, now, strict=True)
            if was is not value and was != value
        ]
        if changed:
            more = [f"and {len(changed) - _SHOWN} more"] if len(changed) > _SHOWN else []
            raise UsageError(
                "the script has changed what its module or loss reads, which the captured graph has as it was",
                [*changed[:_SHOWN], *more],
                [
                    "a number that changes is part of the batch: torch.full((len(x),), tau), as an input or a target",
                    "or close this run, begin one with the module as it is now, and run.load(folder)",
                ],
            )

    def _note(self, of: str, owner: Any) -> None:
        is_torchs = _is_torchs(type(owner))
        read = self._reading.names
        written = self._reading.written
        for key, value in vars(owner).items():
            is_read = key not in _OF_ALL_MODULES and (is_torchs or key in read)
            if is_read and (type(owner), key) not in written and _is_plain(value):
                self._places.append((key + of, partial(vars(owner).get, key, _MISSING)))


class _Reading:
    """The code of a module and a loss.

    Attributes:
        names: that it mentions.
        written: (class, attribute) that methods write.
    """

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.written: set[tuple[type, str]] = set()
        self._functions: dict[CodeType, FunctionType] = {}

    def method(self, cls: type, name: str) -> None:
        """A method of a class, with the methods and properties that it mentions."""
        followed = set()
        waiting = [name]
        while waiting:
            each = waiting.pop()
            attribute_value = getattr(cls, each, None)
            function = attribute_value.fget if isinstance(attribute_value, property) else attribute_value
            if each in followed or not isinstance(function, FunctionType) or _is_torchs(function):
                continue
            followed.add(each)
            self.function(function)
            waiting += _mentioned(function.__code__)
            self.written |= {(cls, attribute) for attribute in _names_of(function.__code__, "STORE_ATTR")}

    def callable(self, function: Any) -> None:
        """A function, a method, a partial function, or an object that is called."""
        for _ in range(8):  # of partial functions
            if not hasattr(function, "func"):
                break
            function = function.func
        if isinstance(function, MethodType):
            self.method(type(function.__self__), function.__name__)
        elif isinstance(function, FunctionType):
            self.function(function)
        else:
            self.method(type(function), "__call__")

    def function(self, function: FunctionType) -> None:
        """A function, with those of the user's that it mentions."""
        if function.__code__ in self._functions or _is_torchs(function):
            return
        self._functions[function.__code__] = function
        mentioned = _mentioned(function.__code__)
        self.names |= mentioned
        for name in mentioned:
            other = function.__globals__.get(name)
            if isinstance(other, FunctionType):
                self.function(other)

    def variables(self) -> Iterator[tuple[str, Callable[[], Any]]]:
        """Those that functions read and do not make themselves: of an outer function, or of their file."""
        for function in self._functions.values():
            if "site-packages" in function.__code__.co_filename:  # flags of a library, which it may set when it likes
                continue
            code = function.__code__
            names = function.__globals__
            cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
            readers = {name: partial(_content, cell) for name, cell in cells}
            readers |= {
                name: partial(names.get, name, _MISSING)
                for name in _names_of(code, "LOAD_GLOBAL", "LOAD_NAME")
                if name in names
            }
            for name in readers.keys() - _names_of(code, "STORE_DEREF", "STORE_GLOBAL"):
                yield f"{name}, which {function.__qualname__} reads", readers[name]


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return _MISSING


def _codes(code: CodeType) -> Iterator[CodeType]:
    """It, and that of functions inside."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _mentioned(code: CodeType) -> set[str]:
    return {name for each in _codes(code) for name in each.co_names}


def _names_of(code: CodeType, *operations: str) -> set[str]:
    return {each.argval for own in _codes(code) for each in dis.get_instructions(own) if each.opname in operations}


def _is_torchs(function: Any) -> bool:
    return str(function.__module__).split(".")[0] in ("torch", "cuda_ops", "profiler")


def _is_plain(value: Any) -> bool:
    return isinstance(value, _PLAIN) or (isinstance(value, tuple) and all(map(_is_plain, value)))


def _shown(value: Any) -> str:
    return "not there" if value is _MISSING else repr(value)[:40]
