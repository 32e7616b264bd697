"""GraphSAGE (Hamilton, Ying and Leskovec 2017) and GAT (Velickovic et al. 2018) on sampled neighbours, in plain torch.

torch_geometric's ``SAGEConv`` and ``GATConv`` compute the same and may stand in their places.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from cuda_ops.extras.sampling.generated import generated
from cuda_ops.extras.sampling.sampler import Block, NeighbourSampler

NODES = 1_000_000
SMALL = 20_000


class SAGEConv(nn.Module):
    """The mean of the neighbours' features, and the node's own: ``W x_v + U mean(x_u)``."""

    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        self.own = nn.Linear(channels, out, bias=False)
        self.others = nn.Linear(channels, out)

    def forward(self, x: tuple[Tensor, Tensor], edge_index: Tensor) -> Tensor:
        """``x``: rows of the sources and of the targets."""
        sources, targets = x
        messages = sources.index_select(0, edge_index[0])
        sums = targets.new_zeros(targets.shape).index_add(0, edge_index[1], messages)
        counts = targets.new_zeros(targets.shape[0]).index_add(0, edge_index[1], messages.new_ones(messages.shape[0]))
        result: Tensor = self.own(targets) + self.others(sums / counts.clamp(min=1)[:, None])
        return result


class GATConv(nn.Module):
    """Attention over the neighbours, heads side by side; a node attends to itself where the sampler adds it."""

    def __init__(self, channels: int, out: int, heads: int = 1) -> None:
        super().__init__()
        self.heads = heads
        self.values = nn.Linear(channels, heads * out, bias=False)
        self.of_source = nn.Linear(channels, heads)
        self.of_target = nn.Linear(channels, heads, bias=False)

    def forward(self, x: tuple[Tensor, Tensor], edge_index: Tensor) -> Tensor:
        """``x``: rows of the sources and of the targets."""
        sources, targets = x
        source, target = edge_index
        scores = self.of_source(sources).index_select(0, source) + self.of_target(targets).index_select(0, target)
        scores = nn.functional.leaky_relu(scores, 0.2)
        place = target[:, None].expand_as(scores)
        zeros = scores.new_zeros(targets.shape[0], self.heads)
        largest = zeros.scatter_reduce(0, place, scores.detach(), "amax", include_self=False)
        weights = (scores - largest.index_select(0, target)).exp()
        weights = weights / zeros.index_add(0, target, weights).index_select(0, target)
        messages = self.values(sources).index_select(0, source).unflatten(1, (self.heads, -1)) * weights[:, :, None]
        messages = messages.flatten(1)
        result: Tensor = messages.new_zeros(targets.shape[0], messages.shape[1]).index_add(0, target, messages)
        return result


class SampledNetwork(nn.Module):
    """Convolutions with ReLU between them, one a block."""

    def __init__(self, convs: Sequence[nn.Module]) -> None:
        super().__init__()
        self.convs = nn.ModuleList(convs)

    def forward(self, x: Tensor, blocks: Sequence[Block]) -> Tensor:
        """See :class:`cuda_ops.extras.sampling.sampler.SampledGraph`."""
        for number, (conv, (edge_index, targets)) in enumerate(zip(self.convs, blocks, strict=True)):
            x = conv((x, x.index_select(0, targets)), edge_index)
            x = x.relu() if number + 1 < len(self.convs) else x
        return x


def sage(nodes: int = SMALL, samples: int = 64, width: int = 32, fanouts: tuple[int, ...] = (10, 5)) -> Any:
    """GraphSAGE on the generated graph of so many nodes, seeds of ``samples`` as its example."""
    graph = generated(nodes)
    widths = (graph.features.shape[1], *[width] * (len(fanouts) - 1), int(graph.labels.max()) + 1)
    network = SampledNetwork([SAGEConv(a, b) for a, b in pairwise(widths)])
    return _example(network, NeighbourSampler(graph, fanouts), samples)


def gat(
    nodes: int = SMALL, samples: int = 64, width: int = 8, heads: int = 4, fanouts: tuple[int, ...] = (10, 5)
) -> Any:
    """GAT, likewise."""
    graph = generated(nodes)
    convs: list[nn.Module] = []
    channels = graph.features.shape[1]
    for _ in fanouts[1:]:
        convs.append(GATConv(channels, width, heads))
        channels = width * heads
    convs.append(GATConv(channels, int(graph.labels.max()) + 1))
    return _example(SampledNetwork(convs), NeighbourSampler(graph, fanouts, self_loops=True), samples)


def _example(network: nn.Module, sampler: NeighbourSampler, samples: int) -> Any:
    seeds = torch.arange(samples) * (sampler.graph.num_nodes // samples)
    return network, (sampler.sample(seeds), torch.from_numpy(sampler.graph.labels)[seeds]), nn.CrossEntropyLoss()
