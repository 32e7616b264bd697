"""A captured graph on another device than the one that it was captured on.

A model is captured on the processor, wherever it is to run: so its graph and its fingerprint are the same everywhere,
and a rank's GPU never holds more than that rank's stages.  Operators that make tensors from nothing (a mask, positions)
have the device of the capture among their arguments, which is what changes here; so does what is under autocast.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, fx
from torch.amp import is_autocast_available

from cuda_ops._torch import wrap_with_autocast
from cuda_ops.dense.data_dependent import Unit


def on_device(module: fx.GraphModule, device: torch.device) -> fx.GraphModule:
    """A copy of ``module`` whose operators make their tensors on ``device``.

    Parameters and buffers are the same objects, where they were: see :func:`move`.
    """
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    for node in graph.nodes:
        node.args = fx.node.map_aggregate(node.args, lambda each: _placed(each, device))
        node.kwargs = fx.node.map_aggregate(node.kwargs, lambda each: _placed(each, device))
        if node.target is wrap_with_autocast and is_autocast_available(device.type):  # its dtypes are in the graph
            node.args = (device.type, *node.args[1:])
        if isinstance(node.target, Unit):
            node.target = node.target.changed(lambda each: _placed(each, device))
    placed = fx.GraphModule(module, graph)
    for name, inner in module.named_modules():
        if name and isinstance(inner, fx.GraphModule) and _has(placed, name):  # of operators that call a graph
            placed.set_submodule(name, on_device(inner, device))
    return placed


def move(tensors: Iterable[Tensor], device: torch.device) -> None:
    """Moves parameters and buffers to ``device``, those that are there already aside.

    The tensors stay the same objects, so that everyone who has one (the user's module, a captured graph) sees it there.
    Moved before there are gradients: an optimiser that holds one is right as well.
    """
    for tensor in tensors:
        if tensor.device != device:
            tensor.data = tensor.data.to(device)


def tensors_of(*owners: Tensor | fx.GraphModule) -> tuple[Tensor, ...]:
    """Tensors themselves, and the parameters and buffers of captured graphs, constants included."""
    tensors: list[Tensor] = []
    for each in owners:
        tensors += (each,) if isinstance(each, Tensor) else (*each.parameters(), *each.buffers())
    return tuple(tensors)


def _placed(argument: Any, device: torch.device) -> Any:
    return device if isinstance(argument, torch.device) else argument


def _has(module: fx.GraphModule, name: str) -> bool:
    try:
        module.get_submodule(name)
    except AttributeError:
        return False
    return True
