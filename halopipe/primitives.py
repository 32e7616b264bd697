"""Tensors that are divided over processes, and what moves them: linear maps whose backward is the exact adjoint.

For modules of one's own, in a job of torchrun or wherever ranks have a process group:

    from halopipe.primitives import Partition, Ranks, all_reduce, broadcast, halo_exchange, repartition, sum_reduce

    ranks = Ranks()                                                  # of the default process group
    rows = Partition.of((8, 3, 32, 32), {2: (0, 20, 32)})            # 20 rows on rank 0, 12 on rank 1
    x = halo_exchange(x, rows, {2: (1, 1)}, ranks)                   # and one row of the neighbour's

Every rank has one tensor: that which covers its box of a partition.  The primitives are those of DistDL (Hewett and
Grady, "A linear algebraic approach to model parallelism in deep learning", arXiv 2006.03108, 2020), and all of them are
one map and its adjoint: a rank gets, of a tensor that others have, the box that it asks for; backward, gradients return
the way the values came and are added up there.  It is what halopipe's own stages exchange their halos by.

Where a tensor has several copies, each is a variable of its own.  So the sum of the losses of all ranks is what is
differentiated: a loss that every rank computes whole counts once for each of them.

All ranks of a group call the same primitives in the same order, those too that get nothing, and run backward through
all of them (``loss + 0 * y.sum()`` where a rank has no use for ``y``).  What comes back asks for a gradient on every
rank, unless nothing is recorded (``torch.no_grad()``): of data, which need none, exchange without recording.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from planner.ir.box import Box, Interval, inside, intersect, volume, whole
from planner.ir.errors import UsageError
from planner.ir.graph import TensorSpec
from planner.ir.layout import Layout, scaled_intervals
from planner.layers import window
from planner.layers.boxes import as_tuples, boxes_of
from planner.layers.division import moves_between
from runtime.pipeline.routing import slices
from runtime.spatial.collectives import sum_dtype
from runtime.spatial.exchange import Exchange, PeerGroup, accumulate, redistribute
from runtime.transport import GroupExchanges

if TYPE_CHECKING:
    from runtime.transport import Transport

__all__ = [
    "Partition",
    "Ranks",
    "Window",
    "all_reduce",
    "broadcast",
    "halo_exchange",
    "repartition",
    "sum_reduce",
]


@dataclass(frozen=True, slots=True)
class Window:
    """What slides along one dim: the parameters of a convolution or a pool, in elements."""

    kernel: int
    stride: int = 1
    padding: int = 0
    dilation: int = 1


@dataclass(frozen=True, slots=True)
class Partition:
    """Which box of a tensor each rank has.

    Attributes:
        shape: of the whole tensor.
        boxes: by rank of the group, intervals ``[start, stop)`` by dim in the whole tensor.  They may be empty, equal
            (copies), and where they say what ranks ask for, overlap and reach outside of the tensor.
    """

    shape: tuple[int, ...]
    boxes: tuple[Box, ...]

    @classmethod
    def of(cls, shape: Sequence[int], cuts: Mapping[int | str, Sequence[int]]) -> Partition:
        """The ranks form a grid, whose last axis runs fastest; each axis cuts one dim.

        Args:
            cuts: by dim, the cut points from 0 to the extent, or to any number that stands for it: ``(0, 1, 2)`` are
                halves.  A name instead of a dim is an axis along which the tensor is copied.  A dim of extent 1 is
                never cut but copied.

        Raises:
            UsageError: cut points do not begin with 0, or fall, or the tensor has no such dim.
        """
        names = tuple(f"dim {dim}" for dim in range(len(shape)))
        for dim, points in cuts.items():
            if isinstance(dim, int) and not 0 <= dim < len(shape):
                raise UsageError(f"dim {dim} is to be cut, of a tensor of shape {tuple(shape)}", ["dims count from 0"])
            if len(points) < 2 or points[0] != 0 or points[-1] <= 0 or any(a > b for a, b in pairwise(points)):
                text = f"cut points of dim {dim} are {tuple(points)}"
                raise UsageError(text, ["they rise from 0 to the extent"], ["write (0, 20, 32) for 20 rows and 12"])
        axes = {f"dim {dim}" if isinstance(dim, int) else dim: tuple(points) for dim, points in cuts.items()}
        return cls(tuple(shape), as_tuples(boxes_of(Layout(axes), TensorSpec(names, tuple(shape), "float32"), 0)))

    @classmethod
    def copies(cls, shape: Sequence[int], num_ranks: int) -> Partition:
        """Every rank has the whole tensor."""
        return cls(tuple(shape), (whole(tuple(shape)),) * num_ranks)

    @classmethod
    def at(cls, shape: Sequence[int], rank: int, num_ranks: int) -> Partition:
        """One rank has the whole tensor; the others' parts have no elements.

        Raises:
            UsageError: it is a scalar, no part of which is empty.
        """
        if not shape:
            raise UsageError("a scalar has no parts", [], ["reshape it to (1,)"])
        nothing = tuple(Interval(0, 0) for _ in shape)
        return cls(tuple(shape), tuple(whole(tuple(shape)) if each == rank else nothing for each in range(num_ranks)))

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """Of the tensor that a rank has."""
        return tuple(map(len, self.boxes[rank]))

    def slices(self, rank: int) -> tuple[slice, ...]:
        """What cuts a rank's part out of the whole tensor; its box lies inside."""
        return slices(self.boxes[rank], whole(self.shape))

    def grown(self, halos: Mapping[int, tuple[int, int]], *, outside: bool = False) -> Partition:
        """Each part with elements of its neighbours before and after it, by dim; an empty part stays empty.

        Args:
            outside: whether it reaches beyond the tensor, where padding is; else it ends with the tensor.
        """

        def along(dim: int, interval: Interval) -> Interval:
            before, after = halos.get(dim, (0, 0))
            start = interval.start - before
            stop = interval.stop + after
            return Interval(start, stop) if outside else Interval(max(0, start), min(self.shape[dim], stop))

        grown = tuple(
            tuple(along(dim, interval) for dim, interval in enumerate(box)) if volume(box) else box
            for box in self.boxes
        )
        return Partition(self.shape, grown)

    def windowed(self, windows: Mapping[int, Window]) -> tuple[Partition, Partition]:
        """What sliding windows make where this partition holds their input, and what of the input each rank reads.

        Who holds element ``o * stride`` of the input makes element ``o``.  The second reaches outside where padding is
        read: a rank's convolution has none of its own along these dims, nor an output where its part is empty.
        """
        outputs = {
            dim: max(0, (self.shape[dim] + 2 * each.padding - each.dilation * (each.kernel - 1) - 1) // each.stride + 1)
            for dim, each in windows.items()
        }
        shape = tuple(outputs.get(dim, extent) for dim, extent in enumerate(self.shape))

        def makes(dim: int, interval: Interval) -> Interval:
            if dim not in windows:
                return interval
            last = interval.stop == self.shape[dim]  # padding may make more outputs than there are elements
            first, end = (min(-(-at // windows[dim].stride), shape[dim]) for at in (interval.start, interval.stop))
            return Interval(first, shape[dim] if last and len(interval) else end)

        def reads(dim: int, interval: Interval) -> Interval:
            each = windows.get(dim)
            return interval if each is None else window(interval, each.kernel, each.stride, each.padding, each.dilation)

        made = tuple(tuple(makes(dim, interval) for dim, interval in enumerate(box)) for box in self.boxes)
        nothing = tuple(Interval(0, 0) for _ in shape)
        read = tuple(
            tuple(reads(dim, interval) for dim, interval in enumerate(box)) if volume(box) else nothing for box in made
        )
        return Partition(shape, made), Partition(self.shape, read)


class Ranks:
    """The processes that divide tensors among them, in the order of their group.

    Args:
        group: of ``torch.distributed``, with any backend; None: the default process group.
        timeout_s: the longest wait for another rank.

    Attributes:
        rank: this one.
        size: how many there are.

    Raises:
        UsageError: there is no process group.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, timeout_s: float = 600.0) -> None:
        group = dist.group.WORLD if group is None and dist.is_initialized() else group
        if group is None:
            remedies = ["torch.distributed.init_process_group() first", "start the script by torchrun"]
            raise UsageError("there is no process group to exchange tensors over", [], remedies)
        exchanges = GroupExchanges(group)
        exchanges.deadline_s = timeout_s
        self._set(PeerGroup(exchanges, tuple(range(group.size()))))

    @classmethod
    def over(cls, transport: Transport, ranks: Sequence[int] = (), timeout_s: float | None = None) -> Ranks:
        """Over a transport of :mod:`runtime.transport`, as memory that ranks of one host share.

        Args:
            ranks: those of the group; empty: all.
            timeout_s: the longest wait for another rank, of all that waits by this transport from now on; None: as the
                transport was told.
        """
        ranks_over = cls.__new__(cls)
        if timeout_s is not None:
            transport.deadline_s = timeout_s
        ranks_over._set(PeerGroup(transport, tuple(ranks) or tuple(range(transport.world_size))))
        return ranks_over

    def _set(self, peers: PeerGroup) -> None:
        self._peers = peers
        self._exchanges: dict[tuple[Partition, Partition], Exchange] = {}
        self.rank = peers.position
        self.size = len(peers.ranks)

    @property
    def sent_bytes(self) -> int:
        """What this rank has sent since it was made."""
        return self._peers.sent_bytes

    def exchange(self, source: Partition, target: Partition) -> Exchange:
        """How this rank gets its box of ``target`` from what the ranks have by ``source``; made once for each pair.

        Raises:
            UsageError: the partitions are of other tensors or numbers of ranks, or do not say who has an element.
        """
        cached = self._exchanges.get((source, target))
        if cached is None:
            self._check(source, target)
            wanted = [inside(box, source.shape) for box in target.boxes]
            cached = Exchange.of(self._peers, source.boxes, wanted, moves_between(source.boxes, source.boxes, wanted))
            self._exchanges[source, target] = cached
        return cached

    def _check(self, source: Partition, target: Partition) -> None:
        for partition in (source, target):
            if len(partition.boxes) != self.size:
                text = f"a tensor is divided over {len(partition.boxes)} ranks, the group has {self.size}"
                raise UsageError(text, [], ["cut it into as many parts as there are ranks"])
        if source.shape != target.shape:
            text = f"a tensor of shape {source.shape} cannot become one of shape {target.shape}"
            raise UsageError(text, ["both partitions are of the same tensor"], ["reshape each part, or the whole"])
        owned = {box for box in source.boxes if volume(box)}
        shared = next((pair for pair in combinations(sorted(owned), 2) if intersect(*pair)), None)
        if shared is not None:
            remedies = ["give each element to one rank, or equal boxes to several"]
            raise UsageError("what ranks have overlaps", [f"{_text(shared[0])} and {_text(shared[1])}"], remedies)
        count = sum(map(volume, owned))
        total = volume(whole(source.shape))
        if count != total or any(inside(box, source.shape) != box for box in owned):
            text = f"the ranks have {count} elements of a tensor of shape {source.shape}, which has {total}"
            raise UsageError(text, [_text(box) for box in sorted(owned)], ["let the cut points end with the extents"])


def repartition(x: Tensor, source: Partition, target: Partition, ranks: Ranks) -> Tensor:
    """A tensor divided in another way: scatter, gather and all-to-all are cases of it.

    Args:
        x: this rank's part of it by ``source``; anything without elements where that is empty.
        target: what each rank gets of it.  Boxes may overlap, and reach outside of the tensor, where zeros are.

    Returns:
        This rank's part by ``target``.  Backward, the gradient of each element is the sum of those of all its copies,
        at the rank that they were taken from: where several ranks have equal boxes by ``source``, at one of them.

    Raises:
        UsageError: ``x`` is not of the shape that ``source`` says, or as :meth:`Ranks.exchange`.
        DeadlineError, TransportError: another rank did not come, or is gone.
    """
    exchange = ranks.exchange(source, target)
    return redistribute(_part(x, exchange.held, "source", ranks), exchange, target.boxes[ranks.rank])


def broadcast(x: Tensor, source: Partition, ranks: Ranks, target: Partition | None = None) -> Tensor:
    """Copies of a tensor, or of its parts, for several ranks; the adjoint of :func:`sum_reduce`.

    Args:
        x: as in :func:`repartition`; of a tensor that rank 0 has, ``source`` is ``Partition.at(shape, 0, size)``.
        target: None: all of it for all ranks.
    """
    return repartition(x, source, target or Partition.copies(source.shape, ranks.size), ranks)


def sum_reduce(x: Tensor, source: Partition, target: Partition, ranks: Ranks) -> Tensor:
    """Sums of what several ranks have over the same elements, each on one rank; the adjoint of :func:`broadcast`.

    Half precision is added up in float32.

    Args:
        x: this rank's terms, which cover its box of ``source``.
        target: who gets which sums; no element twice.

    Returns:
        This rank's sums, which cover its box of ``target``.  Backward, each term gets the gradient of its sum.

    Raises:
        UsageError: as :func:`repartition`, or several ranks are to have the same sum.
    """
    owned = [box for box in target.boxes if volume(box)]
    if len(set(owned)) != len(owned):
        twice = next(box for box in owned if owned.count(box) > 1)
        raise UsageError("a sum is to be on several ranks", [f"{_text(twice)} twice"], ["all_reduce, or broadcast it"])
    exchange = ranks.exchange(target, source)
    box = source.boxes[ranks.rank]
    terms = _part(x, box, "source", ranks)
    return accumulate(terms.to(sum_dtype(x.dtype)), exchange, box).to(x.dtype)


def all_reduce(x: Tensor, ranks: Ranks, partition: Partition | None = None) -> Tensor:
    """The sum of what ranks have over the same elements, the same bits on each of them; it is its own adjoint.

    Each of n ranks adds up an nth of it, and tells it to the others: 2 (n - 1) / n of its bytes are sent by each.

    Args:
        partition: ranks with equal boxes are summed over; None: all have tensors of the shape of ``x``.
    """
    boxes = Partition.copies(x.shape, ranks.size).boxes if partition is None else partition.boxes
    members: dict[Box, list[int]] = {}
    for rank, box in enumerate(boxes):
        members.setdefault(box, []).append(rank)
    terms = [Interval(0, 0)] * len(boxes)
    sums = [Interval(0, 0)] * len(boxes)
    offset = 0
    for box, owners in members.items():
        count = volume(box)
        even = tuple(range(len(owners) + 1))
        for rank, part in zip(owners, scaled_intervals(even, count), strict=True):
            terms[rank] = Interval(offset, offset + count)
            sums[rank] = Interval(offset + part.start, offset + part.stop)
        offset += count
    flat = _part(x, boxes[ranks.rank], "partition", ranks).reshape(-1)
    source, target = (Partition((offset,), tuple((each,) for each in row)) for row in (terms, sums))
    return repartition(sum_reduce(flat, source, target, ranks), target, source, ranks).view(x.shape)


def halo_exchange(
    x: Tensor, source: Partition, halos: Mapping[int, tuple[int, int]], ranks: Ranks, *, zeros: bool = False
) -> Tensor:
    """This rank's part and the elements around it, from as many ranks as have them.

    Args:
        x: this rank's part by ``source``.
        halos: by dim, how many elements before and after; they may exceed a neighbour's part.
        zeros: whether the result also reaches beyond the tensor, with zeros there, as a convolution's padding.

    What a strided window reads differs from rank to rank: :meth:`Partition.windowed` says what :func:`repartition` is
    to get.
    """
    return repartition(x, source, source.grown(halos, outside=zeros), ranks)


def _part(x: Tensor, box: Box, name: str, ranks: Ranks) -> Tensor:
    """``x`` as this rank's part of a partition, from which something flows back where gradients are recorded."""
    shape = tuple(map(len, box))
    if tuple(x.shape) != shape:
        if x.numel() or volume(box):
            text = f"rank {ranks.rank} has a tensor of shape {tuple(x.shape)}, its part by {name} has {shape}"
            raise UsageError(text, [f"its box is {_text(box)}"], [f"cut the whole by {name}.slices(rank)"])
        x = x.reshape(shape)
    if torch.is_grad_enabled() and not x.requires_grad and (x.is_floating_point() or x.is_complex()):
        x = x.detach().requires_grad_()  # backward runs on all ranks or on none: others wait for this one's gradients
    return x


def _text(box: Box) -> str:
    return " x ".join(map(str, box))
