"""A captured model: what the profiler makes and measures, and the runtime cuts into stages.

What it answers, which layer compares it with what is right, and which nodes make its values.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from planner.ir.errors import UnsupportedModelError
from planner.ir.graph import SAMPLE, Graph, Layer, TensorSpec, producer

if TYPE_CHECKING:
    from cuda_ops.preparation import InputPreparation

_MOST_SHOWN = 8


@dataclass(frozen=True, slots=True)
class LossCall:
    """What the user's loss function is called with.

    Attributes:
        values: of the tensors in the module's output, then of those in the targets; empty where the graph, which has
            what the loss is made of, does not make one.
        arguments: the output and the targets as the function is given them, of all these tensors.
    """

    values: tuple[str, ...]
    arguments: Callable[[Sequence[Tensor]], tuple[Any, ...]] = field(compare=False)


@dataclass(frozen=True, slots=True)
class CapturedModule:
    """A model with its loss.

    Attributes:
        graph: for the planner.
        graph_module: for execution: placeholders are ``num_samples`` (an int; only if ``polymorphic``), those of
            ``sizes`` (ints) and the graph's inputs by name, the output is the loss.  Its parameters and buffers are
            those of the user's module.  In-place operators are rewritten, guards dropped.  Integers follow from
            ``num_samples`` and ``sizes`` alone, and are in no layer.
        layer_of_node: the layer of every node that makes a tensor.
        node_of_value: the node that makes each value: an input, ``conv1``, ``lstm:1``.
        polymorphic: whether other numbers of samples than ``graph.samples`` may be run.
        mixing: layers whose result for a sample depends on other samples; their attribute ``mixes_samples`` is set.
            (Layers with the attribute ``interleaves_samples`` keep samples apart, but not each in one piece.)
        reductions: how the parts of a batch make up what a layer reduces them to, where parts are not just means; see
            :mod:`profiler.capture.loss_reduction`.  Layers through which the loss of a batch is none of its parts'
            losses have the attribute ``needs_whole_batch``.
        sizes: sizes that vary beside the number of samples: by placeholder, a graph input and the dim whose extent it
            is.  All dims of the graph's inputs that bear the name have that extent; ``graph`` is for the example's.
        autocast: the dtype that operators run in where torch's autocast says so; None: no autocast.  Whoever runs
            ``graph_module``, or parts of it, does so under ``torch.autocast``; dtypes in ``graph`` are those of then.
        preparation: of a sparse network, makes the graph's inputs, in their order, of a batch of clouds.
        raw: the tensors of such a batch by name, for the example's samples; none for another network.
        evaluating: modules that were given in evaluation mode, which they are in under a plan as well.
        evaluation: why the graph does not tell what the module does in evaluation mode; empty: it does.
        outputs: the value that each tensor of the module's output is, by the names that its user has for them
            (``logits``) and in their order; empty where the loss is not made of it, or a layer does not hand it out.
        fixed: where the user's code fixes the number of samples, if that is known; empty: elsewhere, or nowhere.
        doubled: whether the example has one sample, which is repeated.
        loss_call: how the user's loss function is called; None where the module makes its loss itself, or its output
            holds something else than tensors and constants.
    """

    graph: Graph
    graph_module: fx.GraphModule
    layer_of_node: Mapping[str, str]
    node_of_value: Mapping[str, str]
    polymorphic: bool
    mixing: tuple[str, ...] = ()
    reductions: Mapping[str, str] = field(default_factory=dict)
    sizes: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    autocast: torch.dtype | None = None
    preparation: InputPreparation | None = None
    raw: Mapping[str, TensorSpec] = field(default_factory=dict)
    evaluating: tuple[str, ...] = ()
    evaluation: str = ""
    outputs: Mapping[str, str] = field(default_factory=dict)
    fixed: str = ""
    doubled: bool = False
    loss_call: LossCall | None = None

    @property
    def remarks(self) -> tuple[str, ...]:
        """What a user may not expect, in words."""
        shown = ", ".join(self.evaluating[:_MOST_SHOWN]) + (", ..." if len(self.evaluating) > _MOST_SHOWN else "")
        samples = self.graph.samples
        square = [name for name, spec in self.graph.inputs.items() if spec.shape.count(samples) > 1]
        dense = self.graph.inputs if self.preparation is None else {}
        rows = {name: spec.shape[0] // samples for name, spec in dense.items() if spec.dims[:1] == (SAMPLE,)}
        several = ", ".join(f"{number} rows of {name}" for name, number in rows.items() if number > 1)
        lines = {
            f"{len(self.evaluating)} modules are in evaluation mode, and stay in it: {shown}; "
            "call train() on them in the factory if they are to be trained as others": bool(self.evaluating),
            f"plans can train this model, not evaluate it: {self.evaluation}": bool(self.evaluation),
            f"the example has 1 sample, which is repeated to {samples} (export takes 1 for a constant); "
            f"a plan has {samples} samples a step unless its global batch says otherwise": self.doubled,
            f"a sample has {several}; halopipe plan --global-batch and --micro-batch count samples": bool(several),
            f"micro-batches have {samples} samples, no other number: the model's code fixes it"
            + (f" {self.fixed}" if self.fixed else ""): not self.polymorphic,
            f"{', '.join(square)}: of {samples} along several dims, as many as the example has samples; where "
            "one is no tensor of samples (a mask over tokens), profile an example of another number of samples": bool(
                square
            )
            and not self.polymorphic,
        }
        return tuple(line for line, is_so in lines.items() if is_so)


def attribute(module: fx.GraphModule, name: str) -> Any:
    """What a captured graph calls ``name``, with dots: a parameter, a buffer, a constant, or a graph inside."""
    root: Any = module
    return reduce(getattr, name.split("."), root)


_OF_CLASSES = ("aten.cross_entropy_loss.default", "aten.nll_loss.default", "aten.nll_loss_nd.default")


def judging_layer(graph: Graph) -> Layer:
    """The layer of the loss; of a loss that is a mean of one of classes (over sites, over samples), the latter."""
    of_classes = [layer for layer in graph.layers if layer.attributes.get("op") in _OF_CLASSES]
    return of_classes[0] if len(of_classes) == 1 else graph.by_name()[producer(graph.loss)]


def compares(layer: Layer) -> bool:
    """Whether it is an operator that compares predictions with targets, rather than one that is made of such."""
    return len(layer.inputs) > 1 and (layer.kind == "loss" or layer.attributes.get("op") in _OF_CLASSES)


def judged_values(graph: Graph) -> tuple[str, ...]:
    """The values that layers make and that are compared with the targets."""
    return tuple(value for value in judging_layer(graph).inputs if value not in graph.inputs)


def judged_inputs(model: CapturedModule) -> tuple[str, ...]:
    """The inputs of the graph that the values which layers make are compared with: targets."""
    of_call = () if model.loss_call is None else model.loss_call.values
    read = (*judging_layer(model.graph).inputs, *of_call)
    return tuple(dict.fromkeys(value for value in read if value in model.graph.inputs))


def watched_values(model: CapturedModule) -> tuple[str, ...]:
    """The values that layers make and that evaluation may be asked for."""
    outputs = (value for value in model.outputs.values() if value and value not in model.graph.inputs)
    return tuple(dict.fromkeys((*judged_values(model.graph), *outputs)))


def answers_of(model: CapturedModule) -> tuple[str, ...]:
    """The values of the module's output.

    Raises:
        UnsupportedModelError: the captured graph does not make all of them.
    """
    if model.preparation is not None:
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


def makers(model: CapturedModule) -> dict[str, fx.Node]:
    """The node that makes each value; of one that is picked from several outputs, the operator that has them."""
    nodes = {node.name: node for node in model.graph_module.graph.nodes}
    return {value: _picked_from(nodes[name]) for value, name in model.node_of_value.items()}


def main_nodes(model: CapturedModule) -> dict[str, fx.Node]:
    """The node of each layer that makes its outputs."""
    return {producer(value): node for value, node in makers(model).items() if value not in model.graph.inputs}


def _picked_from(node: fx.Node) -> fx.Node:
    maker = node.args[0] if node.target is operator.getitem else None
    return maker if isinstance(maker, fx.Node) and not isinstance(maker.meta.get("val"), Tensor) else node
