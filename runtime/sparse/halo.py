"""The executor: layers over sites that several ranks share, as autograd functions.

Rows that others read leave first; while they travel, a convolution does what its own rows contribute, and in backward
the gradients of the rank's own inputs and of the weights.  Everything is added up in the order of positions, so that a
result does not depend on who was faster.  A rank that lends and borrows nothing, since its samples are whole, does what
one device would.  Where a layer's weights are more than its rows, own and borrowed rows go through one call: to go over
the weights and their gradient once more would take longer than the rows travel.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from cuda_ops.sparse import operators
from cuda_ops.sparse.local import LocalMap, RowHalo
from cuda_ops.sparse.registrations import in_its_dtype
from runtime.spatial.exchange import PeerGroup
from runtime.transport import Pending

_OfSamples = Callable[[Tensor, tuple[int, ...], PeerGroup], Tensor]
"""What the functions of samples that ranks share take: a table, the shares and the way to the others."""


def shared_conv(x: Tensor, weight: Tensor, local: LocalMap, peers: PeerGroup) -> Tensor:
    """A sparse convolution of this rank's outputs.

    Args:
        x: (own inputs, in channels).
        weight: (offsets, in channels, out channels); its gradient is this rank's part of the sum.

    Returns:
        (own outputs, out channels).
    """
    device = x.device.type
    x, weight = in_its_dtype(device, x, weight)
    with torch.autocast(device, enabled=False):  # both are in its dtype, and so must be what flows back
        if weight.numel() > x.numel() or local.halo.is_empty:
            return operators.sparse_conv(with_halo(x, local, peers), weight, local.neighbours, local.reverse)
        convolve: Callable[[Tensor, Tensor, LocalMap, PeerGroup], Tensor] = _Conv.apply
        return convolve(x, weight, local, peers)


def with_halo(x: Tensor, local: LocalMap, peers: PeerGroup) -> Tensor:
    """``x`` (own inputs, channels), and after it the rows of others that ``local`` reads."""
    if local.halo.is_empty:
        return x
    extend: Callable[[Tensor, LocalMap, PeerGroup], Tensor] = _WithHalo.apply
    return extend(x, local, peers)


class _Conv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, local: LocalMap, peers: PeerGroup) -> Tensor:
        halo, pending = _start(x, local.halo, peers)
        own = local.of_own
        y = operators.sparse_conv(x, weight, own.neighbours, own.reverse)
        pending.wait()
        if len(halo):  # convolution is linear: what the halo contributes is added
            y.index_add_(0, local.boundary, operators.sparse_conv(halo, weight, local.of_boundary, local.of_halo))
        ctx.save_for_backward(x, halo, weight)
        ctx.local = local
        ctx.peers = peers
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, halo, weight = ctx.saved_tensors
        local: LocalMap = ctx.local
        dy = dy.contiguous()
        transposed = weight.transpose(1, 2)
        own = local.of_own
        dx = dw = back = None
        if ctx.needs_input_grad[0]:
            lent = dy.new_empty(0, weight.shape[1])
            if len(halo):
                lent = operators.sparse_conv(dy, transposed, local.of_halo, local.neighbours)
            back = _start_back(lent, local.halo, ctx.peers)
            dx = operators.sparse_conv(dy, transposed, own.reverse, own.neighbours)
        if ctx.needs_input_grad[1]:
            dw = operators.sparse_conv_weight(x, dy, own.neighbours)
            if len(halo):
                dw += operators.sparse_conv_weight(halo, dy[local.boundary], local.of_boundary)
        if dx is not None and back is not None:
            dx = _added(dx, local.halo, *back)
        return dx, dw, None, None


class _WithHalo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, local: LocalMap, peers: PeerGroup) -> Tensor:
        ctx.local = local
        ctx.peers = peers
        halo, pending = _start(x, local.halo, peers)
        pending.wait()
        return torch.cat([x, halo])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, drows: Tensor) -> tuple[Tensor | None, ...]:
        own = ctx.local.num_own
        back = _start_back(drows[own:].contiguous(), ctx.local.halo, ctx.peers)
        return _added(drows[:own].clone(), ctx.local.halo, *back), None, None


class SampleSums:
    """How sums over sites become samples that ranks share: rank ``r`` goes on with ``shares[r]`` of them, in order."""

    def __init__(self, shares: tuple[int, ...], peers: PeerGroup) -> None:
        self._shares = shares
        self._peers = peers

    def sum(self, parts: Tensor) -> Tensor:
        """Of (samples, channels), this rank's part of each sum, the sums of its own samples."""
        scatter: _OfSamples = _Scatter.apply
        return scatter(parts, self._shares, self._peers)

    def largest(self, parts: Tensor) -> Tensor:
        """Of (samples, channels), this rank's largest values, -inf where it has none, those of its own samples."""
        largest: _OfSamples = _Largest.apply
        return largest(parts, self._shares, self._peers)

    def whole(self, own: Tensor) -> Tensor:
        """Of (own samples, channels), all samples: the adjoint of :meth:`sum`."""
        gather: _OfSamples = _Gather.apply
        return gather(own, self._shares, self._peers)


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parts: Tensor, shares: tuple[int, ...], peers: PeerGroup) -> Tensor:
        ctx.how = shares, peers
        return _table(parts, shares, peers).sum(0)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return SampleSums(*ctx.how).whole(dy), None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, shares: tuple[int, ...], peers: PeerGroup) -> Tensor:
        ctx.how = shares, peers
        return _all_samples(own, shares, peers)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return SampleSums(*ctx.how).sum(dy), None, None


class _Largest(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parts: Tensor, shares: tuple[int, ...], peers: PeerGroup) -> Tensor:
        table = _table(parts, shares, peers)
        values, winners = table.max(0)  # of equal ones the first
        ctx.how = shares, peers
        ctx.save_for_backward((table == values).int().argmax(0) if len(table) > 1 else winners)
        return torch.where(values == -torch.inf, 0, values)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (winners,) = ctx.saved_tensors
        shares, peers = ctx.how
        both = _all_samples(torch.cat([dy, winners.to(dy.dtype)], 1), shares, peers)
        gradient, who = both.chunk(2, 1)
        return torch.where(who == peers.position, gradient, 0), None, None


def _start(x: Tensor, halo: RowHalo, peers: PeerGroup) -> tuple[Tensor, Pending]:
    """Rows leave; what comes fills the returned tensor."""
    coming = x.new_empty(halo.num_received, *x.shape[1:])
    sent = {position: operators.pack_rows(x, rows) for position, rows in halo.sends.items()}
    return coming, peers.start(sent, _by_position(coming, halo))


def _start_back(lent: Tensor, halo: RowHalo, peers: PeerGroup) -> tuple[dict[int, Tensor], Pending]:
    """Gradients of others' rows go back; those of own rows come."""
    coming = {position: lent.new_empty(len(rows), *lent.shape[1:]) for position, rows in halo.sends.items()}
    return coming, peers.start(_by_position(lent, halo), coming)


def _added(dx: Tensor, halo: RowHalo, coming: dict[int, Tensor], pending: Pending) -> Tensor:
    pending.wait()
    for position in sorted(coming):
        dx = operators.unpack_add(dx, halo.sends[position], coming[position])
    return dx


def _by_position(rows: Tensor, halo: RowHalo) -> dict[int, Tensor]:
    parts = torch.split(rows, [halo.receives[position] for position in sorted(halo.receives)])
    return dict(zip(sorted(halo.receives), parts, strict=False))


def _table(parts: Tensor, shares: tuple[int, ...], peers: PeerGroup) -> Tensor:
    """(ranks, own samples, channels): every rank's part of this rank's samples."""
    cuts = torch.split(parts.contiguous(), list(shares))
    me = peers.position
    table = parts.new_empty(len(shares), shares[me], *parts.shape[1:])
    table[me] = cuts[me]
    sent = {position: cut for position, cut in enumerate(cuts) if position != me and shares[position]}
    coming = {position: table[position] for position in range(len(shares)) if position != me and shares[me]}
    peers.start(sent, coming).wait()
    return table


def _all_samples(own: Tensor, shares: tuple[int, ...], peers: PeerGroup) -> Tensor:
    """(samples, channels) of every rank's own samples."""
    me = peers.position
    ends = list(accumulate(shares))
    samples = own.new_empty(ends[-1], *own.shape[1:])
    parts = torch.split(samples, list(shares))
    own = own.contiguous()
    parts[me].copy_(own)
    others = [position for position in range(len(shares)) if position != me]
    sent = dict.fromkeys(others, own) if shares[me] else {}
    peers.start(sent, {position: parts[position] for position in others if shares[position]}).wait()
    return samples
