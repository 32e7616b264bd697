"""Backward in two halves at the price of one: weight gradients are left for later, where the operator runs.

        forward     y = operator(x, w)          as ever, but through a node of autograd of its own
        backward    dx = ... ; note (dy, x, w)  torch.autograd.backward: the input's gradient, nothing else
        later       w.grad += ...               WeightGradientQueue.run, as many other micro-batches later as one likes

Walking the chain of input gradients a second time instead costs up to as much as the whole backward again ("B" and "W"
in Qi et al. 2024, "Zero Bubble Pipeline Parallelism", section 2).  Operators without a rule here, and parameters that
are read otherwise, keep their gradients in the first half.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch.autograd.function import once_differentiable

from cuda_ops.calls import arguments_of
from cuda_ops.dense.backward_halves import Halves, OperatorCall, WeightGradients
from cuda_ops.operator_table import functional_row

Add = Callable[[Tensor, Tensor], None]
"""(parameter, gradient): adds it to ``parameter.grad``."""


def accumulate(parameter: Tensor, gradient: Tensor) -> None:
    """Adds to ``parameter.grad``; the first gradient becomes it, in the parameter's dtype and memory layout."""
    if parameter.grad is not None:
        parameter.grad.add_(gradient)
    elif gradient.dtype == parameter.dtype and gradient.stride() == parameter.stride():
        parameter.grad = gradient
    else:
        parameter.grad = torch.empty_like(parameter, requires_grad=False).copy_(gradient)


class WeightGradientQueue:
    """What the backward of one micro-batch left for later, in the order in which it left it.

    Args:
        add: given each parameter with a part of its gradient.
    """

    def __init__(self, add: Add = accumulate) -> None:
        self._add = add
        self._notes: deque[tuple[tuple[Tensor | None, Tensor | None], Callable[[], WeightGradients]]] = deque()

    def __len__(self) -> int:
        """Operators noted."""
        return len(self._notes)

    def held(self) -> list[Tensor]:
        """The tensors that what was noted is computed from."""
        computed = (compute.args for _, compute in self._notes if isinstance(compute, partial))
        return [each for arguments in computed for each in arguments if isinstance(each, Tensor)]

    def note(self, targets: tuple[Tensor | None, Tensor | None], compute: Callable[[], WeightGradients]) -> None:
        """Leaves ``compute`` for :meth:`run`; its results are the gradients of ``targets``."""
        self._notes.append((targets, compute))

    @torch.no_grad()
    def run(self) -> None:
        """Computes all gradients and adds them up; what each needed is let go before the next."""
        while self._notes:
            self._run_oldest()

    def _run_oldest(self) -> None:
        """Apart, as names of a loop would keep the gradients made while the next ones are computed."""
        targets, compute = self._notes.popleft()
        gradients = compute()
        del compute
        for target, gradient in zip(targets, gradients, strict=True):
            if target is not None and gradient is not None:
                self._add(target, gradient.sum_to_size(target.shape))


@dataclass(slots=True)
class CurrentQueue:
    """Where operators leave their weight gradients: the queue of the micro-batch that runs forward now.

    Attributes:
        queue: None where backward is to be whole: then the operators are torch's own.
    """

    queue: WeightGradientQueue | None = None


def deferred(node: fx.Node, current: CurrentQueue) -> Callable[..., Tensor] | None:
    """What to call in place of ``node``, with its own arguments; None where its backward cannot be halved.

    Args:
        node: of a graph whose parameters, buffers and constants are ``get_attr`` nodes.  Weight and bias must be such:
            what is computed from parameters may be read by others too, and gets its gradient with them.
        current: asked at every call.
    """
    target: Any = node.target
    reader = functional_row(target).halves if node.op == "call_function" else None
    if reader is None or not reader.covers(target):
        return None
    arguments = arguments_of(node)
    weight = arguments[reader.weight]
    bias = arguments[reader.bias] if reader.bias else None
    if any(not isinstance(each, fx.Node) or each.op != "get_attr" for each in (weight, bias) if each is not None):
        return None
    function = partial(_call, target, reader.read, current)
    function.__name__ = f"deferred_{target.overloadpacket.__name__}"  # type: ignore[attr-defined]  # fx writes it
    function.__module__ = __name__
    return function


def _call(
    target: Callable[..., Tensor],
    read: Callable[..., OperatorCall | None],
    current: CurrentQueue,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    queue = current.queue
    call = read(*args, **kwargs) if queue is not None and torch.is_grad_enabled() else None
    if queue is None or call is None or not call.weight.requires_grad:
        return target(*args, **kwargs)
    if call.weight.layout is not torch.strided or call.weight.is_complex():
        return target(*args, **kwargs)
    x = call.x
    weight = call.weight
    bias = call.bias
    device = weight.device.type
    if torch.is_autocast_enabled(device):
        if call.autocasts is None:
            return target(*args, **kwargs)
        dtype = torch.get_autocast_dtype(device) if call.autocasts else None
        with torch.autocast(device, enabled=False):
            operands = (as_autocast(each, dtype) for each in (x, weight.detach(), bias))
            return _apply(queue, call, *operands)
    return _apply(queue, call, x, weight.detach(), bias)


def _apply(queue: WeightGradientQueue, call: OperatorCall, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The weight goes in detached, so that in backward nothing flows to it."""
    targets = call.weight, call.bias if call.bias is not None and call.bias.requires_grad else None
    bias = None if bias is None else bias.detach()
    weight = weight.requires_grad_()
    apply: Callable[..., Tensor] = _Deferred.apply
    y = apply(queue, call.halves, targets, call.before(x) if call.before else x, weight, bias)
    return call.after(y) if call.after else y


class _Deferred(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        queue: WeightGradientQueue,
        halves: Halves,
        targets: tuple[Tensor, Tensor | None],
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.queue = queue
        ctx.halves = halves
        ctx.targets = targets
        ctx.set_materialize_grads(False)
        return halves.forward(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None) -> tuple[Tensor | None, ...]:
        if dy is None:
            return (None,) * 6
        x, weight = (tensor.detach() for tensor in ctx.saved_tensors)
        wanted = True, ctx.targets[1] is not None
        ctx.queue.note(ctx.targets, partial(ctx.halves.weight_gradients, dy, x, weight, wanted))
        dx = ctx.halves.input_gradient(dy, x, weight) if ctx.needs_input_grad[3] else None
        return None, None, None, dx, None, None


def as_autocast(tensor: Tensor | None, dtype: torch.dtype | None) -> Any:
    """In ``dtype``, as autocast casts: floats, but not of 64 bits."""
    is_kept = dtype is None or tensor is None or not tensor.is_floating_point() or tensor.dtype == torch.float64
    return tensor if is_kept or tensor is None else tensor.to(dtype)
