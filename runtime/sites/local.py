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
        owners: int64 (sites,), by position in the stage.
        position: of this rank.
        rows: int64, this rank's rows, ascending.
    """

    owners: Tensor
    position: int
    rows: Tensor

    @classmethod
    def by(cls, owners: Tensor, position: int) -> Owned:
        """This rank's among ``owners``."""
        return cls(owners, position, (owners == position).nonzero().squeeze(1))

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
        return self._reads_halo.nonzero().squeeze(1)

    @cached_property
    def interior(self) -> Tensor:
        """int64: outputs that do not."""
        return (~self._reads_halo).nonzero().squeeze(1)

    @cached_property
    def of_boundary(self) -> Tensor:
        """``neighbours`` of the boundary."""
        return self.neighbours[:, self.boundary].contiguous()

    @cached_property
    def of_interior(self) -> Tensor:
        """``neighbours`` of the interior."""
        return self.neighbours[:, self.interior].contiguous()

    @cached_property
    def of_own(self) -> Tensor:
        """``reverse`` of the own inputs."""
        return self.reverse[:, : self.num_own].contiguous()

    @cached_property
    def of_halo(self) -> Tensor:
        """``reverse`` of the halo."""
        return self.reverse[:, self.num_own :].contiguous()

    @property
    def _reads_halo(self) -> Tensor:
        return (self.neighbours >= self.num_own).any(0)

    def to(self, device: torch.device) -> LocalMap:
        """The same on a device."""
        sends = {position: rows.to(device) for position, rows in self.halo.sends.items()}
        halo = Halo(sends, self.halo.receives)
        return LocalMap(self.neighbours.to(device), self.reverse.to(device), self.num_own, halo)


def local_map(kernel_map: KernelMap, source: Owned, target: Owned) -> LocalMap:
    """This rank's part of ``kernel_map``, whose inputs and outputs are owned as ``source`` and ``target`` say."""
    read = kernel_map.neighbours[:, target.rows].long()  # rows of the whole input, -1 for none
    foreign = torch.unique(read[(read >= 0) & (source.owners[read] != source.position)])
    owners = source.owners[foreign]
    order = owners.argsort(stable=True)
    place = torch.full((len(source.owners) + 1,), -1, dtype=torch.int32)  # the last entry is that of -1
    place[source.rows] = torch.arange(len(source), dtype=torch.int32)
    place[foreign[order]] = torch.arange(len(source), len(source) + len(foreign), dtype=torch.int32)
    neighbours = place[read]
    receives = {int(owner): int(count) for owner, count in zip(*owners.unique(return_counts=True), strict=True)}
    halo = Halo(_sends(kernel_map, source, target), receives)
    reverse = operators.reversed_map(neighbours, len(source) + len(foreign))
    return LocalMap(neighbours, reverse, len(source), halo)


def local_segments(samples: Tensor, num_samples: int) -> Segments:
    """Where each sample's rows lie among rows of ``samples`` (rows,), those of a sample one after another."""
    lengths = torch.bincount(samples, minlength=num_samples)
    starts = torch.full((num_samples,), len(samples), dtype=torch.int64)
    starts.scatter_reduce_(0, samples, torch.arange(len(samples)), "amin")
    return Segments(torch.where(lengths > 0, starts, 0), lengths)


def _sends(kernel_map: KernelMap, source: Owned, target: Owned) -> dict[int, Tensor]:
    """Of this rank's inputs, those that outputs of other ranks read."""
    readers = kernel_map.reverse[:, source.rows].long()
    by = torch.where(readers >= 0, target.owners[readers], source.position)
    others = [int(position) for position in by.unique() if position != source.position]
    return {position: (by == position).any(0).nonzero().squeeze(1) for position in others}
