"""What ranks do together, done by one alone: it gets what it would get if the others had what it has.

So a rank does its part of a stage that it shares without any other, and never waits amid it.  Nothing is sent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from runtime.transport.base import Pending, parts


class _Done:
    """Of which nothing is left to wait for."""

    def wait(self) -> None:
        """Returns at once."""


class Mirror:
    """The part of a :class:`runtime.transport.base.Transport` that does things in groups, for ``rank`` alone."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    @torch.no_grad()
    def all_reduce(self, tensor: Tensor, ranks: tuple[int, ...], deadline_s: float) -> None:
        """As many times ``tensor`` as there are ranks."""
        tensor.mul_(len(ranks))

    def start_sum(self, tensor: Tensor, ranks: tuple[int, ...], deadline_s: float) -> Pending:
        """As :meth:`all_reduce`."""
        self.all_reduce(tensor, ranks, deadline_s)
        return _Done()

    @torch.no_grad()
    def start_exchange(
        self, sent: Mapping[int, Tensor], received: Mapping[int, Tensor], deadline_s: float, key: int | None = None
    ) -> Pending:
        """From each rank comes what goes to it; zeros, if that has another size."""
        for source, tensor in received.items():
            _fill(tensor, sent.get(source))
        return _Done()

    @torch.no_grad()
    def reduce_scatter(self, flat: Tensor, counts: Sequence[int], ranks: tuple[int, ...], deadline_s: float) -> None:
        """As many times this rank's part as there are ranks."""
        parts(flat, counts, ranks)[ranks.index(self._rank)].mul_(len(ranks))

    @torch.no_grad()
    def all_gather(self, flat: Tensor, counts: Sequence[int], ranks: tuple[int, ...], deadline_s: float) -> None:
        """This rank's part in the place of each; zeros, where that has another size."""
        pieces = parts(flat, counts, ranks)
        own = pieces[ranks.index(self._rank)]
        for rank, piece in zip(ranks, pieces, strict=True):
            if rank != self._rank:
                _fill(piece, own)

    def all_max(self, tensor: Tensor, ranks: tuple[int, ...], deadline_s: float) -> None:
        """``tensor`` itself."""


def _fill(tensor: Tensor, values: Tensor | None) -> None:
    if values is not None and values.numel() == tensor.numel() and values.dtype == tensor.dtype:
        tensor.copy_(values.view_as(tensor))
    else:
        tensor.zero_()
