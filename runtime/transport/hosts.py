"""Ranks of one host through shared memory, ranks of several over gloo.

Each pair of ranks shares memory if the plan has both on one host and both could map the other's segment; else it talks
over gloo.  A group shares memory if all its pairs do.  All ranks know which pairs do, so all of them agree.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from typing import TYPE_CHECKING

from torch import Tensor

from cuda_ops._torch import PrefixStore, Store, default_store
from cuda_ops.device.compiling import CannotCompileError
from cuda_ops.device.host import MPI_JOB
from planner.ir.cluster import GLOO, SHARED_MEMORY, transport_text
from planner.ir.errors import TransportError
from runtime.timeouts import TRANSPORT_S
from runtime.transport.base import Deadline, MessageKey, Pending, Spec, Transport, default_group, join, met
from runtime.transport.collectives import ByRank, CollectiveOperations
from runtime.transport.segments import Address, SharedSegments
from runtime.transport.shared_memory import SPIN_S, SharedMemoryTransport

if TYPE_CHECKING:
    from runtime.transport.gloo import GlooTransport

_LOGGER = logging.getLogger(__name__)


def open_named(
    name: str,
    rank: int,
    store: Store,
    timeout_s: float,
    groups: Iterable[Sequence[int]],
    hosts: Sequence[str],
    *,
    sleeps: bool = False,
) -> Transport:
    """The transport of a rank that computes on a processor; a run and the profile of its links ask for it here.

    Args:
        name: ``shared`` (memory within a host, gloo between), ``gloo`` or ``mpi``; empty: MPI in a job of mpiexec, else
            shared, where that can be had.
        hosts: of each rank.
        sleeps: whether this rank sleeps while it waits, at once, since something else uses its core meanwhile.

    Raises:
        TransportError: the ranks did not find each other, or cannot exchange by it.
    """
    if MPI_JOB in os.environ and name in ("", "mpi"):
        from runtime.transport.mpi import open_mpi  # of MPI's jobs alone

        return open_mpi(rank, len(hosts), timeout_s, groups)
    if name == "mpi":
        raise TransportError(
            "MPI joins ranks that mpiexec started",
            ["nobody did"],
            [f"mpiexec -n {len(hosts)} halopipe ...", "--transport shared"],
        )
    if name not in ("", "shared", "gloo"):
        raise TransportError(
            f"nothing is exchanged by {name!r}", [], [f"--transport {each}" for each in ("shared", "gloo", "mpi")]
        )
    if name == "gloo":
        from runtime.transport.gloo import open_gloo  # late, see `_over_gloo`

        return open_gloo(rank, len(hosts), store, timeout_s, groups)
    return open_shared(rank, len(hosts), store, timeout_s, groups, hosts, required=bool(name), sleeps=sleeps)


def open_shared(
    rank: int | None = None,
    world_size: int | None = None,
    store: Store | None = None,
    timeout_s: float = TRANSPORT_S,
    groups: Iterable[Sequence[int]] = (),
    hosts: Sequence[str] = (),
    *,
    required: bool = False,
    sleeps: bool = False,
) -> Transport:
    """Join the default process group; its ranks share memory within a host, and talk over gloo between hosts.

    Args:
        rank, world_size, store, timeout_s, groups: as in :func:`runtime.transport.gloo.open_gloo`.
        hosts: of each rank, in the plan; empty: all are on one.
        required: whether ranks of one host that cannot share memory are an error; else they talk over gloo as well.
        sleeps: as of :func:`open_named`.

    Raises:
        TransportError: the ranks did not find each other, or cannot share memory.
        DeadlineError: not all of them were ready in time.
    """
    transport = join("gloo", rank, world_size, store, timeout_s, partial(_meet, tuple(groups), hosts, required, sleeps))
    return met(transport, timeout_s)


def _meet(groups: tuple[Sequence[int], ...], hosts: Sequence[str], required: bool, sleeps: bool) -> Transport:
    """The transport of this rank of the default process group."""
    world = default_group()
    rank = world.rank()
    size = world.size()
    hosts = hosts or [""] * size
    store = PrefixStore("halopipe/segments", default_store())
    segments, addresses, why = _attached(store, rank, size, hosts[rank])
    store.set(f"attached/{rank}", json.dumps({"ranks": [rank, *addresses], "why": why}))
    attached = [json.loads(store.get(f"attached/{other}")) for other in range(size)]
    pairs = [*combinations(range(size), 2)]
    near = frozenset(pair for pair in pairs if all(set(pair) <= set(attached[each]["ranks"]) for each in pair))
    apart = [pair for pair in pairs if pair not in near and hosts[pair[0]] == hosts[pair[1]]]
    if apart:
        _say(apart, [each["why"] for each in attached], required)
    far_groups = [ranks for ranks in groups if len(ranks) == 1 or not near.issuperset(combinations(ranks, 2))]
    if segments is None or not any(rank in pair for pair in near):
        if segments is not None:
            segments.close()
        alone = _over_gloo(far_groups)
        alone.name = transport_text(SHARED_MEMORY if near else "", GLOO)  # of the world: the same on all ranks
        return alone
    cores = [addresses[other].cores for other in addresses if other == rank or tuple(sorted((rank, other))) in near]
    has_core_each = len(set[int]().union(*cores)) >= len(cores)
    spin_s = SPIN_S if has_core_each and not sleeps else 0.0
    if len(near) == len(pairs):
        return SharedMemoryTransport(segments, size, groups, spin_s=spin_s, owns_group=True)
    shared = SharedMemoryTransport(segments, size, groups, spin_s=spin_s, in_parts=False)
    return MixedTransport(shared, _over_gloo(far_groups), near)


def _attached(store: Store, rank: int, size: int, host: str) -> tuple[SharedSegments | None, dict[int, Address], str]:
    """This rank's segment, the addresses of those that it could map with its own, and why it could not map others."""
    segments, why = _segments(rank, size)
    if segments is None:
        store.set(f"address/{rank}", "")
        return None, {}, why
    mine = segments.address(host)
    store.set(f"address/{rank}", mine.text())
    texts = [store.get(f"address/{other}").decode() for other in range(size)]
    addresses = {rank: mine}
    for other, text in enumerate(texts):
        address = Address.of_text(text) if text else None
        if other == rank or address is None or (address.host, address.boot) != (mine.host, mine.boot):
            continue
        fault = segments.attach(other, address)
        why = why or fault
        if not fault:
            addresses[other] = address
    return segments, addresses, why


def _over_gloo(groups: Iterable[Sequence[int]]) -> GlooTransport:
    from runtime.transport.gloo import GlooTransport  # late: ranks that all share memory need none

    return GlooTransport(groups, owns_group=True)


def _segments(rank: int, size: int) -> tuple[SharedSegments | None, str]:
    """This rank's segment, or why there is none."""
    try:
        return SharedSegments(rank, size), ""
    except (CannotCompileError, OSError) as error:
        return None, str(error)


def _say(apart: Sequence[tuple[int, int]], why: Sequence[str], required: bool) -> None:
    """That some ranks of one host cannot share memory."""
    first, second = apart[0]
    title = f"ranks {first} and {second} are on one host of the plan, and cannot share memory"
    reasons = [f"rank {rank}: {text}" for rank, text in enumerate(why) if text]
    reasons = reasons or ["they run on different machines, whatever the plan says"]
    if required:
        raise TransportError(
            title, reasons, ["--transport gloo", "run all ranks of a host as one user, in one container"]
        )
    _LOGGER.warning("%s: %s; they talk over gloo, which is slower", title, "; ".join(reasons))


class MixedTransport(CollectiveOperations):
    """Shared memory where both ranks of a pair, or all of a group, have it, gloo elsewhere.

    See :class:`runtime.transport.base.Transport`.

    Args:
        near: the pairs of ranks that share memory, the smaller one first.
    """

    def __init__(self, shared: SharedMemoryTransport, gloo: GlooTransport, near: frozenset[tuple[int, int]]) -> None:
        super().__init__(shared.groups, gloo.world_size)
        self.rank = gloo.rank
        self.world_size = gloo.world_size
        self.name = transport_text(shared.name, gloo.name)
        self._shared = shared
        self._gloo = gloo
        self._pairs = near
        self._near = frozenset(sum(pair) - self.rank for pair in near if self.rank in pair)

    @property
    def deadline_s(self) -> float:
        return self._gloo.deadline_s

    @deadline_s.setter
    def deadline_s(self, deadline_s: float) -> None:
        self._shared.deadline_s = self._gloo.deadline_s = deadline_s

    def name_among(self, ranks: Sequence[int]) -> str:
        return self.among(tuple(sorted(ranks))).name

    def post_receive(self, key: MessageKey, source: int, specs: Sequence[Spec]) -> None:
        self._to(source).post_receive(key, source, specs)

    def receive(self, key: MessageKey, source: int) -> tuple[Tensor, ...]:
        return self._to(source).receive(key, source)

    def send(self, key: MessageKey, destination: int, tensors: Sequence[Tensor]) -> None:
        self._to(destination).send(key, destination, tensors)

    def flush(self) -> None:
        deadline = Deadline(self.deadline_s)
        self._shared.flush(deadline)
        self._gloo.flush(deadline)

    def start_exchange(self, sent: ByRank, received: ByRank, key: int | None = None) -> Pending:
        near = self._near
        if near.issuperset(sent) and near.issuperset(received):
            return self._shared.start_exchange(sent, received, key)
        if near.isdisjoint(sent) and near.isdisjoint(received):
            return self._gloo.start_exchange(sent, received, key)
        here = [{rank: tensor for rank, tensor in each.items() if rank in near} for each in (sent, received)]
        away = [{rank: tensor for rank, tensor in each.items() if rank not in near} for each in (sent, received)]
        far = self._gloo.start_exchange(away[0], away[1], key)
        return _Both(self._shared.start_exchange(here[0], here[1], key), far)

    def barrier(self, word: int = 0) -> int:
        return self._gloo.barrier(word)

    def close(self) -> None:
        self._shared.close()
        self._gloo.close()

    def num_buffers(self) -> tuple[int, int]:
        """How many announced messages, and how many sent ones, have their buffers now."""
        pairs = zip(self._shared.num_buffers(), self._gloo.num_buffers(), strict=True)
        announced, sent = (sum(pair) for pair in pairs)
        return announced, sent

    def _to(self, rank: int) -> SharedMemoryTransport | GlooTransport:
        return self._shared if rank in self._near else self._gloo

    def among(self, ranks: tuple[int, ...]) -> SharedMemoryTransport | GlooTransport:
        return self._shared if self._pairs.issuperset(combinations(ranks, 2)) else self._gloo


@dataclass(frozen=True, slots=True)
class _Both:
    """Two exchanges that were started together."""

    near: Pending
    far: Pending

    def wait(self) -> None:
        self.near.wait()
        self.far.wait()
