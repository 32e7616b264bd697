"""Evaluation mode of a graph that was captured in training mode, operator by operator.

Normalisation takes its running statistics, where it keeps any, and dropout lets everything through, also inside
attention and recurrent layers.  What a module's own code does otherwise in evaluation (``if self.training``) is not in
the graph.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import fx

from planner.ir.errors import UnsupportedModelError
from runtime.stages.aliases import arguments_of

_SWITCHES = ("training", "train", "use_input_stats")
"""Names under which operators take whether they train."""


def in_evaluation(node: fx.Node) -> Callable[..., Any] | None:
    """The rule that puts operators in evaluation mode.

    Raises:
        UnsupportedModelError: an operator draws random numbers, and nothing tells whether it would in evaluation mode.
    """
    arguments = arguments_of(node)
    changes: dict[str, Any] = {name: False for name in _SWITCHES if arguments.get(name)}
    if arguments.get("dropout_p"):
        changes["dropout_p"] = 0.0
    if "running_mean" in arguments and arguments["running_mean"] is None:
        return None  # as in torch: without running statistics it is normalised by those of its input
    if changes:
        return _with(node, changes)
    is_switched = any(name in arguments for name in (*_SWITCHES, "dropout_p"))
    if not is_switched and torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
        raise UnsupportedModelError(
            f"node {node.name} draws random numbers ({node.target}), perhaps only in training",
            ["the captured graph does not tell what it does in evaluation mode"],
            ["draw with nn.Dropout, or evaluate the module itself, on one device"],
        )
    return None


def _with(node: fx.Node, changes: dict[str, Any]) -> Callable[..., Any]:
    """The node's operator, but with some arguments changed."""
    target: Any = node.target
    names = [argument.name for argument in target._schema.arguments]
    places = {names.index(name): value for name, value in changes.items()}
    by_place = {place: value for place, value in places.items() if place < len(node.args)}
    by_name = {names[place]: value for place, value in places.items() if place >= len(node.args)}
    return partial(_call, target, by_place, by_name)


def _call(
    target: Callable[..., Any], by_place: dict[int, Any], by_name: dict[str, Any], *args: Any, **kwargs: Any
) -> Any:
    return target(*(by_place.get(place, value) for place, value in enumerate(args)), **{**kwargs, **by_name})
