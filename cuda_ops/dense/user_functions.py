"""A user's ``torch.autograd.Function`` as one operator, so that a captured graph keeps its backward.

    user:      y = Quantize.apply(x, 8)                     an autograd.Function
    captured:  y = halopipe::user_function([x], [], "models.Quantize:0")[0]

The operator calls the user's own Function on what it is given: what that saves, which of its inputs need a gradient and
what it does in backward are its own affair, under autocast as well.  The text is the key of a table of this process,
since an operator takes tensors, numbers and text alone: every process captures its model itself.  Inputs that the
Function writes to are given as copies and handed out beside its results: in a graph each value has one maker.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from cuda_ops._torch import SingleLevelFunction, TreeSpec, tree_unflatten
from cuda_ops.dense.operators import define_operator


@dataclass(frozen=True, slots=True)
class PlacedArgument:
    """An argument that is a tensor of the call, or an integer that depends on sizes, by its place among those."""

    place: int
    is_tensor: bool


@dataclass(frozen=True, slots=True)
class UserFunction:
    """One call of a Function in a model's code.

    Attributes:
        leaves, structure: its arguments; tensors and integers that depend on sizes by their places.
        written: places of the tensors that it writes to.
        results: places of the tensors among what it returns.
        kept: of ``written``, those that it does not return; they come after its results.
    """

    function: type[torch.autograd.Function]
    leaves: tuple[Any, ...]
    structure: TreeSpec
    written: frozenset[int]
    results: tuple[int, ...]
    kept: tuple[int, ...] = ()

    def __call__(self, tensors: Sequence[Tensor], integers: Sequence[int]) -> list[Tensor]:
        operands = [tensor.clone() if place in self.written else tensor for place, tensor in enumerate(tensors)]
        returned = apply(self.function, *self.arguments(operands, integers))
        outputs = returned if isinstance(returned, tuple) else (returned,)
        return [*(outputs[place] for place in self.results), *(operands[place] for place in self.kept)]

    def arguments(self, tensors: Sequence[Tensor], integers: Sequence[int]) -> Sequence[Any]:
        """What ``function.apply`` is called with."""

        def value(leaf: Any) -> Any:
            if isinstance(leaf, PlacedArgument):
                return (tensors if leaf.is_tensor else integers)[leaf.place]
            return leaf

        values: Sequence[Any] = tree_unflatten(map(value, self.leaves), self.structure)
        return values


def apply(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    """``function.apply``, also where a capture looks at such calls (it replaces the class method in between)."""
    return super(SingleLevelFunction, function).apply(*arguments)  # type: ignore[misc]  # torch's stub lacks it


def registered(call: UserFunction) -> str:
    """The text by which the operator finds ``call`` in this process."""
    name = f"{call.function.__module__}.{call.function.__qualname__}:{next(_NUMBERS)}"
    _CALLS[name] = call
    return name


LINEAR_BACKWARD = "linear_backward"
"""In ``node.meta`` of a captured Function: whether its backward is linear in the gradient, else it needs all of it."""


def is_user_function(node: fx.Node) -> bool:
    """Whether ``node`` calls a user's Function."""
    return node.target is USER_FUNCTION


def function_of(node: fx.Node) -> str:
    """Import path of the Function that ``node`` calls."""
    return str(node.args[2]).rpartition(":")[0]


_CALLS: dict[str, UserFunction] = {}
_NUMBERS = itertools.count()


def _run(tensors: Sequence[Tensor], integers: Sequence[int], function: str) -> list[Tensor]:
    return _CALLS[function](tensors, integers)


def _shaped(tensors: Sequence[Tensor], integers: Sequence[int], function: str) -> list[Tensor]:
    with torch.no_grad():
        return [torch.empty_like(each) for each in _run(tensors, integers, function)]


define_operator("user_function(Tensor[] tensors, SymInt[] integers, str function) -> Tensor[]", _shaped, _run)
USER_FUNCTION = torch.ops.halopipe.user_function.default
