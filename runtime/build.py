"""From a decision and a captured graph to the stages that live on one rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import fx, nn
from torch.optim import Optimizer

from planner.ir.errors import CorruptFileError, UnsupportedModelError
from planner.ir.graph import SAMPLE, Graph, producer
from planner.ir.plan import Decision
from planner.ir.schedule import StageGraph
from planner.layers.boundary import Boundaries
from runtime.cut import NUM_SAMPLES, BatchNorm, StageFunction, cut_stage
from runtime.normalisation import synchronised_batch_norm
from runtime.plumbing import narrow_samples
from runtime.reduction import GradientBuckets
from runtime.resident import Feed, Resident, Share
from runtime.stage import StageProgram
from runtime.transport import Transport

MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]


@dataclass(frozen=True, slots=True)
class CapturedModel:
    """What the profiler's capture gives; see ``profiler.capture`` for the contract.

    Attributes:
        graph_module: forward and loss; its parameters and buffers are those of the user's module.
        layer_of_node: the layer of each node that makes tensors.
        node_of_value: the node of each value, graph inputs included.
    """

    graph: Graph
    graph_module: fx.GraphModule
    layer_of_node: Mapping[str, str]
    node_of_value: Mapping[str, str]


def groups_of(decision: Decision) -> tuple[tuple[int, ...], ...]:
    """The groups of ranks that sum over each other, for the transport: one for each stage on several ranks."""
    groups = {tuple(sorted(stage.ranks)): None for stage in decision.stages if len(stage.ranks) > 1}
    return tuple(groups)


def check_layers(decision: Decision, graph: Graph) -> None:
    """Raises :class:`CorruptFileError` unless the decision places exactly the graph's layers."""
    names = graph.by_name()
    faults = [f"layer {name} is in no stage" for name in names if name not in decision.layers]
    faults += [f"layer {name} is not in the model" for name in decision.layers if name not in names]
    if faults:
        raise CorruptFileError("the plan's layers are not those of the model", faults[:20])


class Builder:
    """Builds the stages of one rank.

    Args:
        stages: the program's DAG of stages.
        deadline_s: longest wait for a sum over the ranks of a stage.
    """

    def __init__(
        self,
        decision: Decision,
        model: CapturedModel,
        boundaries: Boundaries,
        stages: StageGraph,
        transport: Transport,
        make_optimizer: MakeOptimizer,
        deadline_s: float,
    ) -> None:
        self._decision, self._model, self._boundaries, self._stages = decision, model, boundaries, stages
        self._transport, self._make_optimizer, self._deadline_s = transport, make_optimizer, deadline_s

    def residents(self) -> dict[int, Resident]:
        """The stages that run on this rank.

        Raises:
            UnsupportedModelError: the plan asks for something that this model or runtime cannot do.
        """
        functions = {stage: self._function(stage) for stage in range(len(self._decision.stages))}
        _refuse_shared_state(functions)
        rank = self._transport.rank
        return {
            stage: self._resident(stage, function)
            for stage, function in functions.items()
            if rank in self._decision.stages[stage].ranks
        }

    def _function(self, stage: int) -> StageFunction:
        model = self._model
        outputs = dict.fromkeys(value for edge in self._stages.out_of(stage) for value in edge.values)
        if self._decision.layers[producer(model.graph.loss)].stage == stage:
            outputs[model.graph.loss] = None
        layers = self._decision.layers_of(stage)
        batch_norm = self._batch_norm(stage)
        return cut_stage(
            model.graph_module, layers, model.layer_of_node, model.node_of_value, tuple(outputs), batch_norm
        )

    def _batch_norm(self, stage: int) -> BatchNorm | None:
        ranks = tuple(sorted(self._decision.stages[stage].ranks))
        if len(ranks) == 1 or self._transport.rank not in ranks:
            return None
        options = {"group_size": len(ranks), "index": ranks.index(self._transport.rank)}
        function = partial(synchronised_batch_norm, reduce=self._add(ranks), **options)
        function.__name__ = "synchronised_batch_norm"  # type: ignore[attr-defined]  # fx writes it into its code
        function.__module__ = __name__
        return function

    def _add(self, ranks: tuple[int, ...]) -> Callable[[torch.Tensor], None]:
        return partial(self._transport.all_reduce, ranks=ranks, deadline_s=self._deadline_s)

    def _resident(self, stage: int, function: StageFunction) -> Resident:
        graph = self._model.graph
        ranks = tuple(sorted(self._decision.stages[stage].ranks))
        received = tuple(name for name in function.inputs if name not in graph.inputs)
        self._check_received(stage, received)
        loss = graph.loss if graph.loss in function.outputs else None
        values = graph.values()
        parameters = function.parameters
        return Resident(
            StageProgram(function, frozenset(received), loss),
            ranks,
            self._shares(stage),
            received,
            tuple(name for name in function.outputs if name != loss and values[name].is_float),
            self._feeds(stage, function),
            parameters,
            {name: value for name, value in function.attributes.items() if name not in parameters},
            GradientBuckets(parameters.values()),
            self._make_optimizer(list(parameters.values())) if parameters else None,
            self._add(ranks),
        )

    def _check_received(self, stage: int, received: tuple[str, ...]) -> None:
        expected = {value for edge in self._stages.into(stage) for value in edge.values}
        if expected != set(received):
            differ = ", ".join(sorted(expected ^ set(received)))
            raise UnsupportedModelError(f"stage {stage}: the model's graph and its code disagree on {differ}")

    def _position(self, stage: int) -> int:
        return self._decision.stages[stage].ranks.index(self._transport.rank)

    def _shares(self, stage: int) -> tuple[Share, ...]:
        decision, graph = self._decision, self._model.graph
        layout, position = decision.layout_of(stage), self._position(stage)
        if set(layout.cuts) - {SAMPLE}:
            dims = ", ".join(layout.cuts)
            raise UnsupportedModelError(f"stage {stage} is cut along {dims}; only cuts of {SAMPLE} can be run")
        rows = [layout.samples(samples)[position] for samples in decision.micro_batches]
        is_free = any(node.target == NUM_SAMPLES for node in self._model.graph_module.graph.nodes)
        if not is_free and set(rows) != {graph.samples}:
            raise UnsupportedModelError(
                f"the model was captured for {graph.samples} samples only, stage {stage} would run it with {rows}",
                remedies=[f"plan with micro-batches of {graph.samples} and one rank a stage"],
            )
        return tuple(Share(count, count / decision.global_batch) for count in rows)

    def _feeds(self, stage: int, function: StageFunction) -> tuple[Mapping[str, Feed], ...]:
        graph, layout = self._model.graph, self._decision.layout_of(stage)
        order = list(graph.inputs)
        feeds, first = [], 0
        for samples in self._decision.micro_batches:
            counts = layout.samples(samples)
            position = self._position(stage)
            start, count = first + sum(counts[:position]), counts[position]
            feeds.append(
                {
                    name: partial(_feed, index=order.index(name), graph=graph, start=start, count=count)
                    for name in function.inputs
                    if name in graph.inputs
                }
            )
            first += samples
        return tuple(feeds)


def _feed(inputs: tuple[torch.Tensor, ...], index: int, graph: Graph, start: int, count: int) -> torch.Tensor:
    spec = tuple(graph.inputs.values())[index]
    return narrow_samples(inputs[index], spec, graph.samples, start, count)


def _refuse_shared_state(functions: Mapping[int, StageFunction]) -> None:
    """A parameter, or a buffer that is written, must not live on two stages: they would drift apart."""
    stage_of: dict[str, int] = {}
    for stage, function in functions.items():
        for name in (*function.parameters, *sorted(function.mutated)):
            if stage_of.setdefault(name, stage) != stage:
                raise UnsupportedModelError(
                    f"{name} is used by stages {stage_of[name]} and {stage}",
                    ["tied parameters, and buffers that layers write, must be on one stage"],
                    ["put all layers that use it on one stage"],
                )
