"""The inspector: what one rank does of a kernel map, and which rows travel for it, for any ownership whatsoever.

Every rank knows the coordinates of the whole micro-batch and who owns which site, so that nobody has to be asked.

    sites      a b c d e f g        rank 0 owns a b c d, rank 1 owns e f g, the kernel reaches one site to each side
    rank 0     a b c d | e          own rows first, then the halo, by owner and row
    rank 1     e f g | d

A map on rows so numbered is an ordinary kernel map: the same kernels work on it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from cuda_ops.sparse import operators
from cuda_ops.sparse.geometry import KernelMap, Segments


@dataclass(frozen=True, slots=True)
class Owned:
    """Who owns the rows of one site set.

    Attributes:
        owners: int16 (sites,), by position in the stage.
        position: of this rank.
        rows: int64, this rank's rows, in the order in which it has them.
    """

    owners: Tensor
    position: int
    rows: Tensor

    @classmethod
    def by(cls, owners: Tensor, position: int) -> Owned:
        """This rank's among ``owners`` (sites,), in the order of the sites."""
        return cls(owners.to(torch.int16), position, (owners == position).nonzero().squeeze(1))

    def of(self, rows: Tensor) -> Tensor:
        """int16: the owner of each of ``rows``, -1 for those that are -1."""
        return _looked_up(torch.cat([self.owners.new_full((1,), -1), self.owners]), rows)

    def __len__(self) -> int:
        """Rows of this rank."""
        return len(self.rows)


@dataclass(frozen=True, slots=True)
class Halo:
    """The rows that ranks lend each other, by position.

    Attributes:
        sends: int64, of this rank's rows those that another reads, ascending.
        receives: how many rows come from another; they stand behind this rank's own, by position.
    """

    sends: Mapping[int, Tensor]
    receives: Mapping[int, int]

    @property
    def num_received(self) -> int:
        """Rows of others that this rank reads."""
        return sum(self.receives.values())


@dataclass(frozen=True)
class LocalMap:
    """One rank's part of a kernel map.

    Attributes:
        neighbours: int32 (offsets, own outputs): rows of the inputs, own ones first, then the halo.
        reverse: int32 (offsets, own inputs and halo).
        num_own: own inputs.
    """

    neighbours: Tensor
    reverse: Tensor
    num_own: int
    halo: Halo

    @cached_property
    def boundary(self) -> Tensor:
        """int64: outputs that read the halo."""
        return (self.neighbours >= self.num_own).any(0).nonzero().squeeze(1)

    @cached_property
    def of_own(self) -> KernelMap:
        """The part of the map that joins own inputs and outputs."""
        reverse = self.reverse[:, : self.num_own].contiguous()
        if not self.halo.num_received:
            return KernelMap(self.neighbours, reverse)
        return KernelMap(self.neighbours.masked_fill(self.neighbours >= self.num_own, -1), reverse)

    @cached_property
    def of_halo(self) -> Tensor:
        """``reverse`` of the halo: the own outputs that read each of its rows."""
        return self.reverse[:, self.num_own :].contiguous()

    @cached_property
    def of_boundary(self) -> Tensor:
        """int32 (offsets, boundary): rows of the halo alone."""
        found = self.neighbours.index_select(1, self.boundary) - self.num_own
        return found.clamp_(min=-1)

    def split(self) -> LocalMap:
        """Itself, with all parts made."""
        _ = self.of_own, self.of_halo, self.of_boundary
        return self

    def to(self, device: torch.device) -> LocalMap:
        """The same on a device."""
        sends = {position: rows.to(device) for position, rows in self.halo.sends.items()}
        halo = Halo(sends, self.halo.receives)
        return LocalMap(self.neighbours.to(device), self.reverse.to(device), self.num_own, halo).split()


def local_map(kernel_map: KernelMap, source: Owned, target: Owned) -> LocalMap:
    """This rank's part of ``kernel_map``, whose inputs and outputs are owned as ``source`` and ``target`` say."""
    read = kernel_map.neighbours.index_select(1, target.rows)  # rows of the whole input, -1 for none
    owners = source.of(read)
    foreign = torch.unique(read[(owners != source.position) & (owners >= 0)]).long()
    owners = source.owners[foreign].long()
    foreign = foreign[owners.argsort(stable=True)]
    place = torch.full((len(source.owners) + 1,), -1, dtype=torch.int32)  # the first entry is that of -1
    place[source.rows + 1] = torch.arange(len(source), dtype=torch.int32)
    place[foreign + 1] = torch.arange(len(source), len(source) + len(foreign), dtype=torch.int32)
    neighbours = _looked_up(place, read)
    counts = torch.bincount(owners).tolist()
    halo = Halo(_sends(kernel_map, source, target), {owner: count for owner, count in enumerate(counts) if count})
    reverse = operators.reversed_map(neighbours, len(source) + len(foreign))
    return LocalMap(neighbours, reverse, len(source), halo)


def local_segments(samples: Tensor, num_samples: int) -> Segments:
    """Where each sample's rows lie among rows of ``samples`` (rows,), those of a sample one after another."""
    lengths = torch.bincount(samples, minlength=num_samples)
    starts = torch.full((num_samples,), len(samples), dtype=torch.int64)
    starts.scatter_reduce_(0, samples, torch.arange(len(samples)), "amin")
    return Segments(torch.where(lengths > 0, starts, 0), lengths)


def _sends(kernel_map: KernelMap, source: Owned, target: Owned) -> dict[int, Tensor]:
    """Of this rank's inputs, those that outputs of other ranks read, in the order of the whole input's rows."""
    readers = target.of(kernel_map.reverse.index_select(1, source.rows))
    lent = ((readers != source.position) & (readers >= 0)).any(0).nonzero().squeeze(1)
    lent = lent[source.rows[lent].argsort()]
    readers = readers[:, lent]
    others = [int(position) for position in torch.unique(readers) if position not in (-1, source.position)]
    return {position: lent[(readers == position).any(0)] for position in others}


def _looked_up(table: Tensor, rows: Tensor) -> Tensor:
    """``table[rows + 1]``, in the shape of ``rows`` (int32); several times as fast as to index with int64."""
    return table.index_select(0, rows.flatten() + 1).view(rows.shape)
