"""What a stage's host prepares ahead of a micro-batch, how long that takes, and where.

    before the program   every rank finds the sites of all micro-batches, at all levels; where ranks of some stage share
                         them, also puts them in order, by the pairs of all maps, which are made for it  ``found_s``
    PREP of a stage      the maps and segments that its layers read; of maps in that order its own part  ``seconds``

in proportion to the samples, from the measurement nearest in size.  A program begins when the slowest rank has found
the sites; that counts as part of each rank's first ``PREP``.  Inputs that no preparation of the profile makes arrive
ready.  Where the device is a core of the host, preparing occupies the rank; beside an accelerator it is done in order
by a thread of the host, and the forward waits for it.  Where a plan prepares the next step during this one, that is
``costs.simulator.next_step``.

Neighbours of a graph's seeds are always made a step ahead, each rank's for its own samples alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from planner.costs.communication.halo import halo_rows
from planner.ir.cluster import Cluster, DeviceSpec
from planner.ir.graph import SITES, Graph, is_sites
from planner.ir.lazy import once
from planner.ir.profile import PreparationCost, Profile, SiteHalo
from planner.layers import prepared_inputs

TURN_S, TURN_SHARE = 2e-4, 0.1
"""What a rank's own thread loses to a thread that finds sites and makes maps: on another core so much for each thing
that is made, since both want the interpreter (3 ms of 17 things, whatever the clouds' sizes: a step of 260 ms lost 0 to
3.6 ms, one of 22 ms, in the interpreter all the time, all of 4.7 ms that were to be gained); on the same core a share
of the thread's time (0.3 of 4.7, 0.7 of 8 ms), on two cores of an AMD EPYC.  A thread that samples neighbours is in
native code throughout, and takes nothing."""

_CORE = "cpu"
_COORDINATES_BYTES = 3 * 4  # int32 (cuda_ops.sparse.preparation)
_KEY_BYTES = _ROW_BYTES = 8  # int64
_ORDER_BYTES = 4 * 8 + 2 * 8 + 4 + 2 + 4
"""runtime.sparse: coordinates with samples, order and place int64, rows int32, owner int16, number int32"""


def has_host_beside(device: DeviceSpec) -> bool:
    """Whether the device computes while its host prepares (``n0/gpu0``, but not ``n0/cpu0``)."""
    return not device.name.rpartition("/")[2].startswith(_CORE)


def spare_cores(cluster: Cluster, num_ranks: int) -> tuple[int | None, ...]:
    """By rank, the core of its host that works for it beside, as a device's number; None where all cores have ranks.

    Ranks take them by turns, in the order of both, as :func:`cuda_ops.device.host.spare_core` has it.  Beside an
    accelerator the rank has its host anyhow: its own number.  Parts of cores do not count (``DeviceSpec.core_share``).
    """
    cores: list[int | None] = []
    for rank in range(num_ranks):
        host = cluster.devices[rank].host
        if has_host_beside(cluster.devices[rank]):
            cores.append(rank)
            continue
        spare = [
            number
            for number, device in enumerate(cluster.devices)
            if number >= num_ranks and device.host == host and is_core(device)
        ]
        before = sum(device.host == host for device in cluster.devices[:rank])
        cores.append(spare[before % len(spare)] if spare else None)
    return tuple(cores)


def is_core(device: DeviceSpec) -> bool:
    """Whether the device is a core of its host, all of it: what else runs there takes from its computing."""
    return not has_host_beside(device) and device.core_share > 0


@dataclass(eq=False)
class Preparations:
    """Look-ups of one profile, each made once."""

    profile: Profile

    @cached_property
    def inputs(self) -> frozenset[str]:
        """Those that a host prepares."""
        return frozenset(prepared_inputs(self.profile.graph))

    def read(self, layers: Iterable[int]) -> frozenset[str]:
        """The prepared inputs that layers, by index, read."""
        if not self.inputs:
            return frozenset()
        return frozenset().union(*(self._read(index) for index in layers))

    def seconds(self, kind: str, layers: Iterable[int], samples: float, *, shared: bool = False) -> float:
        """Seconds of a ``PREP`` on the host of a device of ``kind``, for a micro-batch of ``samples``.

        Args:
            shared: whether the plan's ranks share sites in some stage: then all maps are there, and this is what is
                made of those that the layers read.
        """
        inputs = self.read(layers)
        return self._seconds(kind, inputs, samples, shared) if inputs else 0.0

    @once
    def _seconds(self, kind: str, inputs: frozenset[str], samples: float, shared: bool) -> float:
        prep_s = 0.0
        for several in closure(self.profile.preparations.get(kind, ()), inputs).values():
            cost = _nearest(several, samples)
            if not self._is_found(cost):
                made_s = cost.shared_s if shared and self._is_map(cost) else cost.seconds
                prep_s += made_s * samples / cost.samples
        return prep_s

    @once
    def found_s(self, kind: str, samples: float, *, shared: bool = False) -> float:
        """Seconds in which a rank on a device of ``kind`` finds the sites of a micro-batch, before the program.

        Args:
            shared: as of :meth:`seconds`: then they are put in order as well.
        """
        sites_s = 0.0
        for several in closure(self.profile.preparations.get(kind, ()), self.inputs).values():
            cost = _nearest(several, samples)
            if self._is_found(cost):
                sites_s += (cost.seconds + shared * cost.shared_s) * samples / cost.samples
            elif shared and self._is_map(cost):
                sites_s += cost.seconds * samples / cost.samples
        return sites_s

    def is_beside(self, kind: str) -> bool:
        """Whether a thread of each rank prepares a step ahead, for the rank's own samples."""
        return any(cost.is_beside for cost in self.profile.preparations.get(kind, ()))

    def turns_s(self, kind: str, layers: Iterable[int], seconds: float, has_core: bool) -> float:
        """What a rank's own thread loses to one that prepares ``seconds`` for layers, on another core or the rank's."""
        if self.is_beside(kind):
            return 0.0
        if not has_core:
            return TURN_SHARE * seconds
        made = closure(self.profile.preparations.get(kind, ()), self.read(layers))
        return min(seconds, TURN_S * len(made))

    @property
    def look_ahead(self) -> bool:
        """Whether such threads are there under every plan: the next step is always prepared during this one."""
        return any(map(self.is_beside, self.profile.preparations))

    def num_bytes(self, layers: Iterable[int], samples: float, parts: int = 1) -> int:
        """Bytes of what is made of a micro-batch for layers, which read ``samples`` samples of it.

        Features are copied in the order of the sites.  Of a map whose sites several ranks share, each has its part, and
        apart what joins its own sites where it borrows others.

        Args:
            parts: ranks that share out the sites.
        """
        if not self.inputs:
            return 0
        graph, layers = self.profile.graph, tuple(layers)
        read = {name for index in layers for name in graph.layers[index].inputs if name in graph.inputs}
        copied = sum(input_bytes(graph, name, samples) for name in read - self.inputs if graph.inputs[name].has_sites)
        twice = 2 if parts > 1 and not self.look_ahead and self._borrows(parts, samples * parts) else 1
        return copied + twice * sum(input_bytes(graph, name, samples) for name in self.read(layers))

    def found_bytes(self, samples: float, *, shared: bool) -> int:
        """Bytes that every rank holds of a micro-batch's sites, from before the program on.

        The user's coordinates; of each site its key, of the input's its row in the user's tensors too.

        Args:
            shared: whether some stage's ranks share out the sites: then also their order, and all maps.
        """
        if not self.inputs:
            return 0
        graph, counts = self.profile.graph, dict[str, int]()
        for spec in graph.inputs.values():
            counts.update((dim, extent) for dim, extent in zip(spec.dims, spec.shape, strict=True) if is_sites(dim))
        each = _KEY_BYTES + (_ORDER_BYTES if shared else 0)
        total = each * sum(counts.values()) + (_COORDINATES_BYTES + _ROW_BYTES) * counts.get(SITES, 0)
        maps = sum(graph.inputs[name].num_bytes for name in self.inputs) if shared else 0
        return round((total + maps) * samples / graph.samples)

    def _is_found(self, cost: PreparationCost) -> bool:
        """Whether it is a site set, or made of the user's tensors alone."""
        return not cost.inputs or (not cost.after and not self._is_map(cost))

    def _is_map(self, cost: PreparationCost) -> bool:
        """Whether what it makes lies along sites."""
        return any(self.profile.graph.inputs[name].has_sites for name in cost.inputs)

    def _borrows(self, parts: int, samples: float) -> bool:
        """Whether ranks read sites of each other; they do not where each gets whole samples."""
        measured: dict[str, list[SiteHalo]] = {}
        for halo in self.profile.site_halos:
            measured.setdefault(halo.layer, []).append(halo)
        return not measured or any(
            halo_rows(halos, self.profile.graph, 0, parts, max(1, round(samples))) >= 1 for halos in measured.values()
        )

    @once
    def _read(self, index: int) -> frozenset[str]:
        return self.inputs.intersection(self.profile.graph.layers[index].inputs)


def closure(costs: Iterable[PreparationCost], inputs: frozenset[str]) -> Mapping[str, list[PreparationCost]]:
    """The measurements, by name, of what makes ``inputs`` and of what that is made from."""
    named: dict[str, list[PreparationCost]] = {}
    for cost in costs:
        named.setdefault(cost.name, []).append(cost)
    needed = [name for name, of_name in named.items() if inputs.intersection(of_name[0].inputs)]
    reached: dict[str, list[PreparationCost]] = {}
    while needed:
        name = needed.pop()
        if name not in reached and name in named:
            reached[name] = named[name]
            needed.extend(named[name][0].after)
    return {name: reached[name] for name in sorted(reached)}


def _nearest(several: Iterable[PreparationCost], samples: float) -> PreparationCost:
    """The measurement nearest in size; of two the smaller."""
    return min(several, key=lambda cost: (abs(cost.samples - samples), cost.samples))


def input_bytes(graph: Graph, name: str, samples: float) -> int:
    """Bytes of a prepared input for ``samples`` samples, in proportion."""
    return round(graph.inputs[name].num_bytes * samples / graph.samples)
