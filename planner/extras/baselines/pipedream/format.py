"""PipeDream's ``graph.txt``: layers with their measured costs for one mini-batch, and edges; and the states to cut at.

Narayanan et al., "PipeDream", SOSP 2019; written by ``Graph.__str__`` of the public code (graph/graph.py):

    node2 -- Conv2d(3, 64) -- forward_compute_time=1.250, backward_compute_time=2.500, activation_size=1048576.0, ↩
             parameter_size=6912.000 -- stage_id=0
    <tab>node1 -- node2

A line with costs is a layer: id, description, milliseconds, bytes (a list ``[a; b]`` of several outputs counts as its
sum) and, after the optimiser, a stage, which is not read.  A line with two ids is an edge.  Besides what the original
reads, blank lines, lines that begin with ``#``, blanks around a line, Windows line ends, a byte-order mark and edges
above their nodes do no harm; an edge given twice counts once.

The states of its planners are what may have been done when a stage ends: a network is cut after an *antichain*, layers
of which none precedes another, together with all that they need (an ideal of the DAG).  As in the public code
(graph/graph.py, ``antichain_dag``):

* inputs, and items that nobody reads, are removed (``LayerGraph.kept``);
* the walk starts at the first source in the file and adds one successor of the done layers at a time, with all that it
  needs; another source is therefore done together with the first layer that needs it.  ``every_ideal`` starts at every
  source, which adds states to networks of several sources and changes nothing for others;
* the bytes that cross are the activations of the *augmented* antichain: its layers, and those before one of them that
  also feed a layer not before that one.

Layers that the first source's descendants do not need (a part of the network with no edge to the rest) are never done
by the public code, which so plans without them; here the walk goes on at the first source that is left.
"""

from __future__ import annotations

import functools
import math
import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from planner.extras.baselines.common.ideals import members
from planner.extras.baselines.common.reading import FileText, on_or_after_cycles, read_text
from planner.ir.errors import FormatError, UsageError
from planner.ir.graph import bits_of, topological_order
from planner.solvers.budget import check_time

_SEPARATOR = " -- "
_FIELDS = ("forward_compute_time", "backward_compute_time", "activation_size", "parameter_size")
_FIELD = re.compile(r"(\w+)\s*=\s*(\[[^=]*\]|[^,=]*)\s*(?:,\s*|$)")
_MS = 1e-3


@dataclass(frozen=True, slots=True)
class LayerNode:
    """A layer, measured at one mini-batch.

    Attributes:
        description: what the profiler prints of the module.
        forward_s, backward_s: compute.
        activation_bytes: all outputs together.
        parameter_bytes: what is trained.
    """

    name: str
    description: str
    forward_s: float
    backward_s: float
    activation_bytes: float
    parameter_bytes: float


@dataclass(frozen=True, slots=True)
class LayerGraph:
    """A whole file.

    Attributes:
        source: the file's name, for messages.
        nodes: in the file's order, which need not be topological.
        edges: pairs of indices into ``nodes``, each once, in the file's order; there is no cycle.
    """

    source: str
    nodes: tuple[LayerNode, ...]
    edges: tuple[tuple[int, int], ...]

    def kept(self) -> tuple[int, ...]:
        """The layers that are planned, as the public code takes them, in the file's order.

        Sources whose description begins with ``Input`` go, and then sinks that begin with ``__getitem__``.
        """
        left = set(range(len(self.nodes)))
        for prefix, end in (("Input", 1), ("__getitem__", 0)):
            joined = {edge[end] for edge in self.edges if edge[1 - end] in left}
            left -= {index for index in left - joined if self.nodes[index].description.startswith(prefix)}
        return tuple(sorted(left))

    def in_order(self) -> tuple[int, ...]:
        """Those layers in a topological order: by the number in their names as far as the edges allow.

        The profiler numbers layers as they run.

        Raises:
            FormatError: nothing is left when inputs are removed.
        """
        kept = self.kept()
        if not kept:
            raise FormatError(f"{self.source}: no layers besides inputs", [f"{len(self.nodes)} inputs"])
        place = {index: number for number, index in enumerate(kept)}
        edges = [(place[src], place[dst]) for src, dst in self.edges if src in place and dst in place]
        return tuple(
            kept[k] for k in topological_order(len(kept), edges, lambda k: _last_number(self.nodes[kept[k]].name))
        )


def read(path: str | Path) -> LayerGraph:
    """The graph in a file.

    Raises:
        MissingFileError: there is no such file, or it cannot be read.
        FormatError: it breaks the format; the text names the line.
    """
    file = read_text(path)
    return parse(file.text, file.source)


def parse(text: str, source: str = "graph.txt") -> LayerGraph:
    """The graph in a text; ``source`` is what messages call it.

    Raises:
        FormatError: it breaks the format; the text names the line.
    """
    file = FileText(source, text)
    nodes: list[LayerNode] = []
    numbers: dict[str, int] = {}
    node_lines: list[int] = []
    edge_lines: list[tuple[int, str, str]] = []
    for number, line in file.lines():
        parts = [part.strip() for part in line.split(_SEPARATOR)]
        costs = next((k for k in reversed(range(len(parts))) if f"{_FIELDS[0]}=" in parts[k].replace(" ", "")), None)
        if costs is None and len(parts) == 2:
            edge_lines.append((number, parts[0], parts[1]))
            continue
        if costs is None or costs < 2 or not parts[0]:
            raise file.fault(number, "neither a layer nor an edge", f"found: {_shown(line)}", _EXPECTED)
        if parts[0] in numbers:
            above = f"also in line {node_lines[numbers[parts[0]]]}"
            raise file.fault(number, f"layer {parts[0]!r} appears twice", above)
        numbers[parts[0]] = len(nodes)
        node_lines.append(number)
        nodes.append(_node(file, number, parts[0], _SEPARATOR.join(parts[1:costs]), parts[costs]))
    if not nodes:
        raise FormatError(f"{file.source}: no layers", ["the file has no line with costs"], [_EXPECTED])
    edges: dict[tuple[int, int], int] = {}
    for number, src, dst in edge_lines:
        for name in (src, dst):
            if name not in numbers:
                available = f"{len(nodes)} layers, such as {nodes[0].name!r}"
                raise file.fault(number, f"an edge of {name!r}, which is no layer", f"found: {src} -- {dst}", available)
        edges.setdefault((numbers[src], numbers[dst]), number)
    _require_no_cycle(file, nodes, edges)
    return LayerGraph(file.source, tuple(nodes), tuple(edges))


_EXPECTED = (
    "a layer is 'id -- description -- forward_compute_time=ms, backward_compute_time=ms, activation_size=bytes, "
    "parameter_size=bytes', an edge '<tab>id -- id'"
)


def _node(file: FileText, number: int, name: str, description: str, costs: str) -> LayerNode:
    fields: dict[str, str] = {}
    position = 0
    for match in _FIELD.finditer(costs):
        if match.start() != position or match[1] in fields:
            break
        fields[match[1]] = match[2].strip()
        position = match.end()
    if position != len(costs.rstrip()):
        raise file.fault(number, f"costs of layer {name!r} cannot be read", f"found: {_shown(costs)}", _EXPECTED)
    missing = [field for field in _FIELDS if field not in fields]
    if missing:
        raise file.fault(number, f"layer {name!r} has no {', '.join(missing)}", f"found: {', '.join(fields)}")
    forward_ms, backward_ms, activation, parameters = (_number(file, number, name, f, fields[f]) for f in _FIELDS)
    return LayerNode(name, description, forward_ms * _MS, backward_ms * _MS, activation, parameters)


def _number(file: FileText, number: int, name: str, field: str, text: str) -> float:
    unwrapped = text.strip("[] ").replace("[", "").replace("]", "")
    listed = [word.strip() for word in re.split(r"[;,]", unwrapped)] if text.startswith("[") else [unwrapped]
    try:
        values = [float(word) for word in listed if word or not text.startswith("[")]
    except ValueError:
        raise file.fault(number, f"{field} of layer {name!r} is no number", f"found: {_shown(text)}") from None
    if not all(math.isfinite(value) and value >= 0 for value in values):
        raise file.fault(number, f"{field} of layer {name!r} is {text}", "a finite number from 0 upwards is needed")
    return math.fsum(values)


def _require_no_cycle(file: FileText, nodes: Sequence[LayerNode], edges: Mapping[tuple[int, int], int]) -> None:
    left = set(on_or_after_cycles(len(nodes), edges))
    if left:
        (src, dst), number = next((edge, line) for edge, line in edges.items() if set(edge) <= left)
        where = f"through the edge {nodes[src].name} -- {nodes[dst].name}, or behind it"
        raise file.fault(number, "the edges make a cycle", where, f"{len(left)} layers lie on or behind it")


def _last_number(name: str) -> int:
    digits = re.findall(r"[0-9]+", name)
    return int(digits[-1]) if digits else 0


def _shown(text: str) -> str:
    return repr(text if len(text) <= 80 else f"{text[:77]}...")


MAX_STATES = 8000
"""Pairs of states are held in matrices: more than this many need gigabytes."""

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class States:
    """The states of a network, by growing number of layers done; the last one has all of them done.

    Attributes:
        nodes: layers without the removed ones, in topological order.
        done: by state, the layers done, as bits by index into ``nodes``.
        compute_s, activation_bytes, parameter_bytes: by state, sums over the layers done.
        output_bytes: by state, what crosses a cut there.
        before: ``[k, j]``, whether state k is strictly inside state j.
    """

    nodes: tuple[LayerNode, ...]
    done: tuple[int, ...]
    compute_s: Floats
    activation_bytes: Floats
    parameter_bytes: Floats
    output_bytes: Floats
    before: Bools

    @property
    def num_states(self) -> int:
        """Number of states."""
        return len(self.done)

    def layers(self, first: int | None, last: int) -> list[str]:
        """Names of the layers of a stage that starts in state ``first`` (None: nothing done) and ends in ``last``."""
        bits = self.done[last] & ~(0 if first is None else self.done[first])
        return [node.name for index, node in enumerate(self.nodes) if bits >> index & 1]


@dataclass(frozen=True, slots=True)
class _Dag:
    """The edges between layers, and nothing of their costs."""

    reads: tuple[tuple[int, ...], ...]
    """The layers that a layer reads from, which come before it."""

    readers: tuple[int, ...]
    """Bits of the layers that read it."""

    ancestors: tuple[int, ...]
    """Bits of all layers that a layer needs, itself not among them."""

    sources: tuple[int, ...]
    """In the file's order."""


@dataclass(frozen=True, slots=True, eq=False)
class _StatesOfDag:
    """What the states of a network have from its edges alone.

    Attributes:
        done, before: as of ``States``.
        member: ``[state, layer]``, whether the layer is done.
        crossing: ``[state, layer]``, whether it is in the augmented antichain: its output crosses a cut there.
    """

    done: tuple[int, ...]
    member: Bools
    crossing: Bools
    before: Bools


def states_of(graph: LayerGraph, every_ideal: bool = False) -> States:
    """The states of a network.

    Args:
        every_ideal: all sets of layers that hold what they need, not only those that the public code walks through.

    Raises:
        FormatError: nothing is left when inputs are removed.
        UsageError: there are more than ``MAX_STATES``.
    """
    order = graph.in_order()
    nodes = tuple(graph.nodes[old] for old in order)
    states = _states_of(_dag(graph, order), every_ideal)
    if states is None:
        raise UsageError(
            f"{graph.source}: too many states",
            [f"more than {MAX_STATES} antichains in {len(nodes)} layers"],
            ["merge parallel branches of the network into single layers"],
        )
    columns = np.array(
        [(node.forward_s + node.backward_s, node.activation_bytes, node.parameter_bytes) for node in nodes]
    )
    sums = states.member.astype(np.float64) @ columns
    state, layer = np.nonzero(states.crossing)
    crossing_bytes = np.bincount(state, columns[layer, 1], len(states.done)).astype(np.float64)  # also of no weights
    return States(nodes, states.done, sums[:, 0], sums[:, 1], sums[:, 2], crossing_bytes, states.before)


@functools.lru_cache(maxsize=2)
def _states_of(dag: _Dag, every_ideal: bool) -> _StatesOfDag | None:
    """The states, kept for planners that look at one network at several sizes; None if there are too many."""
    needed = _walk(dag, every_ideal)
    if needed is None:
        return None
    done = tuple(sorted(needed, key=lambda bits: (bits.bit_count(), bits)))
    augmented = _augmented(dag)
    crossing = [_union(augmented[layer] for layer in bits_of(bits & ~needed[bits])) for bits in done]
    member = members(done, len(dag.ancestors))
    return _StatesOfDag(done, member, members(crossing, len(dag.ancestors)), _inside(member.astype(np.float32)))


def _dag(graph: LayerGraph, order: Sequence[int]) -> _Dag:
    number = {old: new for new, old in enumerate(order)}
    reads: list[list[int]] = [[] for _ in number]
    readers = [0] * len(number)
    for src, dst in graph.edges:
        if src in number and dst in number:
            reads[number[dst]].append(number[src])
            readers[number[src]] |= 1 << number[dst]
    sources = tuple(number[old] for old in sorted(number) if not reads[number[old]])
    ancestors: list[int] = []
    for mine in reads:
        ancestors.append(_union(ancestors[layer] | 1 << layer for layer in mine))
    return _Dag(tuple(map(tuple, reads)), tuple(readers), tuple(ancestors), sources)


def _walk(dag: _Dag, every_ideal: bool) -> dict[int, int] | None:
    """By state, those layers of it that others of it need; None if there are too many states."""
    needs = [bits | 1 << layer for layer, bits in enumerate(dag.ancestors)]
    read_by = list(dag.readers)  # any of ``needs``
    for layer, sources in enumerate(dag.reads):
        for source in sources:
            read_by[layer] |= read_by[source]
    starts = list(dag.sources) if every_ideal else _starts(dag)
    roots = _union(1 << start for start in starts)
    queue = [(needs[start], read_by[start]) for start in (starts if every_ideal else starts[:1])]
    needed = {done: dag.ancestors[start] for (done, _), start in zip(queue, starts, strict=False)}
    while queue:
        check_time()
        done, nexts = queue.pop()
        for layer in bits_of((nexts | roots) & ~done):
            grown = done | needs[layer]
            if grown not in needed:
                needed[grown] = needed[done] | dag.ancestors[layer]
                queue.append((grown, nexts | read_by[layer]))
        if len(needed) > MAX_STATES:
            return None
    return needed


def _starts(dag: _Dag) -> list[int]:
    """The first source, and one more for each part of the network that the walk from those before never meets."""
    starts: list[int] = []
    met = 0
    for source in dag.sources:
        if not met >> source & 1:
            starts.append(source)
            met |= _met_from(dag, source)
    return starts


def _met_from(dag: _Dag, source: int) -> int:
    """Everything that some descendant of ``source`` needs, and in turn what that feeds."""
    met = 1 << source
    queue = [source]
    while queue:
        layer = queue.pop()
        near = dag.ancestors[layer] | dag.readers[layer]
        for other in bits_of(near & ~met):
            met |= 1 << other
            queue.append(other)
    return met


def _augmented(dag: _Dag) -> list[int]:
    """By layer, itself and those that it needs that layers read which it does not need.

    Each of the latter is so for a layer that this one reads, or is that layer.
    """
    augmented: list[int] = []
    for layer, sources in enumerate(dag.reads):
        outside = ~(dag.ancestors[layer] | 1 << layer)
        near = bits_of(_union(augmented[source] for source in sources))
        augmented.append(_union((1 << k for k in near if dag.readers[k] & outside), 1 << layer))
    return augmented


def _union(sets: Iterable[int], start: int = 0) -> int:
    return functools.reduce(operator.or_, sets, start)


def _inside(small: NDArray[np.float32]) -> Bools:
    """Set k is inside set j if as many layers are in both as in k, and j has more."""
    common = small @ small.T  # counts up to 2^24 are exact
    size = small.sum(axis=1)
    inside: Bools = (common == size[:, None]) & (size[:, None] < size[None, :])
    return inside
