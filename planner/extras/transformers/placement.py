"""How a captured network's layers are placed by a way: stages of blocks, and each layer's cuts over tensor ranks.

Blocks are the layers whose names hold a number behind one prefix (``h.0.mlp``, ``model.layers.11.norm``).  What lies
before them is on the first stage, what lies behind on the last.  Which part of a layer a tensor rank does follows from
the access relations alone, layer by layer in the graph's order; no name of a layer tells it:

    linear, nothing cut before        columns: its output features are cut                 one exchange of its input
    reads what is cut so              cut along the dim along which it reads its own part  none: heads, hidden features
    linear that contracts what is     rows: partial sums                                   one reduce-scatter
      cut so
    embedding with more entries       rows of the table: partial sums                      one reduce-scatter
      than features
    cross-entropy of cut classes      parts of the classes                                 four numbers a token
    anything else                     the same on every rank; with sequence parallelism    none
                                      cut along the tokens, but for a norm before several
                                      linear maps, which would gather them several times

That is Megatron-LM's division (Shoeybi et al. 2019, section 3; Korthikanti et al. 2022, section 4.2): one all-reduce
each way for attention and one for the feed-forward part, in its two halves.  Without sequence parallelism partial sums
are scattered along features and gathered by who reads them next; with it they are scattered along the tokens.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

from planner.extras.transformers.pools import Pools
from planner.extras.transformers.recomputation import CORE
from planner.extras.transformers.shape import Offload, ParallelDegrees, Precision, Recompute
from planner.ir.box import Box, intersect, volume, whole
from planner.ir.errors import UsageError, operator_of
from planner.ir.graph import SAMPLE, Graph, Layer, TensorSpec, producer
from planner.ir.layout import Layout
from planner.ir.plan import Placement
from planner.layers import kind
from planner.layers.boxes import as_tuples, boxes_of
from planner.layers.contraction import ContractedDims, contracted_dims
from planner.layers.elementwise import CLASS, has_classes_apart
from planner.layers.sized import REPLICA

_NUMBERED = re.compile(r"(?:^|\.)(\d+)(?:\.|$)")


def placements(graph: Graph, ways: ParallelDegrees) -> dict[str, Placement]:
    """The stage and the cuts of each layer, in the graph's order; stages are chunks of blocks.

    Raises:
        UsageError: the network has no blocks, or they cannot be divided so; or nothing runs that part of the way.
    """
    require_executable(ways)
    return dict(_Tensor(graph, ways, _stages(graph, ways)).placements())


def require_executable(ways: ParallelDegrees) -> None:
    """Raises :class:`UsageError`, naming what of a way no plan of halopipe can say."""
    wrong = []
    tensor = max(ways.degrees)
    if ways.expert > 1:
        wrong.append(f"expert {ways.expert}: layers of experts are not divided by experts")
    if ways.context > 1:
        wrong.append(f"context {ways.context}: attention over tokens of several ranks is not divided by tokens")
    if ways.precision is not Precision.BF16:
        wrong.append(f"products in {ways.precision.value}: they are in what the profile was measured in")
    if ways.recompute is Recompute.OPERATORS:
        wrong.append("recomputation by operators")
    if ways.recompute is Recompute.SELECTIVE and ways.recompute_modules != CORE:
        wrong.append(f"{' + '.join(ways.recompute_modules)} computed again: it is attention's core, or a whole block")
    if ways.shard_groups > 1:
        wrong.append(f"ZeRO-{ways.zero} within groups of {ways.shards}: all replicas divide the state")
    if ways.offload is not Offload.NONE:
        wrong.append(f"{ways.offload.value} in the host's memory")
    if ways.zero and tensor > 1:
        wrong.append(f"ZeRO-{ways.zero} beside tensor {tensor}: who has a part of each weight keeps its state")
    if wrong:
        raise UsageError(f"no plan says: {ways}", wrong, ["the same way without it"])


def _blocks(graph: Graph) -> tuple[str, list[int]]:
    """The prefix of the blocks, and their numbers, ascending: of the prefix with the most."""
    numbers: dict[str, set[int]] = {}
    for layer in graph.layers:
        match = _NUMBERED.search(layer.name)
        if match is not None:
            numbers.setdefault(layer.name[: match.start(1)], set()).add(int(match[1]))
    prefix = max(numbers, key=lambda each: len(numbers[each]), default="")
    return prefix, sorted(numbers.get(prefix, ()))


def _stages(graph: Graph, ways: ParallelDegrees) -> dict[str, int]:
    """The chunk of each layer: that of its block, else the first that has what it reads; behind all blocks the last.

    Raises:
        UsageError: there are too few blocks.
    """
    prefix, numbers = _blocks(graph)
    number_of = {number: at for at, number in enumerate(numbers)}
    bounds = []
    first = 0
    for count in ways.chunks(len(numbers)) if ways.pipeline * ways.interleave > 1 else (len(numbers),):
        first += count
        bounds.append(first)

    def block(layer: Layer) -> int | None:
        match = _NUMBERED.match(layer.name, len(prefix) - 1 if prefix else 0)
        return number_of[int(match[1])] if match and layer.name.startswith(prefix) else None

    blocks = [block(layer) for layer in graph.layers]
    last = max((at for at, each in enumerate(blocks) if each is not None), default=-1)
    stages: dict[str, int] = {}
    for at, (layer, own) in enumerate(zip(graph.layers, blocks, strict=True)):
        read = max((stages[producer(value)] for value in layer.inputs if producer(value) in stages), default=0)
        own_stage = 0 if own is None else next(stage for stage, stop in enumerate(bounds) if own < stop)
        stages[layer.name] = len(bounds) - 1 if at > last >= 0 else max(read, own_stage)
    return stages


def _samples(ways: ParallelDegrees) -> dict[str, tuple[int, ...]]:
    """The cut points of data parallelism, in samples of a micro-batch of all replicas."""
    each = ways.micro_batch
    return {SAMPLE: tuple(range(0, (ways.data + 1) * each, each))} if ways.data > 1 else {}


@dataclass
class _Tensor:
    """Places the layers of one graph over tensor ranks, in the graph's order.

    Attributes:
        inner: by value, the dim along which heads or hidden features are cut.
        tokens: by value, the dim along which tokens are (sequence parallelism).
        degree: tensor ranks of the stage of the layer that is placed.
    """

    graph: Graph
    ways: ParallelDegrees
    stages: Mapping[str, int]
    _readers: dict[str, list[Layer]] = field(init=False)
    _values: dict[str, TensorSpec] = field(init=False)
    inner: dict[str, int] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)
    degree: int = 1

    def __post_init__(self) -> None:
        self._readers = {}
        self._values = self.graph.values()
        for layer in self.graph.layers:
            for value in layer.inputs:
                self._readers.setdefault(value, []).append(layer)

    def placements(self) -> Iterator[tuple[str, Placement]]:
        """Of each layer."""
        whole_matrices: list[Layer] = []
        for layer in self.graph.layers:
            self.degree = degree_of(self.ways, self.stages[layer.name])
            if self.degree == 1:
                yield layer.name, Placement(self.stages[layer.name], _samples(self.ways))
                continue
            inputs = tuple(self._values[name] for name in layer.inputs)
            parameters = tuple(self.graph.parameters[name] for name in layer.parameters)
            dim, shared = self._place(layer, inputs, contracted_dims(layer, inputs, parameters))
            work = kind(layer.kind).work(layer, inputs)
            name = REPLICA if dim is None else work.dims[dim]
            shares = _samples(self.ways)
            if SAMPLE not in work.dims:  # positions, masks: the same for all samples
                shares = {f"{REPLICA}s": points for points in shares.values()}
            cuts = {**shares, name: tuple(range(self.degree + 1))}
            if name in (REPLICA, *self._token_names(layer)) and not shared and self._has_matrix(layer):
                whole_matrices.append(layer)
            yield layer.name, Placement(self.stages[layer.name], cuts, self.degree if shared else 1)
        if whole_matrices:
            first = whole_matrices[0]
            raise UsageError(
                f"{first.name} ({operator_of(first)}) cannot be divided over {self.degree} tensor ranks",
                [
                    f"{len(whole_matrices)} layers with a matrix of weights would be computed whole by each of them",
                    "weights are [output, input] of torch.nn.Linear; query, key and value are layers of their own",
                ],
                [
                    "tensor=1 among the parts of the way",
                    "torch.nn.Linear in place of a product with a transposed or joined weight",
                ],
            )

    def _place(
        self, layer: Layer, inputs: tuple[TensorSpec, ...], contracted: ContractedDims | None
    ) -> tuple[int | None, bool]:
        """The dim of the work that is cut, None: none; and whether the ranks share its input channels."""
        is_linear = contracted is not None and layer.kind == "linear"
        if layer.kind == "loss":
            of_classes = self.inner.get(layer.inputs[0]) == CLASS and has_classes_apart(layer, inputs)
            return (CLASS if of_classes else None), False
        if contracted is not None and layer.kind == "embedding":
            entries, features = self.graph.parameters[layer.parameters[0]].shape
            if entries > max(features, self.degree) and SAMPLE in inputs[0].dims:
                return self._scattered(layer, contracted, inputs[0].dims.index(SAMPLE) + 1)
            return None, False
        if is_linear and contracted is not None:
            if self.inner.get(layer.inputs[0]) == contracted.channels:
                return self._scattered(layer, contracted, self._token_dim(layer))
            if layer.outputs[0].shape[contracted.filters] < self.degree:
                return self._along(layer, inputs, self.tokens), False
            self._note(layer, contracted.filters, self.inner)
            return contracted.filters, False
        if self._is_gathered_before(layer):
            return None, False
        for cut_dims in (self.inner, self.tokens):
            dim = self._along(layer, inputs, cut_dims)
            if dim is not None:
                return dim, False
        return None, False

    def _is_gathered_before(self, layer: Layer) -> bool:
        """Whether several linear maps read it and nothing else does, such as a norm before query, key and value.

        Each would gather its tokens; so all ranks do the whole of it, and what it reads is gathered once.
        """
        readers = self._readers.get(layer.name, ())
        return len(readers) > 1 and layer.kind == "layer_norm" and all(reader.kind == "linear" for reader in readers)

    def _scattered(self, layer: Layer, dims: ContractedDims, token_dim: int | None) -> tuple[int | None, bool]:
        """Partial sums: along the tokens with sequence parallelism, else along features, which are gathered then."""
        output = layer.outputs[0]
        fits = token_dim is not None and token_dim < dims.filters and output.shape[token_dim] >= self.degree
        if self.ways.sequence_parallel and fits and token_dim is not None:
            self._note(layer, token_dim, self.tokens)
            return token_dim, True
        if output.shape[dims.filters] < self.degree:
            return None, False
        return dims.filters, True

    def _has_matrix(self, layer: Layer) -> bool:
        """Whether it multiplies by a weight that is large enough to be divided."""
        shapes = [self.graph.parameters[name].shape for name in layer.parameters]
        return "embedding" not in operator_of(layer) and any(
            len(shape) > 1 and min(shape) >= self.degree for shape in shapes
        )

    def _token_names(self, layer: Layer) -> tuple[str, ...]:
        dim = self._token_dim(layer)
        return () if dim is None else (layer.outputs[0].dims[dim],)

    def _token_dim(self, layer: Layer) -> int | None:
        """Which dim of a linear map's output counts tokens: that behind the samples."""
        dims = layer.outputs[0].dims
        return dims.index(SAMPLE) + 1 if SAMPLE in dims[:-1] else None

    def _along(self, layer: Layer, inputs: tuple[TensorSpec, ...], cut_dims: dict[str, int]) -> int | None:
        """The dim of the work along which each rank reads of its inputs what it has of them; noted of the outputs."""
        cut = [(at, cut_dims[name]) for at, name in enumerate(layer.inputs) if name in cut_dims]
        if not cut:
            return None
        relation = kind(layer.kind)
        work = relation.work(layer, inputs)
        for dim, extent in enumerate(work.shape):
            if extent < self.degree or work.dims[dim] == SAMPLE or work.dims.count(work.dims[dim]) > 1:
                continue
            if all(self._reads_own(layer, inputs, box, cut) for box in self._parts(work, dim)):
                self._note(layer, dim, cut_dims)
                return dim
        return None

    def _parts(self, spec: TensorSpec, dim: int) -> list[tuple[int, Box]]:
        """(rank, its part) of a tensor that is cut along ``dim``."""
        layout = Layout({spec.dims[dim]: tuple(range(self.degree + 1))})
        return list(enumerate(as_tuples(boxes_of(layout, spec, self.graph.samples))))

    def _reads_own(
        self,
        layer: Layer,
        inputs: tuple[TensorSpec, ...],
        part: tuple[int, Box],
        cut: list[tuple[int, int]],
    ) -> bool:
        rank, box = part
        read = kind(layer.kind).input_boxes(layer, inputs, box)
        for at, along in cut:
            inside = intersect(read[at], whole(inputs[at].shape))
            own = self._parts(inputs[at], along)[rank][1][along]
            if inside is None or not volume(box) or inside[along] & own != inside[along]:
                return False
        return True

    def _note(self, layer: Layer, dim: int, cut_dims: dict[str, int]) -> None:
        """Outputs that have the dim by name are cut along it."""
        name = kind(layer.kind).work(layer, tuple(self._values[each] for each in layer.inputs)).dims[dim]
        for number, spec in enumerate(layer.outputs):
            value = layer.name if not number else f"{layer.name}:{number}"
            if name in spec.dims and spec.shape[spec.dims.index(name)] >= self.degree:
                cut_dims[value] = spec.dims.index(name)


def schedule_of(ways: ParallelDegrees) -> str:
    """The schedule's name."""
    return "interleaved" if ways.interleave > 1 else ways.schedule


def degree_of(ways: ParallelDegrees, chunk: int) -> int:
    """Tensor ranks of a replica of a chunk's stage."""
    return ways.degrees[chunk % ways.pipeline]


def groups_of(ways: ParallelDegrees, pools: Pools | None = None) -> tuple[tuple[int, ...], ...]:
    """The ranks of each chunk: tensor ranks are neighbours, then replicas, then stages; or those of its pool.

    Raises:
        UsageError: the way is one through pools, and there are no such, or too few devices in one.
    """
    if ways.pools and pools is not None:
        named = {pool.cluster.name: pool for pool in pools.pools}
        if missing := sorted(set(ways.pools) - set(named)):
            raise UsageError(f"the machines have no {', '.join(missing)}", [f"they have {', '.join(named)}"])
        stages = [named[place.cluster.name].ranks[place.start : place.stop] for place in pools.places(ways)]
        for stage, ranks in enumerate(stages):
            needed = ways.data * ways.degrees[stage]
            if len(ranks) < needed:
                raise UsageError(
                    f"stage {stage} takes {needed} devices of {ways.pools[stage]}",
                    [f"{len(named[ways.pools[stage]].ranks)} are there, {len(ranks)} of them free"],
                )
    else:
        ends = [ways.data * end for end in accumulate(ways.degrees, initial=0)]
        stages = [tuple(range(first, stop)) for first, stop in pairwise(ends)]
    return tuple(stages[chunk % ways.pipeline] for chunk in range(ways.pipeline * ways.interleave))
