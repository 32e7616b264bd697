"""Branches on values that a step is not to take: the graph is captured without them, and looks at the values itself.

A branch on whether values are finite (``if not torch.isfinite(x).all(): x = x.clamp(...)``, as DETR has it) is captured
as for values that are: :func:`require_finite` raises where a step would take the other branch.  What
``torch.distributions`` asks of parameters and samples by default (a scale above 0, a class that there is) is captured
as for values that pass: :func:`require_valid` raises where the distribution itself would.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch.overrides import TorchFunctionMode

from cuda_ops._torch import OpOverload
from cuda_ops.calls import draws

_TESTS = {"isfinite": True, "isinf": False, "isnan": False}
"""What each answers of finite values."""
_ALL = ("all", "_is_all_true")
_WATCHED = frozenset(["__bool__", "any", *_ALL, *_TESTS])
_VALIDATING = frozenset(
    f"torch.distributions.{name}" for name in ("constraints", "continuous_bernoulli", "distribution", "geometric")
)
"""Where torch refuses arguments of a distribution unless all of them are valid."""


@torch.library.custom_op("halopipe::require_finite", mutates_args=())
def require_finite(x: Tensor) -> Tensor:
    """A copy of ``x``.

    Raises:
        FloatingPointError: a value is infinite or no number.
    """
    if not torch.isfinite(x).all():
        raise FloatingPointError(
            f"{int((~torch.isfinite(x)).sum())} of {x.numel()} values are not finite, and the module then takes a "
            "branch that is not captured: a smaller learning rate or clipped gradients, or no such branch in forward"
        )
    return x.clone()


@torch.library.custom_op("halopipe::require_valid", mutates_args=())
def require_valid(x: Tensor, valid: Tensor, where: str) -> Tensor:
    """A copy of ``x``.

    Args:
        x: what is read after the check.
        valid: of bool, what the check found of each value.
        where: the method of the distribution that asks.

    Raises:
        ValueError: a value is not valid.
    """
    if not valid.all():
        raise ValueError(
            f"{where} refuses {int((~valid).sum())} of {valid.numel()} values, as torch.distributions does of a module "
            "that is called alone: keep them in range (softplus, clamp), or validate_args=False"
        )
    return x.clone()


require_finite.register_fake(torch.empty_like)
require_finite.register_autograd(lambda _, gradient: gradient)
require_valid.register_fake(lambda x, valid, where: torch.empty_like(x))
require_valid.register_autograd(lambda _, gradient: (gradient, None, None))
FINITE = torch.ops.halopipe.require_finite.default
VALID = torch.ops.halopipe.require_valid.default
torch.fx.node.has_side_effect(FINITE)
torch.fx.node.has_side_effect(VALID)


class ValueChecks(TorchFunctionMode):
    """Python's branches on whether all values are finite, or valid, are taken as if they were; the graph is to look."""

    def __init__(self) -> None:
        super().__init__()
        self._tests: dict[int, tuple[Tensor, Tensor, bool]] = {}  # results, which stay alive, of what, and the answer
        self._validated: dict[int, tuple[Tensor, Tensor, str]] = {}  # the same, and who asks

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Notes tests and answers branches."""
        name = getattr(func, "__name__", "")
        if not args or name not in _WATCHED:  # not looked up: torch.export, strict, may know no id of what there is
            return func(*args, **(kwargs or {}))
        _, tested, answer = self._tests.get(id(args[0]), (None, None, False))
        if func is Tensor.__bool__ and tested is not None and args[0].ndim == 0:
            torch.ops.halopipe.require_finite(tested)
            return answer
        if func is Tensor.__bool__ and id(args[0]) in self._validated:
            _, valid, where = self._validated[id(args[0])]
            torch.ops.halopipe.require_valid(valid, valid, where)
            return True
        result = func(*args, **(kwargs or {}))
        if name in _TESTS and isinstance(result, Tensor):
            self._tests[id(result)] = result, args[0], _TESTS[name]
        elif name in ("all", "any") and tested is not None and (name == "all") is answer:
            self._tests[id(result)] = result, tested, answer
        elif name in _ALL and len(args) == 1 and not kwargs and (where := _validating()):
            self._validated[id(result)] = result, args[0], where
        return result


def _validating() -> str:
    """The method of a distribution, or of a constraint of it, that asks whether all values are valid; else empty."""
    if torch.compiler.is_dynamo_compiling():  # code that is read, and not run, has no frames
        return ""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name == "__torch_function__":
        frame = frame.f_back
    if frame is None or frame.f_globals.get("__name__") not in _VALIDATING:
        return ""
    return f"{type(frame.f_locals.get('self')).__name__}.{frame.f_code.co_name}"


def look_at_values(graph: fx.Graph, is_constant: Callable[[fx.Node], bool]) -> None:
    """Who reads values after a branch on them reads them from what looks at them.

    Args:
        is_constant: whether an attribute that ``graph`` reads is the same at each step: of such values the module
            itself was asked when it was called on its example.
    """
    for node in list(graph.nodes):
        if node.target is VALID:
            _give_what_is_read(graph, node, is_constant)
        if is_value_check(node):
            tested = node.args[0]
            tested.replace_all_uses_with(node, delete_user_cb=lambda user, own=node: user is not own and own < user)
            if not node.users:
                graph.erase_node(node)


def is_value_check(node: fx.Node) -> bool:
    """Whether ``node`` looks at values, and is there for who reads them."""
    return node.target in (FINITE, VALID)


def _give_what_is_read(graph: fx.Graph, node: fx.Node, is_constant: Callable[[fx.Node], bool]) -> None:
    """Gives the check ``node`` the last of the tensors that its answer is made of and that are read after it.

    Where there is none, or all are the same at each step, it keeps its answer alone, which nobody reads.
    """
    valid = cast("fx.Node", node.args[1])
    sources = [each for each in _behind(valid, lambda each: True) if each.op != "call_function" or draws(each.target)]
    if all(each.op == "get_attr" and is_constant(each) for each in sources):
        return

    def is_unread(each: fx.Node) -> bool:
        return not any(node < user for user in each.users)

    read = [each for each in _behind(valid, is_unread) if _is_tensor(each) and not is_unread(each)]
    if not read:
        return
    order = {each: index for index, each in enumerate(graph.nodes)}
    value = max(read, key=order.__getitem__)
    with graph.inserting_before(node):
        node.args = (value, _along(graph, valid, value), node.args[2])
    node.meta["val"] = value.meta["val"].clone()


def _behind(last: fx.Node, is_passed: Callable[[fx.Node], bool]) -> list[fx.Node]:
    """What the tensor ``last`` is made of, and itself; not sizes, nor what is after those that are not passed."""
    visited: dict[fx.Node, None] = {}
    waiting = [last]
    while waiting:
        each = waiting.pop()
        is_size = isinstance(each.meta.get("val"), (int, torch.SymInt))
        if each not in visited and not is_size:
            visited[each] = None
            waiting += each.all_input_nodes if is_passed(each) else []
    return list(visited)


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), Tensor)


def _along(graph: fx.Graph, valid: fx.Node, value: fx.Node) -> fx.Node:
    """``valid`` with a dim for each of ``value``, whose dims of one event (a vector of shares) have one answer."""
    answers = valid.meta["val"].shape
    values = value.meta["val"].shape
    if list(map(str, answers)) != list(map(str, values[: len(answers)])):  # sizes that vary are compared by name
        return _made(graph, torch.ops.aten.all.default, valid)
    for dim in range(len(answers), len(values)):
        valid = _made(graph, torch.ops.aten.unsqueeze.default, valid, dim)
    return valid


def _made(graph: fx.Graph, target: OpOverload, source: fx.Node, *arguments: Any) -> fx.Node:
    made = graph.call_function(target, (source, *arguments))
    made.meta = {**source.meta, "val": target(source.meta["val"], *arguments)}
    return made
