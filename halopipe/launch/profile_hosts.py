"""``profile --hosts``: the hosts of a file measure a model and the links between them; all becomes one profile."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace

from halopipe.launch.hosts import Hosts
from halopipe.launch.profile_order import ProfileOrder, ProfileRequest
from halopipe.launch.remote import RemoteWorkers
from halopipe.launch.spawn import agent_command, store_address
from halopipe.terminal.console import Reporter
from halopipe.version import version
from planner.ir.cluster import Cluster
from planner.ir.codec import loads
from planner.ir.profile import Profile
from runtime.monitor.activity import Beat
from runtime.monitor.watch import host_store, run_workers


def profile_on(hosts: Hosts, request: ProfileRequest, quiet: bool = False) -> Profile:
    """The profile of the hosts of a file, called ``n0``, ``n1``, ... in its order; ``slots`` are a host's workers.

    Raises:
        UsageError: the interface or the launcher cannot be used.
        WorkerDiedError: a host could not be reached.
        StaleFileError: the hosts do not measure the same model.
    """
    ranks_of = _ranks_of(hosts)
    address = store_address(hosts, list(ranks_of))
    store, port = host_store(address)
    names = {host: f"n{number}" for number, host in enumerate(ranks_of)}
    by_rank = tuple(names[host] for host, ranks in ranks_of.items() for _ in ranks)
    paths = tuple(filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)))
    start = agent_command("halopipe.launch.profile_agent")
    workers = []
    for host, ranks in ranks_of.items():
        order = ProfileOrder(request, ranks, by_rank, address, port, hosts.interface, os.getcwd(), paths, version())
        workers.append(RemoteWorkers(host, hosts.command(host, start), order))
    titles = {rank: f"rank {rank} on {host}" for host, ranks in ranks_of.items() for rank in ranks}
    with Reporter("profiling", quiet=quiet) as reporter:

        def watch(beats: Mapping[int, Beat]) -> None:
            doing = ", ".join(
                f"{host}: {beats[ranks[0]].what}" for host, ranks in ranks_of.items() if ranks[0] in beats
            )
            reporter.update(0, None, doing)

        texts = run_workers(workers, titles, store, watch)
    return together({host: loads(texts[ranks[0]], Profile, host) for host, ranks in ranks_of.items()})


def together(found: Mapping[str, Profile]) -> Profile:
    """One profile of those of all hosts; links are those of the first, which measured them with the others.

    Raises:
        StaleFileError: they are of different models.
    """
    from profiler.merge import gather

    links = next(iter(found.values())).cluster
    bare = [replace(profile, cluster=Cluster(profile.cluster.devices, {})) for profile in found.values()]
    gathered = gather(bare, list(found))
    cluster = replace(gathered.cluster, links=links.links, collectives=links.collectives, pairs=links.pairs)
    return replace(gathered, cluster=cluster)


def _ranks_of(hosts: Hosts) -> dict[str, tuple[int, ...]]:
    """The ranks of each host; one where it does not say how many."""
    found: dict[str, tuple[int, ...]] = {}
    total = 0
    for host in hosts.hosts:
        found[host.name] = tuple(range(total, total + (host.slots or 1)))
        total += host.slots or 1
    return found
