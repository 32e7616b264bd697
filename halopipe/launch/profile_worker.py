"""One rank of ``profile --hosts``: the first of each host measures the model, then all measure the links together.

python -m halopipe.launch.profile_worker ORDER.json RANK

Hosts that are one machine (network namespaces, containers) measure the model one after another.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from cuda_ops.device.host import core_of, device_description, die_with_parent, prepare_process
from halopipe.launch.processes import error_path, result_path
from halopipe.launch.profile_order import ProfileOrder
from planner.ir.cluster import Cluster, DeviceSpec
from planner.ir.codec import dumps
from planner.ir.files import write_text
from planner.ir.profile import Profile

if TYPE_CHECKING:
    from cuda_ops._torch import Store
    from runtime.monitor.activity import Activity

LIMIT_S = 24 * 3600.0
"""Longest time in which the models of all hosts are measured."""

_LINKS_S = 300.0  # that ranks may wait for each other while they measure links


def main(arguments: Sequence[str]) -> int:
    """Do one rank's part; the exit code says whether it succeeded."""
    path, rank = Path(arguments[0]), int(arguments[1])
    order = ProfileOrder.read(path)
    die_with_parent(order.parent)

    from runtime.monitor.failure import write_error  # late: it loads torch

    try:
        write_text(result_path(path.parent, rank), _measured(order, rank))
    except Exception as error:  # noqa: BLE001  # whatever it is, the launcher must hear of it
        write_text(error_path(path.parent, rank), write_error(error))
        traceback.print_exception(error)
        return 1
    return 0


def _measured(order: ProfileOrder, rank: int) -> str:
    """The profile of this rank's host as text, on its first rank, with the links of all on rank 0; else ``{}``."""
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # public, but not by torch's types

    from runtime.monitor.watch import join_store

    store = PrefixStore("profile", join_store(order.address, order.port))
    core, cluster = core_of(rank), _cluster(order)  # what there is, before this process takes one core
    with _heard(order, rank) as activity:
        profile = _model(order, store) if rank == order.ranks[0] else None
        store.wait([_key(first) for first in _firsts(order)], timedelta(seconds=LIMIT_S))
        prepare_process(core)
        cluster = _linked(order, rank, store, cluster, activity)
    return "{}" if profile is None else dumps(replace(profile, cluster=cluster))


@contextmanager
def _heard(order: ProfileOrder, rank: int) -> Iterator[Activity]:
    """The launcher hears what this rank does."""
    from runtime.monitor.activity import Activity, Heartbeat
    from runtime.monitor.watch import join_store

    activity = Activity(deadline_s=LIMIT_S)
    activity.begin("measuring the model")
    beating = Heartbeat(join_store(order.address, order.port), rank, activity)
    beating.start()
    try:
        yield activity
    finally:
        beating.stop()


def _model(order: ProfileOrder, store: Store) -> Profile:
    """What the model costs here, measured when it is this host's turn."""
    from halopipe.planning.measure import measure

    first, machine, request = order.ranks[0], _machine(), order.request
    store.set(f"machine/{first}", machine)
    before = [other for other in _firsts(order) if other < first]
    same = [other for other in before if store.get(f"machine/{other}").decode() == machine]
    if same:
        store.wait([_key(same[-1])], timedelta(seconds=LIMIT_S))
    profile = measure(
        request.source,
        num_workers=1,
        optimizer=request.optimizer,
        sizes=request.sizes,
        allow=request.allow,
        num_ranks=request.num_ranks or len(order.hosts),
        quick=request.quick,
        num_processes=request.num_processes,
        quiet=True,
    )
    store.set(_key(first), "")
    return profile


def _cluster(order: ProfileOrder) -> Cluster:
    """The devices of this host."""
    device, host = device_description(len(order.ranks)), order.hosts[order.ranks[0]]
    return Cluster(
        tuple(
            DeviceSpec(f"{host}/cpu{number}", device.processor, host, device.memory_bytes)
            for number in range(len(order.ranks))
        ),
        {},
    )


def _linked(order: ProfileOrder, rank: int, store: Store, cluster: Cluster, activity: Activity) -> Cluster:
    """The cluster, on rank 0 with the links between the ranks of all hosts, which they measure together."""
    import torch.distributed as dist

    from profiler.links.cpu import measure_together
    from profiler.links.messages import FULL, QUICK

    def report(value: object) -> None:
        activity.begin(f"measuring {value[0]}" if isinstance(value, tuple) else "measuring links")

    num_ranks = len(order.hosts)
    if num_ranks == 1:
        return cluster
    report(None)
    timeout = timedelta(seconds=_LINKS_S)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks, timeout=timeout)
    try:
        found = measure_together(store, order.hosts, QUICK if order.request.quick else FULL, report)
        dist.barrier()  # a rank that leaves early would break the connections of the others
    finally:
        dist.destroy_process_group()
    if rank:
        return cluster
    return replace(cluster, links=found.links, collectives=found.collectives, pairs=found.pairs)


def _firsts(order: ProfileOrder) -> list[int]:
    return [order.hosts.index(host) for host in dict.fromkeys(order.hosts)]


def _key(first: int) -> str:
    return f"measured/{first}"


def _machine() -> str:
    """The same text in all namespaces of one machine, another on each machine."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return os.uname().nodename


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
