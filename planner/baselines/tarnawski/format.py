"""The JSON instances of dnn-partitioning: operators or layers with latencies on two kinds of device, and their edges.

Tarnawski, Phanishayee, Devanur, Mahajan, Nina Paravecino, "Efficient algorithms for device placement of DNN graph
operators", NeurIPS 2020; the format is described in the README of the public code (msr-fiddle/dnn-partitioning):

    {"maxSizePerFPGA": bytes, "maxFPGAs": 6, "maxCPUs": 1,
     "nodes": [{"id": 1, "supportedOnFpga": 1, "cpuLatency": 1.5, "fpgaLatency": 0.2, "isBackwardNode": 0,
                "colorClass": 7, "size": bytes, "name": "conv1"}, ...],
     "edges": [{"sourceId": 1, "destId": 2, "cost": 0.05}, ...]}

"FPGA" stands for any accelerator, and times are in one unit that the format leaves open: milliseconds in the published
files, and so here.  ``name``, ``size``, ``colorClass`` and ``isBackwardNode`` may be left out; other keys are not read.
Beyond what the original reads, numbers may stand in quotes and blanks or a byte-order mark before the file.  As there,
a cycle, an edge from a backward to a forward node, and two costs on edges out of one node are faults; an edge given
twice counts once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from planner.baselines.common.reading import FileText, Item, numbered_nodes, parse_object, read_text, require_no_cycle

_SAME_COST = 1e-6
"""Costs of one node's edges may differ by this much, as in the original."""


@dataclass(frozen=True, slots=True)
class Node:
    """An operator or layer.

    Attributes:
        number: its ``id`` in the file.
        name: ``node<id>`` if the file gives none.
        accelerator_ms, cpu_ms: latency there.
        transfer_ms: of its output between an accelerator and host memory; 0 if nothing reads it.
        size_bytes: what it occupies on an accelerator.
        on_accelerator: whether it may run there.
        backward: whether it belongs to the backward pass.
        colour: nodes of one colour stay on one device; None: it has one for itself.
    """

    number: int
    name: str
    accelerator_ms: float
    cpu_ms: float
    transfer_ms: float
    size_bytes: float
    on_accelerator: bool
    backward: bool
    colour: int | None


@dataclass(frozen=True, slots=True)
class Instance:
    """A whole file.

    Attributes:
        source: the file's name, for messages.
        accelerators, cpus: how many there are.
        memory_bytes: of each accelerator.
        nodes: in the file's order, which need not be topological.
        edges: pairs of indices into ``nodes``, each once; there is no cycle.
    """

    source: str
    accelerators: int
    cpus: int
    memory_bytes: float
    nodes: tuple[Node, ...]
    edges: tuple[tuple[int, int], ...]


def read(path: str | Path) -> Instance:
    """The instance in a file.

    Raises:
        MissingFileError: there is no such file, or it cannot be read.
        FormatError: it breaks the format; the text names the place.
    """
    return _parse(read_text(path))


def parse(text: str, source: str = "instance.json") -> Instance:
    """The instance in a text; ``source`` is what messages call it.

    Raises:
        FormatError: it breaks the format; the text names the place.
    """
    return _parse(FileText(source, text))


def _parse(file: FileText) -> Instance:
    top = parse_object(file)
    found, index = numbered_nodes(top)
    edges, costs = _edges(top, index)
    nodes = tuple(_node(item, costs.get(position, 0.0)) for position, item in enumerate(found))
    _require_order(top, nodes, edges)
    accelerators, cpus = top.whole("maxFPGAs", least=0), top.whole("maxCPUs", least=0)
    return Instance(file.source, accelerators, cpus, top.number("maxSizePerFPGA"), nodes, edges)


def _node(item: Item, transfer_ms: float) -> Node:
    number = item.whole("id")
    name = item.text("name", f"node{number}")
    named = item.named(name)
    return Node(
        number=number,
        name=name,
        accelerator_ms=named.number("fpgaLatency"),
        cpu_ms=named.number("cpuLatency"),
        transfer_ms=transfer_ms,
        size_bytes=named.number("size", 0.0),
        on_accelerator=named.flag("supportedOnFpga"),
        backward=named.flag("isBackwardNode", False),
        colour=named.whole("colorClass") if named.has("colorClass") else None,
    )


def _edges(top: Item, index: Mapping[int, int]) -> tuple[tuple[tuple[int, int], ...], dict[int, float]]:
    """The edges, and the cost of what each node sends."""
    edges: dict[tuple[int, int], None] = {}
    costs: dict[int, float] = {}
    for item in top.items("edges"):
        ends = []
        for key in ("sourceId", "destId"):
            number = item.whole(key)
            if number not in index:
                raise item.fault(f"{key!r} {number} is no node's id", [f"{len(index)} nodes, such as {min(index)}"])
            ends.append(index[number])
        src, dst = ends
        if src == dst:
            raise item.fault("an edge from a node to itself", [f"node {item.whole('sourceId')}"], ["remove the edge"])
        cost = item.number("cost")
        if abs(costs.setdefault(src, cost) - cost) > _SAME_COST:
            raise item.fault(
                f"two costs on edges out of node {item.whole('sourceId')}",
                [f"{costs[src]:g} before, {cost:g} here"],
                ["a node sends one output: give its edges one cost"],
            )
        edges[src, dst] = None
    return tuple(edges), costs


def _require_order(top: Item, nodes: Sequence[Node], edges: Sequence[tuple[int, int]]) -> None:
    for src, dst in edges:
        if nodes[src].backward and not nodes[dst].backward:
            raise top.fault(
                "an edge from a backward to a forward node",
                [f"{nodes[src].number} ({nodes[src].name}) to {nodes[dst].number} ({nodes[dst].name})"],
                ["mark the nodes by 'isBackwardNode', or remove the edge"],
            )
    require_no_cycle(top, [f"{node.number} ({node.name})" for node in nodes], edges)
