"""Layers over sites, shared by ranks that are threads and do exchange, under any ownership of the sites.

Each rank has leaves of its own, so that what flows back on it is seen apart; put together by their owners, rows must be
those of one device.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx

from benchmarks.site_balance import Ownership, cut, morton, random_blocks
from cuda_ops.sparse.geometry import BuiltGeometry, KernelMap, MapSpec, Segments, SiteRoute, geometry_of, stride_of
from cuda_ops.sparse.local import LocalMap, Owned, local_map, local_segments
from planner.sites.arrangement import arrange
from planner.sites.bisection import bisection
from planner.sites.work import SiteLevel, SiteLoad, block_work
from runtime.sparse.rules import SharedSites
from runtime.spatial.exchange import PeerGroup
from runtime.stage.modes import MicrobatchShard
from runtime.transport import InProcessTransport
from tests.runtime.ranks import on_ranks

Owners = Callable[[SiteRoute], Tensor]
"""int64 (sites,) of a site set: the position of each site's owner."""
OWNERSHIPS = ("bisection", "morton", "random_blocks", "random_sites", "one_empty", "only_last")
_OPS = torch.ops.halopipe


def cloud(seed: int, samples: int = 4, points: int = 90, extent: int = 5) -> BuiltGeometry:
    """A batch of clouds of different sizes, of which the last but one is empty."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for sample in range(samples):
        count = 0 if sample == samples - 2 else points // (1 + sample)
        sites = torch.unique(torch.randint(-extent, extent, (count, 3), generator=generator), dim=0)
        found.append(torch.cat([torch.full((len(sites), 1), sample), sites], 1))
    geometry, _ = geometry_of(torch.cat(found).int(), samples)
    return geometry


def ownership(kind: str, geometry: BuiltGeometry, num_ranks: int, seed: int = 0) -> Owners:
    """Who owns what: by planes, by curve, by lot, or with ranks that own nothing."""
    generator = torch.Generator().manual_seed(seed)
    if kind == "random_sites":
        return _kept(lambda route: torch.randint(0, num_ranks, (geometry.num_sites(route),), generator=generator))
    if kind == "only_last":
        return lambda route: torch.full((geometry.num_sites(route),), num_ranks - 1)
    level = level_of(geometry, ())
    work = block_work([level], [SiteLoad(0, np.ones(len(level.samples), np.int64), 1.0)])
    speeds = [float(rank + 1) for rank in range(num_ranks)]
    if kind == "one_empty":
        speeds[0] = 0.0
    order = morton if kind == "morton" else bisection
    owned: Ownership = (
        random_blocks(work.keys, num_ranks, seed)
        if kind == "random_blocks"
        else cut(arrange(work, speeds, 0.0, order), speeds, 0.0)
    )

    def owners(route: SiteRoute) -> Tensor:
        found = level_of(geometry, route)
        return torch.from_numpy(owned.owner(found.samples, found.coordinates, found.stride)).long()

    return _kept(owners)


def level_of(geometry: BuiltGeometry, route: SiteRoute) -> SiteLevel:
    coordinates = geometry.coordinates(route).long()
    return SiteLevel(coordinates[:, 0].numpy(), coordinates[:, 1:].numpy(), stride_of(route))


@dataclass(frozen=True)
class Part:
    """What one rank has after forward and backward.

    Attributes:
        out: of the layer, its own rows or samples.
        gradients: of the floating tensors that it was given, by name.
        forward_bytes, backward_bytes: that it sent.
    """

    out: Tensor
    gradients: dict[str, Tensor]
    forward_bytes: int
    backward_bytes: int


class Given:
    """What :class:`SharedSites` asks of a rank's share, for any ownership."""

    def __init__(
        self,
        maps: Mapping[str, Callable[[], LocalMap]],
        segments: Mapping[str, Callable[[], Segments]],
        shares: tuple[int, ...],
    ) -> None:
        self._maps = maps
        self._segments = segments
        self.shares = shares

    def map(self, name: str, device: torch.device) -> LocalMap:
        return self._maps[name]()

    def segments(self, name: str, device: torch.device) -> Segments:
        return self._segments[name]()


@dataclass(frozen=True)
class Sharing:
    """Clouds whose sites are shared by ``num_ranks``; ``shares`` are the samples that each goes on with."""

    geometry: BuiltGeometry
    owners: Owners
    num_ranks: int
    shares: tuple[int, ...] = ()

    def owned(self, route: SiteRoute, position: int) -> Owned:
        """In ascending order on even positions, in descending order on odd ones: any order does."""
        found = Owned.by(self.owners(route), position)
        return replace(found, rows=found.rows.flip(0)) if position % 2 else found

    def local(self, spec: MapSpec, position: int, inverse: bool = False) -> LocalMap:
        found = self.geometry.map(spec)
        source = self.owned(spec.source, position)
        target = self.owned(spec.target, position)
        return local_map(found.inverse(), target, source) if inverse else local_map(found, source, target)

    def segments(self, route: SiteRoute, position: int) -> Segments:
        samples = self.geometry.coordinates(route)[:, 0].long()
        return local_segments(samples[self.owned(route, position).rows], self.geometry.num_samples)

    def samples_of(self, position: int) -> Tensor:
        """Which samples a rank goes on with."""
        start = sum(self.shares[:position])
        return torch.arange(start, start + self.shares[position])

    def run(
        self,
        target: Any,
        tensors: Mapping[str, tuple[Tensor, SiteRoute | str]],
        rest: Sequence[Any],
        dy: tuple[Tensor, SiteRoute | str],
        *,
        spec: MapSpec | None = None,
        inverse: bool = False,
        route: SiteRoute = (),
        leaves: bool = True,
    ) -> list[Part]:
        """An operator's shared form on each rank, forward and backward.

        Args:
            tensors: the operator's first arguments, with the site set that the rows lie on, ``"samples"``, or
                ``"whole"`` of what each rank has all of.
            rest: its further arguments, which the shared form does not look at.
            dy: what flows back, with its rows.
            spec, inverse: the map that its layer reads, maybe backwards.
            route: the site set whose segments it reads.
        """

        def run(end: InProcessTransport) -> Part:
            torch.set_num_threads(1)
            me = end.rank
            peers = PeerGroup(end, tuple(range(self.num_ranks)))
            given = Given(
                {} if spec is None else {"map": partial(self.local, spec, me, inverse)},
                {"segments": partial(self.segments, route, me)},
                self.shares,
            )
            shared = SharedSites({"neighbours": "map", "starts": "segments"}, peers)
            shared.at(MicrobatchShard(0, 1, 0, 1, sites=given))  # type: ignore[arg-type]
            form = shared.rule(node_of(target, (*(x for x, _ in tensors.values()), *rest)))
            assert form is not None
            parts = {name: self.part(x, where, me).requires_grad_(leaves) for name, (x, where) in tensors.items()}
            found = form(*parts.values(), *rest)
            out = found[0] if isinstance(found, tuple) else found
            forward_bytes = peers.sent_bytes
            if out.requires_grad:
                out.backward(self.part(*dy, me))
            gradients = {name: part.grad for name, part in parts.items() if part.grad is not None}
            return Part(out.detach(), gradients, forward_bytes, peers.sent_bytes - forward_bytes)

        return on_ranks(self.num_ranks, run)

    def part(self, whole: Tensor, where: SiteRoute | str, position: int) -> Tensor:
        """A rank's rows."""
        if where == "whole":
            return whole.clone()
        rows = self.samples_of(position) if where == "samples" else self.owned(where, position).rows
        return whole[rows].clone()

    def together(self, parts: Sequence[Tensor], where: SiteRoute | str) -> Tensor:
        """The rows of all ranks, where they belong; what all have all of, added up."""
        if where == "whole":
            return torch.stack(list(parts)).sum(0)
        rows = torch.cat([self._rows(where, position) for position in range(self.num_ranks)])
        assert torch.equal(rows.sort().values, torch.arange(len(rows)))
        found = torch.cat(list(parts))
        assert len(found) == len(rows)
        return found[rows.argsort()]

    def _rows(self, where: SiteRoute | str, position: int) -> Tensor:
        return self.samples_of(position) if where == "samples" else self.owned(where, position).rows


def node_of(target: Any, arguments: Sequence[Any]) -> fx.Node:
    """A call of the operator whose tensors are placeholders that bear its arguments' names."""
    graph = fx.Graph()
    names = [argument.name for argument in target._schema.arguments]
    return graph.call_function(
        target,
        tuple(
            graph.placeholder(name) if isinstance(given, Tensor) else given
            for name, given in zip(names, arguments, strict=True)
        ),
    )


def one_device(
    target: Any, tensors: Mapping[str, Tensor], rest: Sequence[Any], dy: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """What the operator itself makes, and gradients."""
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in tensors.items()}
    found = target(*leaves.values(), *rest)
    out = found[0] if isinstance(found, tuple) else found
    out.backward(dy)
    return out.detach(), {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}


def halo_rows(kernel_map: KernelMap, source: Tensor, target: Tensor) -> int:
    """Pairs of a rank and a row of another's that one of its outputs reads: no less can travel."""
    read = kernel_map.neighbours.long()
    reader = target.expand_as(read)
    foreign = (read >= 0) & (torch.cat([source, source.new_zeros(1)])[read] != reader)  # the last is that of -1
    return len(torch.unique(reader[foreign] * len(source) + read[foreign]))


def close(found: Tensor, expected: Tensor, tolerance: float = 1e-12) -> None:
    """Equal up to rounding."""
    scale = max(1.0, float(expected.abs().max())) if expected.numel() else 1.0
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance * scale)


def _kept(owners: Owners) -> Owners:
    """The same answer to the same question, whichever rank asks."""
    found: dict[SiteRoute, Tensor] = {}
    lock = threading.Lock()

    def kept(route: SiteRoute) -> Tensor:
        with lock:
            if route not in found:
                found[route] = owners(route)
            return found[route]

    return kept
