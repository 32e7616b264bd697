"""Cutting one stage out of the captured graph: a function of its inputs, its state and the number of samples.

        captured:  x -> [conv] -> [bn] -> [relu] -> [fc] -> loss          stage 1 = {relu, fc, loss}
        stage 1:   (num_samples, bn, targets; fc.weight, fc.bias) -> (loss,)

The nodes of the stage's layers are copied as they are.  Integers (sizes that follow from the number of samples) belong
to no layer and are copied wherever they are read.  Parameters, buffers and constants become arguments, so that the
function holds no state and a rank keeps alive only what its own stages use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import reduce

import torch
from torch import fx, nn

from planner.ir.errors import UnsupportedModelError

NUM_SAMPLES = "num_samples"
"""The captured graph's first argument, where it may be run for any number of samples."""

BatchNorm = Callable[..., torch.Tensor]
"""(x, weight, bias, running_mean, running_var, momentum, eps) -> y."""

_BATCH_NORM = torch.ops.aten.batch_norm.default  # x, weight, bias, mean, variance, training, momentum, eps, cudnn


@dataclass(frozen=True, slots=True)
class StageFunction:
    """What one stage computes.

    Attributes:
        function: ``(num_samples, *inputs, *attributes) -> outputs``, all tuples in the orders below.
        inputs: values read: graph inputs, and what other stages make.
        outputs: values that others read, and the loss.
        attributes: parameters, buffers and constants by name, shared with the user's module.
        mutated: names of the attributes that the function writes (running statistics).
    """

    function: Callable[..., tuple[torch.Tensor, ...]]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, torch.Tensor]
    mutated: frozenset[str]

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The attributes that are trained."""
        return {
            name: value
            for name, value in self.attributes.items()
            if isinstance(value, nn.Parameter) and value.requires_grad
        }


def cut_stage(
    graph_module: fx.GraphModule,
    layers: Iterable[str],
    layer_of_node: Mapping[str, str],
    node_of_value: Mapping[str, str],
    outputs: tuple[str, ...],
    batch_norm: BatchNorm | None = None,
) -> StageFunction:
    """The function of the stage that holds ``layers``.

    Args:
        layer_of_node: the layer of each node that makes tensors.
        node_of_value: the node of each value, graph inputs included.
        outputs: the values wanted, in order.
        batch_norm: used in place of batch normalisation in training mode; None leaves it as it is.

    Raises:
        UnsupportedModelError: the stage reads a node of another stage that is no value of the graph.
    """
    cut = _Cut(graph_module, frozenset(layers), layer_of_node, node_of_value)
    return cut.function(outputs, batch_norm)


class _Cut:
    def __init__(
        self,
        graph_module: fx.GraphModule,
        layers: frozenset[str],
        layer_of_node: Mapping[str, str],
        node_of_value: Mapping[str, str],
    ) -> None:
        self._module = graph_module
        self._nodes = {node.name: node for node in graph_module.graph.nodes}
        self._node_of_value = node_of_value
        self._value_of_node = {node: value for value, node in node_of_value.items()}
        self._own = {name for name, layer in layer_of_node.items() if layer in layers}
        self._layer_of_node = layer_of_node

    def function(self, outputs: tuple[str, ...], batch_norm: BatchNorm | None) -> StageFunction:
        graph, copies = fx.Graph(), {}
        body, values, attributes, samples = self._needed()
        number = graph.placeholder(NUM_SAMPLES)
        copies.update(dict.fromkeys(samples, number))
        for index, node in enumerate(values):
            copies[node] = graph.placeholder(f"value_{index}")
        for index, nodes in enumerate(attributes.values()):
            copies.update(dict.fromkeys(nodes, graph.placeholder(f"state_{index}")))
        mutated = set()
        for node in body:
            mutated.update(arg.target for arg in _written(node) if arg.op == "get_attr")
            if batch_norm is not None and _is_training_batch_norm(node):
                x, weight, bias, mean, variance, _, momentum, eps, _ = fx.map_arg(node.args, copies.__getitem__)
                arguments = (x, weight, bias, mean, variance, momentum, eps)
                copies[node] = graph.call_function(batch_norm, arguments)
            else:
                copies[node] = graph.node_copy(node, copies.__getitem__)
        graph.output(tuple(copies[self._nodes[self._node_of_value[value]]] for value in outputs))
        for node in graph.nodes:
            node.meta.clear()  # what the capture noted there would keep the whole model alive
        return StageFunction(
            fx.GraphModule(nn.Module(), graph, "Stage").forward,
            tuple(self._value_of_node[node.name] for node in values),
            outputs,
            {name: self._attribute(name) for name in attributes},
            frozenset(mutated),
        )

    def _needed(self) -> tuple[list[fx.Node], list[fx.Node], dict[str, list[fx.Node]], list[fx.Node]]:
        """Nodes to copy, values and attributes to be given, and nodes that stand for the number of samples."""
        found: set[fx.Node] = set()
        reading = [self._nodes[name] for name in self._own]
        while reading:
            node = reading.pop()
            if node not in found:
                found.add(node)
                if self._is_copied(node):
                    reading += node.all_input_nodes
        body: list[fx.Node] = []
        values: list[fx.Node] = []
        attributes: dict[str, list[fx.Node]] = {}
        samples: list[fx.Node] = []
        for node in self._module.graph.nodes:
            if node not in found:
                continue
            if self._is_copied(node):
                body.append(node)
            elif node.op == "get_attr":
                attributes.setdefault(str(node.target), []).append(node)
            elif node.op == "placeholder" and node.target == NUM_SAMPLES:
                samples.append(node)
            elif node.name in self._value_of_node:
                values.append(node)
            else:
                layer = self._layer_of_node.get(node.name, "none")
                raise UnsupportedModelError(
                    "a stage reads something that is no value of the graph", [f"node {node.name} of layer {layer}"]
                )
        return body, values, attributes, samples

    def _is_copied(self, node: fx.Node) -> bool:
        return node.name in self._own or (node.op == "call_function" and node.name not in self._layer_of_node)

    def _attribute(self, name: str) -> torch.Tensor:
        found: torch.Tensor = reduce(getattr, name.split("."), self._module)
        return found


def _is_training_batch_norm(node: fx.Node) -> bool:
    return node.target is _BATCH_NORM and node.args[5] is True


def _written(node: fx.Node) -> list[fx.Node]:
    """The arguments that a node writes: those its operator says, and batch normalisation's running statistics.

    (The schema of ``aten::batch_norm`` does not tell.)
    """
    if _is_training_batch_norm(node):
        return [arg for arg in node.args[3:5] if isinstance(arg, fx.Node)]
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return []
    return [
        value
        for argument, value in zip(schema.arguments, node.args, strict=False)
        if argument.alias_info is not None and argument.alias_info.is_write and isinstance(value, fx.Node)
    ]


def random_layers(graph_module: fx.GraphModule, layer_of_node: Mapping[str, str]) -> tuple[str, ...]:
    """Layers that draw random numbers (dropout): two runs of them, cut differently, are not comparable."""
    found = {
        layer_of_node[node.name]: None
        for node in graph_module.graph.nodes
        if node.op == "call_function"
        and node.name in layer_of_node
        and torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
        and not _is_idle_dropout(node)
    }
    return tuple(found)


def _is_idle_dropout(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    arguments = {} if schema is None else dict(zip((a.name for a in schema.arguments), node.args, strict=False))
    arguments.update(node.kwargs)
    return any(arguments.get(name) == 0 for name in ("p", "dropout", "dropout_p")) or arguments.get("train") is False
