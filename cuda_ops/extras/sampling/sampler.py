"""Blocks of a graph network's layers: sampled neighbours of seeds, of these, and so on.

    level L      seeds                         one row a sample, also where a node comes twice
    level L-1    seeds and their neighbours    distinct
    ...
    level 0      whose features are read

The block of layer ``l`` joins level ``l - 1`` to level ``l``.  A level's rows are its targets first, then each
neighbour as it first comes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from cuda_ops.extras.sampling.draws import NeighbourDraws, NodeIds, base_of, fastest
from cuda_ops.extras.sampling.graph import GraphError, NodeGraph

_WORK_UNIT = 16  # parts of an edge, in which work is counted


class Block(NamedTuple):
    """The edges of one layer, as torch_geometric's convolutions take them: ``conv((x, x[targets]), edge_index)``.

    Attributes:
        edge_index: int64 (2, edges): the row of each message's source, then that of its target.
        targets: int64 (targets,): where each target is among the sources.
    """

    edge_index: Tensor
    targets: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class NeighbourSampler:
    """Samples neighbours without replacement, layer by layer (Hamilton, Ying and Leskovec 2017, algorithm 2).

    Which neighbours a node gets follows from ``seed``, the draw, the layer and the node alone (``draws``).

    Attributes:
        fanouts: by layer, the first applied first: the most neighbours of a node; -1: all.
        seed: of the random numbers.
        self_loops: whether every target is its own neighbour as well, as attention wants it.
        draws: compiled where that can be.

    Raises:
        GraphError: no layer, or a fan-out that is no number of neighbours.
    """

    graph: NodeGraph
    fanouts: tuple[int, ...]
    seed: int = 0
    self_loops: bool = False
    draws: NeighbourDraws | None = None

    def __post_init__(self) -> None:
        if not self.fanouts or any(fanout == 0 or fanout < -1 for fanout in self.fanouts):
            raise GraphError(f"fan-outs {list(self.fanouts)}: one a layer, each 1 or more, or -1 for all neighbours")

    def __reduce__(self) -> tuple[Any, ...]:
        return NeighbourSampler, (self.graph, tuple(self.fanouts), self.seed, self.self_loops)

    def levels(self, seeds: NodeIds, draw: int) -> SampledLevels:
        """The blocks of ``seeds`` (samples,) in the draw of that number.

        Raises:
            GraphError: a seed is no node.
        """
        targets = self._nodes(seeds)
        draws = self.draws or fastest()
        blocks: list[tuple[NodeIds, NodeIds]] = []
        sizes = [len(targets)]
        for layer in reversed(range(len(self.fanouts))):
            base = base_of(self.seed, draw, layer)
            counts, sampled = draws.sample(self.graph, targets, self.fanouts[layer], base, with_self=self.self_loops)
            nodes, own, rows = draws.relabel(self.graph, targets, sampled)
            blocks.append((np.stack([rows, np.repeat(np.arange(len(targets)), counts)]), own))
            targets = nodes
            sizes.append(len(nodes))
        return SampledLevels(targets, tuple(reversed(blocks)), tuple(reversed(sizes)))

    def sample(self, seeds: Tensor | Sequence[int], draw: int = 0) -> SampledGraph:
        """The blocks and features of ``seeds``, as one batch."""
        return SampledGraph(self, torch.as_tensor(seeds, dtype=torch.int64), draw)

    def features(self, nodes: NodeIds) -> Tensor:
        """Rows of the graph's features."""
        return torch.from_numpy((self.draws or fastest()).gather(self.graph.features, nodes))

    def work(self, seeds: NodeIds) -> NodeIds:
        """int64 (samples,): edges that each seed is expected to need alone, in sixteenths."""
        return _work(self.graph, self.fanouts, self.self_loops)[seeds]

    def work_before(self, seeds: NodeIds) -> NodeIds:
        """int64 (samples + 1,): the work of the seeds before each place.

        Raises:
            GraphError: a seed is no node.
        """
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(self.work(self._nodes(seeds)))])

    def _nodes(self, seeds: NodeIds) -> NodeIds:
        nodes = np.ascontiguousarray(seeds, dtype=np.int64)
        odd = nodes[(nodes < 0) | (nodes >= self.graph.num_nodes)]
        if len(odd):
            raise GraphError(f"seed {odd[0]} is no node; the graph has {self.graph.num_nodes}, counted from 0")
        return nodes

    def with_fanouts(self, fanouts: Sequence[int]) -> NeighbourSampler:
        """The same with other fan-outs."""
        return replace(self, fanouts=tuple(fanouts))


@lru_cache(maxsize=4)
def _work(graph: NodeGraph, fanouts: tuple[int, ...], self_loops: bool) -> NodeIds:
    """Of every node, layer by layer: its own edges, and those of whom it reads, as its neighbours have on average."""
    degrees = graph.degrees
    edges = np.zeros(graph.num_nodes)
    has_some = degrees > 0
    for fanout in fanouts:
        num_sampled = degrees if fanout < 0 else np.minimum(degrees, fanout)
        mean = np.zeros(graph.num_nodes)
        sums = np.add.reduceat(np.append(edges[graph.neighbours], 0.0), graph.starts[:-1])
        mean[has_some] = sums[has_some] / degrees[has_some]
        edges = num_sampled * (1 + mean) + edges + self_loops
    return np.maximum(1, np.rint(edges * _WORK_UNIT)).astype(np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class SampledLevels:
    """What was sampled, as arrays.

    Attributes:
        nodes: of level 0, (rows,).
        blocks: by layer: edge index (2, edges), and rows of the targets.
        sizes: rows of each level, 0 to L.
    """

    nodes: NodeIds
    blocks: tuple[tuple[NodeIds, NodeIds], ...]
    sizes: tuple[int, ...]

    @property
    def num_edges(self) -> int:
        """Of all layers."""
        return sum(edges.shape[1] for edges, _ in self.blocks)


def joined(parts: Sequence[SampledLevels]) -> SampledLevels:
    """Several side by side: rows of a level are those of the first part, then those of the next."""
    if len(parts) == 1:
        return parts[0]
    sizes = np.array([part.sizes for part in parts], dtype=np.int64)
    before = np.cumsum(sizes, axis=0) - sizes
    blocks = []
    for layer in range(len(parts[0].blocks)):
        edges = [part.blocks[layer][0] + at[layer : layer + 2, None] for part, at in zip(parts, before, strict=True)]
        own = [part.blocks[layer][1] + at[layer] for part, at in zip(parts, before, strict=True)]
        blocks.append((np.concatenate(edges, 1), np.concatenate(own)))
    return SampledLevels(np.concatenate([part.nodes for part in parts]), tuple(blocks), tuple(sizes.sum(0).tolist()))


class SampledGraph:
    """Seeds with their sampled neighbourhood, the example of a graph network: ``network(batch.x, batch.blocks)``.

    Attributes:
        seeds: int64 (samples,), nodes whose results are wanted.
        draw: the number of the draw: another one has other neighbours.
        x: (rows of level 0, channels), features.
        blocks: by layer, the first applied first.
    """

    def __init__(self, sampler: NeighbourSampler, seeds: Tensor, draw: int = 0) -> None:
        self.sampler = sampler
        self.seeds = seeds
        self.draw = draw
        levels = sampler.levels(seeds.numpy(), draw)
        self.x = sampler.features(levels.nodes)
        self.blocks = [Block(torch.from_numpy(edges), torch.from_numpy(own)) for edges, own in levels.blocks]
        self.num_edges = levels.num_edges

    def __reduce__(self) -> tuple[Any, ...]:
        return SampledGraph, (self.sampler, self.seeds, self.draw)

    def __len__(self) -> int:
        return len(self.seeds)
