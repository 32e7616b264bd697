"""Graph networks on sampled neighbours, as their users write them: by torch_geometric, and in plain torch."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from cuda_ops.extras.sampling.generated import power_law
from cuda_ops.extras.sampling.graph import NodeGraph
from cuda_ops.extras.sampling.sampler import Block, NeighbourSampler
from profiler.extras.sampled_graphs.networks import GATConv, SAGEConv

CHANNELS = 6
CLASSES = 3
GRAPH: NodeGraph = power_law(300, seed=1, degree=6.0, channels=CHANNELS, classes=CLASSES)


class Convolutions(nn.Module):
    def __init__(self, *convs: nn.Module, between: nn.Module | None = None) -> None:
        super().__init__()
        self.convs = nn.ModuleList(convs)
        self.between = between

    def forward(self, x: Tensor, blocks: list[Block]) -> Tensor:
        for number, (conv, (edge_index, targets)) in enumerate(zip(self.convs, blocks, strict=True)):
            x = conv((x, x[targets]), edge_index)
            if number + 1 < len(self.convs):
                x = x.relu() if self.between is None else self.between(x.relu())
        return x


class PlainMean(nn.Module):
    """The mean of the neighbours' features, beside the node's own."""

    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        self.own = nn.Linear(channels, out)
        self.others = nn.Linear(channels, out, bias=False)

    def forward(self, x: tuple[Tensor, Tensor], edge_index: Tensor) -> Tensor:
        sources, targets = x
        sums = torch.zeros_like(targets).index_add(0, edge_index[1], sources[edge_index[0]])
        ones = torch.ones_like(edge_index[1], dtype=sources.dtype)
        counts = torch.zeros(targets.shape[0], dtype=sources.dtype).index_add(0, edge_index[1], ones)
        return self.own(targets) + self.others(sums / counts.clamp(min=1)[:, None])


def example(
    network: nn.Module,
    loss: Any,
    *,
    fanouts: tuple[int, ...] = (3, 2),
    self_loops: bool = False,
    graph: NodeGraph = GRAPH,
) -> Any:
    sampler = NeighbourSampler(graph, fanouts, self_loops=self_loops)
    seeds = torch.tensor([3, 150, 0, 77, 3, 299, 42, 8])
    return network, (sampler.sample(seeds, 5), torch.from_numpy(GRAPH.labels)[seeds]), loss


def sage() -> Any:
    return example(Convolutions(SAGEConv(CHANNELS, 8), SAGEConv(8, CLASSES)), nn.CrossEntropyLoss())


def gat() -> Any:
    return example(Convolutions(GATConv(CHANNELS, 4, 2), GATConv(8, CLASSES)), nn.CrossEntropyLoss(), self_loops=True)


def their_sage() -> Any:
    layers = geometric()
    return example(Convolutions(layers.SAGEConv(CHANNELS, 8), layers.SAGEConv(8, CLASSES)), nn.CrossEntropyLoss())


def their_gat() -> Any:
    layers = geometric()
    convs = layers.GATConv(CHANNELS, 4, 2, add_self_loops=False), layers.GATConv(8, CLASSES, add_self_loops=False)
    return example(Convolutions(*convs), nn.CrossEntropyLoss(), self_loops=True)


def geometric() -> Any:
    """torch_geometric's layers; it takes 7 seconds to import."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`torch.jit", DeprecationWarning)  # which it calls
        import torch_geometric.nn

        return torch_geometric.nn


def plain() -> Any:
    convs = PlainMean(CHANNELS, 8), PlainMean(8, 8), PlainMean(8, CLASSES)
    return example(Convolutions(*convs, between=nn.LayerNorm(8)), nn.CrossEntropyLoss(), fanouts=(2, 3, -1))


def weighted() -> Any:
    """A mean over those seeds that have a label, by the weights of their classes."""
    network, (batch, labels), _ = sage()
    labels = torch.where(labels == 2, -100, labels)
    return network, (batch, labels), nn.CrossEntropyLoss(weight=torch.tensor([1.0, 3.0, 2.0]))


def normalised() -> Any:
    convs = SAGEConv(CHANNELS, 8), SAGEConv(8, CLASSES)
    return example(Convolutions(*convs, between=nn.BatchNorm1d(8)), nn.CrossEntropyLoss())


def dropping() -> Any:
    convs = SAGEConv(CHANNELS, 8), SAGEConv(8, CLASSES)
    return example(Convolutions(*convs, between=nn.Dropout(0.5)), nn.CrossEntropyLoss())


def penalised() -> Any:
    """A loss with a sum over all nodes, of which those that two ranks need count once on one device."""
    network, made, _ = sage()

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = network

        def forward(self, x: Tensor, blocks: list[Block]) -> tuple[Tensor, Tensor]:
            return self.network(x, blocks), self.network.convs[0]((x, x[blocks[0].targets]), blocks[0].edge_index)

    def loss(output: tuple[Tensor, Tensor], labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output[0], labels) + 1e-3 * output[1].square().sum()

    return Both(), made, loss


def shifted() -> Any:
    """Rows' numbers that are reckoned with: they count from the first row of a rank, which is not one device's."""
    network, made, loss = sage()

    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = network

        def forward(self, x: Tensor, blocks: list[Block]) -> Tensor:
            marks = blocks[-1].edge_index[0] * 2
            out: Tensor = self.inner(x, blocks)
            return (
                out
                + out.new_zeros(out.shape[0]).index_add(0, blocks[-1].edge_index[1], 1e-3 * marks.to(x.dtype))[:, None]
            )

    return Shifted(), made, loss


class Stamped(nn.Module):
    """Features are seconds of an epoch, in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.network = Convolutions(SAGEConv(CHANNELS, 8), SAGEConv(8, CLASSES))

    def forward(self, x: Tensor, blocks: list[Block]) -> Tensor:
        weight = next(self.parameters())
        return self.network(((x - 1.7e9) / 3600).to(weight.dtype), blocks)


STAMPED = replace(GRAPH, features=1.7e9 + 3600 * GRAPH.features.astype("float64"))


def stamped() -> Any:
    return example(Stamped(), nn.CrossEntropyLoss(), graph=STAMPED)
