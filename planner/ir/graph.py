"""The network as the planner sees it: layers in topological order, and what flows between them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush
from math import prod

SAMPLE = "sample"

SITES = "sites"
"""The dim that holds the active sites of a sparse tensor; on further levels ``sites_1``, ``sites_2``, ..."""

LOSS_PREFIX = "loss_fn."
"""Begins the names of what belongs to a loss that is a module with parameters or buffers of its own."""

MIXES_SAMPLES = "mixes_samples"
"""Attribute of a layer whose result for a sample depends on others; the capture finds it by trying."""

NEEDS_WHOLE_BATCH = "needs_whole_batch"
"""Attribute of a layer through which the loss of a batch is no weighted sum of the losses of its parts: all samples of
a step have to be there at once, in one micro-batch."""

FIXES_SAMPLES = "fixes_samples"
"""Attribute of the layers of a graph that holds for micro-batches of ``Graph.samples`` samples alone."""

SHARED_STATE = "shared_state"
"""Attribute of layers that use a buffer which one of them writes: its name.  They must be in one stage."""

KEEPS_SAMPLES = "keeps_samples"
"""Attribute of a layer that writes to a buffer what it makes of samples: its name.  Its stage has one rank."""

UPDATES_STATE = "updates_state"
"""Attribute of a layer that writes to a buffer in each forward what the loss then reads, as a mean teacher does that
follows its student: its name.  Each micro-batch is a forward."""

NOT_LINEAR_BACKWARD = "not_linear_backward"
"""Attribute of a layer with a Function whose backward is not linear in the gradient: its name.  Ranks that divide more
than samples would give it the gradient in shares."""

SEEDS = "seeds"
"""Attribute of a layer of a sampled graph that ranks which share seeds would run otherwise than one device: ``draws``
(random numbers for nodes, of which two ranks may both have one) or ``mixes`` (nodes of several seeds)."""

SHARED_STATISTICS = "shared_statistics"
"""Attribute of a batch norm that uses running statistics which other layers use as well: their name."""

INTERLEAVES_SAMPLES = "interleaves_samples"
"""Attribute of a layer that keeps samples apart, but not each in one piece of its sample dim (time x sample)."""

BYTES_PER_ELEMENT: Mapping[str, int] = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
    "complex64": 8,
    "complex128": 16,
}

Attribute = bool | int | float | str | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What a tensor is, without its values.

    Attributes:
        dims: a name per dim: ``sample``, ``channel``, ``depth``, ``height``, ``width``, ``time``, ``feature``, or
            ``dim2`` where the meaning is not known.  A dim called ``sample`` has an extent proportional to the number
            of samples (a flattened batch x time counts: samples are contiguous in it).  One of sites (:func:`is_sites`)
            grows with them as well, by as many as their clouds happen to have.
        shape: extents for the number of samples the graph was captured with (``Graph.samples``).
        dtype: name as in torch, e.g. ``float32``.
        occupancy: active sites over volume, for sparse tensors; 1 for dense ones.
    """

    dims: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    occupancy: float = 1.0

    @property
    def num_bytes(self) -> int:
        """Payload in bytes at the captured number of samples."""
        return round(prod(self.shape) * self.occupancy) * BYTES_PER_ELEMENT[self.dtype]

    @property
    def is_float(self) -> bool:
        """Whether gradients can flow through it."""
        return self.dtype.startswith(("float", "bfloat", "complex"))

    @property
    def has_samples(self) -> bool:
        """Whether it grows with the number of samples."""
        return SAMPLE in self.dims or self.has_sites

    @property
    def has_sites(self) -> bool:
        """Whether it is a sparse tensor, or a map between such."""
        return any(map(is_sites, self.dims))

    def at(self, samples: int, captured: int) -> TensorSpec:
        """The same tensor for ``samples`` samples, where ``captured`` is the graph's own number.

        Sites are as many as the captured samples have on average.
        """
        if samples == captured or not self.has_samples:
            return self
        shape = tuple(
            extent // captured * samples
            if dim == SAMPLE
            else _sites(extent, samples, captured)
            if is_sites(dim)
            else extent
            for dim, extent in zip(self.dims, self.shape, strict=True)
        )
        return replace(self, shape=shape)


@dataclass(frozen=True, slots=True)
class Layer:
    """One operation.

    Attributes:
        name: unique; the module path in the user's model, with a suffix where a module does several things.
        kind: the file in ``planner/layers/`` that holds its access relation.
        inputs: names of the values it reads: a graph input, a layer, or ``layer:1`` for output 1 of a layer.
        outputs: one spec per output.
        parameters: names of the parameters it uses, as in the user's state dict.
        attributes: what its kind needs to know (kernel, stride, ...), and ``op``, the operator's name.
        buffer_bytes: state that is not trained (running statistics, masks).
        shared_buffers: of that, what other layers read too (tables of rotary positions): names and bytes.
    """

    name: str
    kind: str
    inputs: tuple[str, ...]
    outputs: tuple[TensorSpec, ...]
    parameters: tuple[str, ...] = ()
    attributes: Mapping[str, Attribute] = field(default_factory=dict)
    buffer_bytes: int = 0
    shared_buffers: tuple[tuple[str, int], ...] = field(default=(), metadata={"added": "0.1"})


@dataclass(frozen=True, slots=True)
class Graph:
    """A network with its loss, captured at ``samples`` samples.

    Attributes:
        samples: number of samples that the shapes below are for.
        inputs: what a training step feeds in, inputs and targets alike.
        layers: in topological order (also the order of execution on one device).
        parameters: every trained parameter; one used by several layers is tied.
        loss: the value that a training step minimises, a mean over samples.
    """

    samples: int
    inputs: Mapping[str, TensorSpec]
    layers: tuple[Layer, ...]
    parameters: Mapping[str, TensorSpec]
    loss: str

    def by_name(self) -> dict[str, Layer]:
        """Layers by name."""
        return {layer.name: layer for layer in self.layers}

    def values(self) -> dict[str, TensorSpec]:
        """Every value by name (``conv1``, ``lstm``, ``lstm:1``), graph inputs included."""
        specs = dict(self.inputs)
        for layer in self.layers:
            specs.update((value_name(layer.name, index), spec) for index, spec in enumerate(layer.outputs))
        return specs

    def with_inputs(self) -> Iterator[tuple[Layer, tuple[TensorSpec, ...]]]:
        """Each layer with the specs of what it reads."""
        values = self.values()
        return ((layer, tuple(values[name] for name in layer.inputs)) for layer in self.layers)

    def made_of(self, names: Iterable[str]) -> tuple[Layer, ...]:
        """The layers of these names and all that they are made of, in order."""
        needed = set(names)
        layers = list[Layer]()
        for layer in reversed(self.layers):
            if layer.name in needed:
                layers.append(layer)
                needed.update(map(producer, layer.inputs))
        return tuple(reversed(layers))

    def tied_layers(self) -> dict[str, tuple[int, ...]]:
        """By parameter that several layers use, these layers by index, ascending."""
        return _used_by_several(layer.parameters for layer in self.layers)

    def sharing_layers(self) -> dict[str, tuple[int, ...]]:
        """The same by buffer that one of them writes (``SHARED_STATE``)."""
        marks = (layer.attributes.get(SHARED_STATE) for layer in self.layers)
        return _used_by_several([str(mark)] if mark is not None else [] for mark in marks)

    def layer_at(
        self, layer: Layer, samples: int, values: Mapping[str, TensorSpec], sites: Mapping[str, int] | None = None
    ) -> tuple[Layer, tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
        """A layer that makes its outputs for a number of samples, its inputs then, and its parameters.

        Args:
            layer: of the graph.
            values: of the graph, indexed once (:meth:`values`).
            sites: of its samples, by the name of the number; those not named are as many as on average.
        """
        named = sites or {}
        outputs = tuple(spec_of_sites(spec, samples, self.samples, named) for spec in layer.outputs)
        inputs = tuple(spec_of_sites(values[name], samples, self.samples, named) for name in layer.inputs)
        return replace(layer, outputs=outputs), inputs, tuple(self.parameters[name] for name in layer.parameters)

    def parameter_bytes(self, layers: frozenset[str] | None = None) -> int:
        """Bytes of the distinct parameters of ``layers`` (all layers if None)."""
        used = {p for layer in self.layers if layers is None or layer.name in layers for p in layer.parameters}
        return sum(self.parameters[name].num_bytes for name in used)

    def buffer_bytes(self, layers: Iterable[int]) -> int:
        """Bytes of the distinct buffers of layers, by index."""
        own = 0
        shared = dict[str, int]()
        for layer in (self.layers[index] for index in layers):
            own += layer.buffer_bytes - sum(size for _, size in layer.shared_buffers)
            shared.update(layer.shared_buffers)
        return own + sum(shared.values())

    def cut(self, position: int) -> tuple[str, ...]:
        """Values made by ``layers[:position]`` and read by ``layers[position:]``, in order of making."""
        late = {value for layer in self.layers[position:] for value in layer.inputs}
        early = [
            value_name(layer.name, index) for layer in self.layers[:position] for index in range(len(layer.outputs))
        ]
        return tuple(value for value in early if value in late)


def is_sites(dim: str) -> bool:
    """Whether a dim of that name holds active sites."""
    return dim == SITES or dim.startswith(f"{SITES}_")


def _sites(extent: int, samples: int, captured: int) -> int:
    return (2 * extent * samples + captured) // (2 * captured)


def value_name(layer: str, index: int) -> str:
    """Name of output ``index`` of ``layer``; output 0 carries the layer's own name."""
    return layer if index == 0 else f"{layer}:{index}"


def output_of(value: str) -> tuple[str, int]:
    """The layer that makes ``value``, and the number of its output: what :func:`value_name` put together."""
    layer, _, index = value.partition(":")
    return layer, int(index or 0)


def _used_by_several(uses: Iterable[Iterable[str]]) -> dict[str, tuple[int, ...]]:
    """By what several layers use, these by index; ``uses`` are of one layer after another."""
    users: dict[str, list[int]] = {}
    for index, names in enumerate(uses):
        for name in dict.fromkeys(names):
            users.setdefault(name, []).append(index)
    return {name: tuple(layers) for name, layers in users.items() if len(layers) > 1}


def producer(value: str) -> str:
    """Name of the layer (or graph input) that makes ``value``."""
    return value.partition(":")[0]


def spec_of_sites(spec: TensorSpec, samples: int, captured: int, sizes: Mapping[str, int]) -> TensorSpec:
    """``spec``, of a graph of ``captured`` samples, for ``samples`` samples that have ``sizes`` sites, by name."""
    resized = spec.at(samples, captured)
    shape = tuple(sizes.get(dim, extent) for dim, extent in zip(resized.dims, resized.shape, strict=True))
    return resized if shape == resized.shape else replace(resized, shape=shape)


def topological_order(
    num_nodes: int, edges: Iterable[tuple[int, int]], key: Callable[[int], float] | None = None
) -> tuple[int, ...]:
    """The nodes in topological order, of those that are ready the least first; without those on or after a cycle.

    Args:
        key: what comes before the number of a node in comparing it.
    """
    successors: list[list[int]] = [[] for _ in range(num_nodes)]
    missing = [0] * num_nodes
    for src, dst in edges:
        successors[src].append(dst)
        missing[dst] += 1
    rank = [(key(node) if key is not None else 0, node) for node in range(num_nodes)]
    ready = [rank[node] for node, count in enumerate(missing) if not count]
    heapify(ready)
    order: list[int] = []
    while ready:
        order.append(heappop(ready)[1])
        for dst in successors[order[-1]]:
            missing[dst] -= 1
            if not missing[dst]:
                heappush(ready, rank[dst])
    return tuple(order)


def bits_of(bits: int) -> Iterator[int]:
    """The numbers in a set that is written as bits (``1 << number``), ascending."""
    while bits:
        low = bits & -bits
        yield low.bit_length() - 1
        bits ^= low
