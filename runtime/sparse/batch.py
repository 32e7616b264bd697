"""A batch of clouds as the graph's inputs: prepared when they are asked for, micro-batch by micro-batch.

What is wrong with a user's clouds, told as an error of the run.

A micro-batch of clouds whose rows, on every level, are in one order that any stage may cut into intervals.

Sites come sorted by their keys.  Where some stage has several ranks, the rows of all site sets follow the order of the
blocks that they lie in (:mod:`planner.sites.arrangement`): the rank of a site is then the same function of its
coordinates on every level, and what a rank has of a tensor is an interval of its rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from cuda_ops.preparation import InputPreparation
from cuda_ops.sparse.errors import SparseInputError
from cuda_ops.sparse.geometry import CellGrid, KernelMap, MapSpec, Segments, SiteRoute
from cuda_ops.sparse.local import Owned, local_segments
from cuda_ops.sparse.preparation import SITES, Clouds, Preparation
from cuda_ops.sparse.recipe import HALVES
from planner.ir.errors import StageFailedError, UnsupportedModelError
from planner.ir.graph import SAMPLE, Graph, TensorSpec, spec_of_sites
from planner.ir.plan import Decision
from planner.layers import MAPPED
from planner.sites.arrangement import Arrangement, arrange, cut_places
from planner.sites.keys import block_keys
from planner.sites.prices import NeighbourPairs, SitePrices, network_work
from planner.sites.work import BlockWork, SiteLevel
from runtime.pipeline.microbatches import Batch, InputShapes


@contextmanager
def telling(microbatch: int) -> Iterator[None]:
    """Raises :class:`StageFailedError` for clouds of a micro-batch that cannot be used."""
    try:
        yield
    except SparseInputError as error:
        raise StageFailedError(
            f"clouds of micro-batch {microbatch}: {error.what}",
            [f"{error.where}: found {error.found}, expected {error.expected}"],
            [error.remedy],
        ) from error


class ArrangedClouds:
    """``clouds`` with rows in the order of blocks.

    Args:
        names: by graph input, the name that the preparation has for it.
        price: what the blocks are balanced by.
        speeds: of the ranks of the stage that whole samples should suit best.
    """

    def __init__(self, clouds: Clouds, names: Mapping[str, str], price: SitePrices, speeds: Sequence[float]) -> None:
        self.clouds = clouds
        self._levels = {route: SiteLevel(*clouds.level(route)) for route in clouds.preparation.size_of}
        self._arrangement: Arrangement = arrange(self._work(names, price), speeds)
        self._orders: dict[SiteRoute, tuple[Tensor, Tensor, Tensor]] = {}
        self._maps: dict[MapSpec, KernelMap] = {}

    @property
    def sizes(self) -> dict[str, int]:
        """See :class:`Clouds`."""
        return self.clouds.sizes

    def places(self, speeds: Sequence[float]) -> list[int]:
        """Where ranks of ``speeds`` cut the order of blocks."""
        return cut_places(self._arrangement, speeds)

    def cut_points(self, places: Sequence[int]) -> dict[str, tuple[int, ...]]:
        """The cut points among the rows of every site set, by the name of its size."""
        at = torch.tensor(list(places))
        return {
            word: tuple(torch.searchsorted(self._order(route)[1], at).tolist())
            for route, word in self.clouds.preparation.size_of.items()
        }

    def owned(self, route: SiteRoute, places: Sequence[int], position: int) -> Owned:
        """What the rank at ``position`` owns of a site set, in rows of ``clouds``' own maps."""
        order, blocks, _ = self._order(route)
        cuts = torch.tensor(list(places), dtype=torch.int64)
        start, stop = torch.searchsorted(blocks, cuts[position : position + 2]).tolist()
        owners = torch.empty(len(order), dtype=torch.int16)
        owners[order] = torch.searchsorted(cuts[1:-1], blocks, right=True).to(torch.int16)
        return Owned(owners, position, order[start:stop])

    def samples(self, route: SiteRoute) -> Tensor:
        """int64 (sites,): the sample of each row."""
        return self.sorted_samples(route)[self._order(route)[0]]

    def map(self, spec: MapSpec) -> KernelMap:
        """See :class:`Clouds`."""
        arranged = self._maps.get(spec)
        if arranged is None:
            source, _, row_of_source = self._order(spec.source)
            target, _, row_of_target = self._order(spec.target)
            kernel_map = self.clouds.map(spec)
            neighbours = _renumbered(kernel_map.neighbours, target, row_of_source)
            reverse = _renumbered(kernel_map.reverse, source, row_of_target)
            arranged = self._maps[spec] = KernelMap(neighbours, reverse)
        return arranged

    def segments(self, route: SiteRoute) -> Segments:
        """See :class:`Clouds`."""
        return local_segments(self.samples(route), self.clouds.num_samples)

    def cells(self, grid: CellGrid) -> Tensor:
        """See :class:`Clouds`."""
        return self.clouds.cells(grid)[self._order(grid.route)[0]]

    def tensor(self, name: str) -> Tensor:
        """See :class:`Clouds`."""
        preparation = self.clouds.preparation
        if name in preparation.recipe.names:
            return preparation.recipe.tensor(self, name)
        rows = self.clouds.tensor(name)
        return rows[self._order(())[0]] if (name, 0) in preparation.varying[SITES] else rows

    def _work(self, names: Mapping[str, str], price: SitePrices) -> BlockWork:
        size_of = self.clouds.preparation.size_of
        recipe = self.clouds.preparation.recipe
        pairs = {}
        for name in price.pair:
            passage = recipe.passage(self.clouds, names[name])
            if passage is not None:
                counts = passage.kernel_map.pairs_of_inputs().numpy(), passage.kernel_map.pairs_of_outputs().numpy()
                pairs[name] = NeighbourPairs(size_of[passage.source], size_of[passage.target], *counts)
        levels = {word: self._levels[route] for route, word in size_of.items()}
        return network_work(levels, pairs, price)

    def _order(self, route: SiteRoute) -> tuple[Tensor, Tensor, Tensor]:
        """Of a site set: the sorted row of each row, its block's place, and the row of -1 and of each sorted row."""
        cached = self._orders.get(route)
        if cached is None:
            level = self._levels[route]
            blocks = torch.from_numpy(block_keys(level.samples, level.coordinates, level.stride))
            place = self._place_of(blocks)
            order = place.argsort(stable=True)
            rows = torch.full((len(order) + 1,), -1, dtype=torch.int32)
            rows[order + 1] = torch.arange(len(order), dtype=torch.int32)
            cached = self._orders[route] = order, place[order], rows
        return cached

    @cached_property
    def _place_of(self) -> Callable[[Tensor], Tensor]:
        keys = torch.from_numpy(self._arrangement.keys.copy())
        ascending, place = keys.sort()
        return lambda blocks: place[torch.searchsorted(ascending, blocks)]

    def sorted_samples(self, route: SiteRoute) -> Tensor:
        """int64 (sites,): the sample of each row of ``clouds``."""
        return torch.from_numpy(self._levels[route].samples)


def _renumbered(half: Tensor, columns: Tensor, rows: Tensor) -> Tensor:
    """Columns of one half of a map, with the numbers that ``rows`` has for -1 and each row."""
    chosen = half.index_select(1, columns)
    return rows.index_select(0, chosen.flatten() + 1).view(chosen.shape)


@dataclass(frozen=True, slots=True)
class PreparedInputs:
    """How a model's inputs are prepared.

    Attributes:
        graph: whose inputs they are.
        names: by graph input, the name that the preparation has for it.
        raw: the tensors that a user's batch has, samples first, by name.
        looked_at: graph inputs that layers other than convolutions and poolings read, maps among them.
    """

    graph: Graph
    preparation: InputPreparation
    names: dict[str, str]
    raw: dict[str, TensorSpec]
    looked_at: frozenset[str]

    @classmethod
    def of(cls, graph: Graph, preparation: InputPreparation, raw: dict[str, TensorSpec]) -> PreparedInputs:
        """The graph's inputs are in the preparation's order."""
        looked_at = {name for layer in graph.layers if layer.kind not in MAPPED for name in layer.inputs}
        names = dict(zip(graph.inputs, preparation.names, strict=True))
        return cls(graph, preparation, names, raw, frozenset(looked_at.intersection(graph.inputs)))

    @property
    def of_clouds(self) -> Preparation:
        """The preparation of a sparse network."""
        return cast("Preparation", self.preparation)

    @property
    def maps(self) -> frozenset[str]:
        """The graph inputs that are half of a kernel map."""
        return frozenset(name for name, own in self.names.items() if own.startswith(HALVES))


class AnyShare(Protocol):
    """What one rank of a stage of several has of a micro-batch.

    Attributes:
        shares: samples of each rank of the stage, by position.
        sizes: this rank's rows of each set, by the name of the number.
        cuts: the cut points of all ranks among the rows of each set, by the name of its number.
    """

    shares: tuple[int, ...]

    @property
    def sizes(self) -> dict[str, int]: ...

    @property
    def cuts(self) -> dict[str, tuple[int, ...]]: ...

    def tensor(self, name: str) -> Tensor:
        """This rank's part of a graph input."""


class SizedBatch(ABC):
    """The micro-batches of a step as the graph's inputs, whose sites, or sampled nodes, are counted first."""

    def __init__(self, raw: Batch, prepared: PreparedInputs) -> None:
        self.raw = raw
        self.rows = raw.rows
        self.prepared = prepared

    @abstractmethod
    def sizes(self, microbatch: int) -> dict[str, int]:
        """Rows of each set of a micro-batch, by the name of the number."""

    @abstractmethod
    def whole(self, name: str, microbatch: int) -> Tensor:
        """A graph input of all samples."""

    @abstractmethod
    def part(self, name: str, microbatch: int, start: int, count: int) -> Tensor:
        """See :class:`runtime.pipeline.microbatches.Batch`."""

    def shapes(self, microbatch: int) -> InputShapes:
        graph = self.prepared.graph
        sizes = self.sizes(microbatch)
        rows = self.rows[microbatch]
        return {name: spec_of_sites(spec, rows, graph.samples, sizes).shape for name, spec in graph.inputs.items()}


class SeparateBatch(SizedBatch):
    """One whose ranks prepare what they run, and cut the samples as suits what each of them needs."""

    @abstractmethod
    def share(self, microbatch: int, speeds: tuple[float, ...], position: int) -> AnyShare:
        """What the rank at ``position``, of ranks of ``speeds``, has."""


class PreparedBatch(SizedBatch):
    """``raw`` as the graph's inputs.

    Args:
        speeds: of the ranks that share out sites in the largest stage; empty: no stage does, rows stay sorted.

    Attributes:
        shares: by stage and micro-batch, a rank's share of sites that was made ahead; whoever binds the batch takes
            it away (:func:`runtime.sparse.share.share_of`), as it refers to the batch.
    """

    def __init__(self, raw: Batch, prepared: PreparedInputs, price: SitePrices, speeds: Sequence[float] = ()) -> None:
        super().__init__(raw, prepared)
        self._price = price
        self._speeds = tuple(speeds)
        self._clouds: dict[int, Clouds | ArrangedClouds] = {}
        self._made: dict[tuple[int, str], Tensor] = {}
        self.shares: dict[tuple[int, int], Any] = {}

    @property
    def neighbours(self) -> frozenset[str]:
        """The graph inputs that layers take as a map's neighbours."""
        return frozenset(self._price.pair)

    def clouds(self, microbatch: int) -> Clouds | ArrangedClouds:
        """The clouds of a micro-batch, arranged if some stage shares out sites."""
        cached = self._clouds.get(microbatch)
        if cached is None:
            rows = self.rows[microbatch]
            tensors = [self.raw.part(name, microbatch, 0, rows) for name in self.prepared.raw]
            with telling(microbatch):
                clouds = self.prepared.of_clouds.clouds(tensors)
            cached = ArrangedClouds(clouds, self.prepared.names, self._price, self._speeds) if self._speeds else clouds
            self._clouds[microbatch] = cached
        return cached

    def sizes(self, microbatch: int) -> dict[str, int]:
        return self.clouds(microbatch).sizes

    def whole(self, name: str, microbatch: int) -> Tensor:
        tensor = self._made.get((microbatch, name))
        if tensor is None:
            with telling(microbatch):
                tensor = self.clouds(microbatch).tensor(self.prepared.names[name])
            dtype = getattr(torch, self.prepared.graph.inputs[name].dtype)
            tensor = self._made[microbatch, name] = tensor.to(dtype)
        return tensor

    def part(self, name: str, microbatch: int, start: int, count: int) -> Tensor:
        tensor = self.whole(name, microbatch)
        spec = self.prepared.graph.inputs[name]
        return tensor if spec.has_sites else tensor[start : start + count]


def site_speeds(decision: Decision, stage: int) -> tuple[float, ...]:
    """The shares of the work that the ranks of a stage take: those of the samples; empty for one rank."""
    if len(decision.stages[stage].ranks) == 1:
        return ()
    points = decision.layout_of(stage).cuts.get(SAMPLE)
    if points is None:
        raise UnsupportedModelError(
            f"stage {stage} does not share out samples or sites", [f"it has {len(decision.stages[stage].ranks)} ranks"]
        )
    return tuple(float(stop - start) for start, stop in pairwise(points))
