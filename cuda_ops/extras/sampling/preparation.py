"""From a batch of seeds to what a graph network is given: its blocks are inputs of its graph, made ahead.

A batch has samples first:

    seeds    int64 (samples,)     nodes
    draws    int64 (samples,)     the number of the draw, the same for all: the step, as data sources give it
    targets  (samples, ...)

and becomes ``seed_rows`` (samples,), ``features`` (sites, channels), by layer ``edges_1`` (2, edges) and ``targets_1``
(sites_1,), and so on; the targets of the last layer are ``seed_rows``.  Numbers of rows and edges are sizes that vary,
named as those of sparse tensors are, since they are planned, cut and sent alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from cuda_ops.extras.sampling.graph import GraphError
from cuda_ops.extras.sampling.sampler import Block, NeighbourSampler, SampledLevels, joined
from cuda_ops.preparation import SeparatePreparation
from cuda_ops.sparse.recipe import PreparedNetwork

SITES = "sites"


@dataclass(frozen=True, slots=True)
class SampledPreparation(SeparatePreparation):
    """How a graph network's inputs are made of seeds.

    Attributes:
        per_site: of each target, that it is one a seed.
        casts: what features are cast to, by the dtype that the graph has them in; others stay as they are.
    """

    raw_names: ClassVar = ("seeds", "draws")
    without_samples: ClassVar = ("features", "edges_", "targets_")
    indices: ClassVar = ("edges_", "targets_", "seed_rows")

    sampler: NeighbourSampler
    per_site: tuple[bool, ...] = ()
    casts: Mapping[torch.dtype, torch.dtype] = field(default_factory=dict)

    @property
    def num_layers(self) -> int:
        """Of the network: one a block."""
        return len(self.sampler.fanouts)

    @property
    def input_names(self) -> tuple[str, ...]:
        blocks = [f"{what}_{layer}" for layer in range(1, self.num_layers + 1) for what in ("edges", "targets")]
        return ("seed_rows", "features", *blocks[:-1])

    def words(self) -> dict[str, int | tuple[int, int]]:
        """By the name of a size, the level whose rows it counts; of edges (layer,) as (layer, 0)."""
        levels: dict[str, int | tuple[int, int]] = {
            SITES if not level else f"{SITES}_{level}": level for level in range(self.num_layers)
        }
        return {**levels, **{f"{SITES}_edges_{layer}": (layer, 0) for layer in range(1, self.num_layers + 1)}}

    @property
    def varying(self) -> dict[str, list[tuple[str, int]]]:
        by_size = {SITES: [("features", 0)]}
        by_size |= {f"{SITES}_{level}": [(f"targets_{level}", 0)] for level in range(1, self.num_layers)}
        return by_size | {f"{SITES}_edges_{layer}": [(f"edges_{layer}", 1)] for layer in range(1, self.num_layers + 1)}

    def sizes(self, levels: SampledLevels) -> dict[str, int]:
        """By name, of what was sampled."""
        return {
            word: levels.sizes[at] if isinstance(at, int) else levels.blocks[at[0] - 1][0].shape[1]
            for word, at in self.words().items()
        }

    def tensor(self, levels: SampledLevels, name: str) -> Tensor:
        """A prepared input of what was sampled."""
        what, _, number = name.rpartition("_")
        if name == "features":
            features = self.sampler.features(levels.nodes)
            return features.to(self.casts.get(features.dtype, features.dtype))
        if name == "seed_rows":
            return torch.from_numpy(levels.blocks[-1][1])
        return torch.from_numpy(levels.blocks[int(number) - 1][0 if what == "edges" else 1])

    def prepared(self, raw: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return (*self._inputs(self._levels(raw)), *raw[2:])

    def side_by_side(self, parts: Sequence[Sequence[Tensor]]) -> list[tuple[Tensor, ...]]:
        """The rows of one part are none of another's, though they be the same nodes."""
        alone = [self._levels(part) for part in parts]
        return [self._inputs(levels) for levels in (joined(alone), *alone)]

    def of_fewer(self, raw: tuple[Tensor, ...], divisor: int) -> tuple[SampledPreparation, tuple[Tensor, ...]]:
        """With a part of the neighbours, at least one of each node."""
        fewer = [-1 if fanout < 0 else -(-fanout // divisor) for fanout in self.sampler.fanouts]
        return replace(self, sampler=self.sampler.with_fanouts(fewer)), raw

    def cast(self, casts: Mapping[torch.dtype, torch.dtype]) -> SampledPreparation:
        """With features of those dtypes cast."""
        return replace(self, casts=casts)

    def _levels(self, raw: Sequence[Tensor]) -> SampledLevels:
        return self.sampler.levels(raw[0].numpy(), draw_of(raw[1]))

    def _inputs(self, levels: SampledLevels) -> tuple[Tensor, ...]:
        return tuple(self.tensor(levels, name) for name in self.input_names)


def draw_of(draws: Tensor) -> int:
    """The number of a batch's draw.

    Raises:
        GraphError: its samples say different ones.
    """
    if not len(draws):
        return 0
    first = int(draws[0])
    if bool((draws != first).any()):
        raise GraphError(
            f"draws {first} and {int(draws[draws != first][0])} in one micro-batch: all of a batch are one"
        )
    return first


class PreparedGraphNetwork(PreparedNetwork):
    """A graph network as a function of tensors, ``forward(seed_rows, features, edges_1, targets_1, ..., edges_L)``."""

    def __init__(self, network: nn.Module, recipe: Any = None) -> None:
        super().__init__(network, recipe)

    def forward(self, seed_rows: Tensor, features: Tensor, *blocks: Tensor) -> Any:
        """See the class."""
        flat = (*blocks, seed_rows)
        pairs = zip(flat[::2], flat[1::2], strict=True)
        return self.user_module(features, [Block(edge_index, targets) for edge_index, targets in pairs])
