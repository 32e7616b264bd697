"""Batches of seeds of a graph, shuffled anew in every pass; each batch is a draw of its own.

    seeds int64 (samples,)   draws int64 (samples,)   labels int64 (samples,)

Neighbours are not among them: each rank samples those of its own seeds
(:mod:`runtime.extras.sampled_graphs.preparing`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from cuda_ops.extras.sampling.graph import NodeGraph

SeedBatch = tuple[tuple[Tensor, Tensor], Tensor]


def seed_batches(
    graph: NodeGraph, global_batch: int, seed: int = 0, nodes: Tensor | None = None, *, endless: bool = True
) -> Iterator[SeedBatch]:
    """((seeds, draws), labels) of ``global_batch`` nodes.

    Args:
        seed: of the order.
        nodes: int64, those to train on; None: all.
        endless: pass over them again and again, and let a batch reach into the next pass; else one pass, whose last
            batch may be smaller.
    """
    labels = torch.from_numpy(graph.labels)
    chosen = torch.arange(graph.num_nodes) if nodes is None else nodes
    generator = torch.Generator().manual_seed(seed)
    waiting = chosen[:0]
    draw = 0
    is_over = False
    while True:
        while len(waiting) < global_batch and not is_over:
            waiting = torch.cat([waiting, chosen[torch.randperm(len(chosen), generator=generator)]])
            is_over = not endless
        if not len(waiting):
            return
        now = waiting[:global_batch]
        waiting = waiting[global_batch:]
        yield (now, torch.full_like(now, draw)), labels[now]
        draw += 1


def graph_seeds(global_batch: int, input_shape: tuple[int, ...], seed: int) -> Iterator[SeedBatch]:
    """Of the generated graph of 1,000,000 nodes, for ``profiler.models.graphs:sage --arg nodes=1000000``."""
    return _of_generated(1_000_000, global_batch, seed)


def small_graph_seeds(global_batch: int, input_shape: tuple[int, ...], seed: int) -> Iterator[SeedBatch]:
    """Of the generated graph of 20,000 nodes, for ``profiler.models.graphs:sage`` and ``gat``."""
    return _of_generated(20_000, global_batch, seed)


def _of_generated(nodes: int, global_batch: int, seed: int) -> Iterator[SeedBatch]:
    from cuda_ops.extras.sampling.generated import generated

    return seed_batches(generated(nodes), global_batch, seed)
