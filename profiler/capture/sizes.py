"""Sizes that vary: what the symbols in exported shapes stand for, and integer nodes that compute sizes from them.

The number of samples is one symbol; every name that the factory says varies (see ``profiler.source.source``) is
another. Conditions on them (see ``profiler.capture.sizes``) are nodes as well: calls of ``require``.

Under which conditions on its sizes a graph was captured, and the sizes that turn out to be fixed.

``torch.export`` notes a guard whenever code asks something about a size.  What the user's code asked decides which
operators are in the graph, and stays a condition, as do largest extents; what torch asked inside its operators does not
matter: they look at the shapes again whenever they run.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import sympy
import torch
from torch import Tensor, fx

from cuda_ops._torch import sympy_interpreter
from planner.ir.errors import UnsupportedModelError

NUM_SAMPLES = "num_samples"
_TRIED = (2, 3, 5, 7, 64)
"""Numbers of samples at which a size is worked out that torch does not simplify."""

Places = Sequence[tuple[str, int]]
"""(graph input, dim), as often as a size occurs there."""


class FixedSamplesError(Exception):
    """The graph holds for the example's number of samples alone."""


@dataclass(frozen=True, slots=True)
class Symbols:
    """What the symbols in exported shapes stand for; all of them are sympy's.

    Attributes:
        samples: the number of samples; None where it is fixed.
        names: of the other sizes that vary, by symbol.
        extents: of these in the example.
        same: symbols that stand for the same number as another.
        related: (name, expression) of sizes that follow from others.
    """

    samples: Any | None = None
    names: Mapping[Any, str] = field(default_factory=dict)
    extents: Mapping[Any, int] = field(default_factory=dict)
    same: Mapping[Any, Any] = field(default_factory=dict)
    related: tuple[tuple[str, Any], ...] = ()

    def expression(self, size: Any) -> Any:
        """``size`` in terms of ``samples`` and ``names``."""
        return size.node.expr.xreplace(self.same) if isinstance(size, torch.SymInt) else sympy.Integer(int(size))

    def factor(self, size: Any) -> Any | None:
        """What ``size`` is per sample, as an expression; None where it is no multiple of the number of samples."""
        if self.samples is None or not isinstance(size, torch.SymInt):
            return None
        expression = self.expression(size)
        factor = expression.coeff(self.samples)
        is_whole = (expression - factor * self.samples).expand() == 0 and factor.is_integer
        if is_whole and not factor.has(self.samples):
            return factor
        if expression.free_symbols != {self.samples}:
            return None
        tried = {expression.subs(self.samples, number) / number for number in _TRIED}  # (n * n) // n is n
        return tried.pop() if len(tried) == 1 and all(each.is_Integer and each for each in tried) else None

    def per_sample(self, size: Any) -> int | None:
        """What ``size`` is per sample at the example's other extents; None where it is no multiple of the samples."""
        factor = self.factor(size)
        return None if factor is None else int(factor.subs(self.extents))

    def depends_on_samples(self, size: Any) -> bool:
        """Whether ``size`` varies with the number of samples, as a multiple of it or otherwise."""
        return self.samples is not None and self.expression(size).has(self.samples)

    def extent(self, size: Any, samples: int) -> int:
        """``size`` for ``samples`` samples, at the example's other extents."""
        if not isinstance(size, torch.SymInt):
            return int(size)
        numbers = dict(self.extents) if self.samples is None else {**self.extents, self.samples: samples}
        return int(self.expression(size).subs(numbers))

    def name_of(self, size: Any) -> str | None:
        """The one size that ``size`` is, or follows from."""
        symbols = self.expression(size).free_symbols
        return self.names.get(next(iter(symbols))) if len(symbols) == 1 else None


def _extents(value: Tensor) -> tuple[Any, ...]:
    """The shape of a traced tensor: numbers, and symbols, of which torch's types do not know."""
    return tuple(value.shape)


def read_symbols(inputs: Mapping[str, Tensor], varying: Mapping[str, Places], extents: Mapping[str, int]) -> Symbols:
    """The symbols of an exported graph.

    Args:
        inputs: its placeholders' values.
        varying: by name, the places of each size that varies; extents: in the example.

    Raises:
        FixedSamplesError: the sample dims are several numbers.
        UnsupportedModelError: a size cannot vary.
    """
    places = {place for occurrences in varying.values() for place in occurrences}
    own = {
        symbol
        for name, value in inputs.items()
        for dim, size in enumerate(_extents(value))
        if isinstance(size, torch.SymInt) and (name, dim) not in places
        for symbol in size.node.expr.free_symbols
    }
    if len(own) > 1:
        raise FixedSamplesError
    names: dict[Any, str] = {}
    same: dict[Any, Any] = {}
    expressions: dict[str, list[Any]] = {}
    for name, occurrences in varying.items():
        for tensor, dim in occurrences:
            require_free(name, inputs[tensor], tensor, dim, extents[name])
        expressions[name] = [_extents(inputs[tensor])[dim].node.expr for tensor, dim in occurrences]
        symbols = [each for each in expressions[name] if each.is_Symbol and each not in names and each not in own]
        if symbols:
            names[symbols[0]] = name
            same.update((other, symbols[0]) for other in symbols[1:])
    related = [(name, each.xreplace(same)) for name, several in expressions.items() for each in several]
    return Symbols(
        next(iter(own), None),
        names,
        {symbol: extents[name] for symbol, name in names.items()},
        same,
        tuple(dict.fromkeys((name, each) for name, each in related if names.get(each) != name)),
    )


class SizeNodes:
    """Adds to ``graph`` integer nodes that compute sizes.

    Args:
        sizes: names of the placeholders to begin with, beside the number of samples.
    """

    def __init__(self, graph: fx.Graph, symbols: Symbols, sizes: Sequence[str]) -> None:
        self._graph = graph
        self._symbols = symbols
        self._made: dict[Any, fx.Node] = {}
        self._placeholders: dict[str, fx.Node] = {}
        if symbols.samples is not None:
            self._made[symbols.samples] = self._placeholders[NUM_SAMPLES] = graph.placeholder(NUM_SAMPLES)
        for name in sizes:
            self._placeholders[name] = graph.placeholder(name)
        self._made.update((symbol, self._placeholders[name]) for symbol, name in symbols.names.items())

    def node(self, size: Any) -> fx.Node:
        """The node whose value is ``size``.

        Raises:
            FixedSamplesError: it depends on the number of samples, but is no multiple of it.
        """
        expression = self._symbols.expression(size)
        if self._symbols.factor(size) is None and self._symbols.depends_on_samples(size):
            raise FixedSamplesError
        return self._node(expression, size)

    def require_all(self, placeholders: Mapping[str, Tensor]) -> None:
        """Adds the conditions under which the graph was captured, as far as other sizes than samples are in them."""
        for name, expression in self._symbols.related:
            holds = self._graph.call_function(operator.eq, (self._placeholders[name], self._node(expression, 1)))
            self._require(holds, f"{name} = {self._text(expression)}", {name}, expression.free_symbols)
        for condition in conditions(self._symbols.names, self._symbols.same, placeholders):
            if condition.free_symbols <= self._made.keys():
                self._require(self._node(condition, True), self._text(condition), set(), condition.free_symbols)

    def _require(self, holds: fx.Node, text: str, names: set[str], symbols: set[Any]) -> None:
        shown = sorted(names | {str(self._made[symbol].target) for symbol in symbols})
        node = self._graph.call_function(require, (holds, text), {name: self._placeholders[name] for name in shown})
        holds.meta["val"] = node.meta["val"] = True

    def _text(self, expression: Any) -> str:
        shown_symbols = {symbol: sympy.Symbol(str(self._made[symbol].target)) for symbol in expression.free_symbols}
        shown = expression.xreplace(shown_symbols)
        return f"{shown.lhs} {shown.rel_op} {shown.rhs}" if isinstance(shown, sympy.Rel) else str(shown)

    def _node(self, expression: Any, value: Any) -> fx.Node:
        if expression not in self._made:
            last = next(iter(reversed(self._graph.nodes)), None)
            self._made[expression] = self._computed(expression)
            for node in reversed(self._graph.nodes):
                if node is last:
                    break
                node.meta["val"] = value  # only its type is read, which tells it from a tensor
        return self._made[expression]

    def _computed(self, expression: Any) -> fx.Node:
        tracer = fx.proxy.GraphAppendingTracer(self._graph)
        proxies = {symbol: fx.Proxy(self._made[symbol], tracer) for symbol in expression.free_symbols}
        samples = self._symbols.samples
        if isinstance(expression, sympy.Integer):  # a size that torch found to be a number after all
            return self._graph.call_function(operator.index, (int(expression),))
        if samples is not None and isinstance(expression, sympy.Expr):
            factor = expression.coeff(samples)
            if factor.is_Integer and (expression - factor * samples).expand() == 0:
                return self._graph.call_function(operator.mul, (self._made[samples], int(factor)))
        interpret, arithmetic = sympy_interpreter()
        return cast("fx.Proxy", interpret(arithmetic, proxies, expression)).node


_TORCH = Path(torch.__file__).parent
_INSIDE = ("fx", "export", "utils")  # and what begins with "_": torch's own ways, not what a user's module calls


def require(holds: bool, what: str, **sizes: int) -> None:
    """Raises :class:`UnsupportedModelError` unless ``holds``: the graph was captured under a condition on ``sizes``."""
    if not holds:
        numbers = ", ".join(f"{name} {size}" for name, size in sizes.items())
        raise UnsupportedModelError(
            f"the model was captured for other sizes than {numbers}",
            [f"what was captured holds for {what}"],
            ["give batches of such sizes", "or a model whose code does the same whatever the sizes are"],
        )


def require_free(name: str, value: Tensor, tensor: str, dim: int, extent: int) -> None:
    """Raises :class:`UnsupportedModelError` if the size ``name``, ``dim`` of ``tensor``, is a number after all.

    Args:
        value: of ``tensor`` in the exported graph.
        extent: in the example.
    """
    size = _extents(value)[dim]
    if isinstance(size, torch.SymInt) and size.node.expr.free_symbols:
        return
    raise UnsupportedModelError(
        f"{name} cannot vary: the model fixes it to {int(size)}",
        [f"dim {dim} of {tensor} is said to vary from the example's {extent}", *_causes(value, extent)],
        [
            "take sizes from x.shape where they are used, rather than as numbers",
            "x.amax(dim), x.mean(dim) or adaptive pooling instead of a pool as large as the extent",
            "nn.LSTM, nn.GRU or nn.RNN instead of a loop over steps",
            f"or leave {name} out of what varies, and give batches of {extent} only",
        ],
    )


def _causes(value: Tensor, extent: int) -> list[str]:
    """Where the model asked for the extent as a number, if it did so itself."""
    environment = _environment(value)
    guards = [] if environment is None else environment.guards
    frames = [
        guard.sloc.framework_loc
        for guard in guards
        if isinstance(guard.expr, sympy.Eq) and guard.expr.rhs == extent and _is_by_user(guard)
    ]
    return [f"at {frame.filename}:{frame.lineno} in {frame.name}" for frame in frames if frame is not None][:1]


def conditions(names: Mapping[Any, str], same: Mapping[Any, Any], inputs: Mapping[str, Tensor]) -> tuple[Any, ...]:
    """What must be true of the sizes, as sympy's expressions of their symbols.

    Args:
        names: of the sizes that vary, by symbol; conditions on none of these are left out.
        same: symbols that stand for the same number as another.
        inputs: the values of the graph's placeholders.
    """
    environments = [_environment(value) for value in inputs.values()]
    if not names or not environments or environments[0] is None:
        return ()
    required: dict[Any, None] = {}
    for guard in environments[0].guards:
        condition = environments[0].replace(guard.expr).xreplace(same)
        is_limit = isinstance(condition, (sympy.Le, sympy.Lt)) and condition.lhs.is_Symbol and condition.rhs.is_Integer
        if condition.free_symbols & names.keys() and (_is_by_user(guard) or is_limit):  # of an extent
            required[condition] = None
    return tuple(required)


def guards_of(values: Iterable[Tensor]) -> tuple[Any, ...]:
    """What was asked of the sizes in a graph of which these are values, as sympy's expressions of their symbols."""
    environment = next(filter(None, map(_environment, values)), None)
    return () if environment is None else tuple(guard.expr for guard in environment.guards)


def _environment(value: Tensor) -> Any | None:
    """Where torch keeps what it knows of the symbols."""
    return getattr(getattr(value, "fake_mode", None), "shape_env", None)


def _is_by_user(guard: Any) -> bool:
    """Whether the code that asked is the user's, or of a module or function of torch that the user called."""
    frame = guard.sloc.framework_loc
    file = Path(getattr(frame, "filename", ""))
    if not file.is_relative_to(_TORCH):
        return True
    first = file.relative_to(_TORCH).parts[0]
    return not first.startswith("_") and first not in _INSIDE
