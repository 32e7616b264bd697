"""Nodes of a captured graph: what they call and read, and the names of the layers that they become.

Names of layers: the path of the user's module that computes them, unique and the same in every process.

conv1             the module does one thing
relu, relu_2      ... and is called twice
blocks.0.add      the module does several things, or has parts that do others
lstm              ... of which one uses its parameters
loss, loss.mul    what the loss function does; its result is ``loss``
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

from torch import Tensor, fx

from cuda_ops._torch import OpOverload
from cuda_ops.dense.user_functions import function_of, is_user_function
from cuda_ops.operator_table import name_of

LOSS = "loss"


def overload_of(node: fx.Node) -> OpOverload:
    """The operator that ``node`` calls, which is known to be one of torch's dispatcher."""
    return cast("OpOverload", node.target)


def function_called(node: fx.Node) -> Callable[..., Any]:
    """What ``node`` calls, which is known to call a function."""
    return cast("Callable[..., Any]", node.target)


def name_read(node: fx.Node) -> str:
    """The name that ``node``, known to be a placeholder or to read an attribute, has for what it stands for."""
    return cast("str", node.target)


def node_argument(node: fx.Node, index: int) -> fx.Node:
    """An argument of ``node`` that is known to be a node."""
    return cast("fx.Node", node.args[index])


def nodes_in(value: Any) -> list[fx.Node]:
    """The nodes inside of an argument, or of several, as often as they are there."""
    nodes: list[fx.Node] = []

    def note(node: fx.Node) -> fx.Node:
        nodes.append(node)
        return node

    fx.map_arg(value, note)
    return nodes


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors of a node's result, which is one, several or none."""
    several = value if isinstance(value, (tuple, list)) else (value,)
    return [each for each in several if isinstance(each, Tensor)]


def place(node: fx.Node) -> str:
    """Path of the user's module that ``node`` belongs to: empty for the outermost, ``loss`` for the loss function."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    path: str = next(reversed(stack.values()))[0]
    if path.startswith("_empty_nn_module_stack"):
        return ""
    if path == "" or path.split(".")[0] == "loss_fn":
        return LOSS
    return path.partition(".")[2].replace(":", "_")


def operation(node: fx.Node) -> str:
    """The operator's name without its namespace and overload, ``conv2d``; of a user's Function its class's."""
    if is_user_function(node):
        return function_of(node).rpartition(".")[2]
    return name_of(node.target)


def layer_names(mains: Sequence[fx.Node], owns_parameters: Sequence[bool], reserved: Iterable[str]) -> tuple[str, ...]:
    """A name for each layer, given the node that makes its result; the last one is the loss.

    Args:
        owns_parameters: whether the layer uses trained parameters.
        reserved: names that are in use already, those of the graph's inputs.
    """
    paths = [place(node) for node in mains]
    parents = {path[:index] for path in paths for index, letter in enumerate(path) if letter == "."}
    operations: dict[str, set[str]] = {}
    owners: dict[str, set[str]] = {}
    for path, node, owns in zip(paths, mains, owns_parameters, strict=True):
        operations.setdefault(path, set()).add(operation(node))
        if owns:
            owners.setdefault(path, set()).add(operation(node))
    used = {*reserved, LOSS}
    names = []
    for path, node in zip(paths, mains, strict=True):
        name = operation(node)
        leaf = path not in parents and path != LOSS
        alone = len(operations[path]) == 1 or owners.get(path) == {name}
        wanted = path if path and leaf and alone else f"{path}.{name}".lstrip(".")
        names.append(LOSS if node is mains[-1] else _unique(wanted, used))
        used.add(names[-1])
    return tuple(names)


def _unique(name: str, used: set[str]) -> str:
    number = 1
    candidate = name
    while candidate in used:
        number += 1
        candidate = f"{name}_{number}"
    return candidate
