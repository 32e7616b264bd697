"""What the executor asks of a transport, and the two ways in which a transport fails.

Joining the default process group: by hand, or from what torchrun or Slurm say in the environment.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple, Protocol, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from cuda_ops._torch import PrefixStore, Store
from planner.ir.errors import DeadlineError, TransportError

Spec = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype of one tensor of a message."""

ErrorWords = tuple[object, ...]
"""What an error would say, put together only if there is one."""

KEYED = 1 << 30
"""Keys of exchanges are below; tags from here on are those of keyed exchanges."""
_PLACES = 1 << 14
"""Places of a stage's graph that exchanges have keys of."""


def exchange_key(stage: int, place: int, training: bool = True) -> int | None:
    """Names an exchange at a place of a stage's graph: even, and below ``KEYED``; None: the graph has too many places.

    Args:
        place: number of the node, or of the layer's exchange.
        training: an evaluation has exchanges of its own.
    """
    return (stage * _PLACES + place) << 2 | training << 1 if place < _PLACES else None


class MessageKey(NamedTuple):
    """The name of one message between one pair of ranks, known to both before it is sent.

    ``kind`` is one capital letter (``F`` forward, ``B`` backward).  Between a pair of ranks no two messages in flight
    may have equal keys.  :func:`runtime.transport.frame.tag` says how large the numbers may be.
    """

    step: int
    kind: str
    src_stage: int
    dst_stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"step {self.step} {self.kind} {self.src_stage}->{self.dst_stage} mb {self.microbatch}"


class Pending(Protocol):
    """Something between ranks that was started and goes on by itself."""

    def wait(self) -> None:
        """Return when the result is in place, once for each start; the deadline counts from here.

        Raises:
            DeadlineError, TransportError: as every wait of a :class:`Transport`.
        """


class Exchanging(Protocol):
    """The part of a transport that exchanges."""

    rank: int

    def start_exchange(
        self,
        sent: Mapping[int, Tensor],
        received: Mapping[int, Tensor],
        key: int | None = None,
    ) -> Pending:
        """Start to send tensors to ranks and to fill those that come from ranks; both are in place after the wait.

        What one rank sends another so is matched with what that one receives by order, never with anything else.  Only
        those that something goes to or comes from take part.

        Args:
            sent: of any strides, as cut out of larger tensors; nobody may write to them before the wait has returned.
            received: contiguous, of the shape and dtype that their sender sends.
            key: below 2**30, the same at both ends, of an exchange that comes again and again with the same shapes: its
                next receives may then be announced long before, and what is sent is waited for by the next one or by
                :meth:`flush`.  Exchanges of one key are matched by order.
        """


class Transport(Exchanging, Protocol):
    """Point-to-point messages and sums among ``world_size`` ranks, used by one thread a rank.

    What ranks do together (``all_reduce``, ``start_sum``, ``reduce_scatter``, ``all_gather``, ``all_max``) is among
    ``ranks``, a declared group, whose members come in the same order; only sums that were started have an order of
    their own.  All ranks get the same bits, whenever each of them came: the order of addition is fixed, but another
    one in each transport.

    Attributes:
        name: what the world exchanges by, in the words of :mod:`planner.ir.cluster`.
        deadline_s: the longest that a wait may take, read where one waits (:func:`within`).

    Raises:
        DeadlineError: a wait was longer than ``deadline_s``, or could only become so.  The transport is then
            unusable, and the peers of this rank soon meet a TransportError: one late message ends the step for all.
        TransportError: a peer is gone, or what came is not what was announced.
    """

    world_size: int
    name: str
    deadline_s: float

    def name_among(self, ranks: Sequence[int]) -> str:
        """What ``ranks``, this one among them, exchange by."""

    def post_receive(self, key: MessageKey, source: int, specs: Sequence[Spec]) -> None:
        """Announce the message ``key`` from rank ``source``: its buffer is allocated and may be filled from now on."""

    def receive(self, key: MessageKey, source: int) -> tuple[Tensor, ...]:
        """The tensors of an announced message; small ones share a buffer, which lives as long as any of them."""

    def send(self, key: MessageKey, destination: int, tensors: Sequence[Tensor]) -> None:
        """Start to send the tensors in one message.

        Nobody may write to them before the message was taken: small ones are copied, large ones need not be.
        """

    def flush(self) -> None:
        """Wait until every message sent from here was taken by its receiver, and let go of their buffers.

        Messages let go by themselves as soon as one comes back from their receiver that was sent after it had them.
        """

    def all_reduce(self, tensor: Tensor, ranks: tuple[int, ...]) -> None:
        """Replace ``tensor`` by its sum over ``ranks``."""

    def start_sum(self, tensor: Tensor, ranks: tuple[int, ...]) -> Pending:
        """As :meth:`all_reduce`, in the background; nobody may read or write ``tensor`` before the wait has returned.

        The started sums of a group are matched with one another by order, never with what else the group does: a rank
        may start a sum before or after an ``all_reduce`` of the same group.
        """

    def reduce_scatter(self, flat: Tensor, counts: Sequence[int], ranks: tuple[int, ...]) -> None:
        """Replace this rank's part of ``flat`` by its sum over ``ranks``; the other parts are left as they were.

        Args:
            flat: [sum of counts], contiguous.
            counts: elements of each rank's part, in the order of ``ranks``; some may be 0.
        """

    def all_gather(self, flat: Tensor, counts: Sequence[int], ranks: tuple[int, ...]) -> None:
        """Replace the parts of ``flat`` that are others' by what those have there; as :meth:`reduce_scatter`."""

    def all_max(self, tensor: Tensor, ranks: tuple[int, ...]) -> None:
        """Replace ``tensor``, a small one, by its largest elements over ``ranks``; NaN is larger than all."""

    def barrier(self, word: int = 0) -> int:
        """Wait until every rank is here; each brings a word from 0 to 255, and all get the largest of them."""

    def close(self) -> None:
        """Leave.  Messages that were not flushed may be lost; peers that still wait for this rank get an error."""


@contextmanager
def within(transport: Transport, deadline_s: float) -> Iterator[None]:
    """Inside, waits may take so long."""
    before = transport.deadline_s
    transport.deadline_s = deadline_s
    try:
        yield
    finally:
        transport.deadline_s = before


F = TypeVar("F", bound=Callable[..., Any])


def without_gradients(function: F) -> F:
    """As ``torch.no_grad`` above a function that is mostly called where it holds already: entering it costs more."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        with torch.no_grad():
            return function(*args, **kwargs)

    return cast(F, call)


def declare(groups: Iterable[Sequence[int]], world_size: int) -> dict[tuple[int, ...], int]:
    """The groups by their ranks, numbered in order, the world first.

    Raises:
        TransportError: a group is not an increasing tuple of ranks of the world.
    """
    numbers = {tuple(range(world_size)): 0}
    for ranks in map(tuple, groups):
        if not ranks or list(ranks) != sorted(set(ranks)) or ranks[0] < 0 or ranks[-1] >= world_size:
            raise TransportError(f"group {ranks} is not an increasing tuple of ranks below {world_size}")
        numbers.setdefault(ranks, len(numbers))
    return numbers


def check_member(rank: int, ranks: tuple[int, ...], declared: Iterable[tuple[int, ...]]) -> None:
    """Refuse a sum over a group that was not declared or that ``rank`` is not in.

    Raises:
        TransportError: it names the group and those that were declared.
    """
    groups = tuple(declared)
    if ranks not in groups or rank not in ranks:
        raise TransportError(
            f"rank {rank} cannot sum over ranks {ranks}",
            [f"groups with rank {rank}: {', '.join(str(group) for group in groups if rank in group)}"],
            ["declare every group when the transport is made, in the same order on all ranks"],
        )


def parts(flat: Tensor, counts: Sequence[int], ranks: tuple[int, ...]) -> tuple[Tensor, ...]:
    """Each rank's part of ``flat``, as views.

    Raises:
        TransportError: ``flat`` does not consist of such parts.
    """
    if flat.dim() != 1 or not flat.is_contiguous() or len(counts) != len(ranks) or sum(counts) != flat.numel():
        raise TransportError(
            f"parts of {list(counts)} elements for ranks {ranks} do not make up a tensor of shape {tuple(flat.shape)}",
            ["expected a contiguous tensor of one dim, and a count for each rank"],
        )
    return torch.split(flat, list(counts))


def add_in_order(own: Tensor, position: int, others: Sequence[Tensor]) -> None:
    """Adds ``others`` to ``own``, which comes before number ``position`` of them: all ranks get the same bits.

    Args:
        others: on any device; they are left as they were.
    """
    before = others[:position]
    after = others[position:]
    if before:
        total = before[0] if len(before) == 1 else before[0] + before[1]
        for term in before[2:]:
            total += term
        own += total.to(own.device)  # the addition of two numbers commutes
    for term in after:
        own += term.to(own.device)


def is_plain(tensor: Tensor) -> bool:
    """Whether its values are the bytes that follow one another in this process's memory."""
    return tensor.is_contiguous() and has_values(tensor)


def has_values(tensor: Tensor) -> bool:
    """Whether what lies in this process's memory are its values, and not others that it stands for."""
    return tensor.is_cpu and not tensor.is_conj() and not tensor.is_neg()


def plain(tensor: Tensor, device: torch.device | str = "cpu") -> Tensor:
    """Its values as bytes that follow one another on ``device``: its own memory, or a copy."""
    return tensor.detach().to(device).contiguous().resolve_conj().resolve_neg()


def plain_copy(tensor: Tensor) -> Tensor:
    """Its values as bytes that follow one another, in memory of their own: one pass over what has other strides."""
    return tensor.detach().clone(memory_format=torch.contiguous_format).resolve_conj().resolve_neg()


def plain_like(tensor: Tensor, device: torch.device | str = "cpu") -> Tensor:
    """Room for its values, as :func:`plain` would have them."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)


def flat_on_cpu(tensor: Tensor) -> Tensor:
    """Its values in one dim, plain and on the CPU: its own memory, or a copy."""
    return plain(tensor).view(-1)


def put_back(flat: Tensor, tensor: Tensor) -> None:
    """Where :func:`flat_on_cpu` had to copy, ``tensor`` becomes what ``flat`` is now."""
    if flat.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(flat.view(tensor.shape))


@dataclass(frozen=True, slots=True)
class Deadline:
    """A wait of at most ``limit_s``, or several waits that share the limit, counted from ``start_s``."""

    limit_s: float
    start_s: float = field(default_factory=time.monotonic)

    def waited_s(self) -> float:
        """Since the start."""
        return time.monotonic() - self.start_s

    def left_s(self) -> float:
        """Until the limit; negative after it."""
        return self.limit_s - self.waited_s()

    def error(self, what: str, rank: int, peer: str) -> DeadlineError:
        """The error of a wait that lasted too long: ``what`` was awaited by ``rank`` from ``peer``."""
        return DeadlineError(
            f"{what}: rank {rank} waited {self.waited_s():.2f} s for {peer}, deadline {self.limit_s:g} s",
            remedies=[f"see what {peer} does; if it is only slow, raise the timeout"],
        )


def words(parts: ErrorWords) -> str:
    """As an error says it."""
    return " ".join(map(str, parts))


def gone(what: str, rank: int, peer: str, cause: str) -> TransportError:
    """The error of a peer that can no longer be reached."""
    return TransportError(f"{what}: rank {rank} lost {peer}", [cause], [f"look for the first error of {peer}"])


def named(ranks: Iterable[int]) -> str:
    """Ranks in words."""
    return ", ".join(f"rank {rank}" for rank in ranks)


T = TypeVar("T")


def join(
    backend: str,
    rank: int | None,
    world_size: int | None,
    store: Store | None,
    timeout_s: float,
    make: Callable[[], T],
) -> T:
    """What ``make`` makes in the default process group, which is joined first.

    Args:
        rank, world_size, store: of this process; None where the environment names them.
        timeout_s: for the first meeting, and the longest that a sum left behind by an error may keep the process.

    Raises:
        TransportError: the ranks did not find each other.
    """
    timeout = timedelta(seconds=timeout_s)
    try:
        if store is None:
            rank_and_size = (-1 if rank is None else rank, -1 if world_size is None else world_size)
            store, rank, world_size = next(rendezvous("env://", *rank_and_size, timeout=timeout))
            # A restarted job finds the keys of its predecessor in torchrun's store: each attempt has its own.
            store = PrefixStore(f"halopipe/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
        mine = cast(int, rank)  # who gives a store gives these as well
        size = cast(int, world_size)
        dist.init_process_group(backend, store=store, rank=mine, world_size=size, timeout=timeout)
        return make()
    except (RuntimeError, ValueError) as error:
        place = "a rank from the environment" if rank is None else f"rank {rank} of {world_size}"
        remedies = ["start with torchrun, or give rank, world_size and store", "look for the first error of the others"]
        raise TransportError(f"{place} could not join the others", [str(error)], remedies) from error


M = TypeVar("M", bound="Transport")


def met(transport: M, timeout_s: float) -> M:
    """The transport, once all ranks have it: one that leaves early would break the others' connecting.

    Raises:
        DeadlineError: not all of them were ready in time.
    """
    transport.deadline_s = timeout_s
    transport.barrier()
    return transport


def default_group() -> dist.ProcessGroup:
    """The default process group.

    Raises:
        TransportError: there is none.
    """
    world = dist.group.WORLD
    if world is None:
        raise TransportError("there is no default process group", remedies=["use open_gloo or open_nccl"])
    return world
