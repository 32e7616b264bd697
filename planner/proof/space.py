"""The space of a proof: micro-batches, places to cut, pools of like devices and groups of these, schedules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import product
from math import inf
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner import layers, schedules
from planner.ir.box import intersect, volume, whole
from planner.ir.graph import BYTES_PER_ELEMENT, Layer, TensorSpec, producer
from planner.ir.layout import Shares, equal_shares, samples_of
from planner.ir.problem import ALWAYS, AUTO, NEVER, Problem
from planner.ir.profile import Measurement
from planner.ir.proof import ProofSpace
from planner.layers.boundary import without_gradient
from planner.layers.recomputed import attention_cores

Array = NDArray[np.float64]
Flags = NDArray[np.bool_]
CutNumbers = NDArray[np.signedinteger[Any]]
Counts = tuple[int, ...]  # devices by pool
MOST_CUTS = 640
FEW_SAMPLES = 12


class ProofGroup(NamedTuple):
    """Devices as a stage: by pool, samples of each in a full micro-batch, and what it computes again."""

    devices: Counts
    shares: Shares
    recompute: str


class ProofValue(NamedTuple):
    """What a layer makes for others: by index, bytes a sample that each reads, and whether a gradient comes back."""

    maker: int
    readers: list[int]
    num_bytes: Array
    gradient: bool


class PlanSpace:
    """Plans of one request.

    Attributes:
        pools: ranks that nothing tells apart; of each its kind of device, memory limit and host.
        like: pools that may change places, by number.
        measured: by kind of device and layer; ``covered``: the most samples at which all layers were.
        repeated: by what a stage computes again, 1 for the layers that are.
        members: 1 where a layer (second index) lies before a cut; ``inside``: whether a cut lies before another.
        meeting: of any two stages that meet at a cut, at least, as of :meth:`crossing`.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.graph = problem.graph
        self.cluster = problem.cluster
        self.count = len(self.graph.layers)
        devices = self.cluster.devices
        alike: dict[tuple[str, tuple[str, ...], int], list[int]] = {}
        for rank in problem.ranks:
            key = devices[rank].kind, self.cluster.groups_of(rank), problem.memory_limit_bytes(rank)
            alike.setdefault(key, []).append(rank)
        self.pools = list(alike.values())
        self.kinds = [k for k, *_ in alike]
        self.limits = [m for *_, m in alike]
        self.hosts = [devices[ranks[0]].host for ranks in self.pools]
        swaps = len(set(self.hosts)) == len(self.pools) and len(self.cluster.nested_tiers) == 2
        shapes = [(k, m, len(ranks), 0 if swaps else ranks[0]) for (k, _, m), ranks in alike.items()]
        self.like = [[n for n, shape in enumerate(shapes) if shape == of] for of in dict.fromkeys(shapes)]
        self.schedules = tuple(problem.schedules or schedules.default_names())
        self.splits = any(schedules.traits(name).splits_backward for name in self.schedules)
        cores = {name for core in attention_cores(self.graph) for name in core}
        in_core = np.array([float(layer.name in cores) for layer in self.graph.layers])
        self.repeated = {"nothing": np.zeros(self.count), "all": np.ones(self.count), "cores": in_core}
        choices = {NEVER: ("nothing",), ALWAYS: ("all",), AUTO: ("nothing", "all", *["cores"][: bool(cores)])}
        self.recompute = choices.get(problem.recompute, ("cores",))
        self.measured = {k: _by_layer(problem.profile.measurements[k], self.graph.layers) for k in set(self.kinds)}
        self.covered = {k: min(m[-1].samples for m in of if m) for k, of in self.measured.items()}
        self.sizes = self._sizes()
        self._read_graph()

    def _sizes(self) -> tuple[int, ...]:
        """Of micro-batches: divisors of the batch and what was measured, all of a small batch; or what is asked for."""
        batch = self.problem.global_batch
        asked = self.problem.micro_batch_sizes
        if layers.batch_wide_layers(self.graph) or layers.fixes_samples(self.graph):
            return (batch if layers.batch_wide_layers(self.graph) else self.graph.samples,)
        most = min(batch, sum(self.covered[k] * len(p) for k, p in zip(self.kinds, self.pools, strict=True)))
        measured_sizes = {m.samples for by_layer in self.measured.values() for of in by_layer for m in of}
        sizes = (n for n in range(1, most + 1) if batch % n == 0 or batch <= FEW_SAMPLES or n in measured_sizes)
        return tuple(sorted({min(size, batch) for size in asked} or sizes))

    def _read_graph(self) -> None:
        graph = self.graph
        index = {layer.name: n for n, layer in enumerate(self.graph.layers)}
        specs = graph.values()
        silent = without_gradient(graph)
        read_by = dict[str, dict[int, float]]()
        self.users: dict[str, list[int]] = {}
        for number, layer in enumerate(graph.layers):
            for name, size in _bytes_read(layer, tuple(specs[name] for name in layer.inputs), graph.samples):
                if producer(name) in index:
                    read_by.setdefault(name, {})[number] = size
            for name in dict.fromkeys(layer.parameters):
                self.users.setdefault(name, []).append(number)
        self.values = [
            ProofValue(index[producer(v)], list(of), np.array(list(of.values())), specs[v].is_float and v not in silent)
            for v, of in read_by.items()
        ]
        needs = [sum({1 << value.maker for value in self.values if n in value.readers}) for n in range(self.count)]
        ideals, self.any_cut = _ideals(needs)
        self.last = len(ideals) - 1
        self.members = np.array([[ideal >> n & 1 for n in range(self.count)] for ideal in ideals], dtype=np.float64)
        self.inside = np.array([[a != b and a & ~b == 0 for b in ideals] for a in ideals])
        cuts = range(self.last + 1)
        each = [self.crossing(np.flatnonzero(self.inside[:, c]), c, c, np.flatnonzero(self.inside[c])) for c in cuts]
        least = np.array([one.min(axis=(1, 2), initial=inf) for one in each]).T
        self.meeting = np.where(np.isfinite(least), least, 0.0)

    def crossing(self, first: CutNumbers, middle: int, start: int, last: CutNumbers) -> Array:
        """``[4, first, last]``: from stages that end at the cut ``middle`` to stages from ``start``.

        Bytes a sample there and back; above 0 where anything is read, and where a gradient comes back.
        """
        total = np.zeros((4, len(first), len(last)))
        for maker, readers, num_bytes, gradient in self.values if total.size else ():
            if self.members[middle, maker] and not self.members[start, readers].all():
                made = self.members[middle, maker] - self.members[first, maker]
                some = self.members[last][:, readers] - self.members[start, readers]
                most = (some * num_bytes).max(axis=1)
                reads = some.max(axis=1)
                total += made[:, None] * np.array([most, most * gradient, reads, reads * gradient])[:, None]
        return total

    def stated(self) -> ProofSpace:
        """As a proof says it."""
        pools = (f"{len(p)} x {k} on {h}" for p, k, h in zip(self.pools, self.kinds, self.hosts, strict=True))
        return ProofSpace(self.sizes, self.schedules, self.recompute, tuple(pools), self.last + 1, self.any_cut)

    def micro_batches(self, size: int) -> tuple[int, ...]:
        """Samples of each."""
        full, rest = divmod(self.problem.global_batch, size)
        return (size,) * full + (rest,) * (rest > 0)

    def groups(self, devices: Counts, recompute: str, size: int) -> list[ProofGroup]:
        """Those devices as a stage: alike ones share alike, kinds share in any way that leaves each device a sample."""
        used = Counter(kind for kind, _ in self.members_of(devices))
        kinds = list(used.elements())
        groups = list[ProofGroup]()
        for some in product(*(range(n, size) for n in list(used.values())[1:])):
            totals = (size - sum(some), *some)
            if all(total >= n for total, n in zip(totals, used.values(), strict=True)):
                shares = tuple(s for t, n in zip(totals, used.values(), strict=True) for s in equal_shares(t, n))
                parts = [zip(kinds, samples_of(shares, n), strict=True) for n in set(self.micro_batches(size))]
                asked = bool(self.problem.micro_batch_sizes)
                if all(n > 0 and (asked or n <= self.covered[k]) for part in parts for k, n in part):
                    groups.append(ProofGroup(devices, shares, recompute))
        return groups

    def members_of(self, devices: Counts) -> list[tuple[str, int]]:
        """Kind and memory limit of each member of a group, kinds one after another."""
        order = sorted(range(len(self.pools)), key=lambda n: self.kinds.index(self.kinds[n]))
        return [(self.kinds[n], self.limits[n]) for n in order for _ in range(devices[n])]

    def sized(self) -> list[tuple[str, int]]:
        """Every kind of device at every number of samples that a member of some group has."""
        sized = dict[tuple[str, int], None]()
        for size, devices in product(self.sizes, product(*(range(len(pool) + 1) for pool in self.pools))):
            for group in self.groups(devices, "nothing", size) if sum(devices) else ():
                for n in {size, self.micro_batches(size)[-1]}:
                    kinds = (kind for kind, _ in self.members_of(devices))
                    sized.update(dict.fromkeys(zip(kinds, samples_of(group.shares, n), strict=True)))
        return sorted(sized)


def _bytes_read(layer: Layer, inputs: tuple[TensorSpec, ...], samples: int) -> Iterator[tuple[str, float]]:
    """Of each input, the bytes a sample that the layer reads."""
    kind = layers.kind(layer.kind)
    boxes = kind.input_boxes(layer, inputs, whole(kind.work(layer, inputs).shape))
    for name, spec, box in zip(layer.inputs, inputs, boxes, strict=True):
        part = intersect(box, whole(spec.shape)) if spec.has_samples else None
        yield name, volume(part) * BYTES_PER_ELEMENT[spec.dtype] / samples if part is not None else 0.0


def _by_layer(measured: Sequence[Measurement], of: Sequence[Layer]) -> list[list[Measurement]]:
    by_name: dict[str, list[Measurement]] = {layer.name: [] for layer in of}
    for one in measured:
        by_name.setdefault(one.layer, []).append(one)
    return [sorted(by_name[layer.name], key=lambda m: m.samples) for layer in of]


def _ideals(needs: Sequence[int]) -> tuple[list[int], bool]:
    """Places to cut as bit sets of the layers before; where they are too many, those of the graph's own order."""
    reached = {0}
    pending = [0]
    for ideal in pending:
        for layer, needed in enumerate(needs):
            if not ideal >> layer & 1 and needed & ~ideal == 0 and (grown := ideal | 1 << layer) not in reached:
                reached.add(grown)
                pending.append(grown)
        if len(reached) > MOST_CUTS:
            return [(1 << n) - 1 for n in range(len(needs) + 1)], False
    return sorted(reached, key=lambda ideal: (ideal.bit_count(), ideal)), True
