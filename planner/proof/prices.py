"""What layers, stages, sums and messages of a space take at least: formulas of their own, from the profile alone."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import pairwise, product
from typing import NamedTuple

import numpy as np

from planner import layers
from planner.ir.cluster import ALL_REDUCE, NORMALISATION, STATISTICS
from planner.ir.graph import BYTES_PER_ELEMENT, Graph
from planner.ir.layout import samples_of
from planner.ir.profile import Measurement
from planner.ir.program import BUCKET_BYTES, in_buckets
from planner.proof.space import Array, Counts, PlanSpace, ProofGroup

SizeCurve = tuple[Sequence[tuple[float, float]], float]  # (bytes, seconds), and seconds a byte beyond
QUANTITIES = ("forward_s", "backward_s", "backward_input_s", "backward_weight_s", "saved_bytes", "workspace_bytes")


class LeastCost(NamedTuple):
    """At least, elementwise: the shortest F and B, a member's F and B, its W too, sums and update; most in flight."""

    head: Array
    back: Array
    work: Array
    all_work: Array
    tail: Array
    window: Array


class LeastMessage(NamedTuple):
    """One way between two stages, in seconds at least: a piece, all that a member waits for, a step on one channel."""

    piece_s: Array
    all_s: Array
    step_s: Array


class _MicroBatch(NamedTuple):
    """Of a micro-batch on a member, by first and last cut (:meth:`SpacePrices.sums`)."""

    forward_s: Array
    backward_s: Array
    backward_input_s: Array
    backward_weight_s: Array
    hiding_s: Array  # B without what it computes again
    saved_bytes: Array
    once_bytes: Array  # saved of one micro-batch at a time

    def back_s(self, *, splits: bool) -> Array:
        """The shortest B or I."""
        return np.minimum(self.backward_s, self.backward_input_s) if splits else self.backward_s

    def all_back_s(self, *, splits: bool) -> Array:
        """The shortest B, or I and W."""
        halves_s = self.backward_input_s + self.backward_weight_s
        return np.minimum(self.backward_s, halves_s) if splits else self.backward_s


class _MemberCost(NamedTuple):
    """Of a member, by first and last cut, as of :class:`LeastCost`; ``hiding_s``: B that hides sums of gradients."""

    head: Array
    back: Array
    window: Array
    work: Array
    all_work: Array
    update: Array
    hiding_s: Array


class SpacePrices:
    """Of one space.

    Attributes:
        of_layers: by kind of device and samples, ``[6, layers]`` as of :meth:`derived`; those that are counted.
    """

    def __init__(self, space: PlanSpace) -> None:
        self.space = space
        self.cluster = space.cluster
        self.of_layers = dict[tuple[str, int], Array]()
        graph = space.graph
        own = [[p for p in layer.parameters if space.users[p] == [n]] for n, layer in enumerate(graph.layers)]
        sizes = [float(sum(graph.parameters[p].num_bytes for p in names)) for names in own]
        self.own_bytes = space.members @ np.array(sizes)
        self.unties = all(len(of) == 1 for of in space.users.values())
        whole = [len(names) == len(layer.parameters) for names, layer in zip(own, graph.layers, strict=True)]
        self.per_layer = {kind: self._parameter_costs(kind) for kind in space.kinds}
        self.of_parameters = {kind: (space.members @ (row * whole).T).T for kind, row in self.per_layer.items()}
        mixing = layers.check_samples_apart(graph)
        self.mixing = space.members @ np.array([float(layer.name in mixing) for layer in graph.layers])
        self.has_levels = {k: any(m.levels for row in of for m in row) for k, of in space.measured.items()}
        times = space.problem.global_batch / graph.samples
        self.batch_bytes = sum(s.num_bytes * (times if s.has_samples else 1) for s in graph.inputs.values())
        self.norms = _statistics_bytes(graph)

    def _parameter_costs(self, kind: str) -> Array:
        """``[2, layers]``: seconds of adding into gradients, and of the update."""
        costs = self.space.problem.profile.parameters.get(kind, {})
        rows = (costs.get(layer.name) for layer in self.space.graph.layers)
        return np.array([(c.accumulate_s, c.update_s) if c else (0.0, 0.0) for c in rows]).T

    def derived(self, kind: str, samples: int) -> Array:
        """``[6, layers]``: seconds of F, B, I and W, bytes saved and of workspace; 0 where the profile does not say.

        Where it knows how high memory rises in each layer, workspaces are not sure to meet what is saved: 0.
        """
        rows = np.array([_at(measured, samples) for measured in self.space.measured[kind]]).T
        rows[5] *= not self.has_levels[kind]
        return rows

    @cache  # noqa: B019  # as long as the space is looked at
    def sums(self, kind: str, samples: int, recompute: str) -> Array:
        """Before each cut: F, B, I and W, B without recomputation, saved of each micro-batch, saved of one at once."""
        forward, backward, of_input, weight, saved, _ = self.of_layers[kind, samples]
        repeated = self.space.repeated[recompute]
        more = repeated * forward
        kept = saved * (1 - repeated)
        once = saved if recompute == "all" else kept
        rows = [forward, backward + more, of_input + more, weight, backward, kept, once]
        return np.asarray((self.space.members @ np.array(rows).T).T)

    def stage(self, group: ProofGroup, size: int) -> LeastCost:
        """Stages of ``group``, by first and last cut."""
        batches = self.space.micro_batches(size)
        own_bytes = _between(self.own_bytes)
        met_s = _between((self.space.members @ self.met_s(group.devices, group.recompute).T).T)
        samples = (samples_of(group.shares, n) for n in (size, batches[-1]))
        members = dict.fromkeys(zip(self.space.members_of(group.devices), *samples, strict=True))
        columns = list(zip(*(self._member(group.recompute, len(batches), *each) for each in members), strict=True))
        head, back, window = map(np.minimum.reduce, columns[:3])
        work, all_work, update, hiding_s = map(np.maximum.reduce, columns[3:])
        always = len(batches) * met_s.sum(axis=0)
        tail = update + self._least_sums_s(group.devices, own_bytes, hiding_s + met_s[1])
        window = np.minimum(window, len(batches)) * ((_between(self.mixing) == 0) | (len(group.shares) < 2))
        return LeastCost(head + met_s[0], back + met_s[1], work + always, all_work + always, tail, window)

    def _member(self, recompute: str, count: int, member: tuple[str, int], full: int, last: int) -> _MemberCost:
        """Of ``count`` micro-batches, the last of ``last`` samples on the member, the others of ``full``."""
        kind, limit_bytes = member
        splits = self.space.splits
        a, b = (_MicroBatch(*_between(self.sums(kind, n, recompute))) for n in (full, last))
        adds_s, update_s = _between(self.of_parameters[kind])
        back_a = a.back_s(splits=splits)
        back_b = b.back_s(splits=splits)
        work = (count - 1) * (a.forward_s + back_a + adds_s * (not splits)) + b.forward_s + back_b
        all_a = a.forward_s + a.all_back_s(splits=splits) + adds_s
        all_work = (count - 1) * all_a + b.forward_s + b.all_back_s(splits=splits)
        own_bytes = _between(self.own_bytes)
        state = self.space.problem.profile.optimizer.state_bytes_per_parameter_byte
        free = limit_bytes + count + 6 - self.batch_bytes - (2 + state) * own_bytes - b.saved_bytes
        free = free - self._largest(kind, full) - (a.once_bytes if recompute == "all" else 0.0)
        free = free + np.minimum(own_bytes, a.once_bytes) * self.has_levels[kind]
        window = np.where(free < 0, 0, 1 + np.floor(np.maximum(free, 0) / np.maximum(a.saved_bytes, 1e-9)))
        head = np.minimum(a.forward_s, b.forward_s)
        return _MemberCost(head, np.minimum(back_a, back_b), window, work, all_work, update_s, b.hiding_s)

    @cache  # noqa: B019
    def _largest(self, kind: str, samples: int) -> Array:
        """The workspace of the hungriest layer, by first and last cut."""
        largest = np.zeros(self.space.inside.shape)
        workspace = self.of_layers[kind, samples][5]
        for layer in np.argsort(workspace, kind="stable"):
            has = self.space.members[:, layer] > 0
            largest[np.ix_(~has, has)] = workspace[layer]
        return largest

    def _least_sums_s(self, devices: Counts, num_bytes: Array, later_s: Array) -> Array:
        """What is waited for sums of gradients at least, whatever buckets they are in."""
        line = self.sum_of(devices)
        rate = min([line[1], *(s / at for at, s in line[0])])
        is_one = (num_bytes <= BUCKET_BYTES) & self.unties
        return np.where(is_one, read(line, num_bytes), np.maximum(rate * num_bytes - later_s, 0))

    def waited_s(self, group: ProofGroup, size: int, first: int, last: int) -> float:
        """The same of one stage, bucket by bucket: a sum begins when backward has come past its layers."""
        space = self.space
        left_s = 0.0
        waits_s = [0.0]
        later_s = np.zeros(self.space.count)
        inside = np.flatnonzero(space.members[last] > space.members[first]).tolist()
        names = [(of[0], p) for n in inside for p, of in space.users.items() if of[0] == n and set(of) <= set(inside)]
        sizes = [space.graph.parameters[p].num_bytes for _, p in names]
        shares = samples_of(group.shares, space.micro_batches(size)[-1])
        members = zip(space.members_of(group.devices), shares, strict=True)
        slowest = max((self.of_layers[kind, n][1][inside] for (kind, _), n in members), key=np.sum)
        if self._ring(group.devices)[1]:
            later_s[inside] = np.cumsum([0.0, *(slowest + self.met_s(group.devices, "nothing")[1, inside])[:-1]])
        buckets = in_buckets(sizes)
        for bucket in reversed(buckets):
            left_s += float(read(self.sum_of(group.devices), np.array(float(sum(sizes[n] for n in bucket)))))
            waits_s.append(left_s - (later_s[min(names[n][0] for n in bucket)] if len(buckets) > 1 else 0.0))
        return max(waits_s)

    def of_stage(self, kind: str, first: int, last: int) -> Array:
        """Of a stage: seconds of adding into its gradients, and of its update, with what other stages use too."""
        space = self.space
        total = np.zeros(2)
        inside = set(np.flatnonzero(space.members[last] > space.members[first]).tolist())
        for name, users in space.users.items():
            if inside.intersection(users):
                with_it = [p for p, of in space.users.items() if of[0] == users[0]]
                size, sizes = (sum(space.graph.parameters[p].num_bytes for p in some) for some in ([name], with_it))
                total += self.per_layer[kind][:, users[0]] * size / max(1, sizes)
        return total

    def meetings(self, groups: Sequence[ProofGroup], cuts: Sequence[int]) -> list[tuple[set[int], float]]:
        """By stage: those that share parameters with it, itself included, and seconds of summing their gradients."""
        space = self.space
        sizes = Counter[tuple[int, ...]]()
        stage_of = len(groups) - space.members[list(cuts[1:])].sum(axis=0).astype(int)
        for name, users in space.users.items():
            sizes[tuple(sorted({int(stage_of[n]) for n in users}))] += space.graph.parameters[name].num_bytes
        each = [({stage}, 0.0) for stage in range(len(groups))]
        for stages, size in sizes.items():
            devices = tuple(np.sum([groups[s].devices for s in stages], axis=0).tolist())
            seconds = float(read(self.sum_of(devices), np.array(float(size)))) if len(stages) > 1 else 0.0
            for stage in stages:
                each[stage] = (each[stage][0].union(stages), each[stage][1] + seconds)
        return each

    def _ring(self, devices: Counts) -> tuple[str, bool, int, int]:
        """Of a group: its class of links, whether these move messages while ranks compute, ranks and hosts."""
        ranks = tuple(r for pool, n in zip(self.space.pools, devices, strict=True) for r in pool[:n])
        name = self.cluster.group_link_class(ranks)
        hosts = {self.cluster.devices[r].host for r in ranks}
        return name, len(ranks) < 2 or self.cluster.links[name].in_background, len(ranks), len(hosts)

    @cache  # noqa: B019
    def met_s(self, devices: Counts, recompute: str) -> Array:
        """``[2, layers]``: what these devices exchange of statistics in F and in B (or I), with what they do around."""
        count = sum(devices)
        if count < 2 or not self.norms.any():
            return np.zeros_like(self.norms)
        calls = [_measured(t.points) for t in self.cluster.collectives if t.operation == NORMALISATION]
        sizes = np.array([count * self.norms[0], self.norms[1]])
        seconds = np.sum([read(line, sizes) for line in (self.sum_of(devices, STATISTICS), *calls[:1])], axis=0)
        seconds[1] += self.space.repeated[recompute] * seconds[0]
        return np.asarray(seconds)

    @cache  # noqa: B019
    def sum_of(self, devices: Counts, operation: str = ALL_REDUCE) -> SizeCurve:
        """A sum over these devices as measured, or else as a ring takes it; nothing where others were measured."""
        name, _, count, num_hosts = self._ring(devices)
        tables = [t for t in self.cluster.collectives if (t.operation, t.link) == (operation, name) and t.points]
        if not tables and operation != ALL_REDUCE:
            return self.sum_of(devices)
        alike = [t for t in tables if (t.num_hosts in (0, t.num_ranks)) == (num_hosts == count)] or tables
        exact = [t for t in alike if t.num_ranks == count and t.num_hosts in (0, num_hosts)]
        if exact and count > 1:
            return _measured(exact[0].points)
        if tables or count < 2:
            return ((1, 1e-300),), 0.0
        points, slope = self.message_of(name)
        return [(at * count, 2 * (count - 1) * s) for at, s in points], 2 * (count - 1) / count * slope

    @cache  # noqa: B019
    def message_of(self, name: str) -> SizeCurve:
        """A message on a class of links, and larger ones: no table falls."""
        link = self.cluster.links[name]
        sizes, seconds = zip(*(link.points or ((1e-6, max(link.latency_s, 1e-30)),)), strict=True)
        least = np.minimum.accumulate(seconds[::-1])[::-1].tolist()
        return list(zip(sizes, least, strict=True)), 1.0 / link.bandwidth_bytes_per_s

    def lines(self, source: Counts, target: Counts) -> list[SizeCurve]:
        """Of messages between members of two stages, whichever members these are."""
        pools = self.space.pools
        pairs = product(np.flatnonzero(source), np.flatnonzero(target))
        ends = ((pools[a][0], pools[b][-1 if a == b else 0]) for a, b in pairs)
        return [self.message_of(name) for name in {self.cluster.link_class(a, b) for a, b in ends if a != b}]

    def messages(
        self, ends: Sequence[Counts], shares: Sequence[tuple[int, ...]], size: int, sizes: Array
    ) -> list[LeastMessage]:
        """Between stages, of ``sizes`` bytes a sample there and back; unless ``shares`` are known pieces have one."""
        lines = self.lines(*ends)
        batches = self.space.micro_batches(size)
        some = [[samples_of(own, n) for own in shares] for n in (size, batches[-1])]
        rows = [pieces(*own) if all(shares) else [(0, 0, 1)] for own in some]
        counts = {n for row in rows for *_, n in row}
        extra_s = self._overhead_s(ends)
        both = list[LeastMessage]()
        for num_bytes, end in zip(sizes, (1, 0), strict=True):
            take_s = {n: np.minimum.reduce([read(line, num_bytes * n) for line in lines]) for n in counts}
            waits_s = [np.maximum.reduce([take_s[n] for n in own]) for row in rows for own in _by_member(row, end)]
            piece_s = np.minimum.reduce(list(take_s.values())) + extra_s
            step_s = np.maximum.reduce([take_s[n] for *_, n in rows[0]]) * batches.count(size)
            both.append(LeastMessage(piece_s, np.minimum.reduce(waits_s) + extra_s, step_s))
        return both

    def _overhead_s(self, ends: Sequence[Counts]) -> float:
        """What an action takes at least on any of the members."""
        kinds = {kind for of in ends for kind, n in zip(self.space.kinds, of, strict=True) if n}
        return min(self.space.problem.profile.action_overhead_s.get(kind, 0.0) for kind in kinds)


def read(line: SizeCurve, size: Array) -> Array:
    """(bytes, seconds) in log-log, clamped below, straight beyond; 0 for nothing."""
    points, slope = line
    x, y = np.log(np.array(points, dtype=np.float64)).T
    inside = np.exp(np.interp(np.log(np.maximum(size, points[0][0])), x, y))
    return np.where(size > 0, inside + np.maximum(size - points[-1][0], 0.0) * slope, 0.0)


def pieces(source: Sequence[int], target: Sequence[int]) -> list[tuple[int, int, int]]:
    """Messages between members that share samples so: from, to, how many samples."""
    starts = np.cumsum([0, *source]).tolist()
    ends = np.cumsum([0, *target]).tolist()
    cuts = pairwise(sorted({*starts, *ends}))
    return [(bisect_left(starts, b) - 1, bisect_left(ends, b) - 1, b - a) for a, b in cuts]


def _by_member(parts: Sequence[tuple[int, int, int]], end: int) -> Iterable[list[int]]:
    """Samples of the messages that each member sends (``end`` 0) or receives (1)."""
    counts = defaultdict[int, list[int]](list)
    for part in parts:
        counts[part[end]].append(part[2])
    return counts.values()


def _statistics_bytes(graph: Graph) -> Array:
    """``[2, layers]``: what a rank sends of statistics, in F and in B."""
    num_bytes = np.zeros((2, len(graph.layers)))
    for number, layer in enumerate(graph.layers):
        if layers.kind(layer.kind).REDUCTION == "statistics":
            spec = layer.outputs[0]
            channels = spec.shape[spec.dims.index("channel") if "channel" in spec.dims else 1]
            num_bytes[:, number] = (1 + 2 * channels) * 8, 2 * channels * BYTES_PER_ELEMENT[spec.dtype]
    return num_bytes


def _between(sums: Array) -> Array:
    """Of sums before each cut, those between a first and a last one; the other way round they mean nothing."""
    return np.maximum(sums[..., None, :] - sums[..., :, None], 0.0)


def _measured(points: Sequence[tuple[float, float]]) -> SizeCurve:
    """Beyond the last one as between the last two."""
    (a, s), (b, t) = [(0, 0.0), *points][-2:]
    return points, max(0.0, (t - s) / (b - a))


def _at(measured: Sequence[Measurement], samples: int) -> Array:
    """A layer's ``QUANTITIES``, read between sizes of one back end in log-log, beyond them straight."""
    rows = [np.array([getattr(m, name) for name in QUANTITIES], dtype=np.float64) for m in measured]
    sizes = [m.samples for m in measured]
    keys = [m.key for m in measured]
    if samples in sizes:
        return rows[sizes.index(samples)]
    at = bisect_left(sizes, samples)
    below = [n for n in range(at) if keys[n] == keys[at - 1]]
    above = [n for n in range(at, len(sizes)) if keys[n] == keys[at]]
    is_inside = bool(below and above) and keys[at - 1] == keys[at]
    ends = [at - 1, at] if is_inside else below[-2:] if len(below) > 1 else above[:2]
    if len(ends) < 2:
        return np.zeros(len(QUANTITIES))
    low, high = (rows[n] for n in ends)
    a, b = (sizes[n] for n in ends)
    values = np.maximum(0.0, low + (high - low) * (samples - a) / (b - a))
    if is_inside:
        share = np.log(samples / a) / np.log(b / a)
        positive = (low > 0) & (high > 0)
        values[positive] = low[positive] ** (1 - share) * high[positive] ** share
    return np.asarray(values)
