"""DAPPLE: the shortest latency of a synchronous pipeline of replicated stages, with its three phases.

Fan et al., "DAPPLE: A Pipelined Data Parallel Approach for Training Large Models", PPoPP 2021, section 4.  A chain of
layers, M micro-batches, hosts of like devices; every boundary between stages counts as a stage of its own, whose F and
B are its transfers, so that stages 0 ... S - 1 alternate.

    find      cuts of the chain, and devices of each stage by its three policies; all devices are used
    minimise  L = Tw + Ts + Te
              Tw = sum_{s <= Q} F_s                                              warm-up, up to the pivot stage Q
              Ts = (M - 1) (F_Q + B_Q)                                           steady phase
              Te = max_s (AR_s + sum_{s <= a <= Q} B_a)  for s <= Q              ending, with the all-reduces
                         (AR_s - sum_{Q < a < s} B_a)    for s > Q               (those after Q end before it)
    with      F_s, B_s = the layers' / r_s                                       r_s replicas share a micro-batch
              F = B    = bytes / (b min(r, r'))                                  of a boundary, b of its link
              AR_s     = 2 (r_s - 1) / r_s P_s / b                               a ring; b of the group's slowest link
    and Q     = S - 1; then for s = S - 2 ... 0: Q = s if T_s > T_Q + sum_{s < a < Q} (F_a + B_a),   T = (M - 1)(F + B)

The published planner goes through prefixes and keeps the best for each (layers, devices).  Here the chain is built from
its end, where the rule for Q needs nothing of what comes before: a suffix is known by four numbers,

    c1 = T_Q + sum_{s <= a < Q} (F_a + B_a)     whether a stage before becomes the pivot
    c2 = its latency                            c3 = the same without all-reduces
    c4 = max_{a >= s} (AR_a - sum_{s <= b < a} B_b)     its ending, should a stage before become the pivot

none of which is ever better for being larger, so that of the suffixes that start alike only the Pareto-best are kept,
and the optimum is exact.  Suffixes are dropped early by an upper bound (the best that a beam finds).

The three ways to take devices for a stage, on hosts of like devices:

* *fresh first*: from hosts of which nothing is taken, so that a stage's replicas are close to one another;
* *append first*: from hosts of which something is taken already, so that no host is left in pieces;
* *scatter first*: evenly from the hosts that are taken already, or from all if all are fresh, or full.

Hosts of which equally much is taken are alike, so what is taken is kept sorted, most first; :func:`real_hosts` gives
them their names back.

``best_pipeline`` is that programme.  ``solve`` plans a problem of ours by the search that DAPPLE's authors released
(:mod:`planner.extras.baselines.hpgo`), then by this programme as far as time allows, for which the profile is first
joined to few blocks.  It counts on like devices (the slowest kind's costs) and like hosts; hosts with different numbers
of devices count as one whose links are the slowest.  Every micro-batch size is tried, under both of DAPPLE's schedules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from math import inf

from planner.costs.candidate import Candidate
from planner.costs.cost_model import CostModel
from planner.extras.baselines import hpgo
from planner.extras.baselines.common.answer import (
    OPTIMAL,
    TIME_LIMIT,
    Json,
    Placed,
    RivalAnswer,
    Trial,
    bandwidth_bytes_per_s,
    candidates,
    hosts_of,
    infeasible,
    names_in,
    rival_plan,
    slowest_kind,
    stages_in,
    sums_bytes_per_s,
)
from planner.extras.baselines.common.problem import (
    ChainCosts,
    blocks_at,
    chain_of,
    coarse_ends,
    network,
    require_positive,
    searchable,
    sums,
)
from planner.ir.errors import UsageError
from planner.ir.plan import Plan
from planner.ir.problem import Problem
from planner.solvers.budget import Budget, check_time, part_of_current
from planner.solvers.candidates.candidate import micro_batches
from planner.solvers.candidates.feasibility import micro_batch_sizes, require_divisible
from planner.solvers.progress import Progress

UsedByHost = tuple[int, ...]
"""Devices taken, by host, most first."""

FRESH = "fresh first"
APPEND = "append first"
SCATTER = "scatter first"


@dataclass(frozen=True)
class Assignment:
    """The devices of a stage.

    Attributes:
        before: what is taken before it.
        after: what is taken after it, hosts in the order of ``before``.
        policy: how it was found.
    """

    before: UsedByHost
    after: UsedByHost
    policy: str

    @cached_property
    def devices(self) -> tuple[int, ...]:
        """By host."""
        return tuple(b - a for a, b in zip(self.before, self.after, strict=True))

    @cached_property
    def replicas(self) -> int:
        """How many devices."""
        return sum(self.after) - sum(self.before)

    @cached_property
    def host(self) -> int:
        """The host that has them all, or -1."""
        used = [host for host, count in enumerate(self.devices) if count]
        return used[0] if len(used) == 1 else -1

    def shares_host(self, following: Assignment) -> bool:
        """Whether this stage and the next one may be, and so are, on one and the same host."""
        return self.host >= 0 and following.host >= 0 and self.after[self.host] == following.before[following.host]


def most_first(used: UsedByHost) -> UsedByHost:
    """The same with hosts in their standard order."""
    return tuple(sorted(used, reverse=True))


def real_hosts(stages: Sequence[Assignment]) -> list[tuple[int, ...]]:
    """Devices by host of each stage of a pipeline, a host being the same one throughout."""
    names = list(range(len(stages[0].before)))
    rows: list[tuple[int, ...]] = []
    for index, stage in enumerate(stages):
        row = [0] * len(names)
        for position, count in enumerate(stage.devices):
            row[names[position]] = count
        rows.append(tuple(row))
        order = sorted(range(len(names)), key=lambda position: -stage.after[position])
        if index + 1 < len(stages) and stage.shares_host(stages[index + 1]):
            wanted = stages[index + 1].host  # hosts of equal counts change places, so that the two meet
            mine = order.index(stage.host)
            order[wanted], order[mine] = order[mine], order[wanted]
        names = [names[position] for position in order]
    return rows


def assignments(used: UsedByHost, replicas: int, per_host: int) -> Iterator[Assignment]:
    """The devices that the policies give to the next stage, each once."""
    offered: set[tuple[tuple[int, int], ...]] = set()
    for policy, take in _TAKE.items():
        after = take(used, replicas, per_host)
        new = tuple(sorted(zip(used, after, strict=True)))
        if new not in offered:
            offered.add(new)
            yield Assignment(used, after, policy)


def _scatter_first(used: UsedByHost, replicas: int, per_host: int) -> UsedByHost:
    begun = [host for host, count in enumerate(used) if 0 < count < per_host]
    after = list(used)
    for _ in range(replicas):
        open_hosts = [host for host in begun if after[host] < per_host]
        open_hosts = open_hosts or [host for host, count in enumerate(after) if count < per_host]
        host = min(open_hosts, key=lambda host: (after[host] - used[host], host))
        after[host] += 1
    return tuple(after)


def _fill(used: UsedByHost, replicas: int, per_host: int, fresh_first: bool) -> UsedByHost:
    after = list(used)
    for host in sorted(range(len(used)), key=lambda host: ((used[host] > 0) == fresh_first, host)):
        count = min(replicas, per_host - used[host])
        after[host] += count
        replicas -= count
    return tuple(after)


_TAKE: dict[str, Callable[[UsedByHost, int, int], UsedByHost]] = {
    FRESH: partial(_fill, fresh_first=True),
    APPEND: partial(_fill, fresh_first=False),
    SCATTER: _scatter_first,
}


@dataclass(frozen=True, slots=True)
class Hosts:
    """Like hosts of like devices."""

    hosts: int
    per_host: int
    within_bytes_per_s: float
    across_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Suffix:
    """A pipeline from some layer to the last.

    Attributes:
        c1, c2, c3, c4: see the module.
        first: the layer it starts at.
        assignment: of its first stage.
        rest: what follows the first stage.
    """

    c1: float
    c2: float
    c3: float
    c4: float
    first: int
    assignment: Assignment
    rest: Suffix | None

    def stages(self) -> list[Suffix]:
        """Itself and what follows, in order."""
        suffixes: list[Suffix] = []
        at: Suffix | None = self
        while at is not None:
            suffixes.append(at)
            at = at.rest
        return suffixes


def best_pipeline(
    instance: ChainCosts, hosts: Hosts, micro_batches: int, max_stages: int = 0, time_limit_s: float = inf
) -> RivalAnswer:
    """The best plan: seconds of a mini-batch in ``micro_batches`` parts.

    Args:
        max_stages: most stages; 0: no limit.

    Raises:
        UsageError: no device, no micro-batch or no bandwidth.
    """
    require_positive(hosts=hosts.hosts, devices=hosts.per_host, micro_batches=micro_batches)
    require_positive(within=hosts.within_bytes_per_s, across=hosts.across_bytes_per_s)
    if max_stages < 0:
        raise UsageError(f"at most {max_stages} stages", remedies=["give 0 for no limit"])
    search = _SuffixSearch(instance, hosts, micro_batches, max_stages, part_of_current(time_limit_s))
    best = search.best(search.best(width=1))
    if best is None:
        return infeasible()
    work_s = sum(instance.forward_s) + sum(instance.backward_s)
    least_s = min(best.c2, work_s / (hosts.hosts * hosts.per_host))
    stages: list[Json] = []
    suffixes = best.stages()
    ends = [*(stage.first for stage in suffixes[1:]), instance.num_layers]
    placed = real_hosts([stage.assignment for stage in suffixes])
    for stage, end, devices in zip(suffixes, ends, placed, strict=True):
        names = list[Json](instance.names[stage.first : end])
        stages.append({"layers": names, "devices": list[Json](devices), "policy": stage.assignment.policy})
    plan: dict[str, Json] = {"micro_batches": micro_batches, "stages": stages}
    if search.stopped:
        return RivalAnswer(best.c2, least_s, TIME_LIMIT, plan)
    return RivalAnswer(best.c2, best.c2, OPTIMAL, plan)


PhaseTimes = tuple[float, float, float, float]
"""c1, c2, c3, c4 of a suffix."""

SuffixKey = tuple[int, UsedByHost, int, int]
"""What of a suffix matters to stages before it: first layer, devices taken before, of these on its host (-1: it is on
several), its replicas."""


class _SuffixSearch:
    """The programme over suffixes: Pareto-best suffixes by :data:`SuffixKey`, by growing number of stages."""

    def __init__(self, chain: ChainCosts, hosts: Hosts, micro_batches: int, max_stages: int, budget: Budget) -> None:
        self._chain = chain
        self._hosts = hosts
        self._count = micro_batches
        self._budget = budget
        self._forward = [s / micro_batches for s in sums(chain.forward_s)]
        self._backward = [s / micro_batches for s in sums(chain.backward_s)]
        self._parameters = sums(chain.parameter_bytes)
        self._max_stages = max_stages or hosts.hosts * hosts.per_host
        self._upper = inf
        self.stopped = False
        self._into: dict[UsedByHost, list[Assignment]] = {}
        queue = [(0,) * hosts.hosts]
        reached = set(queue)
        while queue:
            grown = [assignment for used in queue for assignment in self._assigned(used)]
            for assignment in grown:
                self._into.setdefault(most_first(assignment.after), []).append(assignment)
            queue = [
                used
                for used in dict.fromkeys(most_first(assignment.after) for assignment in grown)
                if used not in reached
            ]
            reached.update(queue)

    def _assigned(self, used: UsedByHost) -> Iterator[Assignment]:
        free = self._hosts.hosts * self._hosts.per_host - sum(used)
        for replicas in range(1, free + 1):
            check_time()
            yield from assignments(used, replicas, self._hosts.per_host)

    def best(self, best: Suffix | None = None, width: int = 0) -> Suffix | None:
        """A better pipeline than ``best``, else ``best``; ``width``: most suffixes kept of those alike, 0: all."""
        self._upper = best.c2 if best else inf
        full = (self._hosts.per_host,) * self._hosts.hosts
        level: dict[SuffixKey, list[Suffix]] = {}
        for assignment in self._into[full]:
            check_time()
            self._prepend(level, assignment, None, width)
        for _ in range(self._max_stages):
            suffixes = [suffix for alike in level.values() for suffix in alike]
            for suffix in suffixes:
                if suffix.first == 0 and not any(suffix.assignment.before) and suffix.c2 < self._upper:
                    best = suffix
                    self._upper = suffix.c2
            level = {}
            for suffix in suffixes:
                if self._hopeless(suffix.c1, suffix.c2):
                    continue
                for assignment in self._into.get(suffix.assignment.before, ()):
                    if self._budget.ends():
                        self.stopped = True
                        return best
                    self._prepend(level, assignment, suffix, width)
        return best

    def _prepend(
        self, level: dict[SuffixKey, list[Suffix]], assignment: Assignment, rest: Suffix | None, width: int
    ) -> None:
        """Adds the suffixes with one more stage in front of ``rest``, for every layer it may start at."""
        last = rest.first if rest else self._chain.num_layers
        replicas = assignment.replicas
        before = sum(assignment.before)
        met = assignment.before[assignment.host] if assignment.host >= 0 else -1
        numbers: PhaseTimes | None = None
        if rest is not None:
            link_s = self._link_s(last, assignment, rest.assignment)
            numbers = prepended((rest.c1, rest.c2, rest.c3, rest.c4), link_s, link_s, 0.0, self._count)
        byte_s = self._byte_s(assignment)
        for first in range(last - 1, -1, -1) if before else (0,):
            f = (self._forward[last] - self._forward[first]) / replicas
            b = (self._backward[last] - self._backward[first]) / replicas
            if self._count * (f + b) >= self._upper:
                break  # an earlier start is still longer
            work = self._forward[first] + self._backward[first]
            if before and self._count * work >= self._upper * before:
                continue  # what comes before is too much for the devices that are left
            if (first == 0) != (before == 0):
                continue
            reduction = (self._parameters[last] - self._parameters[first]) * byte_s
            own = prepended(numbers, f, b, reduction, self._count)
            if not self._hopeless(own[0], own[1]):
                key = (first, assignment.before, met, replicas)
                _keep(level.setdefault(key, []), Suffix(*own, first, assignment, rest), width)

    def _hopeless(self, c1: float, c2: float) -> bool:
        """Whether nothing that begins earlier can be below the best known.

        If the pivot stays the latency is c2 and more; a stage that becomes the pivot has (M - 1) (F + B) > c1, and the
        latency is M (F + B) at least.
        """
        steady = c1 * self._count / (self._count - 1) if self._count > 1 else 0.0
        return c2 >= self._upper and steady >= self._upper

    def _byte_s(self, assignment: Assignment) -> float:
        """What the sum of a byte of gradients takes."""
        hosts = self._hosts
        replicas = assignment.replicas
        bandwidth = hosts.within_bytes_per_s if assignment.host >= 0 else hosts.across_bytes_per_s
        return 2 * (replicas - 1) / replicas / bandwidth

    def _link_s(self, cut: int, before: Assignment, following: Assignment) -> float:
        hosts = self._hosts
        bandwidth = hosts.within_bytes_per_s if before.shares_host(following) else hosts.across_bytes_per_s
        size = self._chain.crossing_bytes[cut - 1] / self._count
        return size / (bandwidth * min(before.replicas, following.replicas))


def _keep(alike: list[Suffix], suffix: Suffix, width: int) -> None:
    """Adds a suffix unless another that starts alike is as good in all four numbers."""
    if any(as_good(other, suffix) for other in alike):
        return
    alike[:] = [other for other in alike if not as_good(suffix, other)]
    alike.append(suffix)
    if width and len(alike) > width:
        alike.remove(max(alike, key=lambda other: other.c2))


def prepended(rest: PhaseTimes | None, f: float, b: float, reduction: float, count: int) -> PhaseTimes:
    """The four numbers of a suffix with one more stage in front of ``rest``."""
    steady = (count - 1) * (f + b)
    if rest is None:
        return steady, f + steady + b + reduction, f + steady + b, reduction
    c1, c2, c3, c4 = rest
    ending = max(reduction, c4 - b)
    if steady > c1:
        return steady, f + steady + max(b + reduction, c4), f + steady + b, ending
    return c1 + f + b, f + max(c2, c3 + b + reduction), c3 + f + b, ending


def as_good(one: Suffix, other: Suffix) -> bool:
    """Whether no pipeline is better for ending in ``other`` than in ``one``, which starts alike."""
    return one.c1 <= other.c1 and one.c2 <= other.c2 and one.c3 <= other.c3 and one.c4 <= other.c4


BLOCKS = 20
"""Most blocks of layers."""

SCHEDULES = ("1f1b", "1f1b-so")
"""DAPPLE's two (section 3): before its first backward a stage s of S has S - s forwards, or 2 (S - s) - 1."""


def solve(problem: Problem, progress: Progress | None = None) -> Plan:
    """DAPPLE's stages at the best micro-batch size.

    Raises:
        InfeasibleError: they do not fit, or the model mixes samples.
    """
    if len(problem.ranks) > 1:
        require_divisible(problem.graph)
    return rival_plan(problem, pipelines, "dapple", "DAPPLE's released search, then the shortest latency by its paper")


def pipelines(problem: Problem, cost_model: CostModel, trial: Trial) -> Iterator[Candidate]:
    """What its released planner chooses, then the shortest latency as far as time allows; every micro-batch size."""
    for offer in _offers(problem, cost_model):
        yield from candidates(problem, cost_model, offer.stages, offer.size, trial, SCHEDULES)
    hosts = _hosts(problem)
    within, across = (bandwidth_bytes_per_s(problem, ranks) for ranks in (hosts[0], problem.ranks))
    shape = Hosts(len(hosts), len(hosts[0]), within, across)
    for size, limit_s in trial.sizes(problem, cost_model):
        fine = network(problem, cost_model, slowest_kind(problem, cost_model, size), size)
        net = blocks_at(fine, coarse_ends(chain_of(fine.graph), BLOCKS))
        count = len(micro_batches(problem, size))
        answer = best_pipeline(chain_of(net.graph).scaled(count), shape, count, problem.max_stages, limit_s)
        if trial.has_plan(size, answer):
            layers = [net.layers(names_in(stage)) for stage in stages_in(answer)]
            devices = [_counts(stage["devices"]) for stage in stages_in(answer)]
            yield from candidates(problem, cost_model, _placed(hosts, layers, devices), size, trial, SCHEDULES)


@dataclass(frozen=True, slots=True)
class _Offer:
    """A pipeline of the released planner in ``count`` micro-batches of ``size`` samples."""

    pipeline: hpgo.HpgoPipeline
    size: int
    count: int
    stages: list[Placed]

    @property
    def estimate_s(self) -> float:
        return self.pipeline.estimate_s


def _offers(problem: Problem, cost_model: CostModel) -> Iterator[_Offer]:
    """Of every size, the largest first, the best of each family, the best by its estimate first."""
    hosts = _hosts(problem)
    within, across = (bandwidth_bytes_per_s(problem, ranks) for ranks in (hosts[0], problem.ranks))
    machines = hpgo.HpgoMachines(len(hosts), len(hosts[0]), within, across, sums_bytes_per_s(problem, problem.ranks))
    for size in reversed(micro_batch_sizes(problem, cost_model)) if machines.devices > 1 else ():
        net = searchable(network(problem, cost_model, slowest_kind(problem, cost_model, size), size), machines.devices)
        count = len(micro_batches(problem, size))
        planner = hpgo.Planner(net.graph, machines, count, count)
        for pipeline in sorted(planner.pipelines().values(), key=lambda each: each.estimate_s):
            layers = [net.layers(names) for names in planner.layers(pipeline)]
            yield _Offer(pipeline, size, count, _placed(hosts, layers, pipeline.devices))


def _hosts(problem: Problem) -> tuple[tuple[int, ...], ...]:
    """The ranks of like hosts; all of them as one where hosts differ."""
    hosts = tuple(hosts_of(problem).values())
    return hosts if len({len(ranks) for ranks in hosts}) == 1 else (problem.ranks,)


def _placed(
    hosts: Sequence[Sequence[int]], layers: Sequence[tuple[int, ...]], devices: Sequence[Sequence[int]]
) -> list[Placed]:
    """Stages on the next free ranks of each host."""
    free = [list(ranks) for ranks in hosts]
    return [
        (own, tuple(mine.pop(0) for mine, count in zip(free, counts, strict=True) for _ in range(count)))
        for own, counts in zip(layers, devices, strict=True)
    ]


def _counts(devices: Json) -> list[int]:
    return [count for count in devices if isinstance(count, int)] if isinstance(devices, list) else []
