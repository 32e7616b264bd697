"""What a stage's host prepares ahead of a micro-batch, how long that takes, and where.

    before the program   what every rank makes of all micro-batches                   ``before_program_s``
    PREP of a stage      what its layers read, and what that is made from             ``seconds``

in proportion to the samples, from the measurement nearest in size.  A program begins when the slowest rank has all that
is made before; that counts as part of each rank's first ``PREP``.  Inputs that no preparation of the profile makes
arrive ready.  Where the device is a core of the host, preparing occupies the rank; beside an accelerator it is done in
order by a thread of the host, and the forward waits for it.  Where a plan prepares the next step during this one, that
is ``costs.simulator.next_step``.  What a network's inputs are made of may say more (hook ``inputs prepared ahead``:
sites of point clouds).

Neighbours of a graph's seeds are always made a step ahead, each rank's for its own samples alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from planner.ir.cluster import Cluster, DeviceSpec
from planner.ir.graph import Graph
from planner.ir.lazy import once
from planner.ir.profile import PreparationCost, Profile
from planner.layers import prepared_inputs

TURN_S = 2e-4
TURN_SHARE = 0.1
"""What a rank's own thread loses to a thread that finds sites and makes maps: on another core so much for each thing
that is made, since both want the interpreter (3 ms of 17 things, whatever the clouds' sizes: a step of 260 ms lost 0 to
3.6 ms, one of 22 ms, in the interpreter all the time, all of 4.7 ms that were to be gained); on the same core a share
of the thread's time (0.3 of 4.7, 0.7 of 8 ms), on two cores of an AMD EPYC.  A thread that samples neighbours is in
native code throughout, and takes nothing."""

_CORE = "cpu"


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
    """Look-ups of one profile, each made once.  Of inputs that are not all made in ``PREP`` there are others."""

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
            shared: whether the ranks of some stage share out micro-batches.
        """
        costs = self._measured(kind, self.read(layers), samples)
        return sum(self.in_program_s(cost, shared) * samples / cost.samples for cost in costs)

    @once
    def before_program_s(self, kind: str, samples: float, *, shared: bool = False) -> float:
        """Seconds in which a rank on a device of ``kind`` makes of a micro-batch what is made before the program.

        Args:
            shared: as of :meth:`seconds`.
        """
        costs = self._measured(kind, self.inputs, samples)
        return sum(self.before_s(cost, shared) * samples / cost.samples for cost in costs)

    @once
    def _measured(self, kind: str, inputs: frozenset[str], samples: float) -> list[PreparationCost]:
        """What makes ``inputs``, each as measured nearest in size; of two the smaller."""
        made = closure(self.profile.preparations.get(kind, ()), inputs).values()
        return [min(several, key=lambda cost: (abs(cost.samples - samples), cost.samples)) for several in made]

    def in_program_s(self, cost: PreparationCost, shared: bool) -> float:
        """What of a measurement is in ``PREP``."""
        return cost.seconds

    def before_s(self, cost: PreparationCost, shared: bool) -> float:
        """What of a measurement is before the program."""
        return 0.0

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

        Args:
            parts: ranks that share out the micro-batch.
        """
        return sum(input_bytes(self.profile.graph, name, samples) for name in self.read(layers))

    def before_program_bytes(self, samples: float, *, shared: bool) -> int:
        """Bytes of a micro-batch that every rank holds from before the program on; ``shared`` as of :meth:`seconds`."""
        return 0

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


def input_bytes(graph: Graph, name: str, samples: float) -> int:
    """Bytes of a prepared input for ``samples`` samples, in proportion."""
    return round(graph.inputs[name].num_bytes * samples / graph.samples)
