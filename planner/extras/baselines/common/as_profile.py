"""A published profile as one of ours, so that every solver can plan the network.

What a ``graph.txt`` does not say is filled in, and every measurement is marked as a datasheet's:

* seconds and bytes grow in proportion to samples (the file has one mini-batch);
* a backward is half for the inputs and half for the weights, or all for the inputs where there are no weights;
* a layer keeps its output until the backward, and needs no room beside it; updates take no time;
* an output is of float32, and has at least one number a sample, also where the file says 0 bytes.

Inputs become inputs of the graph (``LayerGraph.kept``); layers stand in the order of the numbers in their names, as far
as the edges allow; several last layers are joined by a layer that costs
nothing; and a loss that costs nothing comes last.

Clusters by a few numbers, to plan published profiles on: like machines, hosts, mixed types.

Links are given by bandwidth alone, full duplex; an all-reduce is what the planner's ring makes of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from planner.extras.baselines.pipedream.format import LayerGraph, LayerNode
from planner.ir.cluster import ACROSS_HOSTS, DATASHEET, WITHIN_HOST, Cluster, DeviceSpec, Link
from planner.ir.errors import FormatError, UsageError
from planner.ir.graph import BYTES_PER_ELEMENT, SAMPLE, Graph, Layer, TensorSpec
from planner.ir.profile import Measurement, ModelSource, Optimizer, ParameterCost, Profile, Provenance

DTYPE = "float32"
INPUT = "input"
TARGET = "target"
JOIN = "join"
LOSS = "loss"


def as_profile(
    graph: LayerGraph | Mapping[str, LayerGraph],
    cluster: Cluster,
    samples: int,
    speeds: Mapping[str, float] | None = None,
) -> Profile:
    """The profile of a network on ``cluster``.

    Args:
        graph: one file for all kinds of device, or one for each kind.
        samples: of the mini-batch that the file is of.
        speeds: by kind of device, how many times as fast it is as the file says; 1 if not given.

    Raises:
        UsageError: no sample, or a kind of device without a file.
        FormatError: nothing is left when inputs are removed, or the files are of different networks.
    """
    kinds = list(dict.fromkeys(device.kind for device in cluster.devices))
    missing = [] if isinstance(graph, LayerGraph) else [kind for kind in kinds if kind not in graph]
    if samples < 1 or missing:
        shown = f"{samples} samples" + "".join(f", no file for {kind}" for kind in missing)
        raise UsageError("a profile needs samples, and a file for every kind of device", [shown])
    by_kind = {kind: graph if isinstance(graph, LayerGraph) else graph[kind] for kind in kinds}
    first = by_kind[kinds[0]]
    order = first.in_order()
    names = _names(first, order)
    layers = _graph(first, order, names, samples)
    _require_one_network(by_kind)
    factors = speeds or {}
    return Profile(
        model=ModelSource(f"{first.source}:graph"),
        optimizer=Optimizer(),
        graph=layers,
        cluster=cluster,
        measurements={
            kind: tuple(
                measurement
                for layer, node in _timed(of_kind, order, layers)
                for measurement in _measurements(layer, node, samples, factors.get(kind, 1.0))
            )
            for kind, of_kind in by_kind.items()
        },
        parameters={
            kind: {layer.name: ParameterCost(0.0, 0.0) for layer in layers.layers if layer.parameters} for kind in kinds
        },
        provenance=Provenance({"graph.txt": first.source}),
    )


def _names(graph: LayerGraph, order: tuple[int, ...]) -> dict[int, str]:
    """A name for each layer and input: the file's, without what our own names use ``:`` for; each once."""
    used = {TARGET, JOIN, LOSS, INPUT}
    names: dict[int, str] = {}
    for index in [*order, *(k for k in range(len(graph.nodes)) if k not in set(order))]:
        wanted = graph.nodes[index].name.replace(":", "_")
        name = next(n for n in (wanted, *(f"{wanted}_{k}" for k in range(2, len(used) + 3))) if n not in used)
        names[index] = name
        used.add(name)
    return names


def _graph(graph: LayerGraph, order: tuple[int, ...], names: Mapping[int, str], samples: int) -> Graph:
    kept = set(order)
    reads: dict[int, list[int]] = {index: [] for index in order}
    for src, dst in graph.edges:
        if dst in kept and (src in kept or graph.nodes[src].description.startswith("Input")):
            reads[dst].append(src)
    inputs = {
        names[src]: _tensor(graph.nodes[src].activation_bytes, samples)
        for sources in reads.values()
        for src in sources
        if src not in kept
    }
    if not inputs or any(not sources for sources in reads.values()):
        inputs[INPUT] = _tensor(0.0, samples)
    layers = [
        Layer(
            names[index],
            "opaque",
            tuple(names[src] for src in reads[index]) or (INPUT,),
            (_tensor(graph.nodes[index].activation_bytes, samples),),
            (f"{names[index]}.weight",) if _parameters(graph.nodes[index]) else (),
            {"op": graph.nodes[index].description or "unknown"},
        )
        for index in order
    ]
    read = {src for sources in reads.values() for src in sources}
    last = [names[index] for index in order if index not in read]
    if len(last) > 1:
        layers.append(Layer(JOIN, "opaque", tuple(last), (_tensor(0.0, samples),), attributes={"op": JOIN}))
    inputs[TARGET] = TensorSpec((SAMPLE,), (samples,), "int64")
    loss = Layer(LOSS, "loss", (layers[-1].name, TARGET), (TensorSpec((), (), DTYPE),), attributes={"op": LOSS})
    parameters = {
        f"{names[index]}.weight": TensorSpec(("dim0",), (_parameters(graph.nodes[index]),), DTYPE)
        for index in order
        if _parameters(graph.nodes[index])
    }
    return Graph(samples, inputs, (*layers, loss), parameters, LOSS)


def _tensor(num_bytes: float, samples: int) -> TensorSpec:
    features = max(1, math.ceil(num_bytes / (samples * BYTES_PER_ELEMENT[DTYPE])))
    return TensorSpec((SAMPLE, "feature"), (samples, features), DTYPE)


def _parameters(node: LayerNode) -> int:
    return math.ceil(node.parameter_bytes / BYTES_PER_ELEMENT[DTYPE])


def _timed(graph: LayerGraph, order: tuple[int, ...], layers: Graph) -> list[tuple[Layer, LayerNode]]:
    nothing = LayerNode("", "", 0.0, 0.0, 0.0, 0.0)
    nodes = [graph.nodes[index] for index in order]
    return [(layer, nodes[k] if k < len(nodes) else nothing) for k, layer in enumerate(layers.layers)]


def _measurements(layer: Layer, node: LayerNode, samples: int, speed: float) -> list[Measurement]:
    measurements = []
    for rows in _sizes(samples):
        share = rows / samples
        forward = node.forward_s * share / speed
        backward = node.backward_s * share / speed
        weight = backward / 2 if layer.parameters else 0.0
        saved = round(node.activation_bytes * share)
        measurements.append(
            Measurement(layer.name, rows, forward, backward, backward - weight, weight, saved, 0, 1, evidence=DATASHEET)
        )
    return measurements


def _sizes(samples: int) -> list[int]:
    """Powers of two up to ``samples``, and ``samples``."""
    return sorted({2**power for power in range(samples.bit_length())} | {samples})


def _require_one_network(by_kind: Mapping[str, LayerGraph]) -> None:
    kinds = list(by_kind)
    first = by_kind[kinds[0]]
    for other in by_kind.values():
        same = [node.name for node in other.nodes] == [node.name for node in first.nodes]
        if not same or set(other.edges) != set(first.edges):
            raise FormatError(
                f"{other.source} is not a profile of the same network as {first.source}",
                [f"{graph.source}: {len(graph.nodes)} layers, {len(graph.edges)} edges" for graph in (other, first)],
                ["give profiles of one network, measured on each kind of device"],
            )


KIND = "gpu"
"""The kind of like machines."""

GIB = 2**30


def flat(machines: int, bandwidth_bytes_per_s: float, memory_bytes: int = 16 * GIB) -> Cluster:
    """Like machines, any two of them joined alike."""
    return mixed({KIND: machines}, bandwidth_bytes_per_s, memory_bytes)


def mixed(counts: Mapping[str, int], bandwidth_bytes_per_s: float, memory_bytes: int = 16 * GIB) -> Cluster:
    """Machines of several kinds, any two of them joined alike; kinds in the order given."""
    kinds = [kind for kind, count in counts.items() for _ in range(count)]
    devices = tuple(
        DeviceSpec(f"n0/{kind}{kinds[:rank].count(kind)}", kind, "n0", memory_bytes) for rank, kind in enumerate(kinds)
    )
    return Cluster(devices, {WITHIN_HOST: Link(0.0, bandwidth_bytes_per_s)})


def hosts(
    num_hosts: int,
    devices_per_host: int,
    within_bytes_per_s: float,
    across_bytes_per_s: float,
    memory_bytes: int = 16 * GIB,
) -> Cluster:
    """Like hosts of like devices, with one link class inside a host and one across."""
    devices = tuple(
        DeviceSpec(f"n{host}/{KIND}{device}", KIND, f"n{host}", memory_bytes)
        for host in range(num_hosts)
        for device in range(devices_per_host)
    )
    links = {WITHIN_HOST: Link(0.0, within_bytes_per_s), ACROSS_HOSTS: Link(0.0, across_bytes_per_s)}
    return Cluster(devices, links)
