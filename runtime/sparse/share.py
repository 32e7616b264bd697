"""One rank's share of the sites of a micro-batch, in a stage of several ranks: what it is fed, and what it lends."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, Protocol, Self, TypeVar

import torch
from torch import Tensor

from cuda_ops.sparse.geometry import Segments, SiteRoute
from cuda_ops.sparse.local import LocalMap, Owned, local_map, local_segments
from planner.ir.graph import SAMPLE, is_sites
from planner.ir.layout import Layout
from planner.ir.plan import Decision
from planner.layers.boundary import Boundaries
from runtime.pipeline.routing import CPU
from runtime.sparse.batch import AnyShare, ArrangedClouds, PreparedBatch, SeparateBatch, site_speeds


class _Movable(Protocol):
    def to(self, device: torch.device) -> Self:
        """The same on a device."""


M = TypeVar("M", bound=_Movable)


class SiteShare:
    """The share of the rank at ``position``; maps are made when they are first asked for.

    Args:
        clouds: the micro-batch, in the order that ranks cut.
        places: where the stage's ranks cut the order of blocks.
        shares: samples that each rank goes on with after a reduction over sites, by position.

    Attributes:
        shares: as given.
        sizes: this rank's sites of each site set, by the name of the number.
    """

    def __init__(
        self,
        batch: PreparedBatch,
        microbatch: int,
        clouds: ArrangedClouds,
        places: Sequence[int],
        position: int,
        shares: tuple[int, ...],
    ) -> None:
        self._batch = batch
        self._microbatch = microbatch
        self._clouds = clouds
        self._places = tuple(places)
        self._position = position
        self.shares = shares
        self.cuts = clouds.cut_points(places)
        self.sizes = {word: points[position + 1] - points[position] for word, points in self.cuts.items()}
        self._made: dict[tuple[str, torch.device], Any] = {}
        self._of_sets: dict[SiteRoute, Owned] = {}

    @classmethod
    def of(
        cls, batch: PreparedBatch, microbatch: int, speeds: Sequence[float], position: int, shares: tuple[int, ...]
    ) -> SiteShare:
        """The share of one of ranks of ``speeds``."""
        clouds = batch.clouds(microbatch)
        if not isinstance(clouds, ArrangedClouds):
            raise ValueError("sites are shared out of clouds that are arranged")
        return cls(batch, microbatch, clouds, clouds.places(speeds), position, shares)

    def map(self, name: str, device: torch.device = CPU) -> LocalMap:
        """This rank's part of the kernel map of which a layer takes the graph input ``name`` as neighbours.

        Where that input is the reverse of a map, the layer goes back through it (an inverse convolution).
        """
        return self._at(self._map, name, device)

    def segments(self, name: str, device: torch.device = CPU) -> Segments:
        """Where each sample's rows are among this rank's, for the graph input ``name`` that holds the starts."""
        return self._at(self._segments, name, device)

    def tensor(self, name: str) -> Tensor:
        """This rank's part of a graph input.

        Of a kernel map nothing: layers over shared sites ask :meth:`map`.  Only where some other layer looks at a map
        (whether a neighbour is there) has it this rank's columns, of rows numbered in the whole micro-batch.
        """
        prepared = self._batch.prepared
        if name in self._batch.neighbours:
            self.map(name)  # it is time to make it
        if name in prepared.maps and name not in prepared.looked_at:
            return torch.empty(0, dtype=torch.int32)
        whole = self._batch.whole(name, self._microbatch)
        spec = prepared.graph.inputs[name]
        for dim, word in enumerate(spec.dims):
            if is_sites(word):
                start, stop = self.cuts[word][self._position : self._position + 2]
                return whole.narrow(dim, start, stop - start)
        start = list(accumulate(self.shares, initial=0))[self._position]
        return whole[start : start + self.shares[self._position]]

    def _at(self, make: Callable[[str], M], name: str, device: torch.device) -> M:
        made: M | None = self._made.get((name, device))
        if made is None:
            made = make(name) if device == CPU else self._at(make, name, CPU).to(device)
            self._made[name, device] = made
        return made

    def _map(self, name: str) -> LocalMap:
        prepared = self._batch.prepared
        passage = prepared.of_clouds.recipe.passage(self._clouds.clouds, prepared.names[name])
        if passage is None:
            raise KeyError(f"{name} is no half of a kernel map")
        return local_map(passage.kernel_map, self._owned(passage.source), self._owned(passage.target)).split()

    def _segments(self, name: str) -> Segments:
        prepared = self._batch.prepared
        route = prepared.of_clouds.recipe.segments_of(prepared.names[name])
        samples = self._clouds.sorted_samples(route)[self._owned(route).rows]
        return local_segments(samples, sum(self.shares))

    def _owned(self, route: SiteRoute) -> Owned:
        owned = self._of_sets.get(route)
        if owned is None:
            owned = self._of_sets[route] = self._clouds.owned(route, self._places, self._position)
        return owned


AnyBatch = PreparedBatch | SeparateBatch


def share_of(decision: Decision, batch: AnyBatch, microbatch: int, stage: int, position: int) -> AnyShare:
    """The share of a micro-batch that the rank at ``position`` of a stage of several has; that made ahead, if any."""
    speeds = site_speeds(decision, stage)
    if isinstance(batch, SeparateBatch):
        return batch.share(microbatch, speeds, position)
    if (stage, microbatch) in batch.shares:
        made: SiteShare = batch.shares.pop((stage, microbatch))
        return made
    samples = decision.layout_of(stage).samples(batch.rows[microbatch])
    return SiteShare.of(batch, microbatch, speeds, position, samples)


def boundaries_of_sites(
    decision: Decision,
    batch: AnyBatch,
    microbatch: int,
    shares: Mapping[tuple[int, int], AnyShare],
    planned: Boundaries,
) -> Boundaries:
    """What stages hand each other of a micro-batch: intervals of rows, cut where its sites are shared out.

    Args:
        shares: by stage and micro-batch, of the stages of several ranks.
        planned: of the decision; where one stage prepares samples apart, nothing is handed on, and only who has
            them differs.
    """
    if len(decision.stages) == 1 and isinstance(batch, SeparateBatch):
        share = shares.get((0, microbatch))
        points = () if share is None else tuple(accumulate(share.shares, initial=0))
        return replace(planned, layouts=(Layout({SAMPLE: points}),)) if points else planned
    layouts = tuple(
        Layout({**layout.cuts, **shares[stage, microbatch].cuts}) if (stage, microbatch) in shares else layout
        for stage, layout in enumerate(planned.layouts)
    )
    return planned.at_sites(batch.sizes(microbatch), layouts)
