"""Piper's JSON instances: layers with options (tensor degree, recomputation), and the bytes on their edges.

Tarnawski, Narayanan, Phanishayee, "Piper: multidimensional planner for DNN parallelization", NeurIPS 2021; the format
is described in the README of the public code (msr-fiddle/piper), where an option is called a TMPC:

    {"maxDevices": 8, "maxMemoryPerDevice": bytes, "bandwidth": bytes per second, "mbsInBatch": 480,
     "nodes": [{"id": 0, "name": "conv1", "TMPCs": {"1": [
         {"id": "vanilla", "timePerSample": 2.678, "parameterSize": bytes,
          "memoryUsageA": bytes for each micro-batch in flight, "memoryUsageB": bytes,
          "syncTimeFw": {"7": bytes by id of what it reads}, "syncTimeBw": {"1": bytes by id of its readers}}]}}, ...],
     "edges": [{"sourceId": 0, "destId": 1, "communicationCost": bytes}, ...]}

The number of micro-batches in a batch is ``mbsInBatch``, or ``maxBatchSize`` as the README calls it.  The published
files give times in milliseconds although the objective adds bytes / bandwidth; both are taken as they stand.  Beyond
what the original reads, numbers may stand in quotes, blanks or a byte-order mark before the file, a layer may have any
number of options, and a network of one layer needs no edges.

The devices of a plan are a :class:`Machine`; :class:`Room` is what a stage must leave of them for the stages after it
and in front of it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path

import numpy as np

from planner.extras.baselines.common.ideals import Bools, Floats, Ints, Lattice
from planner.extras.baselines.common.reading import (
    FileText,
    Item,
    edges_of,
    numbered_nodes,
    parse_object,
    read_text,
    require_no_cycle,
    whole_number,
)

_MOST_DEVICES = 10_000
"""A larger tensor degree or number of devices is taken for a mistake, as in the original."""


@dataclass(frozen=True, slots=True)
class PiperOption:
    """One way to run a layer on the devices that share its tensors.

    Attributes:
        name: ``vanilla`` or ``activation recomp`` in the published files.
        time_per_sample: compute of one micro-batch, forward and backward.
        parameter_bytes: on each device.
        bytes_per_in_flight: memory for each micro-batch in flight (``memoryUsageA``).
        fixed_bytes: memory besides (``memoryUsageB``).
        sync_forward_bytes: by index of the layer it reads, moved if that is in another stage.
        sync_backward_bytes: by index of the layer that reads it, moved if that is in another stage.
    """

    name: str
    time_per_sample: float
    parameter_bytes: float
    bytes_per_in_flight: float
    fixed_bytes: float
    sync_forward_bytes: Mapping[int, float]
    sync_backward_bytes: Mapping[int, float]


@dataclass(frozen=True, slots=True)
class PiperNode:
    """A layer.

    Attributes:
        number: its ``id`` in the file.
        name: ``node<id>`` if the file gives none.
        options: by tensor degree; a degree that is not there cannot be used.
    """

    number: int
    name: str
    options: Mapping[int, tuple[PiperOption, ...]]


@dataclass(frozen=True, slots=True)
class PiperInstance:
    """A whole file.

    Attributes:
        source: the file's name, for messages.
        devices: how many there are, all alike.
        memory_bytes: of each.
        bandwidth_bytes_per_s: of each to the outside.
        micro_batches: in a batch; data degrees divide it.
        nodes: in the file's order, which need not be topological.
        edges: (index, index, bytes) each once; there is no cycle.
    """

    source: str
    devices: int
    memory_bytes: float
    bandwidth_bytes_per_s: float
    micro_batches: int
    nodes: tuple[PiperNode, ...]
    edges: tuple[tuple[int, int, float], ...]


def read(path: str | Path) -> PiperInstance:
    """The instance in a file.

    Raises:
        MissingFileError: there is no such file, or it cannot be read.
        FormatError: it breaks the format; the text names the place.
    """
    file = read_text(path)
    return parse(file.text, file.source)


def parse(text: str, source: str = "instance.json") -> PiperInstance:
    """The instance in a text; ``source`` is what messages call it.

    Raises:
        FormatError: it breaks the format; the text names the place.
    """
    file = FileText(source, text)
    top = parse_object(file)
    items, index = numbered_nodes(top)
    edges = _edges(top, index)
    reads: list[set[int]] = [set() for _ in items]
    readers: list[set[int]] = [set() for _ in items]
    for src, dst, _ in edges:
        readers[src].add(dst)
        reads[dst].add(src)
    nodes = tuple(_node(item, index, reads[k], readers[k]) for k, item in enumerate(items))
    require_no_cycle(top, [f"{node.number} ({node.name})" for node in nodes], [(src, dst) for src, dst, _ in edges])
    devices = top.whole("maxDevices", least=1)
    if devices > _MOST_DEVICES:
        raise top.fault(f"{devices} devices", [f"at most {_MOST_DEVICES}"])
    batches = "mbsInBatch" if top.has("mbsInBatch") or not top.has("maxBatchSize") else "maxBatchSize"
    return PiperInstance(
        source=file.source,
        devices=devices,
        memory_bytes=top.number("maxMemoryPerDevice", least=1e-9),
        bandwidth_bytes_per_s=top.number("bandwidth", least=1e-9),
        micro_batches=top.whole(batches, least=1),
        nodes=nodes,
        edges=edges,
    )


def _edges(top: Item, index: Mapping[int, int]) -> tuple[tuple[int, int, float], ...]:
    edges: dict[tuple[int, int], float] = {}
    for item, src, dst in edges_of(top, index):
        if (src, dst) in edges:
            ends = f"{item.whole('sourceId')} to {item.whole('destId')}"
            raise item.fault("an edge that is there already", [ends], ["remove the edge"])
        edges[src, dst] = item.number("communicationCost")
    return tuple((src, dst, size) for (src, dst), size in edges.items())


def _node(item: Item, index: Mapping[int, int], reads: set[int], readers: set[int]) -> PiperNode:
    number = item.whole("id")
    name = item.text("name", f"node{number}")
    lists = item.named(name).item("TMPCs")
    options: dict[int, tuple[PiperOption, ...]] = {}
    for key in lists.fields:
        degree = whole_number(key)
        if degree is None or not 1 <= degree <= _MOST_DEVICES:
            raise lists.fault(f"{key!r} is no tensor degree", [f"a whole number from 1 to {_MOST_DEVICES} is needed"])
        choices = tuple(_option(each, index, reads, readers) for each in lists.items(key))
        names = [option.name for option in choices]
        if len(set(names)) < len(names):
            raise lists.fault(f"two options of degree {degree} have one id", [f"found: {', '.join(names)}"])
        if choices:
            options[degree] = choices
    if not options:
        raise lists.fault("no options", ["a layer needs at least one way to run"])
    return PiperNode(number, name, options)


def _option(item: Item, index: Mapping[int, int], reads: set[int], readers: set[int]) -> PiperOption:
    return PiperOption(
        name=item.text("id"),
        time_per_sample=item.number("timePerSample"),
        parameter_bytes=item.number("parameterSize"),
        bytes_per_in_flight=item.number("memoryUsageA"),
        fixed_bytes=item.number("memoryUsageB"),
        sync_forward_bytes=_by_layer(item.item("syncTimeFw"), index, reads, "reads"),
        sync_backward_bytes=_by_layer(item.item("syncTimeBw"), index, readers, "is read by"),
    )


def _by_layer(item: Item, index: Mapping[int, int], wanted: set[int], relation: str) -> dict[int, float]:
    """Numbers by neighbour: exactly those that an edge leads from or to."""
    numbers: dict[int, float] = {}
    for key in item.fields:
        number = whole_number(key)
        position = index.get(number) if number is not None else None
        if position is None or position not in wanted:
            raise item.fault(f"{key!r} is no layer that this one {relation}", _numbers(index, wanted))
        numbers[position] = item.number(key)
    if len(numbers) < len(wanted):
        missing = _numbers(index, wanted - set(numbers))
        raise item.fault(f"a layer that this one {relation} is missing", missing, ["give a number for every edge"])
    return numbers


def _numbers(index: Mapping[int, int], wanted: Sequence[int] | set[int]) -> list[str]:
    numbers = sorted(number for number, position in index.items() if position in wanted)
    return [f"edges lead to {', '.join(map(str, numbers[:8]))}" if numbers else "no edge leads there"]


_MANY = 1e9
"""More devices than there are."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What a plan may use: ``devices`` alike, each with its memory and its bandwidth to the outside.

    Attributes:
        most_replicas: of a stage.
    """

    devices: int
    memory_bytes: float
    bandwidth_bytes_per_s: float
    most_replicas: int = sys.maxsize

    def with_endless_memory(self) -> Machine:
        """The same, where everything fits."""
        return replace(self, memory_bytes=inf)

    def replicas(self, micro_batches: int, most: int) -> tuple[int, ...]:
        """Data degrees up to ``most`` that may be used, ascending: those that divide the micro-batches of a batch."""
        return tuple(d for d in range(1, min(most, self.most_replicas) + 1) if micro_batches % d == 0)


@dataclass(frozen=True, slots=True)
class Room:
    """What is left for a stage if every stage is to take less than ``below``.

    Attributes:
        largest_degree: of tensors, on any stage.
        downstream, front: by ideal, devices that the layers in it need at least, and the others.
        most: by ideal, the most that the data degrees of the stages in it can sum up to.
    """

    devices: int
    below: float
    largest_degree: int
    downstream: Ints
    front: Ints
    most: Ints

    @classmethod
    def of(
        cls, instance: PiperInstance, machine: Machine, lattice: Lattice, below: float, degrees: Sequence[int]
    ) -> Room:
        """Work, with the bytes over an ideal's border, over what a device does in ``below``; bytes over its memory."""
        inside = lattice.members(len(instance.nodes)).astype(np.float64)
        downstream = inside @ np.array(least_work(instance))
        front = downstream[-1] - downstream
        if instance.edges:
            sources = [src for src, _, _ in instance.edges]
            targets = [dst for _, dst, _ in instance.edges]
            crossing = 2 * np.array([size for _, _, size in instance.edges]) / machine.bandwidth_bytes_per_s
            cut = (inside[:, targets] * (1 - inside[:, sources])) @ crossing
            downstream = downstream + cut
            front = front + cut
        held = inside @ np.array(_least_bytes(instance))
        stages = [devices_for(part, max(machine.memory_bytes, 1e-9)) for part in (held, held[-1] - held)]
        needed = [np.maximum(devices_for(a, below), b) for a, b in zip((downstream, front), stages, strict=True)]
        most = np.minimum(instance.micro_batches, np.maximum(0, machine.devices - needed[1]) // degrees[0])
        return cls(machine.devices, below, degrees[-1], needed[0], needed[1], most)

    def in_flight(self, below: Ints, above: Ints, replicas: Ints, degree: int) -> tuple[Ints, Ints]:
        """The fewest and the most micro-batches in flight of stages on ``replicas`` or more."""
        most_replicas = np.maximum(1, (self.devices - self.downstream[below] - self.front[above]) // degree)
        fewest = -(-self.downstream[below] // self.largest_degree)
        return 1 - (-fewest // most_replicas), -(-self.most[above] // replicas)

    @property
    def hopeful(self) -> Bools:
        """Whether a plan may be cut at an ideal."""
        may_cut: Bools = self.downstream + self.front <= self.devices
        may_cut[[0, -1]] = True
        return may_cut


def devices_for(work: Floats, below: float) -> Ints:
    """Devices that do ``work`` in ``below`` or less, at least."""
    if not 0 < below < inf:
        return np.zeros(len(work), dtype=np.intp)
    return np.ceil(np.minimum(work / below, _MANY) * (1 - 1e-9)).astype(np.intp)


def least_work(instance: PiperInstance) -> list[float]:
    """Of each layer, its time summed over devices, at the tensor degree where that is least."""
    return [
        min(t * option.time_per_sample for t, options in node.options.items() for option in options)
        for node in instance.nodes
    ]


def _least_bytes(instance: PiperInstance) -> list[float]:
    """Of each layer, what it takes with one micro-batch in flight, in its leanest option."""
    return [
        min(option.bytes_per_in_flight + option.fixed_bytes for options in node.options.values() for option in options)
        for node in instance.nodes
    ]
