"""A micro-batch of clouds whose rows, on every level, are in one order that any stage may cut into intervals.

Sites come sorted by their keys.  Where some stage has several ranks, the rows of all site sets follow the order of the
blocks that they lie in (:mod:`planner.sites.arrangement`): the rank of a site is then the same function of its
coordinates on every level, and what a rank has of a tensor is an interval of its rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property

import torch
from torch import Tensor

from cuda_ops.sparse.geometry import KernelMap, MapSpec, Route, Segments
from cuda_ops.sparse.local import Owned, local_segments
from cuda_ops.sparse.preparation import SITES, Clouds
from planner.sites.arrangement import Arrangement, arrange, cut_places
from planner.sites.blocks import BlockWork, Level
from planner.sites.keys import block_keys
from planner.sites.prices import Pairs, Prices, network_work


class ArrangedClouds:
    """``clouds`` with rows in the order of blocks.

    Args:
        names: by graph input, the name that the preparation has for it.
        price: what the blocks are balanced by.
        speeds: of the ranks of the stage that whole samples should suit best.
    """

    def __init__(self, clouds: Clouds, names: Mapping[str, str], price: Prices, speeds: Sequence[float]) -> None:
        self.clouds = clouds
        self._levels = {route: Level(*clouds.level(route)) for route in clouds.preparation.size_of}
        self._arrangement: Arrangement = arrange(self._work(names, price), speeds)
        self._orders: dict[Route, tuple[Tensor, Tensor, Tensor]] = {}
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

    def owned(self, route: Route, places: Sequence[int], position: int) -> Owned:
        """What the rank at ``position`` owns of a site set, in rows of ``clouds``' own maps."""
        order, blocks, _ = self._order(route)
        cuts = torch.tensor(list(places), dtype=torch.int64)
        start, stop = torch.searchsorted(blocks, cuts[position : position + 2]).tolist()
        owners = torch.empty(len(order), dtype=torch.int16)
        owners[order] = torch.searchsorted(cuts[1:-1], blocks, right=True).to(torch.int16)
        return Owned(owners, position, order[start:stop])

    def samples(self, route: Route) -> Tensor:
        """int64 (sites,): the sample of each row."""
        return self.sorted_samples(route)[self._order(route)[0]]

    def map(self, spec: MapSpec) -> KernelMap:
        """See :class:`Clouds`."""
        found = self._maps.get(spec)
        if found is None:
            (source, _, row_of_source), (target, _, row_of_target) = self._order(spec.source), self._order(spec.target)
            kernel_map = self.clouds.map(spec)
            neighbours = _renumbered(kernel_map.neighbours, target, row_of_source)
            reverse = _renumbered(kernel_map.reverse, source, row_of_target)
            found = self._maps[spec] = KernelMap(neighbours, reverse)
        return found

    def segments(self, route: Route) -> Segments:
        """See :class:`Clouds`."""
        return local_segments(self.samples(route), self.clouds.num_samples)

    def tensor(self, name: str) -> Tensor:
        """See :class:`Clouds`."""
        preparation = self.clouds.preparation
        if name in preparation.recipe.names:
            return preparation.recipe.tensor(self, name)
        found = self.clouds.tensor(name)
        return found[self._order(())[0]] if (name, 0) in preparation.varying[SITES] else found

    def _work(self, names: Mapping[str, str], price: Prices) -> BlockWork:
        words, recipe = self.clouds.preparation.size_of, self.clouds.preparation.recipe
        pairs = {}
        for name in price.pair:
            found = recipe.passage(self.clouds, names[name])
            if found is not None:
                counts = found.kernel_map.pairs_of_inputs().numpy(), found.kernel_map.pairs_of_outputs().numpy()
                pairs[name] = Pairs(words[found.source], words[found.target], *counts)
        levels = {word: self._levels[route] for route, word in words.items()}
        return network_work(levels, pairs, price)

    def _order(self, route: Route) -> tuple[Tensor, Tensor, Tensor]:
        """Of a site set: the sorted row of each row, its block's place, and the row of -1 and of each sorted row."""
        found = self._orders.get(route)
        if found is None:
            level = self._levels[route]
            blocks = torch.from_numpy(block_keys(level.samples, level.coordinates, level.stride))
            place = self._place_of(blocks)
            order = place.argsort(stable=True)
            rows = torch.full((len(order) + 1,), -1, dtype=torch.int32)
            rows[order + 1] = torch.arange(len(order), dtype=torch.int32)
            found = self._orders[route] = order, place[order], rows
        return found

    @cached_property
    def _place_of(self) -> Callable[[Tensor], Tensor]:
        keys = torch.from_numpy(self._arrangement.keys.copy())
        ascending, place = keys.sort()
        return lambda blocks: place[torch.searchsorted(ascending, blocks)]

    def sorted_samples(self, route: Route) -> Tensor:
        """int64 (sites,): the sample of each row of ``clouds``."""
        return torch.from_numpy(self._levels[route].samples)


def _renumbered(half: Tensor, columns: Tensor, rows: Tensor) -> Tensor:
    """Columns of one half of a map, with the numbers that ``rows`` has for -1 and each row."""
    chosen = half.index_select(1, columns)
    return rows.index_select(0, chosen.flatten() + 1).view(chosen.shape)
