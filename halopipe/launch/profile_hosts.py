"""A profile of several hosts: every process that torchrun starts measures, and rank 0 makes one profile of it all.

torchrun --nnodes 2 --nproc-per-node 2 ... -m halopipe profile MODEL

The first rank of each host measures the model; hosts that are one machine (network namespaces, containers) do so one
after another.  Then all ranks measure the links together.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from cuda_ops.device.host import core_of, device_description, prepare_process
from halopipe.launch.job_environment import JobRank
from halopipe.terminal.console import Reporter
from planner.ir.cluster import Cluster, DeviceSpec, PairLink
from planner.ir.codec import dumps, loads
from planner.ir.errors import DeadlineError, HalopipeError
from planner.ir.profile import Profile
from planner.layers import over_sites
from runtime.monitor.failure import cause, errors_left

if TYPE_CHECKING:
    from cuda_ops._torch import Store
    from runtime.monitor.activity import Activity, Beat, StatusStore

SILENCE_S = 60.0
"""A rank that says nothing for so long is gone, with its host or its link."""

_LIMIT_S = 24 * 3600.0
_POLL_S = 0.2


def profile_hosts(
    job: JobRank, measure: Callable[[bool], Profile], quick: bool = False, transport: str = ""
) -> Profile | None:
    """One rank's part; on rank 0, the profile of all hosts, called ``n0``, ``n1``, ... as torchrun numbers them.

    Args:
        measure: gives what the model costs on this host; called with whether to be silent.
        transport: that links are measured with, as of ``profiler.links.cpu.opened``.

    Raises:
        StaleFileError: the hosts do not measure the same model.
        DeadlineError: a rank is gone.
        HalopipeError: what another rank failed by.
    """
    from halopipe.launch.job_stores import job_stores  # late: loads torch
    from halopipe.launch.torchrun import end_with_torchrun, gathered, raised_by_all
    from runtime.monitor.activity import Activity, Heartbeat

    end_with_torchrun()
    store, board = job_stores(job.rank, job.num_ranks)
    activity = Activity(deadline_s=_LIMIT_S)
    activity.begin("measuring the model")
    with raised_by_all(board, job.rank, job.num_ranks), Heartbeat(board, job.rank, activity):
        store.set(f"host/{job.rank}", f"n{job.host}")
        hosts = tuple(store.get(f"host/{rank}").decode() for rank in range(job.num_ranks))
        core = core_of(job.local_rank)
        cluster = _cluster(hosts, job)  # before this process takes one core
        waiting = _HostsWait(board, hosts, job.rank > 0)
        profile = _model(job, hosts, store, waiting, measure) if job.local_rank == 0 else None
        activity.begin("waiting for the others")
        waiting.until(store, [_key(first) for first in _firsts(hosts)])
        prepare_process(core)
        cluster = _linked(job, hosts, quick, store, cluster, activity, transport, profile)
        one_host = replace(cluster, pairs=())  # which are of several
        own = "{}" if profile is None else dumps(replace(profile, cluster=one_host))
        texts = gathered(store, job.rank, job.num_ranks, own)
        if job.rank:
            return None
        by_host = {hosts[first]: loads(texts[first], Profile, hosts[first]) for first in _firsts(hosts)}
        return together(by_host, cluster.pairs)


def together(by_host: Mapping[str, Profile], pairs: tuple[PairLink, ...] = ()) -> Profile:
    """One profile of those of all hosts; links are those of the first, which measured them with the others.

    Args:
        pairs: of hosts, that are not as their class.

    Raises:
        StaleFileError: they are of different models.
    """
    from profiler.merge import gather

    links = next(iter(by_host.values())).cluster
    bare = [replace(profile, cluster=Cluster(profile.cluster.devices, {})) for profile in by_host.values()]
    merged = gather(bare, list(by_host))
    cluster = replace(merged.cluster, links=links.links, collectives=links.collectives, pairs=pairs)
    return replace(merged, cluster=cluster)


@dataclass(slots=True)
class _HostsWait:
    """Waits for what other ranks write, and sees which of them is gone.

    Attributes:
        hosts: of each rank.
    """

    board: StatusStore
    hosts: tuple[str, ...]
    quiet: bool

    def until(self, store: Store, keys: list[str]) -> None:
        """Until all keys are there.

        Raises:
            DeadlineError: a rank is silent, or the store is.
            HalopipeError: what another rank failed by.
        """
        from runtime.monitor.activity import Silence, StatusStore, read_board

        asked = StatusStore.of(store)
        ranks = range(len(self.hosts))
        silence = Silence(ranks)
        with Reporter("profiling", quiet=self.quiet) as reporter:
            while not asked.answer(lambda own: own.check(keys), False):
                errors: Mapping[int, HalopipeError] = self.board.answer(lambda own: errors_left(own, ranks), {})
                if errors:
                    raise cause(errors)
                beats: Mapping[int, Beat] = self.board.answer(lambda own: read_board(own, range(len(ranks))), {})
                silence.note(beats)
                silent = [rank for rank in ranks if silence.seconds_of(rank) > SILENCE_S]
                if silent:
                    raise self._gone(silent)
                firsts = [rank for rank in _firsts(self.hosts) if rank in beats]
                reporter.update(0, None, ", ".join(f"{self.hosts[rank]}: {beats[rank].what}" for rank in firsts))
                time.sleep(_POLL_S)

    def _gone(self, silent: list[int]) -> DeadlineError:
        named = ", ".join(f"rank {rank} on {self.hosts[rank]}" for rank in silent)
        return DeadlineError(
            f"nothing was heard of {named} for {SILENCE_S:g} s",
            ["its process has ended, or its host or link is gone"],
            ["see what torchrun says on that host, and start all of them again"],
        )


def _model(
    job: JobRank, hosts: tuple[str, ...], store: Store, waiting: _HostsWait, measure: Callable[[bool], Profile]
) -> Profile:
    """What the model costs here, measured when it is this host's turn."""
    machine = _machine()
    store.set(f"machine/{job.rank}", machine)
    before = [other for other in _firsts(hosts) if other < job.rank]
    same = [other for other in before if store.get(f"machine/{other}").decode() == machine]
    if same:
        waiting.until(store, [_key(same[-1])])
    profile = measure(waiting.quiet)
    store.set(_key(job.rank), "")
    return profile


def _cluster(hosts: tuple[str, ...], job: JobRank) -> Cluster:
    """The devices of this host."""
    host = hosts[job.rank]
    count = hosts.count(hosts[job.rank])
    device = device_description(count)
    names = [f"{host}/cpu{number}" for number in range(count)]
    return Cluster(tuple(DeviceSpec(name, device.processor, host, device.memory_bytes) for name in names), {})


def _linked(
    job: JobRank,
    hosts: tuple[str, ...],
    quick: bool,
    store: Store,
    cluster: Cluster,
    activity: Activity,
    transport: str,
    profile: Profile | None,
) -> Cluster:
    """The cluster, on rank 0 with the links between the ranks of all hosts, which they measure together.

    Args:
        profile: of this host; what rank 0 computes around exchanges depends on its network.
    """
    from profiler.links.cpu import measure_together, opened
    from profiler.links.messages import FULL, QUICK

    def report(value: object) -> None:
        activity.begin(f"measuring {value[0]}" if isinstance(value, tuple) else "measuring links")

    if len(hosts) == 1:
        return cluster
    report(None)
    joined = opened(transport, job.rank, store, hosts)
    sites = profile is not None and bool(over_sites(profile.graph))
    try:
        costs = measure_together(joined, store, hosts, QUICK if quick else FULL, report, sites=sites)
        joined.barrier()  # a rank that leaves early would break the connections of the others
    finally:
        joined.close()
    if job.rank:
        return cluster
    return replace(cluster, links=costs.links, collectives=costs.collectives, pairs=costs.pairs)


def _firsts(hosts: tuple[str, ...]) -> list[int]:
    return [hosts.index(host) for host in dict.fromkeys(hosts)]


def _key(first: int) -> str:
    return f"measured/{first}"


def _machine() -> str:
    """The same text in all namespaces of one machine, another on each machine."""
    from runtime.transport.segments import boot_id  # late: it loads torch

    try:
        return boot_id()
    except OSError:
        return os.uname().nodename
