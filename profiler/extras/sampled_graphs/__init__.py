"""Graph networks on sampled neighbours: seeds are their samples (decision 0014).

Modules:

    networks   GraphSAGE and GAT in plain torch, for users ``profiler.models.graphs``
    source     A factory's SampledGraph as a model on tensors, whose blocks are inputs; what sampling them costs
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from planner.ir.extras import is_a
from profiler.extra import ProfilerExtra

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor, nn

    from planner.ir.graph import Graph
    from planner.ir.profile import PreparationCost
    from profiler.source.losses import TrainedLoss
    from profiler.source.model import LoadedModel, PreparedExample

_GRAPH = "cuda_ops.extras.sampling.sampler.SampledGraph"
_PREPARATION = "cuda_ops.extras.sampling.preparation.SampledPreparation"


class SampledGraphModels(ProfilerExtra):
    """Graph networks on sampled neighbours."""

    public: ClassVar = {"profiler.models.graphs": {"*": "profiler.extras.sampled_graphs.networks"}}

    def loaded(
        self, factory: str, module: nn.Module, inputs: Any, targets: Any, loss: TrainedLoss
    ) -> tuple[LoadedModel, Mapping[str, Any]] | None:
        if not any(is_a(value, _GRAPH) for value in (inputs if isinstance(inputs, tuple) else (inputs,))):
            return None
        from profiler.extras.sampled_graphs.source import load_sampled

        return load_sampled(factory, module, inputs, targets, loss)

    def raw(self, inputs: Any) -> tuple[Tensor, ...] | None:
        if not is_a(inputs, _GRAPH):
            return None
        from profiler.extras.sampled_graphs.source import raw_of

        return raw_of(inputs)

    def preparation_cost(
        self, graph: Graph, example: PreparedExample, raw: tuple[Tensor, ...], samples: int
    ) -> PreparationCost | None:
        if not is_a(example.preparation, _PREPARATION):
            return None
        from profiler.extras.sampled_graphs.source import sampling_cost

        return sampling_cost(graph, example, raw, samples)


EXTRA = SampledGraphModels()
