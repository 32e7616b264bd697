"""``torch.autograd.grad`` inside of forward, as one operator: physics-informed losses, forces, penalties on gradients.

    user:      u_x = torch.autograd.grad(u, x, ones, create_graph=True)[0]
    traced:    u_x = halopipe::derivative([u], [x], [ones])[0]
    captured:  u_x = derivative(x, w, ..., ones)[0]          which computes u of x once more, and differentiates that

``torch.export`` cannot follow a backward: what autograd saved for it are other tensors than those it knows.  So the
trace holds a mark, and the graph then the operators between ``x`` and ``u`` in its place.  They are run by autograd
with a graph of their own, so that the result has a gradient by all that it is made of, as the user's has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch.overrides import TorchFunctionMode

from cuda_ops.dense.data_dependent import Unit, cut_out
from cuda_ops.dense.operators import define_operator


def _shaped(outputs: Sequence[Tensor], inputs: Sequence[Tensor], seeds: Sequence[Tensor | None]) -> list[Tensor]:
    return [torch.empty_like(each) for each in inputs]


define_operator("derivative(Tensor[] outputs, Tensor[] inputs, Tensor?[] seeds) -> Tensor[]", _shaped)
MARK = torch.ops.halopipe.derivative.default


class UnknownDerivativeError(ValueError):
    """A derivative that cannot be written as operators of the graph; the text says why."""


class Derivatives(TorchFunctionMode):
    """Calls of ``torch.autograd.grad`` leave a mark in the trace."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Marks derivatives, calls all else."""
        keywords = dict(kwargs or {})
        if func is not torch.autograd.grad:
            return func(*args, **keywords)
        outputs, inputs = (tuple(each) if isinstance(each, (tuple, list)) else (each,) for each in args[:2])
        if keywords.get("is_grads_batched"):
            raise UnknownDerivativeError("is_grads_batched=True is not captured: one call for each row")
        seeds = keywords.get("grad_outputs")
        seeds = (seeds,) if seeds is None or isinstance(seeds, Tensor) else tuple(seeds)
        seeds = (*seeds, *(None,) * (len(outputs) - len(seeds)))
        gradients = torch.ops.halopipe.derivative(list(outputs), list(inputs), list(seeds))
        return tuple(gradients if keywords.get("create_graph") else (each.detach() for each in gradients))


class Derivative(Unit):
    """The gradients of a unit's values by some of its arguments.

    Attributes:
        places: of those arguments.
        seeded: of the unit's values, those whose gradient is given, after the unit's own arguments.
    """

    __name__ = "derivative"

    def __init__(self, graph: fx.Graph, places: Sequence[int], seeded: Sequence[bool]) -> None:
        super().__init__(graph)
        self.places = tuple(places)
        self.seeded = tuple(seeded)

    def __call__(self, *arguments: Any) -> list[Tensor]:
        """The gradients, with a graph of their own where gradients are enabled."""
        is_trained = torch.is_grad_enabled()
        num_seeds = sum(self.seeded)
        with torch.inference_mode(False), torch.enable_grad():
            tensors = [each.clone() if isinstance(each, Tensor) and each.is_inference() else each for each in arguments]
            inputs = tensors[: len(tensors) - num_seeds]
            seeds = iter(tensors[len(tensors) - num_seeds :])
            for place in self.places:
                if not inputs[place].requires_grad:
                    inputs[place] = inputs[place].detach().requires_grad_(True)
            outputs = self.module(*inputs)
            wanted = [inputs[place] for place in self.places]
            own = [next(seeds) if is_seeded else None for is_seeded in self.seeded]
            return list(torch.autograd.grad(outputs, wanted, own, create_graph=is_trained))

    def changed(self, argument: Callable[[Any], Any]) -> Derivative:
        """A copy whose operators have ``argument(each)`` in place of each argument that is no node."""
        return Derivative(super().changed(argument).module.graph, self.places, self.seeded)


def differentiate(graph: fx.Graph) -> list[fx.Node]:
    """Writes derivatives in place of their marks, in order; what they differentiate stays as it is, for other readers.

    Raises:
        UnknownDerivativeError: no operator of the graph leads from an input to the outputs.
    """
    made = []
    marks = graph.find_nodes(op="call_function", target=MARK)
    _read_once(graph, [each for node in marks for each in cast("list[fx.Node]", node.args[1])])
    for node in list(graph.nodes):
        if node in marks:
            outputs, inputs, seeds = cast("tuple[list[fx.Node], ...]", node.args)
            own = _between(graph, inputs, outputs)
            unread = [each.name for each in inputs if not any(each in part.all_input_nodes for part in own)]
            if unread or not all(each in own for each in outputs):
                raise UnknownDerivativeError("a value does not depend on what it is differentiated by")
            inner, copies, sources, _ = cut_out(own)
            inner.output(tuple(copies[each] for each in outputs))
            seeded = [each is not None for each in seeds]
            node.target = Derivative(inner, [sources.index(each) for each in inputs], seeded)
            node.args = (*sources, *(each for each in seeds if each is not None))
            made.append(node)
    return made


def _read_once(graph: fx.Graph, inputs: Sequence[fx.Node]) -> None:
    """A parameter that something is differentiated by is read by one node, at the first place of all."""
    wanted = {each.target for each in inputs if each.op == "get_attr"}
    first: dict[Any, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op == "get_attr" and node.target in wanted and first.setdefault(node.target, node) is not node:
            node.replace_all_uses_with(first[node.target])


def _between(graph: fx.Graph, inputs: Sequence[fx.Node], outputs: Sequence[fx.Node]) -> list[fx.Node]:
    """The nodes on ways from ``inputs`` to ``outputs``, those included, in order."""
    downstream: set[fx.Node] = set(inputs)
    order = []
    for node in graph.nodes:
        if node not in downstream and any(each in downstream for each in node.all_input_nodes):
            downstream.add(node)
            order.append(node)
    upstream: set[fx.Node] = set(outputs)
    for node in reversed(order):
        if node in upstream:
            upstream.update(node.all_input_nodes)
    wanted = set(inputs)
    return [node for node in order if node in upstream and node not in wanted]
