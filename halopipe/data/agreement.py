"""Whether the ranks read the same data: they compare digests of what each of them read of a batch.

A rank notes 32 bits for each tensor of a batch (zlib's CRC, some GB/s), or of each sample where ranks share a Dataset.
What was noted is exchanged before each of the first steps, then at growing intervals, and before a checkpoint is
written; every batch since the last exchange is compared, so that none is left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from halopipe.data.sources import digest
from planner.ir.errors import DifferentDataError
from runtime.transport import Transport

FIRST = 8
"""So many batches are compared before they are used."""
_MOST = 64
"""Batches between two exchanges, at the most."""

UNREAD, ENDED = -1, -2
"""In place of a digest: not read by this rank; there was no batch."""

_REMEDIES = (
    "--data-from first: one rank reads for all",
    "draw from torch, numpy or random themselves, which are seeded; seed other generators with the factory's argument",
    "no DistributedSampler, nor any other choice by rank: batches are global, halopipe shares them out",
    "--data-from share, for a map-style Dataset whose samples follow from their numbers",
)

_SCRIPT_REMEDIES = (
    "give every rank the same global batch: seed the data in the same way on all of them",
    "no DistributedSampler, nor any other choice by rank: batches are global, halopipe shares them out",
    "read on rank 0 and broadcast",
)


@dataclass(slots=True)
class Agreement:
    """Compares what the ranks of a job read, batch after batch; all of them call the same.

    Attributes:
        names: of the tensors of a batch.
        step: of the first batch, as errors name it.
        slots: of a batch whose digests are compared by themselves: 1, or its samples.
        always: each batch is compared before it is used, not only the first ones.
        is_script: the batches are given by a script, not read from ``--data``.
        noted: batches so far.
    """

    transport: Transport
    names: tuple[str, ...]
    deadline_s: float
    step: int = 0
    slots: int = 1
    always: bool = False
    is_script: bool = False
    noted: int = 0
    _waiting: list[tuple[str, Tensor]] = field(default_factory=list)

    def note(self, tensors: Sequence[Sequence[Tensor]] | None, where: str = "") -> None:
        """A batch that this rank read whole: of each name its tensors, one a micro-batch; None: the data ended.

        Raises:
            DifferentDataError: ranks have read other ones.
        """
        if self.transport.world_size == 1 or (tensors is None and not (self.always or self._is_due)):
            return  # where the data ended between two exchanges, that is this rank's own error
        row = [ENDED] * len(self.names) if tensors is None else [_joined(each) for each in tensors]
        self.note_slots({0: row}, where)

    def note_slots(self, digests: Mapping[int, Sequence[int]], where: str = "") -> None:
        """The same of a batch of which this rank read some samples."""
        if self.transport.world_size == 1:
            return
        table = torch.full((self.slots, len(self.names)), UNREAD, dtype=torch.int64)
        for slot, row in digests.items():
            table[slot] = torch.tensor(row, dtype=torch.int64)
        self._waiting.append((f"step {self.step + self.noted}{where}", table))
        is_due, self.noted = self.always or self._is_due, self.noted + 1
        if is_due:
            self.confirm()

    @property
    def _is_due(self) -> bool:
        number = self.noted + 1
        return number <= FIRST or number % _MOST == 0 or (number < _MOST and not number & (number - 1))

    def confirm(self) -> None:
        """Compares what was not yet compared.

        Raises:
            DifferentDataError: ranks have read other ones.
        """
        if not self._waiting:
            return
        labels, tables = zip(*self._waiting, strict=True)
        self._waiting = []
        mine, size = torch.stack(tables).flatten(), self.transport.world_size
        everybody = torch.zeros(size, mine.numel(), dtype=torch.int64)
        everybody[self.transport.rank] = mine
        flat = everybody.flatten()
        self.transport.all_gather(flat, [mine.numel()] * size, tuple(range(size)), self.deadline_s)
        found = flat.view(size, len(labels), self.slots, len(self.names))
        read = found != UNREAD
        highest = found.masked_fill(~read, ENDED - 1).amax(0)
        lowest = found.masked_fill(~read, 2**40).amin(0)
        differs = (highest != lowest) & read.any(0)
        if differs.any():
            batch, slot, _ = differs.nonzero()[0].tolist()
            raise self._error(labels[batch], slot, found[:, batch, slot], differs[batch, slot].tolist())

    def _error(self, where: str, slot: int, found: Tensor, differs: list[bool]) -> DifferentDataError:
        sample = f", sample {slot} of the batch" if self.slots > 1 else ""
        wrong = [name for name, is_wrong in zip(self.names, differs, strict=True) if is_wrong]
        details = [
            f"{where}{sample}, {name}: {_told(found[:, place].tolist())}"
            for place, (name, is_wrong) in enumerate(zip(self.names, differs, strict=True))
            if is_wrong
        ]
        title = f"ranks read different data at {where.split(' (')[0]}: {', '.join(wrong)}"
        return DifferentDataError(title, details, _SCRIPT_REMEDIES if self.is_script else _REMEDIES)


def _joined(tensors: Sequence[Tensor]) -> int:
    """One digest of a tensor, or of those of several micro-batches."""
    digests = [digest(tensor) for tensor in tensors]
    return digests[0] if len(digests) == 1 else digest(torch.tensor(digests))


def _told(digests: Sequence[int]) -> str:
    """``ranks 0, 2 read 5f3a12bc, rank 1 read 99ab0c1d``."""
    ranks: dict[int, list[int]] = {}
    for rank, value in enumerate(digests):
        if value != UNREAD:
            ranks.setdefault(value, []).append(rank)
    return ", ".join(
        f"rank{'s' * (len(who) > 1)} {', '.join(map(str, who))} "
        + ("had no batch any more" if value == ENDED else f"read {value:08x}")
        for value, who in ranks.items()
    )
