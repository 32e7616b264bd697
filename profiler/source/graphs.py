"""Graph networks: a factory's SampledGraph as a model on tensors, whose blocks are inputs.

The network takes ``(x, blocks)`` (:class:`cuda_ops.sampling.sampler.SampledGraph`); seeds are its samples.  Blocks are
sampled ahead of the features' use, and numbers of nodes and edges are sizes that vary, as those of sparse networks are
(decision 0014).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from cuda_ops.sampling.preparation import PreparedGraphNetwork, SampledPreparation
from cuda_ops.sampling.sampler import SampledGraph
from planner.ir.errors import FactoryError
from profiler.source.losses import TrainedLoss
from profiler.source.model import GraphExample, LoadedModel
from profiler.source.structure import BatchStructure, Nest

_LEAST = 2  # one is special to the capture
_NUM_INPUTS = 2


def is_sampled(inputs: Any) -> bool:
    """Whether a factory's inputs are a sampled graph."""
    values = inputs if isinstance(inputs, tuple) else (inputs,)
    return any(isinstance(each, SampledGraph) for each in values)


def load_sampled(
    factory: str, network: nn.Module, inputs: Any, aims: Any, loss: TrainedLoss
) -> tuple[LoadedModel, Mapping[str, Any]]:
    """The model, and what varies in it.

    Args:
        factory: its name, for people.
        inputs: a SampledGraph (or a tuple of just that); ``aims``: the targets, one a seed.

    Raises:
        FactoryError: the network takes something beside it, or a target has another number of rows.
    """
    values = inputs if isinstance(inputs, tuple) else (inputs,)
    if len(values) != 1:
        raise FactoryError(
            f"{factory} returned a SampledGraph among other inputs",
            [f"{len(values)} inputs"],
            ["a network that takes (x, blocks); further numbers can be features of the graph's nodes"],
        )
    example: SampledGraph = values[0]
    nest, targets = Nest.of(aims, f"{factory}: targets")
    odd = [tuple(each.shape) for each in targets if not each.ndim or len(each) != len(example)]
    if odd:
        raise FactoryError(
            f"{factory}: targets are one a seed",
            [f"{len(example)} seeds, a target of shape {odd[0]}"],
            ["labels of the seeds: graph.labels[seeds]"],
        )
    raw: tuple[Tensor, ...] = raw_of(example)
    if len(example) < _LEAST:
        raw, targets = tuple(torch.cat([each] * _LEAST) for each in raw), tuple(torch.cat([t] * 2) for t in targets)
    preparation = SampledPreparation(example.sampler, len(targets))
    graph_example = GraphExample(preparation, raw, targets)
    prepared, compared = graph_example.prepared(raw, targets)
    structure = replace(BatchStructure.plain(_NUM_INPUTS, 0), targets=nest)
    model = LoadedModel(
        PreparedGraphNetwork(network, preparation), prepared, compared, loss, clouds=graph_example, structure=structure
    )
    of = dict(zip(preparation.names, BatchStructure.plain(preparation.num_inputs, len(targets)).names, strict=True))
    varying = {word: [(of[name], dim) for name, dim in places] for word, places in preparation.varying.items()}
    return model, varying


def raw_of(example: SampledGraph) -> tuple[Tensor, Tensor]:
    """Seeds and draws, as data sources give them."""
    return example.seeds, torch.full_like(example.seeds, example.draw)
