"""Prices of layers, messages and sums over ranks written a second time, by loops: an oracle for tests.

The rules are those of ``planner.costs.layers`` and ``planner.costs.communication``, with none of their code: one loop
over the measurements for every question, least squares by trying every set of coefficients that may be above zero.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, pairwise

import numpy as np

from planner.costs.layers.interpolation import QUANTITIES
from planner.ir.box import Interval, intersect, volume, whole
from planner.ir.cluster import ALL_REDUCE, Cluster, Collective, Link
from planner.ir.graph import BYTES_PER_ELEMENT, SAMPLE, Layer, TensorSpec
from planner.ir.profile import Measurement, Profile
from planner.layers import kind

Point = tuple[float, float, float, float]
Name = tuple[object, ...]

SECONDS = QUANTITIES[:4]


def at_samples(measured: Sequence[Measurement], samples: float, what: str) -> float:
    """The measurement, or the line through two of one key: log-log between neighbours, straight elsewhere.

    Raises:
        LookupError: there are no two.
    """
    for measurement in measured:
        if measurement.samples == samples:
            return float(getattr(measurement, what))
    if samples == 0:
        return 0.0
    low = max((m for m in measured if m.samples < samples), key=lambda m: m.samples, default=None)
    high = min((m for m in measured if m.samples > samples), key=lambda m: m.samples, default=None)
    if low is not None and high is not None and low.key == high.key:
        a = float(getattr(low, what))
        b = float(getattr(high, what))
        if a > 0 and b > 0:
            share = math.log(samples / low.samples) / math.log(high.samples / low.samples)
            return float(a * (b / a) ** share)
        return _line(low, high, samples, what)
    below = sorted((m for m in measured if low and m.samples <= low.samples and m.key == low.key), key=_samples)
    above = sorted((m for m in measured if high and m.samples >= high.samples and m.key == high.key), key=_samples)
    if len(below) > 1:
        return _line(below[-2], below[-1], samples, what)
    if len(above) > 1:
        return _line(above[0], above[1], samples, what)
    raise LookupError(f"no line to read {what} at {samples} samples")


def _samples(measurement: Measurement) -> int:
    return measurement.samples


def _line(low: Measurement, high: Measurement, samples: float, what: str) -> float:
    a = float(getattr(low, what))
    b = float(getattr(high, what))
    least = a * samples / low.samples if samples < 1 else 0.0  # a part of a sample takes that part of the time
    return max(least, a + (b - a) * (samples - low.samples) / (high.samples - low.samples))


def from_points(points: Sequence[tuple[int, float]], size: float, bytes_per_s: float | None = None) -> float:
    """Log-log between the points, the first one's time below; beyond, the bytes that remain at a rate.

    Args:
        bytes_per_s: that rate; None: the one between the last two points.
    """
    if size <= points[0][0]:
        return points[0][1]
    for (x0, y0), (x1, y1) in pairwise(points):
        if size <= x1:
            return float(y0 * (y1 / y0) ** (math.log(size / x0) / math.log(x1 / x0)))
    x1, y1 = points[-1]
    if bytes_per_s is not None:
        return y1 + (size - x1) / bytes_per_s
    if len(points) == 1:
        return y1 * size / x1
    x0, y0 = points[-2]
    return y1 + max(0.0, (size - x1) * (y1 - y0) / (x1 - x0))


def message_s(link: Link, size: float) -> float:
    """A message of ``size`` bytes on an idle link."""
    if size <= 0:
        return 0.0
    if link.points:
        return from_points(link.points, size, link.bandwidth_bytes_per_s)
    return link.latency_s + size / link.bandwidth_bytes_per_s


def delay_s(points: Sequence[tuple[int, float]], size: float) -> float:
    """What a rank loses by a message: straight between the points, the first one's below, in proportion beyond."""
    if size <= 0 or not points:
        return 0.0
    if size <= points[0][0]:
        return points[0][1]
    for (x0, y0), (x1, y1) in pairwise(points):
        if size <= x1:
            return y0 + (y1 - y0) * (size - x0) / (x1 - x0)
    x1, y1 = points[-1]
    return y1 / x1 * size


@dataclass(eq=False)
class Modelled:
    """Models of everything that was measured on one kind of device; a model is made when it is asked for."""

    profile: Profile
    device_kind: str
    layers: dict[str, Layer] = field(init=False, repr=False)
    values: dict[str, TensorSpec] = field(init=False, repr=False)
    rows: list[tuple[Measurement, Point]] = field(init=False, repr=False)
    models: dict[tuple[Name, str], Point] = field(init=False, default_factory=dict, repr=False)
    points: dict[tuple[str, float, tuple[int, ...]], Point] = field(init=False, default_factory=dict, repr=False)
    called: dict[Name, list[tuple[Measurement, Point]]] = field(init=False, default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        self.layers = self.profile.graph.by_name()
        self.values = self.profile.graph.values()
        measured = [
            *self.profile.measurements.get(self.device_kind, ()),
            *self.profile.parts.get(self.device_kind, ()),
        ]
        self.rows = [
            (m, self.point(m.layer, m.samples, m.part)) for m in measured if m.layer in self.layers and m.samples
        ]
        for row in self.rows:
            for name in (("layer", row[0].layer), *(self._name(row[0], level) for level in range(3))):
                self.called.setdefault(name, []).append(row)

    def whole(self, layer: str, samples: float, what: str) -> float:
        """Seconds or bytes of a whole layer.

        Raises:
            LookupError: no family says.
        """
        found = self._answer(layer, self.point(layer, samples, ()), what)
        if found is None:
            raise LookupError(f"{layer} at {samples} samples")
        return found

    def part(
        self, layer: str, samples: int, part: tuple[int, ...], least: Sequence[Mapping[str, float]], what: str
    ) -> float | None:
        """Seconds of a part, as slow as the ``least`` of what is known to do as much; None where no family says."""
        point = self.point(layer, samples, part)
        own = {name: self._answer(layer, point, name) for name in SECONDS}
        slow = 1.0
        for names in (SECONDS[:1], SECONDS[:2], (SECONDS[0], *SECONDS[2:])):
            mine = sum(own[name] or 0.0 for name in names)
            if mine > 0:
                slow = max(slow, min(sum(one[name] for name in names) for one in least) / mine)
        found = own[what]
        return None if found is None else found * slow

    def point(self, name: str, samples: float, part: tuple[int, ...]) -> Point:
        """(1, flops, bytes, bytes of parameters x samples)."""
        key = (name, samples, part)
        if key not in self.points:
            captured = self.profile.graph.samples
            once = self._count(name, captured)
            twice = self._count(name, 2 * captured)
            flops, moved, weights = (a + (b - a) * (samples / captured - 1) for a, b in zip(once, twice, strict=True))
            if part:
                flops, moved, weights = self._of_part(name, int(samples), part, flops)
            self.points[key] = (1.0, flops, moved, weights)
        return self.points[key]

    def _count(self, name: str, samples: int) -> tuple[float, float, float]:
        layer, inputs = self._sized(name, samples)
        weights = sum(self.profile.graph.parameters[each].num_bytes for each in layer.parameters)
        moved = weights + sum(spec.num_bytes for spec in inputs) + sum(spec.num_bytes for spec in layer.outputs)
        return kind(layer.kind).forward_flops(layer, inputs), moved, weights * samples

    def _of_part(self, name: str, samples: int, part: tuple[int, ...], flops: float) -> tuple[float, float, float]:
        layer, inputs = self._sized(name, samples)
        relation = kind(layer.kind)
        work = relation.work(layer, inputs)
        box = []
        extents = list(part)
        for dim, extent in zip(work.dims, work.shape, strict=True):
            mine = extent if dim == SAMPLE else extents.pop(0)
            first = (extent - mine) // 2 if dim in ("depth", "height", "width") else 0
            box.append(Interval(first, first + mine))
        share = volume(tuple(box)) / max(1, math.prod(work.shape))
        moved = share * sum(spec.num_bytes for spec in layer.outputs)
        for spec, asked in zip(inputs, relation.input_boxes(layer, inputs, tuple(box)), strict=True):
            inside = intersect(asked, whole(spec.shape))
            moved += BYTES_PER_ELEMENT[spec.dtype] * (volume(inside) if inside is not None else 0)
        specs = tuple(self.profile.graph.parameters[each] for each in layer.parameters)
        used = relation.weight_boxes(layer, specs, tuple(box))
        weights = sum(BYTES_PER_ELEMENT[spec.dtype] * volume(each) for spec, each in zip(specs, used, strict=True))
        return flops * share, moved + weights, weights * samples

    def _sized(self, name: str, samples: int) -> tuple[Layer, tuple[TensorSpec, ...]]:
        layer = self.layers[name]
        captured = self.profile.graph.samples
        outputs = tuple(spec.at(samples, captured) for spec in layer.outputs)
        return replace(layer, outputs=outputs), tuple(self.values[each].at(samples, captured) for each in layer.inputs)

    def _answer(self, name: str, point: Point, what: str) -> float | None:
        near = own = self.called.get(("layer", name), [])
        for level in (1, 2):
            near = near or self.called.get(self._level(name, "", level), [])
        if not near:
            return None
        nearest = min(near, key=lambda row: round(_apart(row[1], point), 9))  # of equally near ones the first
        family = self._family(nearest[0])
        if family is None:
            return None
        base, model = self._model(family, what)
        if not own:
            return 0.0 if base else _times(model, point)
        top = bottom = 0.0
        for m, at in own:
            if self._family(m) == family:
                weight = 1 / (_apart(at, point) + 0.02)
                said = _times(model, at)
                top += weight * (float(getattr(m, what)) / said if said > 0 else 1.0)
                bottom += weight
        return _times(model, point) * top / bottom

    def _family(self, m: Measurement) -> Name | None:
        """The narrowest name under which there are three shapes."""
        for level in range(3):
            name = self._name(m, level)
            shapes: set[Point] = set()
            for _, at in self.called[name]:
                shapes.add(at)
                if len(shapes) == 3:
                    return name
        return None

    def _model(self, family: Name, what: str) -> tuple[bool, Point]:
        """Whether it is mostly zero and in proportion to the bytes, and the coefficients."""
        if (family, what) not in self.models:
            rows = [(at, float(getattr(m, what))) for m, at in self.called[family]]
            some = [(at, value) for at, value in rows if value > 0]
            zero = 2 * len(some) < len(rows)
            self.models[family, what] = (0.0, 0.0, 1.0, 0.0) if zero else _least_squares(some)
            self.models[(family, "is zero"), what] = (float(zero), 0.0, 0.0, 0.0)
        return bool(self.models[(family, "is zero"), what][0]), self.models[family, what]

    def _name(self, m: Measurement, level: int) -> Name:
        return self._level(m.layer, m.key, level)

    def _level(self, name: str, key: str, level: int) -> Name:
        layer = self.layers[name]
        first = all(each in self.profile.graph.inputs for each in layer.inputs)
        return (layer.kind, str(layer.attributes.get("op", "")), first, key)[: (4, 3, 1)[level]]


def _apart(a: Point, b: Point) -> float:
    return sum((math.log(x + 1) - math.log(y + 1)) ** 2 for x, y in zip(a[1:3], b[1:3], strict=True))


def _times(model: Point, point: Iterable[float]) -> float:
    return sum(c * x for c, x in zip(model, point, strict=True))


def _least_squares(rows: Sequence[tuple[Point, float]]) -> Point:
    """Of all sets of columns with coefficients that are not negative the one with the least sum of squares."""
    points = np.array([[x / value for x in at] for at, value in rows])
    largest = points.max(axis=0)
    scale = np.where(largest > 0, largest, 1.0)
    ridge = np.sqrt(len(rows)) * np.diag([1e-3, 1e-3, 1e-3, 3e-2])
    matrix = np.concatenate((points / scale, ridge))
    target = np.array([1.0] * len(rows) + [0.0] * 4)
    best = np.zeros(4)
    least = float(target @ target)
    for columns in (list(each) for size in range(1, 5) for each in combinations(range(4), size)):
        found = np.linalg.lstsq(matrix[:, columns], target, rcond=None)[0]
        left = target - matrix[:, columns] @ found
        if found.min() >= 0 and left @ left < least:
            best = np.zeros(4)
            least = float(left @ left)
            best[columns] = found
    one, flops, moved, weights = (best / scale).tolist()
    return one, flops, moved, weights


Part = tuple[int, ...]


def cost_of_part(
    profile: Profile,
    device_kind: str,
    layer: str,
    samples: int,
    part: Part,
    whole: Part,
    what: str,
    modelled: Modelled | None = None,
    share: Mapping[str, float] | None = None,
) -> float | None:
    """Seconds or bytes (``what``) of a part; None where it is a share of as many whole samples.

    Args:
        part, whole: extents of the work of the part and of the layer, without the dim of the samples.
        modelled: for parts that nobody measured at any number of samples; None: there is no model of them.
        share: by name: the seconds of as large a share of the whole at these samples.
    """
    if part == whole or samples == 0 or 0 in part:
        return None
    measured = [m for m in profile.parts.get(device_kind, ()) if m.layer == layer]
    alike = [m for m in measured if m.part == part]
    if alike:
        try:
            return at_samples(alike, samples, what)
        except LookupError:
            alike = []
    if modelled is not None and share is not None and what in share:
        least = [share]
        for m in measured:
            if m.samples == samples:
                least.append({name: getattr(m, name) * math.prod(part) / math.prod(m.part) for name in share})
        said = modelled.part(layer, samples, part, least, what)
        if said is not None:
            return said
    now = [m for m in measured if m.samples == samples and _is_cut(m.part, whole) == _is_cut(part, whole)]
    if not now:
        return None
    now += [m for m in profile.measurements[device_kind] if m.layer == layer and m.samples == samples]
    return _by_elements(now, math.prod(part), math.prod(whole), what)


def _by_elements(measured: Sequence[Measurement], wanted: int, whole: int, what: str) -> float:
    """The value at ``wanted`` elements of work."""
    sizes = [(math.prod(m.part) if m.part else whole, m) for m in measured]
    below = [(size, m) for size, m in sizes if size <= wanted]
    above = [(size, m) for size, m in sizes if size >= wanted]
    lowest = max((size for size, _ in below), default=0)
    highest = min((size for size, _ in above), default=0)
    # Of several of one size the last counts below, the first above.
    low = next((m for size, m in reversed(below) if size == lowest), None)
    high = next((m for size, m in above if size == highest), None)
    if low is not None and high is not None and low.key == high.key and lowest != highest:
        a = float(getattr(low, what))
        b = float(getattr(high, what))
        if a <= 0 or b <= 0:
            return a + (b - a) * (wanted - lowest) / (highest - lowest)
        return float(a * (b / a) ** (math.log(wanted / lowest) / math.log(highest / lowest)))
    is_low = high is None or (low is not None and wanted * wanted <= lowest * highest)
    nearest, size = (low, lowest) if is_low else (high, highest)
    return float(getattr(nearest, what)) * wanted / size


def _is_cut(part: Part, whole: Part) -> list[bool]:
    return [mine < of_all for mine, of_all in zip(part, whole, strict=True)]


def sum_s(cluster: Cluster, operation: str, group: tuple[int, ...], size: float) -> float:
    """Seconds of a sum of ``size`` bytes a rank over ``group``, all of whose ranks are there."""
    if size <= 0 or len(group) < 2:
        return 0.0
    count = len(group)
    hosts = len({cluster.devices[rank].host for rank in group})
    tables = _tables(cluster, operation, group)
    for table in tables:
        if table.num_ranks == count and table.num_hosts in (0, hosts):
            return from_points(table.points, size)
    smaller = [table for table in tables if table.num_ranks <= count]
    larger = [table for table in tables if table.num_ranks >= count]
    ratio = 1.0
    if smaller:
        low = max(smaller, key=lambda table: table.num_ranks)
        ratio = _slowness(cluster, group, low, size)
    if larger:
        high = min(larger, key=lambda table: table.num_ranks)
        above = _slowness(cluster, group, high, size)
        if not smaller:
            ratio = above
        elif high.num_ranks > low.num_ranks:
            ratio += (above - ratio) * (count - low.num_ranks) / (high.num_ranks - low.num_ranks)
    return ratio * _ring_s(cluster, group, count, size)


def moving_s(cluster: Cluster, group: tuple[int, ...], size: int) -> float:
    """What the rank that loses most loses of its core by a sum: as much as by the messages of a ring."""
    around = sorted(group)
    moved = round(2 * (len(group) - 1) / len(group) * size)
    lost = [0.0] * len(around)
    for position, rank in enumerate(around):
        following = (position + 1) % len(around)
        link = cluster.link(rank, around[following])
        lost[position] += delay_s(link.sender_core, moved)
        lost[following] += delay_s(link.receiver_core, moved)
    return max(s * cluster.devices[rank].core_share for s, rank in zip(lost, around, strict=True))


def _slowness(cluster: Cluster, group: tuple[int, ...], table: Collective, size: float) -> float:
    found = from_points(table.points, size) / _ring_s(cluster, group, table.num_ranks, size)
    return max(1.0, found) if table.num_ranks == 2 and len(group) > 2 else found


def _ring_s(cluster: Cluster, group: tuple[int, ...], count: int, size: float) -> float:
    """Each rank hands on a part of ``size`` 2 (n - 1) times, to the next rank by number."""
    around = sorted(group)
    between = cluster.group_link_class(group)
    slowest = 0.0
    for position, rank in enumerate(around):
        following = around[(position + 1) % len(around)]
        if cluster.link_class(rank, following) == between:
            slowest = max(slowest, message_s(cluster.link(rank, following), size / count))
    return 2 * (count - 1) * slowest


def _tables(cluster: Cluster, operation: str, group: tuple[int, ...]) -> Sequence[Collective]:
    hosts = {cluster.devices[rank].host for rank in group}
    link = cluster.group_link_class(group)
    found = [each for each in cluster.collectives if each.operation == operation and each.link == link and each.points]
    if not found and operation != ALL_REDUCE:
        return _tables(cluster, ALL_REDUCE, group)
    one_a_host = len(hosts) == len(group)
    alike = [each for each in found if one_a_host == (each.num_hosts == 0 or each.num_hosts == each.num_ranks)]
    return alike if alike else found
