"""Small image networks with synthetic costs: seconds in proportion to operations and bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

from benchmarks.chains import cluster
from planner.ir.graph import Attribute, Graph, Layer, TensorSpec
from planner.ir.profile import Measurement, ModelSource, Optimizer, ParameterCost, Profile, Provenance

IMAGE = ("sample", "channel", "height", "width")
FLOP_PER_S = 1e12
BYTES_PER_S = 1e11
CALL_S = 2e-6

Value = TensorSpec
Named = tuple[str, TensorSpec]


class Network:
    """Layers one after another; every method adds one and returns (name, spec) of its output."""

    def __init__(self, samples: int, channels: int, height: int, width: int | None = None) -> None:
        self.samples = samples
        self.layers: list[Layer] = []
        self.parameters: dict[str, TensorSpec] = {}
        self.flops: dict[str, float] = {}
        shape = (samples, channels, height, width or height)
        self.image: Named = ("x", TensorSpec(IMAGE, shape, "float32"))

    def conv(
        self, x: Named, filters: int, kernel: int = 3, stride: int = 1, groups: int = 1, dilation: int = 1
    ) -> Named:
        n, channels, height, width = x[1].shape
        padding = dilation * (kernel // 2)
        out = [(extent + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1 for extent in (height, width)]
        attributes: dict[str, Attribute] = {
            "op": "aten.conv2d.default",
            "kernel": (kernel, kernel),
            "stride": (stride, stride),
            "padding": (padding, padding),
            "dilation": (dilation, dilation),
            "groups": groups,
        }
        weight = (filters, channels // groups, kernel, kernel)
        flops = 2.0 * prod((n, filters, *out)) * prod(weight[1:])
        return self._add("conv", (x,), (n, filters, *out), IMAGE, attributes, (weight,), flops)

    def pool(self, x: Named, kernel: int = 2) -> Named:
        n, channels, height, width = x[1].shape
        numbers = {"kernel": kernel, "stride": kernel, "padding": 0, "dilation": 1}
        attributes: dict[str, Attribute] = {name: (number, number) for name, number in numbers.items()}
        return self._add("pool", (x,), (n, channels, height // kernel, width // kernel), IMAGE, attributes)

    def norm(self, x: Named) -> Named:
        channels = x[1].shape[1]
        return self._add("batch_norm", (x,), x[1].shape, x[1].dims, {}, ((channels,), (channels,)))

    def relu(self, x: Named) -> Named:
        return self._add("pointwise", (x,), x[1].shape, x[1].dims)

    def add(self, x: Named, y: Named) -> Named:
        return self._add("pointwise", (x, y), x[1].shape, x[1].dims)

    def concat(self, x: Named, y: Named) -> Named:
        n, channels, *space = x[1].shape
        return self._add("concat", (x, y), (n, channels + y[1].shape[1], *space), IMAGE, {"dim": 1})

    def pool_all(self, x: Named) -> Named:
        n, channels, _, _ = x[1].shape
        return self._add("global_pool", (x,), (n, channels, 1, 1), IMAGE)

    def head(self, x: Named, classes: int, pool: str = "adaptive_pool") -> Named:
        n, channels, _, _ = x[1].shape
        pooled = self._add(pool, (x,), (n, channels, 1, 1), IMAGE)
        flat = self._add("reshape", (pooled,), (n, channels), ("sample", "feature"))
        flops = 2.0 * n * channels * classes
        return self._add("linear", (flat,), (n, classes), ("sample", "feature"), {}, ((classes, channels),), flops)

    def graph(self, x: Named) -> Graph:
        """The network with a loss on ``x``."""
        loss = Layer("loss", "loss", (x[0], "y"), (TensorSpec((), (), "float32"),), attributes={"op": "mse"})
        inputs = {"x": self.image[1], "y": TensorSpec(("sample",), (self.samples,), "int64")}
        return Graph(self.samples, inputs, (*self.layers, loss), self.parameters, "loss")

    def _add(
        self,
        kind: str,
        inputs: tuple[Named, ...],
        shape: tuple[int, ...],
        dims: tuple[str, ...],
        attributes: Mapping[str, Attribute] | None = None,
        weights: Sequence[tuple[int, ...]] = (),
        flops: float = 0.0,
    ) -> Named:
        name = f"{kind}{len(self.layers)}"
        names = tuple(f"{name}.p{k}" for k in range(len(weights)))
        for parameter, weight in zip(names, weights, strict=True):
            self.parameters[parameter] = TensorSpec(tuple(f"dim{k}" for k in range(len(weight))), weight, "float32")
        spec = TensorSpec(dims, shape, "float32")
        reads = tuple(value for value, _ in inputs)
        self.layers.append(Layer(name, kind, reads, (spec,), names, {"op": kind, **(attributes or {})}))
        self.flops[name] = flops
        return name, spec


def priced(network: Network, end: Named, *devices: Any, **more: Any) -> Profile:
    """:func:`priced_graph` of the network, which says what else may be given."""
    return priced_graph(network.graph(end), network.flops, *devices, **more)


def priced_graph(
    graph: Graph,
    flops: Mapping[str, float],
    speeds: Sequence[float] = (1.0, 1.0),
    hosts: Sequence[str] | None = None,
    memory_bytes: float = 2**34,
    latency_s: float = 0.0,
    bandwidth_bytes_per_s: float = 1e10,
    sizes: tuple[int, ...] = (1, 2, 4, 8, 16, 32),
    duplex: bool = True,
) -> Profile:
    """A profile of a graph, whose layers have these flops, on devices of these speeds."""

    def seconds(layer: Layer, samples: int) -> float:
        share = samples / graph.samples
        moved = 3 * sum(spec.num_bytes for spec in layer.outputs)
        return share * (flops.get(layer.name, 0.0) / FLOP_PER_S + moved / BYTES_PER_S) + CALL_S

    def measurements(speed: float) -> tuple[Measurement, ...]:
        found = []
        for layer in graph.layers:
            kept = sum(spec.num_bytes for spec in layer.outputs) // graph.samples
            for samples in sizes:
                once = seconds(layer, samples) / speed
                found.append(Measurement(layer.name, samples, once, 2 * once, once, once, kept * samples, 0, 10))
        return tuple(found)

    kinds = {f"kind-{speed:g}": speed for speed in speeds}
    costs = {
        layer.name: ParameterCost(0.0, sum(graph.parameters[name].num_bytes for name in layer.parameters) / BYTES_PER_S)
        for layer in graph.layers
        if layer.parameters
    }
    return Profile(
        model=ModelSource("tests.models:network"),
        optimizer=Optimizer("SGD", {"lr": 0.01}, 0.0),
        graph=graph,
        cluster=cluster(
            speeds, hosts, memory_bytes, latency_s, bandwidth_bytes_per_s, duplex, all_reduce_latency_s=latency_s
        ),
        measurements={kind: measurements(speed) for kind, speed in kinds.items()},
        parameters=dict.fromkeys(kinds, costs),
        provenance=Provenance({"halopipe": "0", "torch": "0", "python": "0"}),
    )


def with_running_statistics(profile: Profile) -> Profile:
    """The profile of the same network, whose batch norms keep a mean and a variance of each channel."""
    graph = profile.graph
    layers = (
        replace(layer, buffer_bytes=2 * 4 * layer.outputs[0].shape[1]) if layer.kind == "batch_norm" else layer
        for layer in graph.layers
    )
    return replace(profile, graph=replace(graph, layers=tuple(layers)))


def plain(samples: int = 4, height: int = 16, filters: Sequence[int] = (8, 8)) -> tuple[Network, Named]:
    """Convolutions with ReLU, one after another."""
    network = Network(samples, 3, height)
    x = network.image
    for count in filters:
        x = network.relu(network.conv(x, count))
    return network, x


def residual(samples: int = 4, height: int = 16, blocks: int = 1, classes: int = 10) -> tuple[Network, Named]:
    """A stem, residual blocks with batch norms (the later ones halve the image), and a classifier."""
    network = Network(samples, 3, height)
    x = network.relu(network.norm(network.conv(network.image, 8)))
    for block in range(blocks):
        stride, filters = (2, 16) if block else (1, 8)
        y = network.relu(network.norm(network.conv(x, filters, 3, stride)))
        y = network.norm(network.conv(y, filters))
        skip = x if stride == 1 and x[1].shape[1] == filters else network.conv(x, filters, 1, stride)
        x = network.relu(network.add(y, skip))
    return network, network.head(x, classes)


def mesh_like(samples: int = 2, height: int = 32, groups: Sequence[int] = (8, 16)) -> tuple[Network, Named]:
    """Convolution, ReLU, batch norm in groups that halve the image (Dryden et al. 2019), and a 1 x 1 convolution."""
    network = Network(samples, 4, height)
    x = network.image
    for filters in groups:
        for position in range(3):
            x = network.norm(network.relu(network.conv(x, filters, 3, 1 if position else 2)))
    return network, network.conv(x, 4, 1)
