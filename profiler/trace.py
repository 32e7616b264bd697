"""From a module and its loss to one clean operator graph, by ``torch.export``.

``torch.export(strict=False)`` takes what symbolic tracing and hooks do not (33 of 33 models tried, gradients equal to
the bit).  It is asked for a graph in which the number of samples is a symbol; where the model's own code fixes that
number, the graph holds for the example's number alone.  Guards are dropped: the callers keep shapes straight.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from planner.ir.errors import UnsupportedModelError
from profiler.functional import rewrite_in_place
from profiler.source import LoadedModel

NUM_SAMPLES = "num_samples"

_PREFIX = "module."
_REFUSALS = (RuntimeError, ValueError, TypeError, AssertionError)  # what torch.export raises for a fixed sample dim
_CHECKS = ("_assert_", "sym_constrain_range", "_check")


@dataclass(frozen=True, slots=True)
class Traced:
    """The forward pass with its loss.

    Attributes:
        module: placeholders are ``num_samples`` (if ``symbol`` is there), then ``inputs``; the output is the loss.
        inputs: names of the placeholders of inputs and targets.
        samples: of the example it was traced with.
        symbol: the number of samples in the shapes of ``node.meta["val"]`` (sympy's); None if that number is fixed.
        parameters: trained parameters by the user's names, each once; the tensors of the user's module.
    """

    module: fx.GraphModule
    inputs: tuple[str, ...]
    samples: int
    symbol: Any | None
    parameters: Mapping[str, Tensor]


class _WithLoss(nn.Module):
    def __init__(self, model: LoadedModel) -> None:
        super().__init__()
        self.module = model.module
        self.loss = model.loss_fn
        self.num_inputs = len(model.inputs)
        function = _loss_function(model)
        if isinstance(function, nn.Module):
            self.loss_fn = function  # registered, so that its buffers have names

    def forward(self, *tensors: Tensor) -> Tensor:
        output = self.module(*tensors[: self.num_inputs])
        return self.loss(output, tensors[self.num_inputs :])


class _FixedError(Exception):
    """A size in the graph is no multiple of the number of samples."""


def trace(model: LoadedModel) -> Traced:
    """The graph of ``model`` in training mode; an example of one sample is repeated to two, as 1 is special to export.

    Raises:
        UnsupportedModelError: ``torch.export`` refuses the model; the text holds its reason.
    """
    samples = max(2, model.samples)
    tensors = tuple(_repeated(tensor, model.samples, samples) for tensor in (*model.inputs, *model.targets))
    names = (*_numbered("inputs", len(model.inputs)), *_numbered("targets", len(model.targets)))
    wrapper = _WithLoss(model).train(model.module.training)
    try:
        dim = torch.export.Dim("samples")
        shapes = tuple({0: dim} if tensor.ndim and tensor.shape[0] == samples else {} for tensor in tensors)
        return _clean(model, _export(wrapper, tensors, (shapes,)), names, samples)
    except (*_REFUSALS, _FixedError):
        pass  # the second try says what is wrong, if it is more than a fixed number of samples
    try:
        return _clean(model, _export(wrapper, tensors, None), names, samples)
    except Exception as error:
        if isinstance(error, UnsupportedModelError):
            raise
        lines = str(error).strip().splitlines()
        reason = [*lines[:2], *[line.strip() for line in lines[2:] if line.lstrip().startswith('File "')][-1:]]
        raise UnsupportedModelError(
            "the model cannot be captured", [f"torch.export: {type(error).__name__}", *reason]
        ) from error


def proportion(size: Any, symbol: Any | None) -> int | None:
    """``k`` where ``size`` is ``k`` times the number of samples; None where it does not depend on it in this way."""
    if symbol is None or not isinstance(size, torch.SymInt):
        return None
    expression = size.node.expr
    factor = expression.coeff(symbol)
    return int(factor) if factor.is_Integer and (expression - factor * symbol).expand() == 0 else None


def attribute(module: nn.Module, target: str) -> Any:
    """What a dotted name, such as the target of a ``get_attr`` node, stands for."""
    value: Any = module
    for name in target.split("."):
        value = getattr(value, name)
    return value


def _repeated(tensor: Tensor, samples: int, wanted: int) -> Tensor:
    if samples == wanted or not tensor.ndim or tensor.shape[0] != samples:
        return tensor
    return torch.cat([tensor] * wanted)


def _numbered(name: str, count: int) -> tuple[str, ...]:
    return tuple(name if index == 0 else f"{name}_{index + 1}" for index in range(count))


def _export(wrapper: nn.Module, tensors: tuple[Tensor, ...], shapes: Any) -> fx.GraphModule:
    with warnings.catch_warnings():
        # nn.LSTM assigns its own flat list of weights in forward; the tensors in it are the parameters
        warnings.filterwarnings("ignore", message="The tensor attributes? ")
        exported = torch.export.export(wrapper, tensors, strict=False, dynamic_shapes=shapes)
        return exported.module()


def _clean(model: LoadedModel, exported: fx.GraphModule, names: tuple[str, ...], samples: int) -> Traced:
    found = [node for node in exported.graph.nodes if node.op == "placeholder"]
    symbols = {symbol for node in found for symbol in _symbols(node.meta["val"])}
    if len(symbols) > 1:
        raise _FixedError
    symbol = next(iter(symbols), None)
    canonical = _canonical_names(model)
    attributes: dict[str, Any] = {}
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    count = graph.placeholder(NUM_SAMPLES) if symbol is not None else None
    for node, name in zip(found, names, strict=True):
        copies[node] = graph.placeholder(name)
        copies[node].meta = dict(node.meta)
    for node in exported.graph.nodes:
        if node.op in ("placeholder", "call_module"):  # the only module called is that of the guards
            continue
        if node.op == "get_attr":
            value = attribute(exported, node.target)
            target = canonical.get(id(value), node.target.removeprefix(_PREFIX))
            if attributes.setdefault(target, value) is not value:
                target = f"{target}_constant"
                attributes[target] = value
            copies[node] = graph.get_attr(target)
            copies[node].meta = dict(node.meta)
        elif count is not None and str(node.target).startswith("aten.sym_"):
            copies[node] = _size(graph, count, proportion(node.meta["val"], symbol))
        elif node.op == "output":
            graph.output(copies[_only_output(node)])
        elif not _is_check(node):
            copies[node] = graph.node_copy(node, copies.__getitem__)
    rewrite_in_place(graph, attributes)
    graph.eliminate_dead_code(lambda node: node.is_impure() or isinstance(node.target, torch._ops.HigherOrderOperator))
    module = fx.GraphModule(attributes, graph)
    parameters = {name: value for name, value in attributes.items() if _is_trained(value)}
    return Traced(module, names, samples, symbol, parameters)


def _loss_function(model: LoadedModel) -> Callable[..., Any]:
    return getattr(model.loss_fn, "function", model.loss_fn)


def _symbols(value: Any) -> set[Any]:
    sizes = value.shape if isinstance(value, Tensor) else ()
    return {symbol for size in sizes if isinstance(size, torch.SymInt) for symbol in size.node.expr.free_symbols}


def _canonical_names(model: LoadedModel) -> dict[int, str]:
    """The user's name of each parameter and buffer, the first one where several are tied."""
    function = _loss_function(model)
    found: dict[int, str] = {}
    for prefix, module in (("", model.module), *([("loss_fn.", function)] if isinstance(function, nn.Module) else [])):
        for name, value in (*module.named_parameters(), *module.named_buffers()):
            found.setdefault(id(value), prefix + name)
    return found


def _is_trained(value: Any) -> bool:
    return isinstance(value, nn.Parameter) and value.requires_grad


def _size(graph: fx.Graph, count: fx.Node, factor: int | None) -> fx.Node:
    if factor is None:
        raise _FixedError
    return count if factor == 1 else graph.call_function(operator.mul, (count, factor))


def _only_output(node: fx.Node) -> fx.Node:
    values = node.args[0]
    while isinstance(values, (tuple, list)):
        if len(values) != 1:
            raise UnsupportedModelError("the loss is not one tensor", [f"the loss function gives {len(values)} values"])
        values = values[0]
    if not isinstance(values, fx.Node) or not isinstance(values.meta.get("val"), Tensor):
        raise UnsupportedModelError("the loss does not depend on the model", ["loss_fn returned a constant"])
    if values.meta["val"].ndim:
        shape = tuple(values.meta["val"].shape)
        raise UnsupportedModelError("the loss is not a number", [f"loss_fn returned a tensor of shape {shape}"])
    return values


def _is_check(node: fx.Node) -> bool:
    target: Callable[..., Any] | str = node.target
    name = getattr(target, "__name__", str(target))
    return not node.users and name.startswith(_CHECKS)
