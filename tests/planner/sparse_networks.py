"""Small sparse networks with synthetic costs: seconds in proportion to pairs and rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from benchmarks.chains import cluster
from planner.ir.cluster import Cluster
from planner.ir.graph import Attribute, Graph, Layer, TensorSpec
from planner.ir.profile import (
    Measurement,
    ModelSource,
    Optimizer,
    ParameterCost,
    PreparationCost,
    Profile,
    Provenance,
    SiteHalo,
)
from planner.layers import kind

FLOP_PER_S = 1e9
ROWS_PER_S = 1e7


class SparseNetwork:
    """Layers one after another over clouds of ``sites`` sites a sample; every method returns the value it makes."""

    def __init__(self, samples: int = 4, sites: int = 1000, channels: int = 4) -> None:
        self.samples = samples
        self.level = 0
        self.sites = [samples * sites]
        self.layers: list[Layer] = []
        self.parameters: dict[str, TensorSpec] = {}
        starts = TensorSpec(("sample",), (samples,), "int64")
        self.inputs = {
            "lengths": starts,
            "features": TensorSpec(("sites", "channel"), (samples * sites, channels), "float32"),
        }
        self.specs = dict(self.inputs)

    def conv(self, x: str, filters: int, stride: int = 1) -> str:
        """A submanifold convolution of 27 offsets, or a strided one of 8 with a quarter of the sites."""
        offsets = 27 if stride == 1 else 8
        source = self.level
        if stride > 1:
            self.level += 1
            self.sites.append(self.sites[-1] // 4)
        maps = self._maps(source, self.level, offsets)
        channels = self.specs[x].shape[1]
        shape = (self.sites[self.level], filters)
        pairs = 6 * self.sites[self.level] if stride == 1 else self.sites[source]
        return self._add("sparse_conv", (x, *maps), (self._dim(self.level), "channel"), shape, {"pairs": pairs},
                         (offsets, channels, filters))  # fmt: skip

    def norm(self, x: str) -> str:
        return self._add("batch_norm", (x,), self.specs[x].dims, self.specs[x].shape, {}, (self.specs[x].shape[1],))

    def relu(self, x: str) -> str:
        return self._add("pointwise", (x,), self.specs[x].dims, self.specs[x].shape)

    def linear(self, x: str, features: int) -> str:
        dims = self.specs[x].dims
        rows, channels = self.specs[x].shape
        return self._add("linear", (x,), (dims[0], "channel"), (rows, features), {}, (features, channels))

    def segment(self, x: str) -> str:
        """The mean over the sites of each sample."""
        for name in (f"starts_{self.level}", f"lengths_{self.level}"):
            self._input(name, TensorSpec(("sample",), (self.samples,), "int64"))
        return self._add("segment", (x, f"starts_{self.level}", f"lengths_{self.level}"), ("sample", "channel"),
                         (self.samples, self.specs[x].shape[1]))  # fmt: skip

    def expand(self, y: str) -> str:
        """A row for each site."""
        starts = f"starts_{self.level}"
        lengths = f"lengths_{self.level}"
        return self._add("segment_expand", (y, starts, lengths), (self._dim(self.level), "channel"),
                         (self.sites[self.level], self.specs[y].shape[1]))  # fmt: skip

    def graph(self, x: str) -> Graph:
        """The network with a loss on ``x``: a class for each of its rows."""
        dims = self.specs[x].dims
        rows, _ = self.specs[x].shape
        self._input("target", TensorSpec((dims[0],), (rows,), "int64"))
        attributes: dict[str, Attribute] = {"op": "aten.cross_entropy_loss.default", "terms": "places"}
        loss = Layer("loss", "loss", (x, "target"), (TensorSpec((), (), "float32"),), attributes=attributes)
        return Graph(self.samples, self.inputs, (*self.layers, loss), self.parameters, "loss")

    def _add(
        self,
        name: str,
        inputs: tuple[str, ...],
        dims: tuple[str, ...],
        shape: tuple[int, ...],
        attributes: dict[str, Attribute] | None = None,
        weight: tuple[int, ...] = (),
    ) -> str:
        layer = f"{name}{len(self.layers)}"
        parameter = f"{name}{len(self.layers)}.weight"
        spec = TensorSpec(dims, shape, "float32")
        if weight:
            self.parameters[parameter] = TensorSpec(tuple(f"dim{k}" for k in range(len(weight))), weight, "float32")
        own = (parameter,) if weight else ()
        self.layers.append(Layer(layer, name, inputs, (spec,), own, {"op": f"halopipe.{name}", **(attributes or {})}))
        self.specs[layer] = spec
        return layer

    def _maps(self, source: int, target: int, offsets: int) -> tuple[str, str]:
        names = f"neighbours_{source}_{target}", f"reverse_{source}_{target}"
        for name, level in zip(names, (target, source), strict=True):
            shape = (offsets, self.sites[level])
            self._input(name, TensorSpec(("dim0", self._dim(level)), shape, "int32"))
        return names

    def _input(self, name: str, spec: TensorSpec) -> None:
        self.inputs.setdefault(name, spec)
        self.specs.setdefault(name, spec)

    @staticmethod
    def _dim(level: int) -> str:
        return f"sites_{level}" if level else "sites"


def classifier(samples: int = 4, sites: int = 1000, channels: int = 4) -> Graph:
    """Two levels, then a class for each sample."""
    net = SparseNetwork(samples, sites, channels)
    x = net.relu(net.norm(net.conv("features", 8)))
    x = net.relu(net.norm(net.conv(x, 16, stride=2)))
    return net.graph(net.linear(net.segment(net.conv(x, 16)), 10))


def segmenter(samples: int = 4, sites: int = 1000) -> Graph:
    """A class for each site."""
    net = SparseNetwork(samples, sites)
    x = net.relu(net.norm(net.conv("features", 8)))
    return net.graph(net.linear(net.relu(net.norm(net.conv(x, 8))), 5))


def sparse_profile(
    graph: Graph,
    speeds: Sequence[float] = (1.0, 1.0),
    sizes: Sequence[int] = (1, 2, 4),
    preparation_s: float = 1e-3,
    halo_rows: int = 100,
    device: str = "cpu",
    bandwidth_bytes_per_s: float = 1e9,
    memory_bytes: int = 2**30,
) -> Profile:
    """A profile on devices of these speeds.

    Args:
        preparation_s: of one kernel map, for one sample; a map of level 1 is made after the sites of that level.
        halo_rows: received by each of two ranks that share one sample.
        device: family of the devices: ``cpu`` prepares on the rank, ``gpu`` beside it.
    """
    machines = cluster(speeds, bandwidth_bytes_per_s=bandwidth_bytes_per_s, memory_bytes=memory_bytes)
    devices = tuple(replace(d, name=d.name.replace("cpu", device)) for d in machines.devices)
    machines = Cluster(devices, machines.links, machines.collectives)
    kinds = {f"kind-{speed:g}": speed for speed in speeds}
    values = graph.values()

    def measured(layer: Layer, speed: float, samples: int) -> Measurement:
        inputs = tuple(values[name] for name in layer.inputs)
        flops = kind(layer.kind).forward_flops(layer, inputs) / graph.samples * samples
        rows = inputs[0].shape[0] / graph.samples * samples
        seconds = (flops / FLOP_PER_S + rows / ROWS_PER_S) / speed
        saved = sum(spec.num_bytes for spec in layer.outputs) * samples // graph.samples
        return Measurement(layer.name, samples, seconds, 2 * seconds, seconds, seconds, saved, 0, 3)

    levels = {name for name in graph.inputs if name.startswith(("neighbours", "reverse"))}
    deeper = sorted(name for name in levels if name.startswith("neighbours") and not name.endswith("_0_0"))
    preparations = [PreparationCost("sites_1", (), (), preparation_s, 1)] if deeper else []
    for name in sorted(name for name in levels if name.startswith("neighbours")):
        after = ("sites_1",) if name in deeper else ()
        both = (name, name.replace("neighbours", "reverse"))
        preparations.append(PreparationCost(f"map {name}", both, after, preparation_s, 1))
    return Profile(
        ModelSource("tests.models:sparse"),
        Optimizer("SGD", {"lr": 0.01}, 0.0),
        graph,
        machines,
        {
            name: tuple(measured(layer, speed, n) for layer in graph.layers for n in sizes)
            for name, speed in kinds.items()
        },
        {name: {layer.name: ParameterCost(1e-6, 1e-6) for layer in graph.layers if layer.parameters} for name in kinds},
        Provenance({"halopipe": "0", "torch": "0", "python": "0"}),
        preparations=dict.fromkeys(kinds, tuple(preparations)),
        site_halos=tuple(
            SiteHalo(layer.name, 2, 1, halo_rows) for layer in graph.layers if layer.kind == "sparse_conv"
        ),
    )
