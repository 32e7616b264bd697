"""HPGO, the planner that DAPPLE's authors released: few families of pipelines, the best by one closed form.

Fan et al., "DAPPLE", PPoPP 2021; github.com/AlibabaPAI/DAPPLE, folder ``planner`` (BSD-3-Clause): ``orchestrate.rs``,
``device.rs``, and of the crate of that name ``sync_pipeline.rs``, ``split_concat.rs``, ``data_parallel.rs``.  Devices
are n, on hosts of equally many; a pipeline of p devices runs rp times side by side, rp p <= n; its mini-batch is M
micro-batches.  With T the seconds of a mini-batch on one device, those of stage s being T_s on g_s rp devices:

    minimise  L = (M - 1) U / M + T / (rp M) + sum_s C(a_s / (rp M)) + max(0, max_s (AR_s - s U / M))    ``estimate_s``
    with      U = max(max_s T_s / (g_s rp), max_s C(c a_s))          the longest of stages and of cuts, a whole batch
              C(x)    seconds to send x bytes from the devices of a stage to those of the next
              AR_s    the sum of its gradients over g_s rp devices

    family          stages      devices                                                           c
    one stage       1           p rp, rp = n // p, for p = 2 ... n; fresh hosts first             -
    halves          2           n / 2 each, in the order of hosts, where n is even and above 2    2
    one by one      n           one each, of a fresh host or of one in use                        2
    two stages      2           any g and n - g, hosts filled or scattered over                   1

Of halves and one by one the cuts have the smallest U (a dynamic programme over states of the network and devices taken,
which keeps one pipeline for each); of two stages every cut is looked at.  In the released programme others of several
stages are looked at too, and lose: their U is never below that of one stage.

C is bytes over the rate of messages between hosts, for the share of the senders that are on another host; over the rate
of sums between hosts where the receivers are on several; and over the rate inside a host where all are on one.  AR is a
ring, inside a host over g rp / 2 links at once.  AR of a stage counts its own parameters and, as released, those of the
first state after it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import inf

import numpy as np
from numpy.typing import NDArray

from planner.extras.baselines.common.problem import require_positive
from planner.extras.baselines.pipedream.format import Floats, LayerGraph, States, states_of
from planner.ir.errors import UsageError
from planner.solvers.budget import check_time

Counts = tuple[int, ...]
"""Devices by host."""

Ints = NDArray[np.intp]

ONE_STAGE = "one stage"
HALVES = "halves"
ONE_BY_ONE = "one by one"
TWO_STAGES = "two stages"


@dataclass(frozen=True, slots=True)
class HpgoMachines:
    """Like hosts of like devices.

    Attributes:
        within_bytes_per_s: inside a host.
        across_bytes_per_s: of messages between hosts.
        sums_bytes_per_s: of sums over devices of several hosts.
    """

    hosts: int
    per_host: int
    within_bytes_per_s: float
    across_bytes_per_s: float
    sums_bytes_per_s: float

    @property
    def devices(self) -> int:
        """All of them."""
        return self.hosts * self.per_host

    def link_s(self, src: Counts, dst: Counts, num_bytes: Floats) -> Floats:
        """Seconds to send ``num_bytes`` from one stage's devices to another's."""
        if sum(count > 0 for count in dst) > 1:
            return num_bytes / self.sums_bytes_per_s
        elsewhere = sum(count for count, own in zip(src, dst, strict=True) if not own)
        if elsewhere:
            return num_bytes / sum(src) * elsewhere / self.across_bytes_per_s
        return num_bytes / self.within_bytes_per_s

    def reduction_s(self, group: Counts, num_bytes: Floats) -> Floats:
        """Seconds to sum ``num_bytes`` over a stage's devices."""
        count = sum(group)
        ring = 2 * (count - 1) / count * num_bytes
        if sum(each > 0 for each in group) > 1:
            return ring / self.sums_bytes_per_s
        return ring / self.within_bytes_per_s / max(1, count // 2)


@dataclass(frozen=True, slots=True)
class HpgoPipeline:
    """A plan.

    Attributes:
        family: where it is from.
        copies: pipelines side by side (rp); a stage's devices are those of all of them.
        ends: by stage, the state of the network that is done after it.
        devices: by stage, by host.
        estimate_s: of a mini-batch, by HPGO.
    """

    family: str
    copies: int
    ends: tuple[int, ...]
    devices: tuple[Counts, ...]
    estimate_s: float


class Planner:
    """A network on machines, and how its mini-batch is cut.

    Attributes:
        states: of the network: where it may be cut.
        batch_s: seconds of a mini-batch on one device.
    """

    def __init__(self, graph: LayerGraph, machines: HpgoMachines, micro_batches: int, factor: float = 1.0) -> None:
        """A planner.

        Args:
            micro_batches: of a mini-batch, in each pipeline.
            factor: how many mini-batches of the graph's costs are one of this planner's.

        Raises:
            UsageError: no device, micro-batch or bandwidth; more states than can be held.
        """
        require_positive(hosts=machines.hosts, devices=machines.per_host, micro_batches=micro_batches, factor=factor)
        require_positive(within=machines.within_bytes_per_s, across=machines.across_bytes_per_s)
        require_positive(sums=machines.sums_bytes_per_s)
        self.states: States = states_of(graph)
        self._machines = machines
        self._count = micro_batches
        self._done_s: Floats = factor * self.states.compute_s
        self._parameters: Floats = self.states.parameter_bytes
        self._crossing: Floats = factor * self.states.output_bytes
        self._last = self.states.num_states - 1
        self.batch_s = float(self._done_s[-1])

    def pipelines(self) -> dict[str, HpgoPipeline]:
        """The best of each family; by name, families that there is none of left out."""
        best: dict[str, HpgoPipeline] = {}
        for pipeline in (*self._one_stage(), *self._halves(), *self._one_by_one(), *self._two_stages()):
            if pipeline.family not in best or pipeline.estimate_s < best[pipeline.family].estimate_s:
                best[pipeline.family] = pipeline
        return best

    def layers(self, pipeline: HpgoPipeline) -> list[list[str]]:
        """The names of each stage's layers."""
        starts = (None, *pipeline.ends[:-1])
        return [self.states.layers(start, end) for start, end in zip(starts, pipeline.ends, strict=True)]

    def estimate_s(self, copies: int, ends: Sequence[Ints], devices: Sequence[Counts], longest_s: Floats) -> Floats:
        """L of the module, elementwise.

        Args:
            ends: by stage, states that are done after it.
            devices: by stage, by host.
            longest_s: U.
        """
        count = self._count
        block_s = longest_s / count
        waits_s = np.zeros_like(longest_s)
        seconds = block_s * (count - 1) + self.batch_s / copies / count
        before: Floats = np.zeros(1)
        for stage, (end, group) in enumerate(zip(ends, devices, strict=True)):
            if stage + 1 < len(ends):
                sent = self._crossing[end] / copies / count
                seconds = seconds + self._machines.link_s(group, devices[stage + 1], sent)
            summed = self._parameters[np.minimum(end + 1, self._last)] - before
            waits_s = np.maximum(waits_s, self._machines.reduction_s(group, summed) - stage * block_s)
            before = self._parameters[end]
        return seconds + waits_s

    def _made(
        self, family: str, copies: int, ends: Sequence[int], devices: Sequence[Counts], longest_s: float
    ) -> HpgoPipeline:
        states = [np.array([end]) for end in ends]
        estimate_s = float(self.estimate_s(copies, states, devices, np.array([longest_s]))[0])
        return HpgoPipeline(family, copies, tuple(ends), tuple(devices), estimate_s)

    def _one_stage(self) -> Iterator[HpgoPipeline]:
        total = self._machines.devices
        for devices in range(2, total + 1):
            check_time()
            used = total // devices * devices
            group = _filled(self._machines, used)
            yield self._made(ONE_STAGE, total // devices, (self._last,), (group,), self.batch_s / used)

    def _halves(self) -> Iterator[HpgoPipeline]:
        machines = self._machines
        copies = self._machines.devices // 2
        if machines.devices == 2 or machines.devices % 2 or not self._last:
            return
        first = _filled(machines, copies)
        groups = (first, _rest(machines, first))
        stages_s = np.maximum(self._done_s, self.batch_s - self._done_s) / copies
        longest = np.maximum(stages_s, machines.link_s(*groups, 2 * self._crossing))[:-1]
        yield self._made(HALVES, copies, (int(longest.argmin()), self._last), groups, float(longest.min()))

    def _two_stages(self) -> Iterator[HpgoPipeline]:
        """For each number of devices and way to take them, the cut that is best by the estimate itself."""
        machines = self._machines
        cuts = np.arange(self._last)
        last = np.full_like(cuts, self._last)
        for count in range(1, machines.devices) if self._last else ():
            check_time()
            for first in dict.fromkeys((_filled(machines, count), _scattered(machines, count))):
                groups = (first, _rest(machines, first))
                stages_s = (self._done_s / count, (self.batch_s - self._done_s) / (machines.devices - count))
                longest = np.maximum.reduce([*stages_s, machines.link_s(*groups, self._crossing)])[:-1]
                seconds = self.estimate_s(1, (cuts, last), groups, longest)
                ends = (int(seconds.argmin()), self._last)
                yield HpgoPipeline(TWO_STAGES, 1, ends, groups, float(seconds.min()))

    def _one_by_one(self) -> Iterator[HpgoPipeline]:
        """Stages of one device each; of pipelines on the same devices up to the same state the first with least U."""
        machines = self._machines
        if not 2 <= machines.devices <= self.states.num_states:
            return
        own_s = np.where(self.states.before, self._done_s[None, :] - self._done_s[:, None], inf)
        rows = [{_one_of(machines, 0): _OneByOne(self._done_s, np.zeros(len(self._done_s), dtype=np.intp))}]
        for _ in range(machines.devices - 1):
            level: dict[Counts, _OneByOne] = {}
            for used, row in rows[-1].items():
                for host in _next_hosts(machines, used):
                    check_time()
                    rate = np.where(row.hosts == host, machines.within_bytes_per_s, machines.across_bytes_per_s)
                    so_far_s = np.maximum(row.longest_s, 2 * self._crossing / rate)
                    after = tuple(count + (each == host) for each, count in enumerate(used))
                    grown = level.setdefault(after, _OneByOne.empty(len(so_far_s)))
                    grown.improve(np.maximum(so_far_s[:, None], own_s), used, host)
            rows.append(level)
        state = self._last
        used = (machines.per_host,) * machines.hosts
        longest_s = float(rows[-1][used].longest_s[state])
        if longest_s == inf:
            return
        ends = []
        groups = []
        for level in reversed(rows):
            ends.append(state)
            groups.append(_one_of(machines, int(level[used].hosts[state])))
            state, used = level[used].origins.get(state, (state, used))
        yield self._made(ONE_BY_ONE, 1, ends[::-1], groups[::-1], longest_s)


@dataclass(slots=True)
class _OneByOne:
    """Pipelines of one device a stage on the same devices, by the state that they end in.

    Attributes:
        longest_s: the longest of stages and cuts; infinite where there is no pipeline.
        hosts: of the last stage.
        origins: the state before the last stage, and the devices taken before it; nothing if it is the first.
    """

    longest_s: Floats
    hosts: Ints
    origins: dict[int, tuple[int, Counts]] = field(default_factory=dict)

    @classmethod
    def empty(cls, num_states: int) -> _OneByOne:
        return cls(np.full(num_states, inf), np.zeros(num_states, dtype=np.intp))

    def improve(self, seconds: Floats, used: Counts, host: int) -> None:
        """Takes what is better of ``seconds``, by the states before and after the last stage."""
        origin = seconds.argmin(axis=0)
        least = seconds.min(axis=0)
        for state in np.flatnonzero(least < self.longest_s).tolist():
            self.longest_s[state] = least[state]
            self.hosts[state] = host
            self.origins[state] = int(origin[state]), used


def _filled(machines: HpgoMachines, count: int) -> Counts:
    """``count`` devices, one host after another."""
    return tuple(min(machines.per_host, max(0, count - host * machines.per_host)) for host in range(machines.hosts))


def _scattered(machines: HpgoMachines, count: int) -> Counts:
    """``count`` devices, one of each host in turn."""
    each, more = divmod(count, machines.hosts)
    return tuple(each + (host < more) for host in range(machines.hosts))


def _rest(machines: HpgoMachines, used: Counts) -> Counts:
    return tuple(machines.per_host - count for count in used)


def _one_of(machines: HpgoMachines, host: int) -> Counts:
    return tuple(int(each == host) for each in range(machines.hosts))


def _next_hosts(machines: HpgoMachines, used: Counts) -> list[int]:
    """Hosts of one more device: the first that is fresh, and the first that is in use and has room."""
    fresh = [host for host, count in enumerate(used) if not count]
    begun = [host for host, count in enumerate(used) if 0 < count < machines.per_host]
    return [*fresh[:1], *begun[:1]]


def search(
    graph: LayerGraph, machines: HpgoMachines, global_batch: int, micro_batch: int
) -> tuple[float, HpgoPipeline]:
    """HPGO's answer: the speed-up over one device that it estimates, and the plan.

    Args:
        graph: costs of ``micro_batch`` samples.
        global_batch: samples of a mini-batch; each pipeline has an equal part of it, in micro-batches.

    Raises:
        UsageError: there is one device alone, or a micro-batch is larger than the mini-batch.
    """
    require_positive(global_batch=global_batch, micro_batch=micro_batch)
    planners: dict[int, Planner] = {}
    best: tuple[float, HpgoPipeline] | None = None
    for copies in range(1, max(2, machines.devices // 2 + 1)):
        count = global_batch // copies // micro_batch
        if not count:
            continue
        planner = planners.setdefault(count, Planner(graph, machines, count, global_batch / micro_batch))
        for pipeline in planner.pipelines().values():
            speed_up = planner.batch_s / pipeline.estimate_s if pipeline.estimate_s > 0 else inf
            if pipeline.copies == copies and (best is None or speed_up > best[0]):
                best = speed_up, pipeline
    if best is None:
        raise UsageError(
            "there is nothing to choose",
            [f"{machines.devices} devices, micro-batches of {micro_batch} of {global_batch} samples"],
        )
    return best
