"""What the predictions are made from: layers measured on one core, links measured between the hosts of a testbed."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.accuracy.cases import Network, Setting
from benchmarks.devices.ranks import on_ranks
from benchmarks.devices.testbed import INTERFACE, RATES, Testbed
from benchmarks.devices.virtual_device import with_devices
from cuda_ops._torch import default_store
from planner.costs.layers.part_shapes import part_shapes
from planner.ir.cluster import Cluster, DeviceSpec
from planner.ir.codec import dumps, loads
from planner.ir.graph import Graph
from planner.ir.problem import SAMPLE_DIMS
from planner.ir.profile import PartShape, Profile
from planner.layers import over_sites
from profiler import profile
from profiler.links.cpu import measure_together
from profiler.links.messages import FULL, QUICK
from profiler.links.processes import LinkCosts, groups_of
from profiler.merge import gather
from runtime.transport import Transport

_MOST_RANKS = 4


def measured_alone(networks: Sequence[Network], processes: int) -> list[Profile]:
    """Layers, and their parts where plans may cut along space, on a core of this machine, by network.

    With the effort of ``halopipe profile --quick``, by several processes, now on one core and now on the next; one
    process of each network after another, so that none is measured in the machine's fast minutes only.
    """
    found = [[_profiled(network, core) for network in networks] for core in range(processes)]
    return [gather(list(each)) for each in zip(*found, strict=True)]


def measured_beside(network: Network) -> Profile:
    """The same on both cores at once.

    The hosts of a testbed have one machine's memory: a layer that waits for it takes longer while the core beside works
    on the like (up to half as long again, where the layer does little but move data).
    """
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        texts = pool.starmap(_text, [(network, core) for core in range(2)])
    return gather([loads(text, Profile) for text in texts])


def measured_here(network: Network, *, quick: bool) -> Profile:
    """What ``halopipe profile`` measures of two cores of this host."""
    return profile(network.source, sizes=network.sizes, quick=quick, num_workers=2)


def _text(network: Network, core: int) -> str:
    first_in_line()
    return dumps(_profiled(network, core))


def _profiled(network: Network, core: int) -> Profile:
    shapes = None if network.allow == (SAMPLE_DIMS,) else _Shapes(network.samples, network.allow)
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {sorted(cores)[core % len(cores)]})  # the measuring process takes the first it may use
    try:
        return profile(network.source, sizes=network.sizes, quick=True, shapes=shapes, num_workers=1, num_processes=1)
    finally:
        os.sched_setaffinity(0, cores)


class _Shapes:
    """Parts of a full batch for up to four ranks; importable, for the measuring process."""

    def __init__(self, samples: int, allow: tuple[str, ...]) -> None:
        self._samples = samples
        self._allow = allow

    def __call__(self, graph: Graph, sizes: Sequence[int]) -> tuple[PartShape, ...]:
        found: dict[PartShape, None] = {}
        for ranks in range(2, _MOST_RANKS + 1, 2):
            found.update(dict.fromkeys(part_shapes(graph, (self._samples,), self._allow, ranks)))
        return tuple(found)


def on_hosts(setting: Setting, testbed: Testbed, quick: bool, graph: Graph) -> LinkCosts:
    """What moving data costs between the hosts of ``testbed``, and within them, as ranks of that setting see it.

    Args:
        graph: of its network.
    """
    sites = bool(over_sites(graph))
    effort = QUICK if quick else FULL
    names = [f"n{host}" for host in setting.host_of]

    def work(transport: Transport) -> LinkCosts:
        return measure_together(transport, default_store(), names, effort, lambda _what: None, sites=sites)

    return on_ranks(len(names), work, groups_of(names), enter=entrance(setting.host_of, testbed))[0]


def cluster_profile(setting: Setting, layers: Profile, links: LinkCosts) -> Profile:
    """``layers`` on the virtual devices of a setting, joined by ``links``."""
    known = layers.cluster.devices[0]
    devices = tuple(
        DeviceSpec(
            f"n{host}/cpu{setting.host_of[:rank].count(host)}",
            known.kind,
            f"n{host}",
            known.memory_bytes,
        )
        for rank, host in enumerate(setting.host_of)
    )
    cluster = Cluster(devices, links.links, links.collectives, links.pairs)
    return with_devices(replace(layers, cluster=cluster), setting.factors)


def entrance(host_of: Sequence[int], testbed: Testbed):
    """Moves the process of a rank to its host, before it meets the others."""

    def enter(rank: int) -> None:
        testbed.enter(host_of[rank])
        os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE

    return enter


def first_in_line() -> None:
    """Asks that this session's processes come before others; where that is not allowed nothing changes."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, -20)
    with contextlib.suppress(OSError):
        Path("/proc/self/autogroup").write_text("-20", encoding="ascii")


def testbed_of(setting: Setting) -> Testbed:
    """The hosts of a setting."""
    return Testbed.build(len(set(setting.host_of)), RATES[setting.rate])
