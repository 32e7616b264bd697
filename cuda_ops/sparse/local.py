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

from cuda_ops.sparse.geometry import KernelMap, Segments

FOREIGN = -2
"""The number of a row that another rank owns."""


@dataclass(frozen=True)
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

    @cached_property
    def numbers(self) -> Tensor:
        """int32 (1 + sites,): -1, which stands for no row, then of each row its number here, ``FOREIGN`` of others'."""
        local_rows = torch.full((1 + len(self.owners),), FOREIGN, dtype=torch.int32)
        local_rows[0] = -1
        local_rows[self.rows + 1] = torch.arange(len(self.rows), dtype=torch.int32)
        return local_rows

    @classmethod
    def by(cls, owners: Tensor, position: int) -> Owned:
        """This rank's among ``owners`` (sites,), in the order of the sites."""
        return cls(owners.to(torch.int16), position, (owners == position).nonzero().squeeze(1))

    def renumbered(self, rows: Tensor) -> Tensor:
        """int32: the numbers that ``rows`` of the whole set have here, see :attr:`numbers`."""
        # Indexing with int64 would take several times as long.
        return self.numbers.index_select(0, rows.flatten() + 1).view(rows.shape)

    def __len__(self) -> int:
        """Rows of this rank."""
        return len(self.rows)


@dataclass(frozen=True, slots=True)
class RowHalo:
    """The rows that ranks lend each other, by position.

    Attributes:
        sends: int64, of this rank's rows those that another reads, ascending.
        receives: how many rows come from another; they stand after this rank's own, by position.
    """

    sends: Mapping[int, Tensor]
    receives: Mapping[int, int]

    @property
    def num_received(self) -> int:
        """Rows of others that this rank reads."""
        return sum(self.receives.values())

    @property
    def is_empty(self) -> bool:
        """Whether this rank lends and borrows nothing, as where it has whole samples."""
        return not self.sends and not self.receives


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
    halo: RowHalo

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
        rows = self.neighbours.index_select(1, self.boundary) - self.num_own
        return rows.clamp_(min=-1)

    def split(self) -> LocalMap:
        """Itself, with the parts made that a layer asks for; of a rank that borrows nothing all is its own."""
        if self.halo.num_received:
            _ = self.of_own, self.of_halo, self.of_boundary
        return self

    def to(self, device: torch.device) -> LocalMap:
        """The same on a device."""
        sends = {position: rows.to(device) for position, rows in self.halo.sends.items()}
        halo = RowHalo(sends, self.halo.receives)
        return LocalMap(self.neighbours.to(device), self.reverse.to(device), self.num_own, halo).split()


def local_map(kernel_map: KernelMap, source: Owned, target: Owned) -> LocalMap:
    """This rank's part of ``kernel_map``, whose inputs and outputs are owned as ``source`` and ``target`` say."""
    read = kernel_map.neighbours.index_select(1, target.rows)  # rows of the whole input, -1 for none
    readers = kernel_map.reverse.index_select(1, source.rows)
    neighbours = source.renumbered(read)
    reverse = target.renumbered(readers)
    sends: dict[int, Tensor] = {}
    if _has_foreign(reverse):
        sends = _sends(readers, reverse, source, target)
        reverse.clamp_(min=-1)
    if not _has_foreign(neighbours):
        return LocalMap(neighbours, reverse, len(source), RowHalo(sends, {}))
    borrowed = neighbours == FOREIGN
    rows = read[borrowed]
    foreign = torch.unique(rows)
    owners = source.owners[foreign.long()].long()
    foreign = foreign[owners.argsort(stable=True)]
    ascending, place = foreign.sort()
    neighbours[borrowed] = (len(source) + place[torch.searchsorted(ascending, rows)]).int()
    counts = torch.bincount(owners).tolist()
    of_halo = target.renumbered(kernel_map.reverse.index_select(1, foreign)).clamp_(min=-1)
    halo = RowHalo(sends, {owner: count for owner, count in enumerate(counts) if count})
    return LocalMap(neighbours, torch.cat([reverse, of_halo], 1), len(source), halo)


def local_segments(samples: Tensor, num_samples: int) -> Segments:
    """Where each sample's rows lie among rows of ``samples`` (rows,), those of a sample one after another."""
    lengths = torch.bincount(samples, minlength=num_samples)
    starts = torch.full((num_samples,), len(samples), dtype=torch.int64)
    starts.scatter_reduce_(0, samples, torch.arange(len(samples)), "amin")
    return Segments(torch.where(lengths > 0, starts, 0), lengths)


def _sends(readers: Tensor, reverse: Tensor, source: Owned, target: Owned) -> dict[int, Tensor]:
    """Of this rank's inputs, those that outputs of other ranks read, in the order of the whole input's rows.

    Args:
        readers: int32 (offsets, own inputs), the outputs that read each, by their rows in the whole output.
        reverse: the same by their numbers here.
    """
    lent = (reverse == FOREIGN).any(0).nonzero().squeeze(1)
    lent = lent[source.rows[lent].argsort()]
    owners = torch.where(reverse[:, lent] == FOREIGN, target.owners[readers[:, lent].long()], -1)
    others = torch.unique(owners[owners >= 0]).tolist()
    return {position: lent[(owners == position).any(0)] for position in others}


def _has_foreign(numbers: Tensor) -> bool:
    return numbers.numel() > 0 and int(numbers.amin()) == FOREIGN
