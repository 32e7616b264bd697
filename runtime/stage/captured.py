"""A captured model, as the runtime takes it.

What a model answers, and which layer compares it with what is right.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import reduce
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, fx

from planner.ir.errors import UnsupportedModelError
from planner.ir.graph import Graph, Layer, TensorSpec, producer

if TYPE_CHECKING:
    from cuda_ops.sampling.preparation import SampledPreparation
    from cuda_ops.sparse.preparation import Preparation
    from runtime.sparse.batch import InputPreparation


_OF_CLASSES = ("aten.cross_entropy_loss.default", "aten.nll_loss.default", "aten.nll_loss_nd.default")


def judging_layer(graph: Graph) -> Layer:
    """The layer of the loss; of a loss that is a mean of one of classes (over sites, over samples), the latter."""
    of_classes = [layer for layer in graph.layers if layer.attributes.get("op") in _OF_CLASSES]
    return of_classes[0] if len(of_classes) == 1 else graph.by_name()[producer(graph.loss)]


@dataclass(frozen=True, slots=True)
class CapturedModel:
    """What the profiler's capture gives; see ``profiler.capture.graph`` for the contract.

    Attributes:
        graph_module: forward and loss; its parameters and buffers are those of the user's module.
        layer_of_node: the layer of each node that makes tensors.
        node_of_value: the node of each value, graph inputs included.
        autocast: the dtype that operators run in where torch's autocast says so; None: no autocast.
        sizes: sizes that vary beside the number of samples: by placeholder, the graph input and the dim they are of.
        reductions: how the parts of a batch make up what a layer reduces them to, where parts are not just means.
        prepared: of a sparse network, how the graph's inputs are made of a batch of clouds; None: they are the batch.
        evaluation: why the graph does not tell what the model does in evaluation mode; empty: it does.
        outputs: the value that each tensor of the module's output is, by its user's name; empty where the graph makes
            none.
        fixed: where the user's code fixes the number of samples, if that is known.
    """

    graph: Graph
    graph_module: fx.GraphModule
    layer_of_node: Mapping[str, str]
    node_of_value: Mapping[str, str]
    autocast: torch.dtype | None = None
    sizes: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    prepared: InputPreparation | None = None
    evaluation: str = ""
    reductions: Mapping[str, str] = field(default_factory=dict)
    outputs: Mapping[str, str] = field(default_factory=dict)
    fixed: str = ""

    @property
    def fed(self) -> Mapping[str, TensorSpec]:
        """The tensors that a step is given, samples first, for the samples of the capture."""
        return self.graph.inputs if self.prepared is None else self.prepared.raw

    @property
    def judged(self) -> tuple[str, ...]:
        """The values that layers make and that are compared with the targets."""
        return tuple(value for value in judging_layer(self.graph).inputs if value not in self.graph.inputs)

    @property
    def watched(self) -> tuple[str, ...]:
        """The values that layers make and that evaluation may be asked for."""
        outputs = (value for value in self.outputs.values() if value and value not in self.graph.inputs)
        return tuple(dict.fromkeys((*self.judged, *outputs)))


class GraphCapture(Protocol):
    """What a capture has, and more."""

    @property
    def graph(self) -> Graph: ...
    @property
    def graph_module(self) -> fx.GraphModule: ...
    @property
    def layer_of_node(self) -> Mapping[str, str]: ...
    @property
    def node_of_value(self) -> Mapping[str, str]: ...
    @property
    def autocast(self) -> torch.dtype | None: ...
    @property
    def sizes(self) -> Mapping[str, tuple[str, int]]: ...
    @property
    def reductions(self) -> Mapping[str, str]: ...
    @property
    def preparation(self) -> Preparation | SampledPreparation | None: ...
    @property
    def raw(self) -> Mapping[str, TensorSpec]: ...
    @property
    def evaluation(self) -> str: ...
    @property
    def outputs(self) -> Mapping[str, str]: ...
    @property
    def fixed(self) -> str: ...


def attribute(module: fx.GraphModule, name: str) -> Any:
    """What a captured graph calls ``name``, with dots: a parameter, a buffer, a constant, or a graph inside."""
    root: Any = module
    return reduce(getattr, name.split("."), root)


def captured_model(captured: GraphCapture) -> CapturedModel:
    """What the runtime needs of a capture."""
    prepared = None
    if captured.preparation is not None:
        from runtime.sparse.batch import InputPreparation  # late, as all of sparse networks: others do without

        prepared = InputPreparation.of(captured.graph, captured.preparation, dict(captured.raw))
    return CapturedModel(
        captured.graph,
        captured.graph_module,
        captured.layer_of_node,
        captured.node_of_value,
        captured.autocast,
        captured.sizes,
        prepared,
        evaluation=captured.evaluation,
        reductions=captured.reductions,
        outputs=captured.outputs,
        fixed=captured.fixed,
    )


def answers_of(model: CapturedModel) -> tuple[str, ...]:
    """The values of the module's output.

    Raises:
        UnsupportedModelError: the captured graph does not make all of them.
    """
    if model.prepared is not None:
        raise UnsupportedModelError(
            "streams are of dense tensors",
            ["this network takes point clouds, whose sites are found for whole batches"],
            ["halopipe run PLAN --eval-data FACTORY in place of it"],
        )
    missing = [name for name, value in model.outputs.items() if not value or value in model.graph.inputs]
    if missing or not model.outputs:
        raise UnsupportedModelError(
            "the module's output cannot be had of the captured graph",
            [f"{missing[0]}, of its {len(model.outputs)} tensors, is not made on the way to the loss"]
            if missing
            else ["its output holds no tensor"],
            ["leave out of the output what the loss does not depend on, or let the loss read it"],
        )
    return tuple(model.outputs.values())


def makers(model: CapturedModel) -> dict[str, fx.Node]:
    """The node that makes each value; of one that is picked from several outputs, the operator that has them."""
    nodes = {node.name: node for node in model.graph_module.graph.nodes}
    return {value: _picked_from(nodes[name]) for value, name in model.node_of_value.items()}


def main_nodes(model: CapturedModel) -> dict[str, fx.Node]:
    """The node of each layer that makes its outputs."""
    return {producer(value): node for value, node in makers(model).items() if value not in model.graph.inputs}


def _picked_from(node: fx.Node) -> fx.Node:
    maker = node.args[0] if node.target is operator.getitem else None
    return maker if isinstance(maker, fx.Node) and not isinstance(maker.meta.get("val"), Tensor) else node
