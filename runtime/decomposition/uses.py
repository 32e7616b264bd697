"""Which layers of a divided stage use which part of a parameter, buffer or constant, and whether they read it directly.

A layer's operator can run on a part of what it reads directly.  What it reads through another operator, such as a view
or the norm of a weight, has to be whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce

from torch import Tensor, fx, nn

from planner.ir.box import Box, whole
from planner.ir.graph import TensorSpec
from planner.layers import kind
from planner.layers.division import Division, LayerDivision
from runtime.stages.captured import CapturedModel, main_nodes

_STATISTICS = "batch_norm"


@dataclass(frozen=True, slots=True)
class Use:
    """What a layer uses of a parameter or buffer.

    Attributes:
        boxes: by position of the rank.
        is_direct: whether the layer's main operator reads it, and no other of its operators does.
    """

    layer: str
    boxes: tuple[Box, ...]
    is_direct: bool


def uses_of(model: CapturedModel, division: Division) -> dict[str, tuple[Use, ...]]:
    """The uses by the layers of a stage, by name of what is used, in the order of the graph."""
    mains = main_nodes(model)
    readers: dict[str, dict[str, list[fx.Node]]] = {}
    for node in model.graph_module.graph.nodes:
        for layer, reader in _readers(node, model) if node.op == "get_attr" else ():
            if layer in division.layers:
                readers.setdefault(str(node.target), {}).setdefault(layer, []).append(reader)
    found: dict[str, tuple[Use, ...]] = {}
    for name, by_layer in readers.items():
        tensor = reduce(getattr, name.split("."), model.graph_module)
        if not isinstance(tensor, Tensor):
            continue  # a graph that an operator calls
        uses = []
        for layer, nodes in by_layer.items():
            is_direct = all(node is mains[layer] for node in nodes)
            uses.append(Use(layer, _boxes(division.layers[layer], name, tensor, is_direct), is_direct))
        found[name] = tuple(uses)
    return found


def _readers(attribute: fx.Node, model: CapturedModel) -> Iterator[tuple[str, fx.Node]]:
    for user in attribute.users:
        layer = model.layer_of_node.get(user.name)
        if layer is not None:
            yield layer, user


def _boxes(division: LayerDivision, name: str, tensor: Tensor, is_direct: bool) -> tuple[Box, ...]:
    """What each rank uses, as the access relation says.

    Of what is not trained, a frozen parameter is used as a trained one is, and running statistics go by channel; other
    buffers and constants stay whole, and forms take their part of them.
    """
    layer = division.layer
    if name in layer.parameters:
        return division.weights[layer.parameters.index(name)]
    shape = tuple(tensor.shape)
    is_by_channel = layer.kind == _STATISTICS and len(shape) == 1
    if not shape or not is_direct or not (isinstance(tensor, nn.Parameter) or is_by_channel):
        return (whole(shape),) * len(division.own)
    spec = TensorSpec(tuple(f"dim{dim}" for dim in range(len(shape))), shape, str(tensor.dtype).removeprefix("torch."))
    relation = kind(layer.kind)
    return tuple(relation.weight_boxes(layer, (spec,), box)[0] for box in division.done)
