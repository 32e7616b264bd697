"""A batch of clouds as the graph's inputs: prepared when they are asked for, micro-batch by micro-batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from cuda_ops.sparse.preparation import Clouds, Preparation
from cuda_ops.sparse.recipe import HALVES
from planner.ir.errors import UnsupportedModelError
from planner.ir.graph import SAMPLE, Graph, TensorSpec
from planner.ir.plan import Decision
from planner.sites.prices import Prices, prices
from runtime.batch import Batch, Shapes
from runtime.sites.arranged import ArrangedClouds
from runtime.sites.faults import telling

POINTS = "points"
"""The dim of a user's tensors that holds the points of a sample, padded to those of the largest."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """How a model's inputs are prepared.

    Attributes:
        graph: whose inputs they are.
        names: by graph input, the name that the preparation has for it.
        raw: the tensors that a user's batch has, samples first, by name.
        looked_at: graph inputs that layers other than convolutions and poolings read, maps among them.
    """

    graph: Graph
    preparation: Preparation
    names: dict[str, str]
    raw: dict[str, TensorSpec]
    looked_at: frozenset[str]

    @classmethod
    def of(cls, graph: Graph, preparation: Preparation, raw: dict[str, TensorSpec]) -> Prepared:
        """The graph's inputs are in the preparation's order."""
        looked_at = {name for layer in graph.layers if layer.kind not in _MAPPED for name in layer.inputs}
        names = dict(zip(graph.inputs, preparation.names, strict=True))
        return cls(graph, preparation, names, raw, frozenset(looked_at.intersection(graph.inputs)))

    @property
    def maps(self) -> frozenset[str]:
        """The graph inputs that are half of a kernel map."""
        return frozenset(name for name, own in self.names.items() if own.startswith(HALVES))


_MAPPED = frozenset({"sparse_conv", "sparse_pool"})


class PreparedBatch:
    """``raw`` as the graph's inputs.

    Args:
        speeds: of the ranks that share out sites in the largest stage; empty: no stage does, rows stay sorted.
    """

    def __init__(self, raw: Batch, prepared: Prepared, price: Prices, speeds: Sequence[float] = ()) -> None:
        self.rows = raw.rows
        self.prepared = prepared
        self._raw, self._price, self._speeds = raw, price, tuple(speeds)
        self._clouds: dict[int, Clouds | ArrangedClouds] = {}
        self._made: dict[tuple[int, str], Tensor] = {}

    @property
    def neighbours(self) -> frozenset[str]:
        """The graph inputs that layers take as a map's neighbours."""
        return frozenset(self._price.pair)

    def clouds(self, microbatch: int) -> Clouds | ArrangedClouds:
        """The clouds of a micro-batch, arranged if some stage shares out sites."""
        found = self._clouds.get(microbatch)
        if found is None:
            rows = self.rows[microbatch]
            tensors = [self._raw.part(name, microbatch, 0, rows) for name in self.prepared.raw]
            with telling(microbatch):
                clouds = self.prepared.preparation.clouds(tensors)
            found = ArrangedClouds(clouds, self.prepared.names, self._price, self._speeds) if self._speeds else clouds
            self._clouds[microbatch] = found
        return found

    def sizes(self, microbatch: int) -> dict[str, int]:
        """Sites of each site set of a micro-batch, by the name of the number."""
        return self.clouds(microbatch).sizes

    def graph(self, microbatch: int) -> Graph:
        """The graph in the shapes of a micro-batch."""
        return graph_of_sites(self.prepared.graph, self.rows[microbatch], self.sizes(microbatch))

    def shapes(self, microbatch: int) -> Shapes:
        graph, sizes, rows = self.prepared.graph, self.sizes(microbatch), self.rows[microbatch]
        return {name: _at(spec, rows, graph.samples, sizes).shape for name, spec in graph.inputs.items()}

    def whole(self, name: str, microbatch: int) -> Tensor:
        """A graph input of all samples."""
        found = self._made.get((microbatch, name))
        if found is None:
            with telling(microbatch):
                found = self.clouds(microbatch).tensor(self.prepared.names[name])
            dtype = getattr(torch, self.prepared.graph.inputs[name].dtype)
            found = self._made[microbatch, name] = found.to(dtype)
        return found

    def part(self, name: str, microbatch: int, start: int, count: int) -> Tensor:
        found = self.whole(name, microbatch)
        spec = self.prepared.graph.inputs[name]
        return found if spec.has_sites else found[start : start + count]


@dataclass(frozen=True, slots=True)
class Preparing:
    """Prepares the batches of a run.

    Attributes:
        speeds: shares of the ranks of the largest stage that shares out sites; empty: there is none.
    """

    prepared: Prepared
    price: Prices
    speeds: tuple[float, ...]

    @classmethod
    def of(cls, decision: Decision, model: SparseModel) -> Preparing | None:
        """For a plan of a model; None where the model takes batches as they are."""
        prepared = model.prepared
        if prepared is None:
            return None
        found = [site_speeds(decision, stage) for stage in range(len(decision.stages))]
        return cls(prepared, prices(prepared.graph), max(found, key=len, default=()))

    def batch(self, raw: Batch) -> PreparedBatch:
        """``raw`` as the graph's inputs."""
        return PreparedBatch(raw, self.prepared, self.price, self.speeds)


class SparseModel(Protocol):
    """A captured model that may be of a sparse network."""

    @property
    def prepared(self) -> Prepared | None:
        """None: it is not."""
        ...


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


def graph_of_sites(graph: Graph, rows: int, sizes: dict[str, int]) -> Graph:
    """``graph`` for ``rows`` samples that have ``sizes`` sites."""

    @cache  # most layers of a level make tensors alike
    def at(spec: TensorSpec) -> TensorSpec:
        return _at(spec, rows, graph.samples, sizes)

    layers = tuple(replace(layer, outputs=tuple(map(at, layer.outputs))) for layer in graph.layers)
    inputs = {name: at(spec) for name, spec in graph.inputs.items()}
    return replace(graph, samples=rows, inputs=inputs, layers=layers)


def _at(spec: TensorSpec, rows: int, captured: int, sizes: dict[str, int]) -> TensorSpec:
    found = spec.at(rows, captured)
    shape = tuple(sizes.get(dim, extent) for dim, extent in zip(found.dims, found.shape, strict=True))
    return found if shape == found.shape else replace(found, shape=shape)
