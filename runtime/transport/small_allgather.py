"""Rows of numbers that ranks tell one another: statistics of a normalisation, parts of a mean, counts.

Every rank sends its row to every other, so that one latency passes whatever their number, and all have the same table.
(A ring takes as many latencies as it has ranks, twice.)  These are messages between pairs of ranks, as halos are: they
are matched by the order in which a stage computes, the same on all its ranks, and never meet sums of gradients, which
start whenever these are complete.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.transport import Exchanging, Pending


@dataclass(frozen=True, slots=True)
class PendingRows:
    """The rows of all ranks, on their way: a table [ranks, numbers], the same bits on each, and what is waited for."""

    table: Tensor
    pending: Pending | None = None

    def wait(self) -> Tensor:
        """The table."""
        if self.pending is not None:
            self.pending.wait()
        return self.table


Tell = Callable[[Sequence[Tensor], torch.dtype], PendingRows]
"""Tells the other ranks of a group the row that some tensors, of one dim each and without gradients, make up.

All ranks call it in the same order, with as many numbers.
"""


class RowGather:
    """The ranks of one group, telling each other rows.

    Args:
        ranks: this one among them; the table is in their order.
        key: even; of the first kind of rows (elements of a dtype) that comes along, the next one of the second;
            others have none.  See ``Transport.start_exchange``.
    """

    def __init__(self, transport: Exchanging, ranks: tuple[int, ...], key: int | None = None) -> None:
        self._transport = transport
        self._key = key
        self._kinds: dict[tuple[int, torch.dtype], int] = {}
        self._num_ranks = len(ranks)
        self._index = ranks.index(transport.rank)
        self._others = tuple((at, rank) for at, rank in enumerate(ranks) if rank != transport.rank)

    def __call__(self, parts: Sequence[Tensor], dtype: torch.dtype) -> PendingRows:
        """See :class:`Tell`."""
        count = sum(part.numel() for part in parts)
        table = torch.empty(self._num_ranks, count, dtype=dtype, device=parts[0].device)
        rows = table.unbind()
        own = rows[self._index]
        torch.cat(tuple(parts), out=own)
        if not self._others:
            return PendingRows(table)
        sent = {rank: own for _, rank in self._others}
        received = {rank: rows[at] for at, rank in self._others}
        number = self._kinds.setdefault((count, dtype), len(self._kinds))
        key = self._key | number if self._key is not None and number < 2 else None
        return PendingRows(table, self._transport.start_exchange(sent, received, key))
