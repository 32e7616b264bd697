"""Cutting one stage out of the captured graph: a function of its inputs, its state and the number of samples.

        captured:  x -> [conv] -> [bn] -> [relu] -> [fc] -> loss          stage 1 = {relu, fc, loss}
        stage 1:   (num_samples, bn, targets; fc.weight, fc.bias) -> (loss,)

The nodes of the stage's layers are copied as they are, but for those that a rule replaces.  Integers (sizes that follow
from the number of samples, and from other sizes that vary) belong to no layer and are copied wherever they are read.
Parameters, buffers and constants become arguments, so that the function holds no state and a rank keeps alive only what
its own stages use.

Which nodes of a graph share memory with a parameter or buffer, and which of them write it.

Buffers that layers write: where two ranks would write them differently, a plan cannot be run.

Parameters may be shared, as gradients are summed; what a layer writes itself is not.  So such a buffer must be on one
stage.  On a stage of several ranks what is written must not depend on a rank's own rows, as a count of batches does
not, and as the statistics of batch normalisation do not that are taken over all of them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from torch import fx, nn
from torch.nn import functional

from cuda_ops._torch import schema_of, wrap_with_set_grad_enabled
from cuda_ops.dense.user_functions import LINEAR_BACKWARD, function_of
from planner.ir.errors import UnsupportedModelError
from planner.ir.graph import SAMPLE
from planner.ir.plan import Decision
from runtime.numerics.finite import Traced
from runtime.stage.captured import CapturedModel, attribute

_BROADCAST = torch.ops.aten.broadcast_tensors.default
_BATCH_NORM = torch.ops.aten.batch_norm.default
_STATISTICS = {
    _BATCH_NORM: "training",
    torch.ops.aten.instance_norm.default: "use_input_stats",
}
"""Operators that write running statistics, which their schema does not tell, and the argument that says when."""


def attributes_behind(graph: fx.Graph, given: Mapping[fx.Node, str] | None = None) -> dict[fx.Node, str]:
    """The parameter, buffer or constant that a node is, is a view of, or has written in place.

    Args:
        given: what placeholders stand for, where that is such a one.
    """
    found: dict[fx.Node, str] = dict(given or {})
    for node in graph.nodes:
        if node.op == "get_attr":
            found[node] = str(node.target)
            continue
        if node.target is operator.getitem and node.args[0] in found:  # of a list of views
            found[node] = found[node.args[0]]
            continue
        returned = {name for each in _returns(node) for name in _aliases(each)}
        makes_list = any(each.alias_info is not None and not _aliases(each) for each in _returns(node))
        for argument, value in _arguments(node):
            if isinstance(value, fx.Node) and value in found:
                aliases = _aliases(argument)
                if returned & aliases or (makes_list and aliases):
                    found[node] = found[value]
    return found


def written(node: fx.Node, behind: Mapping[fx.Node, str]) -> frozenset[str]:
    """The attributes that a node writes, those included that a graph writes which it calls without gradients."""
    if node.target is wrap_with_set_grad_enabled:
        return _written_inside(node, behind)
    values = [value for argument, value in _arguments(node) if argument.alias_info and argument.alias_info.is_write]
    if node.target in _STATISTICS:
        arguments = arguments_of(node)
        if arguments[_STATISTICS[node.target]] is True:
            values += [arguments["running_mean"], arguments["running_var"]]
    return frozenset(behind[value] for value in values if isinstance(value, fx.Node) and value in behind)


def _written_inside(node: fx.Node, behind: Mapping[fx.Node, str]) -> frozenset[str]:
    module = node.graph.owning_module
    inner = node.args[1]
    if module is None or not isinstance(inner, fx.Node):
        return frozenset()
    graph = cast(fx.GraphModule, module.get_submodule(str(inner.target))).graph
    outer = {
        place: behind[argument]
        for place, argument in zip(
            (each for each in graph.nodes if each.op == "placeholder"), node.args[2:], strict=True
        )
        if isinstance(argument, fx.Node) and argument in behind
    }
    inside = attributes_behind(graph, outer)
    return frozenset(name for each in graph.nodes for name in written(each, inside))


def writes_in_place(node: fx.Node) -> bool:
    """Whether a node's operator writes to an argument, as its schema tells."""
    schema = schema_of(node.target)
    return schema is not None and any(each.alias_info and each.alias_info.is_write for each in schema.arguments)


def arguments_of(node: fx.Node) -> dict[str, Any]:
    """A node's arguments by the names that its operator gives them; those left at their defaults are not there."""
    return {argument.name: value for argument, value in _arguments(node)}


def _arguments(node: fx.Node) -> Iterator[tuple[Any, Any]]:
    schema = schema_of(node.target)
    arguments = () if schema is None else schema.arguments
    yield from zip(arguments, node.args, strict=False)
    yield from ((argument, node.kwargs[argument.name]) for argument in arguments if argument.name in node.kwargs)


def _returns(node: fx.Node) -> tuple[Any, ...]:
    schema = schema_of(node.target)
    return () if schema is None else tuple(schema.returns)


def _aliases(argument: Any) -> set[str]:
    return set() if argument.alias_info is None else set(argument.alias_info.before_set)


NUM_SAMPLES = "num_samples"
"""The captured graph's first argument, where it may be run for any number of samples."""

Rule = Callable[[fx.Node], Callable[..., Any] | None]
"""From a node of the captured graph to what is called in its place, with the node's own arguments; None: itself."""

Run = Callable[..., tuple[torch.Tensor, ...]]

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
        attributes: parameters, buffers and constants by name, shared with the user's module.
        mutated: names of the attributes that the function writes (running statistics).
        sizes: further integers that it reads, by name.
        idle: attributes that are parameters and get no gradient, as the loss does not depend on them.
        traced: its operators; None: it was made otherwise.
    """

    function: Run
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, torch.Tensor]
    mutated: frozenset[str]
    sizes: tuple[str, ...] = ()
    idle: frozenset[str] = frozenset()
    traced: Traced | None = field(default=None, compare=False, repr=False)

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
    replace: Rule | None = None,
    sizes: Collection[str] = (),
    *,
    late: bool = False,
    given: Mapping[str, str] | None = None,
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
        given: by node, a further input of the stage; what ``replace`` puts in the node's place takes it before the
            node's own arguments.
        enclose: makes the graph that is run of the stage's own; None: it is run as it is.

    Raises:
        UnsupportedModelError: the stage reads a node of another stage that is no value of the graph.
    """
    cut = _Cut(graph_module, frozenset(layers), layer_of_node, node_of_value, frozenset(sizes))
    return cut.function(outputs, replace or _as_it_is, _compiled_late if late else _compiled, given or {}, enclose)


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
        replace: Rule,
        compiled: Callable[[fx.Graph], Run],
        given: Mapping[str, str],
        enclose: Enclose | None,
    ) -> StageFunction:
        graph, copies = fx.Graph(), {}
        body, values, attributes, sizes = self._needed()
        number = graph.placeholder(NUM_SAMPLES)
        for name, nodes in sizes.items():
            copies.update(dict.fromkeys(nodes, number if name == NUM_SAMPLES else graph.placeholder(name)))
        for index, node in enumerate(values):
            copies[node] = graph.placeholder(f"value_{index}")
        further = {node.name: graph.placeholder(f"given_{node.name}") for node in body if node.name in given}
        for index, nodes in enumerate(attributes.values()):
            copies.update(dict.fromkeys(nodes, graph.placeholder(f"state_{index}")))
        mutated, behind = set[str](), attributes_behind(self._module.graph)
        wanted = [self._nodes[self._node_of_value[value]] for value in outputs]
        same = _broadcast_to_themselves(body, wanted, replace)
        body = [node for node in body if node not in same]

        def copy_of(node: fx.Node) -> fx.Node:
            return copies[same.get(node, node)]

        for node in body:
            changed = written(node, behind)
            mutated |= changed
            target: Any = node.target
            function = replace(node)
            if function is None and changed and writes_in_place(node):
                function = partial(without_gradient, target)
            if function is None:
                copies[node] = graph.node_copy(node, copy_of)
            else:
                args, kwargs = fx.map_arg(node.args, copy_of), fx.map_arg(node.kwargs, copy_of)
                first = (further[node.name],) if node.name in further else ()
                copies[node] = graph.call_function(_named(function), (*first, *args), kwargs)
        graph.output(tuple(copies[node] for node in wanted))
        layers = {
            copies[node].name: self._layer_of_node[node.name] for node in body if node.name in self._layer_of_node
        }
        for node in graph.nodes:
            node.meta.clear()  # what the capture noted there would keep the whole model alive
        state = {copy.name: behind[node] for node, copy in copies.items() if behind.get(node) in mutated}
        return StageFunction(
            compiled(graph if enclose is None else enclose(graph, layers, state)),
            (*(self._value_of_node[node.name] for node in values), *(given[name] for name in further)),
            outputs,
            {name: self._attribute(name) for name in attributes},
            frozenset(mutated),
            tuple(name for name in sizes if name != NUM_SAMPLES),
            traced=Traced(graph, layers, {copies[node].name: _operator(node) for node in body}),
        )

    def _needed(self) -> tuple[list[fx.Node], list[fx.Node], dict[str, list[fx.Node]], dict[str, list[fx.Node]]]:
        """Nodes to copy, values, and attributes and sizes to be given."""
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
        sizes: dict[str, list[fx.Node]] = {}
        for node in self._module.graph.nodes:
            if node not in found:
                continue
            if self._is_copied(node):
                body.append(node)
            elif node.op == "get_attr":
                attributes.setdefault(str(node.target), []).append(node)
            elif node.op == "placeholder" and (node.target == NUM_SAMPLES or node.target in self._sizes):
                sizes.setdefault(str(node.target), []).append(node)
            elif node.name in self._value_of_node:
                values.append(node)
            else:
                layer = self._layer_of_node.get(node.name, "none")
                raise UnsupportedModelError(
                    "a stage reads something that is no value of the graph", [f"node {node.name} of layer {layer}"]
                )
        return body, values, attributes, sizes

    def _is_copied(self, node: fx.Node) -> bool:
        return node.name in self._own or (node.op == "call_function" and node.name not in self._layer_of_node)

    def _attribute(self, name: str) -> torch.Tensor:
        return cast(torch.Tensor, attribute(self._module, name))


@torch.no_grad()
def without_gradient(target: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
    """A write to a buffer, which outlives the step; what it takes from another stage may seem to need a gradient."""
    return target(*arguments, **keywords)


_ATEN = torch.ops.aten
FUNCTIONS: Mapping[object, Callable[..., Any]] = {
    _ATEN.add.Tensor: torch.add,
    _ATEN.batch_norm.default: torch.batch_norm,
    _ATEN.cat.default: torch.cat,
    _ATEN.conv2d.default: torch.conv2d,
    _ATEN.div.Tensor: torch.div,
    _ATEN.dropout.default: torch.dropout,
    _ATEN.embedding.default: torch.embedding,
    _ATEN.flatten.using_ints: torch.flatten,
    _ATEN.gelu.default: functional.gelu,
    _ATEN.layer_norm.default: torch.layer_norm,
    _ATEN.linear.default: functional.linear,
    _ATEN.matmul.default: torch.matmul,
    _ATEN.max_pool2d.default: torch.max_pool2d,
    _ATEN.mul.Tensor: torch.mul,
    _ATEN.permute.default: torch.permute,
    _ATEN.relu.default: torch.relu,
    _ATEN.scaled_dot_product_attention.default: functional.scaled_dot_product_attention,
    _ATEN.softmax.int: torch.softmax,
    _ATEN.sub.Tensor: torch.sub,
    _ATEN.transpose.int: torch.transpose,
}
"""What calls frequent operators from Python; through their schema a call takes one or two microseconds more."""


def _compiled(graph: fx.Graph) -> Run:
    called = fx.Graph()
    called.output(called.graph_copy(graph, {}))
    for node in called.nodes:
        node.target = FUNCTIONS.get(node.target, node.target)
    run: Run = fx.GraphModule(nn.Module(), called, "Stage").forward
    return run


def _compiled_late(graph: fx.Graph) -> Run:
    made: list[Run] = []

    def run(*arguments: Any) -> tuple[torch.Tensor, ...]:
        if not made:
            made.append(_compiled(graph))
        return made[0](*arguments)

    return run


def _operator(node: fx.Node) -> str:
    target: Any = node.target
    return str(target) if schema_of(target) is not None else getattr(target, "__name__", str(target))


def _broadcast_to_themselves(
    body: Iterable[fx.Node], wanted: Collection[fx.Node], replace: Rule
) -> dict[fx.Node, fx.Node]:
    """What tensors become that are broadcast together and have one shape already, as losses do it: themselves.

    Returns:
        By such a result the tensor that it is; and the operator, by which there is nothing to do.
    """
    found: dict[fx.Node, fx.Node] = {}
    for node in body:
        if node.target is not _BROADCAST or replace(node) is not None:
            continue
        tensors = cast(Sequence[fx.Node], node.args[0])
        shapes = {tuple(map(str, each.meta["val"].shape)) if "val" in each.meta else each for each in tensors}
        if len(shapes) == 1 and not any(user in wanted or replace(user) is not None for user in (node, *node.users)):
            results = {user: tensors[cast(int, user.args[1])] for user in node.users}
            found |= {user: found.get(tensor, tensor) for user, tensor in results.items()} | {node: node}
    return found


def _as_it_is(node: fx.Node) -> None:
    """The rule that replaces nothing."""


def _named(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` as fx wants it, which writes its name into code; partial functions have none."""
    if hasattr(function, "__name__"):
        return function

    def call(*arguments: Any, **keywords: Any) -> Any:
        return function(*arguments, **keywords)

    return call


def normalising_layers(model: CapturedModel) -> tuple[str, ...]:
    """Layers that take statistics of a micro-batch."""
    nodes = (node for node in model.graph_module.graph.nodes if takes_statistics(node))
    return tuple(dict.fromkeys(model.layer_of_node[node.name] for node in nodes if node.name in model.layer_of_node))


def takes_statistics(node: fx.Node) -> bool:
    """Whether it is batch normalisation in training mode."""
    return node.target is _BATCH_NORM and arguments_of(node)["training"] is True


def refuse_drifting_buffers(model: CapturedModel, decision: Decision) -> None:
    """Raises :class:`UnsupportedModelError` where copies of a buffer would drift apart."""
    dependent, behind = _dependent(model.graph_module.graph), attributes_behind(model.graph_module.graph)
    writers: dict[str, tuple[int, str]] = {}
    users = stages_using(model, decision)
    for node in model.graph_module.graph.nodes:
        layer = model.layer_of_node.get(node.name)
        if layer is None:
            continue
        stage = decision.layers[layer].stage
        for name in sorted(written(node, behind)):
            writers[name] = stage, layer
            is_summed = node.target is _BATCH_NORM
            if len(decision.stages[stage].ranks) > 1 and node in dependent and not is_summed:
                raise UnsupportedModelError(
                    f"layer {layer} writes the buffer {name} from the rows it sees",
                    [f"stage {stage} runs it on {len(decision.stages[stage].ranks)} ranks, each with other rows"],
                    ["put that layer on a stage of one rank"],
                )
    for name, (stage, layer) in writers.items():
        if others := sorted(users[name] - {stage}):
            raise UnsupportedModelError(
                f"the buffer {name} is written by layer {layer} on stage {stage} and used by stage {others[0]}",
                ["a buffer that layers write must be on one stage"],
                ["put all layers that use it on one stage"],
            )


def refuse_partial_gradients(stage: int, model: CapturedModel, decision: Decision) -> None:
    """Raises :class:`UnsupportedModelError` where a rank would have a share of the gradient that a Function needs.

    Ranks that hold the same of a value get the gradients of those parts of it that are read of each, and add up theirs;
    that is right for a backward that is linear.
    """
    ranks = len(decision.stages[stage].ranks)
    for node in model.graph_module.graph.nodes:
        layer = model.layer_of_node.get(node.name)
        if layer is None or decision.layers[layer].stage != stage or node.meta.get(LINEAR_BACKWARD, True):
            continue
        if len(decision.layers[layer].cuts.get(SAMPLE, (0, 1))) - 1 < ranks:
            raise UnsupportedModelError(
                f"layer {layer} runs {function_of(node)}, whose gradient ranks would have in shares",
                [f"stage {stage} shares out more than samples, and its backward is not linear"],
                ["plan with --allow sample alone", "write a backward that is linear in the gradient"],
            )


def stages_using(model: CapturedModel, decision: Decision) -> dict[str, set[int]]:
    """By parameter, buffer or constant, the stages whose layers read or write it."""
    behind = attributes_behind(model.graph_module.graph)
    users: dict[str, set[int]] = {}
    for node in model.graph_module.graph.nodes:
        layer = model.layer_of_node.get(node.name)
        if layer is None:
            continue
        for argument in node.all_input_nodes:
            if argument in behind:
                users.setdefault(behind[argument], set()).add(decision.layers[layer].stage)
    return users


def _dependent(graph: fx.Graph) -> set[fx.Node]:
    """What depends on a micro-batch, be it on its number of rows alone."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder" or any(argument in found for argument in node.all_input_nodes):
            found.add(node)
    return found
