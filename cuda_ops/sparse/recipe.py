"""What a sparse network asks of its geometry, noted once; made for any batch of clouds, ahead of the features.

Site sets and maps follow from coordinates alone.  A network is run once on a :class:`Recorder`; the :class:`Recipe` it
leaves says which maps and segments its layers read.  ``Recipe.prepare`` makes them for other clouds, on the host and
ahead of the features, and :class:`PreparedNetwork` is the network as a function of tensors only: what it reads of the
geometry are its inputs, so that no size in its graph depends on data.

    recipe = record(network, example, network)                       run once
    tensors = recipe.prepare(geometry)                               of each batch of clouds, by ``recipe.names``
    PreparedNetwork(network, recipe)(lengths, features, *tensors)    equals network(SparseTensor(features, coordinates))
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from cuda_ops.sparse.errors import SparseInputError
from cuda_ops.sparse.geometry import BuiltGeometry, CellGrid, KernelMap, MapSpec, Segments, SiteRoute
from cuda_ops.sparse.nn.tensor import SparseTensor

K = TypeVar("K")
V = TypeVar("V")
HALVES = ("neighbours", "reverse")
"""The two tensors of a kernel map."""
CELLS = "cells"


class Maker(Protocol):
    """Makes maps and segments of one batch of clouds."""

    def map(self, spec: MapSpec) -> KernelMap:
        """The map ``spec``."""

    def segments(self, route: SiteRoute) -> Segments:
        """Where each sample's rows are in a site set."""

    def cells(self, grid: CellGrid) -> Tensor:
        """int64 (sites,): the cell of each site in its sample's grid."""


@dataclass(frozen=True, slots=True)
class Passage:
    """A kernel map, in the direction in which a layer goes through it: an inverse convolution goes back.

    Attributes:
        source, target: the site sets that are read and made.
    """

    kernel_map: KernelMap
    source: SiteRoute
    target: SiteRoute


@dataclass(frozen=True, slots=True)
class Recipe:
    """Maps and segments that a network's layers read, in the order in which it first asked for them.

    Attributes:
        maps: kernel maps; of a map and its inverse the one that was asked for first.
        segments: site sets whose rows by sample are read.
        grids: dense grids whose cells are read.
    """

    maps: tuple[MapSpec, ...]
    segments: tuple[SiteRoute, ...]
    grids: tuple[CellGrid, ...] = ()

    @property
    def routes(self) -> tuple[SiteRoute, ...]:
        """The site sets, the input's first; each after those that lead to it."""
        asked = [route for spec in self.maps for route in (spec.source, spec.target)]
        asked += [*self.segments, *(grid.route for grid in self.grids)]
        return tuple(dict.fromkeys(passed for route in [(), *asked] for passed in _on_the_way(route)))

    @property
    def names(self) -> tuple[str, ...]:
        """Of the tensors that :meth:`prepare` makes, in order."""
        maps = (f"{part}_{index}" for index in range(len(self.maps)) for part in HALVES)
        segments = (f"{part}_{index}" for index in range(len(self.segments)) for part in ("starts", "lengths"))
        return (*maps, *segments, *(f"{CELLS}_{index}" for index in range(len(self.grids))))

    @property
    def sites(self) -> dict[str, Mapping[int, SiteRoute]]:
        """By the name of a tensor, which of its dims hold the sites of which set."""
        by_name: dict[str, Mapping[int, SiteRoute]] = {name: {} for name in self.names}
        for index, spec in enumerate(self.maps):
            by_name[f"neighbours_{index}"] = {1: spec.target}
            by_name[f"reverse_{index}"] = {1: spec.source}
        for index, grid in enumerate(self.grids):
            by_name[f"{CELLS}_{index}"] = {0: grid.route}
        return by_name

    def prepare(self, geometry: Maker) -> dict[str, Tensor]:
        """The tensors of ``names`` for one batch of clouds."""
        return {name: self.tensor(geometry, name) for name in self.names}

    def tensor(self, geometry: Maker, name: str) -> Tensor:
        """The tensor ``name`` for one batch of clouds."""
        what, index = _parted(name)
        if what == CELLS:
            return geometry.cells(self.grids[index])
        field: Tensor = getattr(
            geometry.map(self.maps[index]) if what in HALVES else geometry.segments(self.segments[index]), what
        )
        return field

    def segments_of(self, name: str) -> SiteRoute:
        """The site set whose rows by sample the tensor ``name`` is about."""
        return self.segments[_parted(name)[1]]

    def passage(self, geometry: Maker, name: str) -> Passage | None:
        """What a layer goes through that takes the tensor ``name`` as neighbours; None if that is no half of a map."""
        what, index = _parted(name)
        if what not in HALVES:
            return None
        spec = self.maps[index]
        kernel_map = geometry.map(spec)
        if what == "neighbours":
            return Passage(kernel_map, spec.source, spec.target)
        return Passage(kernel_map.inverse(), spec.target, spec.source)


class Recorder:
    """A geometry that notes what it is asked for."""

    def __init__(self, geometry: BuiltGeometry) -> None:
        self._geometry = geometry
        self._maps: dict[MapSpec, None] = {}
        self._segments: dict[SiteRoute, None] = {}
        self._grids: dict[CellGrid, None] = {}

    @property
    def num_samples(self) -> int:
        return self._geometry.num_samples

    @property
    def recipe(self) -> Recipe:
        """What was asked for so far."""
        return Recipe(tuple(self._maps), tuple(self._segments), tuple(self._grids))

    def num_sites(self, route: SiteRoute) -> int:
        return self._geometry.num_sites(route)

    def coordinates(self, route: SiteRoute) -> Tensor:
        return self._geometry.coordinates(route)

    def map(self, spec: MapSpec) -> KernelMap:
        self._maps[spec] = None
        return self._geometry.map(spec)

    def segments(self, route: SiteRoute) -> Segments:
        self._segments[route] = None
        return self._geometry.segments(route)

    def cells(self, grid: CellGrid) -> Tensor:
        self._grids[grid] = None
        return self._geometry.cells(grid)


class GivenGeometry:
    """A geometry whose maps are given, tensor by tensor, as a recipe names them.

    Args:
        num_sites: of the input.
        num_samples: clouds in the batch.
    """

    def __init__(self, recipe: Recipe, tensors: Mapping[str, Tensor], num_sites: int, num_samples: int) -> None:
        self._num_samples = num_samples
        self._maps = {
            spec: KernelMap(tensors[f"neighbours_{index}"], tensors[f"reverse_{index}"])
            for index, spec in enumerate(recipe.maps)
        }
        self._segments = {
            route: Segments(tensors[f"starts_{index}"], tensors[f"lengths_{index}"])
            for index, route in enumerate(recipe.segments)
        }
        self._cells = {grid: tensors[f"{CELLS}_{index}"] for index, grid in enumerate(recipe.grids)}
        self._sites: dict[SiteRoute, int] = {(): num_sites}
        for spec, kernel_map in self._maps.items():
            self._sites.setdefault(spec.source, kernel_map.num_inputs)
            self._sites.setdefault(spec.target, kernel_map.num_outputs)

    @property
    def num_samples(self) -> int:
        return self._num_samples

    def num_sites(self, route: SiteRoute) -> int:
        return self._sites[route]

    def coordinates(self, route: SiteRoute) -> Tensor:
        raise SparseInputError(
            "coordinates in a prepared network",
            where="SparseTensor.coords",
            actual="a layer that reads them",
            expected="layers that read features and maps alone",
            remedy="make features of coordinates, and voxels of points, before the network",
        )

    def map(self, spec: MapSpec) -> KernelMap:
        return self._of(self._maps, spec)

    def segments(self, route: SiteRoute) -> Segments:
        return self._of(self._segments, route)

    def cells(self, grid: CellGrid) -> Tensor:
        return self._of(self._cells, grid)

    def _of(self, recorded: Mapping[K, V], asked: K) -> V:
        if asked not in recorded:
            raise SparseInputError(
                "a map that was not recorded",
                where="prepared network",
                actual=asked,
                expected=f"one of {len(self._maps)} maps and {len(self._segments)} site sets",
                remedy="a network whose layers do not depend on the data",
            )
        return recorded[asked]


class PreparedNetwork(nn.Module):
    """A sparse network as a function of features and of what a recipe prepares; its parameters keep their names.

    ``forward(lengths, features, *tensors)``: ``lengths`` (samples,), the sites of each cloud, ``features`` (sites,
    channels) in the geometry's order, ``tensors`` as ``recipe.names`` says.
    """

    user_module: nn.Module

    def __init__(self, network: nn.Module, recipe: Recipe) -> None:
        super().__init__()
        self.recipe = recipe
        object.__setattr__(self, "user_module", network)  # not registered: names stay those of the network
        for shared in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            object.__setattr__(self, shared, getattr(network, shared))  # one and the same, also when moved or cast

    def forward(self, lengths: Tensor, features: Tensor, *tensors: Tensor) -> Any:
        """See the class."""
        by_name = dict(zip(self.recipe.names, tensors, strict=True))
        geometry = GivenGeometry(self.recipe, by_name, features.shape[0], lengths.shape[0])
        return self.user_module(SparseTensor.on(geometry, features))

    def train(self, mode: bool = True) -> PreparedNetwork:
        """Training mode, of the network as well."""
        super().train(mode)
        self.user_module.training = mode
        return self


def record(function: Callable[[SparseTensor], Any], example: SparseTensor, network: nn.Module) -> Recipe:
    """What ``function`` asks for, by running it once on ``example``; random state stays as it is.

    Args:
        function: ``network``, or what also computes a loss.
        network: whose buffers stay as they are.

    Raises:
        SparseInputError: the example is no input of a network, but what a layer made.
    """
    if example.route or not isinstance(example.geometry, BuiltGeometry):
        raise SparseInputError(
            "what a network is recorded on",
            where="record",
            actual=f"a tensor after {len(example.route)} steps",
            expected="the network's input",
            remedy="give SparseTensor(features, coordinates)",
        )
    recorder = Recorder(example.geometry)
    buffers = list(network.buffers())
    before = [buffer.clone() for buffer in buffers]
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        function(SparseTensor.on(recorder, example.feats))
        for buffer, value in zip(buffers, before, strict=True):
            buffer.copy_(value)
    return recorder.recipe


def _on_the_way(route: SiteRoute) -> Iterator[SiteRoute]:
    """The site sets that lead to one, and itself."""
    for stop in range(len(route) + 1):
        if stop and route[stop - 1].kind == "joined":
            yield from _on_the_way(route[stop - 1].other)
        yield route[:stop]


def _parted(name: str) -> tuple[str, int]:
    """What a tensor is, and its place in the recipe."""
    what, _, number = name.rpartition("_")
    return what, int(number) if number.isdigit() else -1
