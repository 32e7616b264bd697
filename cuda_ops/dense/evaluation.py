"""Evaluation mode of a graph that was captured in training mode, operator by operator.

Normalisation takes its running statistics, where it keeps any, and dropout lets everything through, also inside
attention and recurrent layers.  What a module's own code does otherwise in evaluation (``if self.training``) is not in
the graph: whoever captures it finds out whether it does.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import fx

from cuda_ops._torch import schema_of
from cuda_ops.dense.state_writes import arguments_of

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
    return _with(node, changes) if changes else None


def draws_in_any_mode(node: fx.Node) -> bool:
    """Whether the operator draws random numbers, and nothing tells whether it would in evaluation mode."""
    schema = schema_of(node.target)
    names = {argument.name for argument in schema.arguments} if schema is not None else set()
    is_switched = not names.isdisjoint((*_SWITCHES, "dropout_p"))
    return not is_switched and torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def is_random(node: fx.Node) -> bool:
    """Whether ``node`` draws random numbers; dropout of nothing does not."""
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    arguments = arguments_of(node)
    switches = [arguments[name] for name in ("train", "training") if name in arguments]
    if node.target is torch.ops.aten.rrelu.default and not switches:
        return False  # off unless it is said to train
    operator: Any = node.target
    names = {argument.name for argument in schema_of(operator).arguments} & {"dropout", "dropout_p"}
    is_dropout = names or "dropout" in str(node.target)
    rates = [arguments[name] for name in (*names, "p") if name in arguments]
    return False not in switches and not (is_dropout and not any(rates))


def _with(node: fx.Node, changes: dict[str, Any]) -> Callable[..., Any]:
    """The node's operator, but with some arguments changed."""
    target: Any = node.target
    names = [argument.name for argument in schema_of(target).arguments]
    places = {names.index(name): value for name, value in changes.items()}
    by_place = {place: value for place, value in places.items() if place < len(node.args)}
    by_name = {names[place]: value for place, value in places.items() if place >= len(node.args)}
    return partial(_call, target, by_place, by_name)


def _call(
    target: Callable[..., Any], by_place: dict[int, Any], by_name: dict[str, Any], *args: Any, **kwargs: Any
) -> Any:
    return target(*(by_place.get(place, value) for place, value in enumerate(args)), **{**kwargs, **by_name})
