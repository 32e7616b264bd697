"""Ranks that are processes of an MPI job: messages and sums over mpi4py, on the CPU.

Messages are those of gloo's transport, frames and keys alike; MPI matches them by tag.  MPI moves bytes only while this
process is inside of it, hence every wait asks again and again: it spins for a moment, which also keeps the core awake,
then sleeps in short growing pauses.  No wait is MPI's own, which has no deadline.

MPI does not say that a peer has left: each rank says so itself when it closes its transport or gives a wait up.  One
that was killed says nothing; mpiexec then ends the others too, and where it does not, they meet their deadlines.

What was measured decided for plain sends and receives, from and into the tensors themselves (mpich 5.0, two ranks of
one host, one tensor each way, 1 KiB / 32 KiB / 256 KiB / 4 MiB): pairs 5 / 11 / 31 / 820 us, persistent requests
2 / 7 / 27 / 540 us, Ineighbor_alltoallw 4 / 10 / 25 / 490 us and persistent 1 / 7 / 22 / 440 us.  The last three need
buffers that stay where they are, while a halo and its receiver are new tensors in each step: copied to where persistent
requests want them, an exchange takes 5 / 17 / 150 / 6,600 us.  A neighbourhood would need a communicator for each
layout besides.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist

from planner.ir.errors import DeadlineError, TransportError
from runtime.transport.base import Deadline, Key, Pending, Spec, check_member, declare, gone, parts
from runtime.transport.gloo import Peer
from runtime.transport.works import KEYED, Barrier, Words, Works, words

if TYPE_CHECKING:
    from mpi4py import MPI

PAIR_SUM_BYTES, SUM_BYTES = 1 << 20, 16 * 1024
"""Up to here two ranks, or more of them, exchange their whole terms; of larger ones each adds a part up for all.

Measured as above, sums of 64 KiB / 1 MiB / 4 MiB / 16 MiB: whole 16 / 156 / 1,920 / 11,200 us, parts 27 / 159 / 1,340 /
10,500 us, MPI's own Iallreduce, which need not give all ranks the same bits, 31 / 233 / 1,360 / 14,700 us.
"""

SPIN_S, CROWDED_SPIN_S = 2e-3, 50e-6
"""How long a wait spins, giving way to whoever else wants the core; and where a host has more ranks than cores."""

_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 20e-6, 500e-6
_STRAGGLE_S = 0.02
"""How long what a rank sent before it left may still be on its way."""

_LEAVE_S = 3.0
"""How long a process that ends waits for the others to end as well, so that MPI can be finalised."""

_TAG_BITS, _MOST_COMMUNICATORS = 32, 64
_FAREWELL = 29 << 26  # the upper five bits of a tag, which no message has
_KEYED = 1 << 31  # the others are those of messages
_TOGETHER = 3 << 30
_UNKEYED = _TOGETHER | 1 << 29
_NUMBERS = 1 << 12  # of one group's sums, which are far fewer at a time

_UNFINISHED: list[tuple[MPI.Request, torch.Tensor]] = []
"""What nobody waits for any more, and MPI may still read or write: both live as long as the process does."""


def load_mpi(timeout_s: float) -> Any:
    """mpi4py's ``MPI``, initialised; this process then leaves MPI when it ends, if the others do as well.

    Args:
        timeout_s: after which it ends: MPI itself waits without a deadline for a rank that never comes.

    Raises:
        TransportError: there is no mpi4py, or it finds no MPI.
    """
    try:
        import mpi4py

        mpi4py.rc.initialize = mpi4py.rc.finalize = False  # where nobody has loaded it yet
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        remedies = ["pip install 'halopipe[mpi]', or mpi4py for the MPI of this machine"]
        raise TransportError("MPI cannot be loaded", [str(error)], remedies) from error
    if not MPI.Is_initialized():
        watch = threading.Timer(timeout_s, _give_up, [timeout_s])
        watch.daemon = True
        watch.start()
        MPI.Init_thread(MPI.THREAD_SERIALIZED)
        watch.cancel()
        atexit.register(_leave, MPI)
    return MPI


def _give_up(timeout_s: float) -> None:
    sys.stderr.write(f"not all processes of the MPI job began within {timeout_s:g} s: this one is ended\n")
    sys.stderr.flush()
    os._exit(DeadlineError.exit_code)


def _leave(mpi: Any) -> None:
    """Finalise MPI, unless a rank is missing: it would be waited for without end."""
    if mpi.Is_finalized() or _UNFINISHED:
        return
    there, end_s = mpi.COMM_WORLD.Ibarrier(), time.monotonic() + _LEAVE_S
    while not there.Test():
        if time.monotonic() > end_s:
            return
        time.sleep(_LONGEST_PAUSE_S)
    mpi.Finalize()


def _forget_segments() -> None:
    """The shared memory of mpich loses its name, once every rank has it: nothing is left of ranks that are killed."""
    with contextlib.suppress(OSError):
        maps = Path("/proc/self/maps").read_text("utf-8", "replace")
        for name in set(re.findall(r"/dev/shm/mpich_shm_\w+", maps)):
            Path(name).unlink(missing_ok=True)


class Request:
    """A send or receive on its way, and the tensor that it is of.

    Attributes:
        peer: the other rank.
    """

    __slots__ = ("_is_exact", "_is_receive", "_request", "_tensor", "_wire", "peer")

    def __init__(
        self, wire: Wire, request: MPI.Request, tensor: torch.Tensor, peer: int, is_receive: bool, is_exact: bool
    ) -> None:
        self._wire, self._tensor, self.peer = wire, tensor, peer
        self._request: MPI.Request | None = request
        self._is_receive, self._is_exact = is_receive, is_exact

    def test(self) -> bool:
        """Whether it is done.

        Raises:
            TransportError: what came has another size.
        """
        if self._request is None:
            return True
        mpi, status = self._wire.mpi, self._wire.status
        try:
            if not self._request.Test(status):
                return False
        except mpi.Exception as error:
            self._request = None
            if error.Get_error_class() == mpi.ERR_TRUNCATE:
                raise self._other_size("more") from error
            raise
        self._request = None
        if self._is_exact and (came := status.Get_count(mpi.BYTE)) != self._tensor.nbytes:
            raise self._other_size(f"{came} bytes")
        return True

    def __del__(self) -> None:
        if self._request is not None and not self._wire.mpi.Is_finalized():
            if self._is_receive:
                self._request.Cancel()
            if not self._request.Test():
                _UNFINISHED.append((self._request, self._tensor))

    def _other_size(self, came: str) -> TransportError:
        return TransportError(
            f"rank {self.peer} sent {came}, rank {self._wire.rank()} expected {self._tensor.nbytes} bytes",
            [f"for a tensor of shape {tuple(self._tensor.shape)} and {self._tensor.dtype}"],
            ["give all ranks the same plan"],
        )


class Wire:
    """Sends and receives under tags of 32 bits, on as many communicators as it takes for the tags that MPI allows.

    Its methods are named as those of torch's process groups, of which messages and barriers use no others.

    Args:
        ranks: a communicator, whose order is theirs; it is duplicated by all of them together.

    Raises:
        TransportError: MPI's tags are too small.
    """

    def __init__(self, mpi: Any, ranks: MPI.Intracomm) -> None:
        self.mpi, self.status = mpi, mpi.Status()
        self._rank, self._size = ranks.rank, ranks.size
        largest = int(ranks.Get_attr(mpi.TAG_UB) or 0)
        self._bits = (largest + 1).bit_length() - 1
        if 1 << _TAG_BITS - self._bits > _MOST_COMMUNICATORS:
            raise TransportError(
                f"this MPI allows tags up to {largest}, expected {(1 << _TAG_BITS) // _MOST_COMMUNICATORS - 1} or more",
                [mpi.Get_library_version().splitlines()[0]],
                ["let the MPI library choose another provider or transport", "--transport gloo"],
            )
        self._communicators = [ranks.Dup() for _ in range(1 << max(0, _TAG_BITS - self._bits))]
        self._mask = (1 << self._bits) - 1

    def rank(self) -> int:
        """This one."""
        return self._rank

    def size(self) -> int:
        """How many ranks there are."""
        return self._size

    def send(self, tensors: Sequence[torch.Tensor], rank: int, tag: int) -> Request:
        """Start to send a contiguous tensor of the CPU."""
        (tensor,) = tensors
        request = self._communicators[tag >> self._bits].Isend(self._buffer(tensor), rank, tag & self._mask)
        return Request(self, request, tensor, rank, False, False)

    def recv(self, tensors: Sequence[torch.Tensor], rank: int, tag: int, is_exact: bool = False) -> Request:
        """Start to receive one; what is shorter is refused if ``is_exact``."""
        (tensor,) = tensors
        request = self._communicators[tag >> self._bits].Irecv(self._buffer(tensor), rank, tag & self._mask)
        return Request(self, request, tensor, rank, True, is_exact)

    def _buffer(self, tensor: torch.Tensor) -> list[Any]:
        num_bytes = tensor.nbytes
        return [self.mpi.buffer.fromaddress(tensor.data_ptr(), num_bytes), num_bytes, self.mpi.BYTE]


class MpiWorks(Works):
    """Waits of one rank: for requests, and for whatever else is asked again and again until it is done.

    Args:
        spin_s: how long a wait asks without a pause.
    """

    def __init__(self, wire: Wire, spin_s: float) -> None:
        super().__init__(wire.rank())
        self.running: list[Steps] = []
        self._wire, self._spin_s = wire, spin_s
        others = [rank for rank in range(wire.size()) if rank != self.rank]
        self._farewells = {rank: self._farewell(wire.recv, rank) for rank in others}
        self._told = False

    def wait(self, work: dist.Work, what: Words, peer: Words, deadline: Deadline) -> None:
        request = cast("Request", work)
        self.until(request.test, what, lambda: (request.peer,), deadline)

    def until(
        self, is_done: Callable[[], bool], what: Words, peers: Callable[[], Sequence[int]], deadline: Deadline
    ) -> None:
        """Until ``is_done()``, which depends on what ``peers()`` do.

        Raises:
            DeadlineError: too late; the others are told that this rank gives up.
            TransportError: a peer has left.
        """
        try:
            if is_done():
                return
            end_s = time.monotonic() + self._spin_s
            while time.monotonic() < end_s:
                os.sched_yield()
                self._go_on()
                if is_done():
                    return
            pause_s = _SHORTEST_PAUSE_S
            while not is_done():
                self._look(is_done, what, peers, deadline)
                time.sleep(pause_s)
                pause_s = min(1.5 * pause_s, _LONGEST_PAUSE_S)
                self._go_on()
        except self._wire.mpi.Exception as error:
            raise gone(words(what), self.rank, _names(peers()), str(error)) from error

    def leave(self) -> None:
        """Tell the others that nothing more comes from here."""
        for rank in () if self._told else self._farewells:
            self._farewell(self._wire.send, rank)
        self._told = True

    def _look(
        self, is_done: Callable[[], bool], what: Words, peers: Callable[[], Sequence[int]], deadline: Deadline
    ) -> None:
        left = [rank for rank in peers() if self._farewells[rank].test()]
        if left:
            end_s = time.monotonic() + _STRAGGLE_S
            while time.monotonic() < end_s:
                if is_done():
                    return
            raise gone(words(what), self.rank, _names(left), "it has left the job, or waited in vain itself")
        if deadline.waited_s() >= deadline.limit_s:
            self.leave()
            raise deadline.error(words(what), self.rank, _names(peers()))

    def _go_on(self) -> None:
        """What was started in the background takes its next step, where it can."""
        self.running = [steps for steps in self.running if not steps.go_on()]

    def _farewell(self, start: Callable[..., Request], rank: int) -> Request:
        return start([torch.zeros(1, dtype=torch.uint8)], rank, _FAREWELL)


class Steps:
    """Something that a group does: requests, then what is computed of what came, and so on.

    Args:
        steps: yields the requests of each step, and goes on when all of them are done.
    """

    def __init__(self, works: MpiWorks, steps: Iterator[list[Request]], what: Words, deadline_s: float) -> None:
        self._works, self._steps, self._what, self._deadline_s = works, steps, what, deadline_s
        self._waiting: list[Request] | None = next(steps, None)

    def go_on(self) -> bool:
        """Whether it is done."""
        while self._waiting is not None:
            while self._waiting:
                if not self._waiting[0].test():
                    return False
                del self._waiting[0]
            self._waiting = next(self._steps, None)
        return True

    def wait(self) -> None:
        """See :class:`runtime.transport.base.Pending`."""
        self._works.until(self.go_on, self._what, self._missing, Deadline(self._deadline_s))

    def _missing(self) -> list[int]:
        return sorted({request.peer for request in self._waiting or () if not request.test()})


_Combine = Callable[[torch.Tensor, torch.Tensor], object]


def open_mpi(
    rank: int | None = None,
    world_size: int | None = None,
    timeout_s: float = 600.0,
    groups: Iterable[Sequence[int]] = (),
) -> MpiTransport:
    """The transport of this process among all those that mpiexec started; all of them open theirs together.

    Args:
        rank: of this process, from 0; None: its rank in MPI's world.
        world_size: how many processes there should be; None: as many as there are.
        timeout_s: for the first meeting.
        groups: those that may do something together, besides the world; the same on all ranks.

    Raises:
        TransportError: there is no MPI, or it has another number of processes.
        DeadlineError: not all of them were ready in time.
    """
    mpi = load_mpi(timeout_s)
    world = mpi.COMM_WORLD
    if world_size is not None and world.size != world_size:
        raise TransportError(
            f"MPI has {world.size} processes, the job {world_size}",
            [mpi.Get_library_version().splitlines()[0]],
            ["start with the mpiexec of the same MPI that mpi4py uses"],
        )
    meet(world, timeout_s)
    local = world.Split_type(mpi.COMM_TYPE_SHARED)
    ranks = world.Split(0, world.rank if rank is None else rank)
    spin_s = SPIN_S if local.size <= (os.cpu_count() or 1) else CROWDED_SPIN_S
    transport = MpiTransport(mpi, ranks, groups, spin_s)
    transport.barrier(timeout_s)
    return transport


def meet(world: MPI.Intracomm, timeout_s: float) -> None:
    """Wait until all processes are here; MPI itself then makes communicators without a deadline.

    Raises:
        DeadlineError: they did not come in time.
    """
    deadline, there = Deadline(timeout_s), world.Ibarrier()
    while not there.Test():
        if deadline.waited_s() > timeout_s:
            raise deadline.error("meet", world.rank, f"one of {world.size - 1} others")
        time.sleep(_LONGEST_PAUSE_S)
    _forget_segments()


class MpiTransport:
    """The transport of one process, see :class:`runtime.transport.base.Transport`; received tensors are on the CPU.

    Args:
        ranks: a communicator of all ranks, in their order.
        groups: as in :func:`open_mpi`.
        spin_s: how long a wait asks without a pause.
    """

    def __init__(
        self, mpi: Any, ranks: MPI.Intracomm, groups: Iterable[Sequence[int]] = (), spin_s: float = SPIN_S
    ) -> None:
        self.rank, self.world_size = ranks.rank, ranks.size
        self._numbers = declare(groups, self.world_size)
        self._wire = Wire(mpi, ranks)
        self._works = MpiWorks(self._wire, spin_s)
        group = cast("dist.ProcessGroup", self._wire)  # has all that messages and barriers ask of one
        self._barrier = Barrier(group, self._works)
        self._peers = [Peer(group, self._works, rank) for rank in range(self.world_size)]
        self._counts: dict[tuple[str, tuple[int, ...]], int] = {}

    def post_receive(self, key: Key, source: int, specs: Sequence[Spec]) -> None:
        self._peers[source].post_receive(key, specs)

    def receive(self, key: Key, source: int, deadline_s: float) -> tuple[torch.Tensor, ...]:
        return self._peers[source].receive(key, Deadline(deadline_s))

    def send(self, key: Key, destination: int, tensors: Sequence[torch.Tensor]) -> None:
        self._peers[destination].send(key, tensors)

    def flush(self, deadline_s: float) -> None:
        deadline = Deadline(deadline_s)
        for peer in self._peers:
            peer.flush(deadline)

    def barrier(self, deadline_s: float) -> None:
        self._barrier.wait(Deadline(deadline_s))

    def close(self) -> None:
        self._works.leave()
        for peer in self._peers:
            peer.clear()
        self._works.running.clear()

    def num_buffers(self) -> tuple[int, int]:
        """How many announced messages, and how many sent ones, have their buffers now."""
        came, sent = zip(*(peer.num_buffers() for peer in self._peers), strict=True)
        return sum(came), sum(sent)

    def start_exchange(
        self,
        sent: Mapping[int, torch.Tensor],
        received: Mapping[int, torch.Tensor],
        deadline_s: float,
        key: int | None = None,
    ) -> Pending:
        if key is not None and not 0 <= key < KEYED:
            raise ValueError(f"key {key} is not below {KEYED}")
        steps = self._exchange(sent, received, _UNKEYED if key is None else _KEYED | key)
        return Steps(self._works, steps, ("exchange",), deadline_s)

    def all_reduce(self, tensor: torch.Tensor, ranks: tuple[int, ...], deadline_s: float) -> None:
        what, tag = self._begin("sum", ranks)
        Steps(self._works, self._sum(tensor, ranks, tag), what, deadline_s).wait()

    def start_sum(self, tensor: torch.Tensor, ranks: tuple[int, ...], deadline_s: float) -> Pending:
        what, tag = self._begin("started sum", ranks)
        steps = Steps(self._works, self._sum(tensor, ranks, tag), what, deadline_s)
        self._works.running.append(steps)
        return steps

    def reduce_scatter(
        self, flat: torch.Tensor, counts: Sequence[int], ranks: tuple[int, ...], deadline_s: float
    ) -> None:
        pieces = parts(flat.detach(), counts, ranks)
        what, tag = self._begin("reduce-scatter", ranks)
        Steps(self._works, self._scatter(pieces, ranks, tag), what, deadline_s).wait()

    def all_gather(self, flat: torch.Tensor, counts: Sequence[int], ranks: tuple[int, ...], deadline_s: float) -> None:
        pieces = parts(flat.detach(), counts, ranks)
        what, tag = self._begin("all-gather", ranks)
        Steps(self._works, self._gather(pieces, ranks, tag), what, deadline_s).wait()

    def all_max(self, tensor: torch.Tensor, ranks: tuple[int, ...], deadline_s: float) -> None:
        what, tag = self._begin("maximum", ranks)
        flat = _here(tensor)
        Steps(self._works, self._combine(flat, ranks, tag, _largest), what, deadline_s).wait()
        _put(flat, tensor)

    def _begin(self, kind: str, ranks: tuple[int, ...]) -> tuple[Words, int]:
        """What errors call it, and the first of two tags; the started sums of a group meet nothing else it does."""
        check_member(self.rank, ranks, self._numbers)
        number = self._counts[kind, ranks] = self._counts.get((kind, ranks), 0) + 1
        tag = self._numbers[ranks] << 14 | number % _NUMBERS << 2 | (kind == "started sum") << 1
        return (f"{kind} over ranks {ranks}, number", number), _TOGETHER | tag

    def _sum(self, tensor: torch.Tensor, ranks: tuple[int, ...], tag: int) -> Iterator[list[Request]]:
        flat = _here(tensor)
        if flat.nbytes <= (PAIR_SUM_BYTES if len(ranks) == 2 else SUM_BYTES):
            yield from self._combine(flat, ranks, tag, _added)
        else:
            ends = [flat.numel() * number // len(ranks) for number in range(len(ranks) + 1)]
            pieces = torch.split(flat, [stop - start for start, stop in pairwise(ends)])
            yield from self._scatter(pieces, ranks, tag)
            yield from self._gather(pieces, ranks, tag | 1)
        _put(flat, tensor)

    def _scatter(self, pieces: Sequence[torch.Tensor], ranks: tuple[int, ...], tag: int) -> Iterator[list[Request]]:
        own = pieces[ranks.index(self.rank)]
        rows = {rank: torch.empty_like(own, device="cpu") for rank in ranks if rank != self.rank}
        yield from self._exchange({r: piece for r, piece in zip(ranks, pieces, strict=True) if r in rows}, rows, tag)
        _together(own, ranks, self.rank, rows, _added)

    def _gather(self, pieces: Sequence[torch.Tensor], ranks: tuple[int, ...], tag: int) -> Iterator[list[Request]]:
        received = {rank: piece for rank, piece in zip(ranks, pieces, strict=True) if rank != self.rank}
        yield from self._exchange(dict.fromkeys(received, pieces[ranks.index(self.rank)]), received, tag)

    def _combine(
        self, flat: torch.Tensor, ranks: tuple[int, ...], tag: int, combine: _Combine
    ) -> Iterator[list[Request]]:
        rows = {rank: torch.empty_like(flat) for rank in ranks if rank != self.rank}
        yield from self._exchange(dict.fromkeys(rows, flat), rows, tag)
        _together(flat, ranks, self.rank, rows, combine)

    def _exchange(
        self, sent: Mapping[int, torch.Tensor], received: Mapping[int, torch.Tensor], tag: int
    ) -> Iterator[list[Request]]:
        """Receives, then sends; those of other devices by way of the CPU."""
        copies, requests = [], []
        for rank, tensor in received.items():
            if tensor.numel():
                here = tensor
                if tensor.device.type != "cpu":
                    here = torch.empty_like(tensor, device="cpu")
                    copies.append((tensor, here))
                requests.append(self._wire.recv([here], rank, tag, True))
        for rank, tensor in sent.items():
            if tensor.numel():
                requests.append(self._wire.send([tensor.to("cpu")], rank, tag))
        yield requests
        for tensor, came in copies:
            tensor.detach().copy_(came)


def _together(
    own: torch.Tensor, ranks: tuple[int, ...], rank: int, rows: Mapping[int, torch.Tensor], combine: _Combine
) -> None:
    """Combine the terms in the order of ranks, into ``own``."""
    terms = [own if each == rank else rows[each] for each in ranks]
    total = terms[0]
    for term in terms[1:]:
        combine(total, term.to(total.device))
    if total is not own:
        own.copy_(total)


def _added(total: torch.Tensor, term: torch.Tensor) -> None:
    total.add_(term)


def _largest(total: torch.Tensor, term: torch.Tensor) -> None:
    torch.maximum(total, term, out=total)


def _here(tensor: torch.Tensor) -> torch.Tensor:
    """Its elements, contiguous and on the CPU: its own memory, or a copy."""
    return tensor.detach().to("cpu").contiguous().view(-1)


def _put(flat: torch.Tensor, tensor: torch.Tensor) -> None:
    """Copy back what :func:`_here` had to copy."""
    if flat.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(flat.view(tensor.shape))


def _names(ranks: Sequence[int]) -> str:
    return ", ".join(f"rank {rank}" for rank in ranks)
