"""One process of an MPI job: its requests under tags, and waits that have a deadline.

MPI moves bytes only while this process is inside of it, hence every wait asks again and again: it spins for a moment,
which also keeps the core awake, then sleeps in short growing pauses.  No wait is MPI's own, which has no deadline.

MPI does not say that a peer has left: each rank says so itself when it closes its transport or gives a wait up.  One
that was killed says nothing; mpiexec then ends the others too, and where it does not, they meet their deadlines.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from planner.ir.errors import DeadlineError, TransportError
from runtime.transport.base import Deadline, ErrorWords, gone, named, words
from runtime.transport.collectives import Steps
from runtime.transport.works import Works

if TYPE_CHECKING:
    from mpi4py import MPI

SPIN_S = 10e-3
"""How long a wait asks without a pause.  A large message goes on only while both ends ask: on two busy cores a sum of
4 MiB took 7.3 ms with 2 ms of it and 2.1 ms with 10 ms."""

_SHORTEST_PAUSE_S = 20e-6
_LONGEST_PAUSE_S = 200e-6
_STRAGGLE_S = 0.02
"""How long what a rank sent before it left may still be on its way."""

_LEAVE_S = 3.0
"""How long a process that failed waits for the others to end as well, so that all of them can say why."""

_TAG_BITS = 32
_MOST_COMMUNICATORS = 64
_FAREWELL = 29 << 26  # the upper five bits of a tag, which no message has

_UNFINISHED: list[tuple[MPI.Request, Tensor]] = []
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


def library(mpi: Any) -> str:
    """Name and version of the MPI that there is."""
    return str(mpi.Get_library_version()).splitlines()[0].rstrip("\0")


def _give_up(timeout_s: float) -> None:
    sys.stderr.write(f"not all processes of the MPI job began within {timeout_s:g} s: this one is ended\n")
    sys.stderr.flush()
    os._exit(DeadlineError.exit_code)


def _leave(mpi: Any, has_failed: bool = False) -> None:
    """Finalise MPI when all processes end, as MPI wants; where one that failed does not, mpiexec ends the others."""
    has_failed = has_failed or bool(_UNFINISHED) or hasattr(sys, "last_value")
    there = None if mpi.Is_finalized() else mpi.COMM_WORLD.Ibarrier()
    start_s = time.monotonic()
    while there is not None and not there.Test():
        if has_failed and time.monotonic() - start_s > _LEAVE_S:
            return
        time.sleep(_LONGEST_PAUSE_S)
    if there is not None and not _UNFINISHED:
        mpi.Finalize()


def _forget_segments() -> None:
    """The shared memory of mpich loses its name, once every rank has it: nothing is left of ranks that are killed."""
    with contextlib.suppress(OSError):
        maps = Path("/proc/self/maps").read_text("utf-8", "replace")
        for name in set(re.findall(r"/dev/shm/mpich_shm_\w+", maps)):
            Path(name).unlink(missing_ok=True)


def meet(world: MPI.Intracomm, timeout_s: float) -> None:
    """Wait until all processes are here; MPI itself then makes communicators without a deadline.

    Raises:
        DeadlineError: they did not come in time.
    """
    deadline = Deadline(timeout_s)
    there = world.Ibarrier()
    while not there.Test():
        if deadline.waited_s() > timeout_s:
            raise deadline.error("meet", world.rank, f"one of {world.size - 1} others")
        time.sleep(_LONGEST_PAUSE_S)
    _forget_segments()


class MpiRequest:
    """A send or receive on its way, and the tensor that it is of.

    Attributes:
        peer: the other rank.
    """

    __slots__ = ("_is_exact", "_is_receive", "_request", "_tensor", "_wire", "peer")

    def __init__(
        self, wire: MpiWire, request: MPI.Request, tensor: Tensor, peer: int, is_receive: bool, is_exact: bool
    ) -> None:
        self._wire = wire
        self._tensor = tensor
        self.peer = peer
        self._request: MPI.Request | None = request
        self._is_receive = is_receive
        self._is_exact = is_exact

    def test(self) -> bool:
        """Whether it is done.

        Raises:
            TransportError: what came has another size.
        """
        if self._request is None:
            return True
        mpi = self._wire.mpi
        status = self._wire.status
        try:
            if not self._request.Test(status):
                return False
        except mpi.Exception as error:
            self._request = None
            if error.Get_error_class() == mpi.ERR_TRUNCATE:
                raise self._other_size("more") from error
            raise
        self._request = None
        if self._is_exact and (received_bytes := status.Get_count(mpi.BYTE)) != self._tensor.nbytes:
            raise self._other_size(f"{received_bytes} bytes")
        return True

    def __del__(self) -> None:
        if self._request is not None and not self._wire.mpi.Is_finalized():
            if self._is_receive:
                self._request.Cancel()
            if not self._request.Test():
                _UNFINISHED.append((self._request, self._tensor))

    def _other_size(self, size: str) -> TransportError:
        return TransportError(
            f"rank {self.peer} sent {size}, rank {self._wire.rank()} expected {self._tensor.nbytes} bytes",
            [f"for a tensor of shape {tuple(self._tensor.shape)} and {self._tensor.dtype}"],
            ["give all ranks the same plan"],
        )


class MpiWire:
    """Sends and receives under tags of 32 bits, on as many communicators as it takes for the tags that MPI allows.

    Its methods are named as those of torch's process groups, of which messages and barriers use no others.

    Args:
        ranks: a communicator, whose order is theirs; it is duplicated by all of them together.

    Raises:
        TransportError: MPI's tags are too small.
    """

    def __init__(self, mpi: Any, ranks: MPI.Intracomm) -> None:
        self.mpi = mpi
        self.status = mpi.Status()
        self._rank = ranks.rank
        self._size = ranks.size
        largest = int(mpi.COMM_WORLD.Get_attr(mpi.TAG_UB) or 0)  # Open MPI tells it of no other
        self._bits = (largest + 1).bit_length() - 1
        if 1 << _TAG_BITS - self._bits > _MOST_COMMUNICATORS:
            raise TransportError(
                f"this MPI allows tags up to {largest}, expected {(1 << _TAG_BITS) // _MOST_COMMUNICATORS - 1} or more",
                [library(mpi)],
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

    def send(self, tensors: Sequence[Tensor], rank: int, tag: int) -> MpiRequest:
        """Start to send a contiguous tensor of the CPU."""
        (tensor,) = tensors
        request = self._communicators[tag >> self._bits].Isend(self._buffer(tensor), rank, tag & self._mask)
        return MpiRequest(self, request, tensor, rank, False, False)

    def recv(self, tensors: Sequence[Tensor], rank: int, tag: int, is_exact: bool = False) -> MpiRequest:
        """Start to receive one; what is shorter is refused if ``is_exact``."""
        (tensor,) = tensors
        request = self._communicators[tag >> self._bits].Irecv(self._buffer(tensor), rank, tag & self._mask)
        return MpiRequest(self, request, tensor, rank, True, is_exact)

    def _buffer(self, tensor: Tensor) -> list[Any]:
        num_bytes = tensor.nbytes
        return [self.mpi.buffer.fromaddress(tensor.data_ptr(), num_bytes), num_bytes, self.mpi.BYTE]


class MpiWorks(Works):
    """Waits of one rank: for requests, and for whatever else is asked again and again until it is done.

    Args:
        is_crowded: whether a wait gives way to other processes each time it has asked, while it spins.
    """

    def __init__(self, wire: MpiWire, is_crowded: bool) -> None:
        super().__init__(wire.rank())
        self._running: list[MpiSteps] = []
        self._wire = wire
        self._is_crowded = is_crowded
        others = [rank for rank in range(wire.size()) if rank != self.rank]
        self._farewells = {rank: self._farewell(wire.recv, rank) for rank in others}
        self._has_left = False

    def wait(self, work: dist.Work, what: ErrorWords, peer: ErrorWords, deadline: Deadline) -> None:
        request = cast("MpiRequest", work)
        self.until(request.test, what, lambda: (request.peer,), deadline)

    def until(
        self, is_done: Callable[[], bool], what: ErrorWords, peers: Callable[[], Sequence[int]], deadline: Deadline
    ) -> None:
        """Until ``is_done()``, which depends on what ``peers()`` do.

        Raises:
            DeadlineError: too late; the others are told that this rank gives up.
            TransportError: a peer has left.
        """
        try:
            if is_done():
                return
            end_s = time.monotonic() + SPIN_S
            while time.monotonic() < end_s:
                if self._is_crowded:
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
            raise gone(words(what), self.rank, named(peers()), str(error)) from error

    def run(self, steps: MpiSteps) -> None:
        """Take the steps of something beside all waits of this rank."""
        self._go_on()
        self._running.append(steps)

    def leave(self) -> None:
        """Tell the others that nothing more comes from here."""
        for rank in () if self._has_left else self._farewells:
            self._farewell(self._wire.send, rank)
        self._has_left = True
        self._running.clear()

    def _look(
        self, is_done: Callable[[], bool], what: ErrorWords, peers: Callable[[], Sequence[int]], deadline: Deadline
    ) -> None:
        departed = [rank for rank in peers() if self._farewells[rank].test()]
        if departed:
            end_s = time.monotonic() + _STRAGGLE_S
            while time.monotonic() < end_s:
                if is_done():
                    return
            self._fail()
            raise gone(words(what), self.rank, named(departed), "it has left the job, or waited in vain itself")
        if deadline.waited_s() >= deadline.limit_s:
            self._fail()
            self.leave()
            raise deadline.error(words(what), self.rank, named(peers()))

    def _fail(self) -> None:
        atexit.unregister(_leave)
        atexit.register(_leave, self._wire.mpi, True)

    def _go_on(self) -> None:
        """What was started in the background takes its next step, where it can."""
        self._running = [steps for steps in self._running if not steps.are_over()]

    def _farewell(self, start: Callable[..., MpiRequest], rank: int) -> MpiRequest:
        return start([torch.zeros(1, dtype=torch.uint8)], rank, _FAREWELL)


class MpiExchange:
    """Requests on their way, and what came where it does not belong: (where it does, where it is)."""

    def __init__(
        self,
        works: MpiWorks,
        requests: list[MpiRequest],
        copies: list[tuple[Tensor, Tensor]],
        what: ErrorWords,
    ) -> None:
        self._works = works
        self._requests = requests
        self._copies = copies
        self._what = what

    @torch.no_grad()
    def is_done(self) -> bool:
        """Whether all of it is in place."""
        while self._requests:
            if not self._requests[0].test():
                return False
            del self._requests[0]
        for tensor, buffer in self._copies:
            tensor.copy_(buffer)
        self._copies = []
        return True

    def wait(self) -> None:
        """See :class:`runtime.transport.base.Pending`."""
        self._works.until(self.is_done, self._what, self._missing, self._works.deadline())

    def _missing(self) -> list[int]:
        return sorted({request.peer for request in self._requests if not request.test()})


class MpiSteps(Steps):
    """A sum whose steps are taken beside other waits."""

    now: MpiExchange | None

    def are_over(self) -> bool:
        """Takes those that can be taken; whether no more are left."""
        while self.now is not None and self.now.is_done():
            self.go_on()
        return self.now is None
