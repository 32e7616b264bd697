"""Cutting one stage out of the captured graph: a function of its inputs, its state and the number of samples.

        captured:  x -> [conv] -> [bn] -> [relu] -> [fc] -> loss          stage 1 = {relu, fc, loss}
        stage 1:   (num_samples, bn, targets; fc.weight, fc.bias) -> (loss,)

The nodes of the stage's layers are copied as they are, but for those that a rule replaces.  Integers (sizes that follow
from the number of samples, and from other sizes that vary) belong to no layer and are copied wherever they are read.
Parameters, buffers and constants become arguments, so that the function holds no state and a rank keeps alive only what
its own stages use.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, fx, nn

from cuda_ops._torch import schema_of
from cuda_ops.calls import arguments_of, writes
from cuda_ops.dense.state_writes import BATCH_NORM, attributes_viewed, users_of_attributes, written
from cuda_ops.operator_table import OPERATORS
from planner.ir.errors import UnsupportedModelError
from planner.ir.plan import Decision
from runtime.captured import CapturedModule, attribute
from runtime.numerics.finite import TracedFunction

_BROADCAST = torch.ops.aten.broadcast_tensors.default

NUM_SAMPLES = "num_samples"
"""The captured graph's first argument, where it may be run for any number of samples."""

NodeRule = Callable[[fx.Node], Callable[..., Any] | None]
"""From a node of the captured graph to what is called in its place, with the node's own arguments; None: itself."""

TensorFunction = Callable[..., tuple[Tensor, ...]]

StageAttribute = Tensor | fx.GraphModule
"""What a captured graph has by name: a parameter, a buffer, a constant, or a graph that one of its operators calls."""

Enclose = Callable[[fx.Graph, Mapping[str, str], Mapping[str, str]], fx.Graph]
"""From a stage's graph, the layer of each node, and by node the buffer that the stage writes and that it is, or is a
view of, to the graph that is run in its place."""


@dataclass(frozen=True, slots=True)
class StageFunction:
    """What one stage computes.

    Attributes:
        function: ``(num_samples, *sizes, *inputs, *attributes) -> outputs``, all tuples in the orders below.
        inputs: values read: graph inputs, and what other stages make.
        outputs: values that others read, and the loss.
        attributes: by name; tensors are shared with the user's module.
        mutated: names of the attributes that the function writes (running statistics).
        sizes: further integers that it reads, by name.
        idle: attributes that are parameters and get no gradient, as the loss does not depend on them.
        traced: its operators; None: it was made otherwise.
    """

    function: TensorFunction
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, StageAttribute]
    mutated: frozenset[str]
    sizes: tuple[str, ...] = ()
    idle: frozenset[str] = frozenset()
    traced: TracedFunction | None = field(default=None, compare=False, repr=False)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The attributes but graphs."""
        return {name: value for name, value in self.attributes.items() if isinstance(value, Tensor)}

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The attributes that are trained."""
        return {
            name: value
            for name, value in self.attributes.items()
            if isinstance(value, nn.Parameter) and value.requires_grad and name not in self.idle
        }


def cut_stage(
    graph_module: fx.GraphModule,
    layers: Iterable[str],
    layer_of_node: Mapping[str, str],
    node_of_value: Mapping[str, str],
    outputs: tuple[str, ...],
    replace: NodeRule | None = None,
    sizes: Collection[str] = (),
    *,
    late: bool = False,
    extra_inputs: Mapping[str, str] | None = None,
    enclose: Enclose | None = None,
) -> StageFunction:
    """The function of the stage that holds ``layers``.

    Args:
        layer_of_node: the layer of each node that makes tensors.
        node_of_value: the node of each value, graph inputs included.
        outputs: the values wanted, in order.
        replace: asked for every node of the stage; None leaves all as they are.
        sizes: placeholders of the captured graph that are integers, beside ``NUM_SAMPLES``.
        late: compile the function when it is first called, rather than now.
        extra_inputs: by node, a further input of the stage; what ``replace`` puts in the node's place takes it
            before the node's own arguments.
        enclose: makes the graph that is run of the stage's own; None: it is run as it is.

    Raises:
        UnsupportedModelError: the stage reads a node of another stage that is no value of the graph.
    """
    cut = _Cut(graph_module, frozenset(layers), layer_of_node, node_of_value, frozenset(sizes))
    return cut.function(
        outputs, replace or _as_it_is, _compiled_late if late else _compiled, extra_inputs or {}, enclose
    )


class _Cut:
    def __init__(
        self,
        graph_module: fx.GraphModule,
        layers: frozenset[str],
        layer_of_node: Mapping[str, str],
        node_of_value: Mapping[str, str],
        sizes: frozenset[str],
    ) -> None:
        self._module = graph_module
        self._nodes = {node.name: node for node in graph_module.graph.nodes}
        self._node_of_value = node_of_value
        self._value_of_node = {node: value for value, node in node_of_value.items()}
        self._own = {name for name, layer in layer_of_node.items() if layer in layers}
        self._layer_of_node = layer_of_node
        self._sizes = sizes

    def function(
        self,
        outputs: tuple[str, ...],
        replace: NodeRule,
        compiled: Callable[[fx.Graph], TensorFunction],
        extra_inputs: Mapping[str, str],
        enclose: Enclose | None,
    ) -> StageFunction:
        needed = self._needed()
        graph = fx.Graph()
        copies, further = _arguments(graph, needed, extra_inputs)
        viewed = attributes_viewed(self._module.graph)
        wanted = [self._nodes[self._node_of_value[value]] for value in outputs]
        same = _broadcast_to_themselves(needed.body, wanted, replace)
        body = [node for node in needed.body if node not in same]

        def copy_of(node: fx.Node) -> fx.Node:
            return copies[same.get(node, node)]

        mutated = set[str]()
        for node in body:
            changed = written(node, viewed)
            mutated |= changed
            function = replace(node)
            if function is None and changed and writes(node.target):
                function = partial(without_gradient, cast(Callable[..., Any], node.target))
            copies[node] = _copied(graph, node, function, copy_of, further.get(node.name))
        graph.output(tuple(copies[node] for node in wanted))
        layers = {
            copies[node].name: self._layer_of_node[node.name] for node in body if node.name in self._layer_of_node
        }
        for node in graph.nodes:
            node.meta.clear()  # what the capture noted there would keep the whole model alive
        state = {copy.name: viewed[node] for node, copy in copies.items() if viewed.get(node) in mutated}
        return StageFunction(
            compiled(graph if enclose is None else enclose(graph, layers, state)),
            (*(self._value_of_node[node.name] for node in needed.values), *(extra_inputs[name] for name in further)),
            outputs,
            {name: cast(StageAttribute, attribute(self._module, name)) for name in needed.attributes},
            frozenset(mutated),
            tuple(name for name in needed.sizes if name != NUM_SAMPLES),
            traced=TracedFunction(graph, layers, {copies[node].name: _operator(node) for node in body}),
        )

    def _needed(self) -> _Needed:
        reached: set[fx.Node] = set()
        reading = [self._nodes[name] for name in self._own]
        while reading:
            node = reading.pop()
            if node not in reached:
                reached.add(node)
                if self._is_copied(node):
                    reading += node.all_input_nodes
        needed = _Needed([], [], {}, {})
        for node in self._module.graph.nodes:
            if node not in reached:
                continue
            if self._is_copied(node):
                needed.body.append(node)
            elif node.op == "get_attr":
                needed.attributes.setdefault(str(node.target), []).append(node)
            elif node.op == "placeholder" and (node.target == NUM_SAMPLES or node.target in self._sizes):
                needed.sizes.setdefault(str(node.target), []).append(node)
            elif node.name in self._value_of_node:
                needed.values.append(node)
            else:
                layer = self._layer_of_node.get(node.name, "none")
                raise UnsupportedModelError(
                    "a stage reads something that is no value of the graph", [f"node {node.name} of layer {layer}"]
                )
        return needed

    def _is_copied(self, node: fx.Node) -> bool:
        return node.name in self._own or (node.op == "call_function" and node.name not in self._layer_of_node)


class _Needed(NamedTuple):
    """What a stage has, and what it reads of the captured graph.

    Attributes:
        body: nodes to copy.
        values: nodes of values that are given.
        attributes, sizes: nodes by the name of what is given.
    """

    body: list[fx.Node]
    values: list[fx.Node]
    attributes: dict[str, list[fx.Node]]
    sizes: dict[str, list[fx.Node]]


def _arguments(
    graph: fx.Graph, needed: _Needed, extra_inputs: Mapping[str, str]
) -> tuple[dict[fx.Node, fx.Node], dict[str, fx.Node]]:
    """The arguments of a stage, in order: by node what stands for it, and by node's name what ``extra_inputs`` add."""
    number = graph.placeholder(NUM_SAMPLES)
    copies = dict[fx.Node, fx.Node]()
    for name, nodes in needed.sizes.items():
        copies.update(dict.fromkeys(nodes, number if name == NUM_SAMPLES else graph.placeholder(name)))
    for index, node in enumerate(needed.values):
        copies[node] = graph.placeholder(f"value_{index}")
    further = {node.name: graph.placeholder(f"given_{node.name}") for node in needed.body if node.name in extra_inputs}
    for index, nodes in enumerate(needed.attributes.values()):
        copies.update(dict.fromkeys(nodes, graph.placeholder(f"state_{index}")))
    return copies, further


def _copied(
    graph: fx.Graph,
    node: fx.Node,
    function: Callable[..., Any] | None,
    copy_of: Callable[[fx.Node], fx.Node],
    first: fx.Node | None,
) -> fx.Node:
    """A node of a stage, or in its place the call of ``function``, which takes ``first`` before its own arguments."""
    if function is None:
        return graph.node_copy(node, copy_of)
    args = fx.map_arg(node.args, copy_of)
    kwargs = fx.map_arg(node.kwargs, copy_of)
    return graph.call_function(_named(function), args if first is None else (first, *args), kwargs)


@torch.no_grad()
def without_gradient(target: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
    """A write to a buffer, which outlives the step; what it takes from another stage may seem to need a gradient."""
    return target(*arguments, **keywords)


FUNCTIONS: Mapping[object, Callable[..., Any]] = {
    getattr(getattr(torch.ops.aten, row.name), row.python[0]): row.python[1] for row in OPERATORS.values() if row.python
}
"""What calls frequent operators from Python; through their schema a call takes one or two microseconds more."""


def _compiled(graph: fx.Graph) -> TensorFunction:
    called = fx.Graph()
    called.output(called.graph_copy(graph, {}))
    for node in called.nodes:
        node.target = FUNCTIONS.get(node.target, node.target)
    run: TensorFunction = fx.GraphModule(nn.Module(), called, "Stage").forward
    return run


def _compiled_late(graph: fx.Graph) -> TensorFunction:
    made: list[TensorFunction] = []

    def run(*arguments: Any) -> tuple[Tensor, ...]:
        if not made:
            made.append(_compiled(graph))
        return made[0](*arguments)

    return run


def _operator(node: fx.Node) -> str:
    target: Any = node.target
    return str(target) if schema_of(target) is not None else getattr(target, "__name__", str(target))


def _broadcast_to_themselves(
    body: Iterable[fx.Node], wanted: Collection[fx.Node], replace: NodeRule
) -> dict[fx.Node, fx.Node]:
    """What tensors become that are broadcast together and have one shape already, as losses do it: themselves.

    Returns:
        By such a result the tensor that it is; and the operator, by which there is nothing to do.
    """
    same_as: dict[fx.Node, fx.Node] = {}
    for node in body:
        if node.target is not _BROADCAST or replace(node) is not None:
            continue
        tensors = cast(Sequence[fx.Node], node.args[0])
        shapes = {tuple(map(str, each.meta["val"].shape)) if "val" in each.meta else each for each in tensors}
        if len(shapes) == 1 and not any(user in wanted or replace(user) is not None for user in (node, *node.users)):
            results = {user: tensors[cast(int, user.args[1])] for user in node.users}
            same_as |= {user: same_as.get(tensor, tensor) for user, tensor in results.items()} | {node: node}
    return same_as


def _as_it_is(node: fx.Node) -> None:
    """The rule that replaces nothing."""


def _named(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` as fx wants it, which writes its name into code; partial functions have none."""
    if hasattr(function, "__name__"):
        return function

    def call(*arguments: Any, **keywords: Any) -> Any:
        return function(*arguments, **keywords)

    return call


def normalising_layers(model: CapturedModule) -> tuple[str, ...]:
    """Layers that take statistics of a micro-batch."""
    nodes = (node for node in model.graph_module.graph.nodes if takes_statistics(node))
    return tuple(dict.fromkeys(model.layer_of_node[node.name] for node in nodes if node.name in model.layer_of_node))


def takes_statistics(node: fx.Node) -> bool:
    """Whether it is batch normalisation in training mode."""
    return node.target is BATCH_NORM and arguments_of(node)["training"] is True


def stages_using(model: CapturedModule, decision: Decision) -> dict[str, set[int]]:
    """By parameter, buffer or constant, the stages whose layers read or write it."""
    users: dict[str, set[int]] = {}
    for name, node in users_of_attributes(model.graph_module.graph):
        layer = model.layer_of_node.get(node.name)
        if layer is not None:
            users.setdefault(name, set()).add(decision.layers[layer].stage)
    return users
