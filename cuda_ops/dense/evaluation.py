"""Evaluation mode of a graph that was captured in training mode, operator by operator.

Normalisation takes its running statistics, where it keeps any, and dropout lets everything through, also inside
attention and recurrent layers.  What a module's own code does otherwise in evaluation (``if self.training``) is not in
the graph: whoever captures it finds out whether it does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

from cuda_ops.calls import argument_names, arguments_of, changed_call, draws

_SWITCHES = ("training", "train", "use_input_stats")
"""Names under which operators take whether they train."""


def evaluated(node: fx.Node) -> Callable[..., Any] | None:
    """What is called in place of a node's operator in evaluation mode; None: itself."""
    arguments = arguments_of(node)
    changes: dict[str, Any] = {name: False for name in _SWITCHES if arguments.get(name)}
    if arguments.get("dropout_p"):
        changes["dropout_p"] = 0.0
    if "running_mean" in arguments and arguments["running_mean"] is None:
        return None  # as in torch: without running statistics it is normalised by those of its input
    target: Any = node.target

    def call(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = changed_call(target, args, kwargs, changes)
        return target(*args, **kwargs)

    return call if changes else None


def draws_in_any_mode(node: fx.Node) -> bool:
    """Whether the operator draws random numbers, and nothing tells whether it would in evaluation mode."""
    return draws(node.target) and {*_SWITCHES, "dropout_p"}.isdisjoint(argument_names(node.target))


def is_random(node: fx.Node) -> bool:
    """Whether ``node`` draws random numbers; dropout of nothing does not."""
    if not draws(node.target):
        return False
    arguments = arguments_of(node)
    rates = [arguments[name] for name in ("dropout", "dropout_p") if name in arguments]
    rates += [arguments.get("p", 0)] if "dropout" in str(node.target) else []
    is_off = any(arguments.get(name) is False for name in ("train", "training"))
    return not is_off and (not rates or any(rates))
