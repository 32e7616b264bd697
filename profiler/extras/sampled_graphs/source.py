"""Graph networks: a factory's SampledGraph as a model on tensors, whose blocks are inputs; what sampling them costs.

The network takes ``(x, blocks)`` (:class:`cuda_ops.extras.sampling.sampler.SampledGraph`); seeds are its
samples.  Blocks are sampled ahead of the features' use, and numbers of nodes and edges are sizes that vary, as those of
sparse networks are (decision 0014).
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from cuda_ops.extras.sampling.preparation import PreparedGraphNetwork, SampledPreparation
from cuda_ops.extras.sampling.sampler import SampledGraph
from planner.ir.errors import FactoryError
from planner.ir.graph import Graph
from planner.ir.profile import PreparationCost
from profiler.measure.contention import trimmed_mean
from profiler.source.losses import TrainedLoss
from profiler.source.model import LoadedModel, PreparedExample
from profiler.source.structure import BatchStructure, Nest

_LEAST = 2  # one is special to the capture
_NUM_INPUTS = 2
_NUM_RUNS = 5


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
        raw = tuple(torch.cat([each] * _LEAST) for each in raw)
        targets = tuple(torch.cat([t] * 2) for t in targets)
    preparation = SampledPreparation(example.sampler, (False,) * len(targets))
    graph_example = PreparedExample(preparation, raw, targets)
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


def sampling_cost(graph: Graph, example: PreparedExample, raw: tuple[Tensor, ...], samples: int) -> PreparationCost:
    """Thread CPU seconds of sampling the neighbours of ``samples`` seeds, and of copying their features."""
    made = tuple(graph.inputs)[: example.preparation.num_inputs]
    seconds = []
    for draw in range(_NUM_RUNS + 1):
        start_s = time.thread_time()
        example.preparation.prepared((raw[0], torch.full_like(raw[1], draw), *raw[2:]))
        seconds.append(time.thread_time() - start_s)
    return PreparationCost("sample", made, (), trimmed_mean(seconds[1:]), samples, is_beside=True)
