"""The states of PipeDream's planners: what may have been done when a stage ends.

PipeDream (Narayanan et al., SOSP 2019) cuts a network behind an *antichain*: layers of which none precedes another,
together with all that they need (an ideal of the DAG).  As in the public code (graph/graph.py, ``antichain_dag``):

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

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.baselines.pipedream.format import LayerGraph, Node
from planner.ir.errors import UsageError
from planner.solvers.progress import check_time

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

    nodes: tuple[Node, ...]
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
    nodes: tuple[Node, ...]
    successors: tuple[tuple[int, ...], ...]
    ancestors: tuple[int, ...]
    """Bits of all layers that a layer needs, itself not among them."""

    sources: tuple[int, ...]
    """In the file's order."""


def states_of(graph: LayerGraph, every_ideal: bool = False) -> States:
    """The states of a network.

    Args:
        every_ideal: all sets of layers that hold what they need, not only those that the public code walks through.

    Raises:
        FormatError: nothing is left when inputs are removed.
        UsageError: there are more than ``MAX_STATES``.
    """
    dag = _dag(graph)
    done = sorted(_walk(graph, dag, every_ideal), key=lambda bits: (bits.bit_count(), bits))
    member = _members(done, len(dag.nodes))
    columns = np.array(
        [(node.forward_s + node.backward_s, node.activation_bytes, node.parameter_bytes) for node in dag.nodes]
    )
    sums = member @ columns
    crossing = _crossing(dag, done)
    return States(dag.nodes, tuple(done), sums[:, 0], sums[:, 1], sums[:, 2], crossing, _inside(member))


def _dag(graph: LayerGraph) -> _Dag:
    number = {old: new for new, old in enumerate(graph.in_order())}
    successors: list[list[int]] = [[] for _ in number]
    missing = [0] * len(number)
    for src, dst in graph.edges:
        if src in number and dst in number:
            successors[number[src]].append(number[dst])
            missing[number[dst]] += 1
    sources = tuple(number[old] for old in sorted(number) if not missing[number[old]])
    ancestors = [0] * len(number)
    ready = list(sources)
    while ready:
        layer = ready.pop()
        for after in successors[layer]:
            ancestors[after] |= ancestors[layer] | 1 << layer
            missing[after] -= 1
            if not missing[after]:
                ready.append(after)
    nodes = tuple(graph.nodes[old] for old in number)
    return _Dag(nodes, tuple(map(tuple, successors)), tuple(ancestors), sources)


def _walk(graph: LayerGraph, dag: _Dag, every_ideal: bool) -> set[int]:
    needs = [bits | 1 << layer for layer, bits in enumerate(dag.ancestors)]
    starts = list(dag.sources) if every_ideal else _starts(dag)
    found = {needs[starts[0]]} if not every_ideal else {needs[start] for start in starts}
    queue = list(found)
    while queue:
        check_time()
        done = queue.pop()
        nexts = {after for layer in _bits(done) for after in dag.successors[layer] if not done >> after & 1}
        for layer in (*nexts, *(start for start in starts if not done >> start & 1)):
            grown = done | needs[layer]
            if grown not in found:
                found.add(grown)
                queue.append(grown)
        if len(found) > MAX_STATES:
            raise UsageError(
                f"{graph.source}: too many states",
                [f"more than {MAX_STATES} antichains in {len(dag.nodes)} layers"],
                ["merge parallel branches of the network into single layers"],
            )
    return found


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
        near = dag.ancestors[layer] | sum(1 << after for after in dag.successors[layer])
        for other in _bits(near & ~met):
            met |= 1 << other
            queue.append(other)
    return met


def _crossing(dag: _Dag, done: Sequence[int]) -> Floats:
    """By state, the bytes of the augmented antichain."""
    readers = [sum(1 << after for after in found) for found in dag.successors]
    augmented = []
    for layer, needed in enumerate(dag.ancestors):
        own = needed | 1 << layer
        augmented.append(sum((1 << k for k in _bits(needed) if readers[k] & ~own), 1 << layer))
    found = np.empty(len(done))
    for state, bits in enumerate(done):
        crossing = 0
        for layer in _bits(bits):
            if not readers[layer] & bits:
                crossing |= augmented[layer]
        found[state] = sum(dag.nodes[layer].activation_bytes for layer in _bits(crossing))
    return found


def _bits(bits: int) -> list[int]:
    found = []
    while bits:
        low = bits & -bits
        found.append(low.bit_length() - 1)
        bits ^= low
    return found


def _members(done: Sequence[int], num_layers: int) -> Floats:
    width = -(-num_layers // 8)
    packed = np.frombuffer(b"".join(bits.to_bytes(width, "little") for bits in done), np.uint8)
    unpacked = np.unpackbits(packed.reshape(len(done), width), axis=1, bitorder="little")
    return unpacked[:, :num_layers].astype(np.float64)


def _inside(member: Floats) -> Bools:
    """Set k is inside set j if as many layers are in both as in k, and j has more."""
    small = member.astype(np.float32)  # counts up to 2^24 are exact, and twice as quick
    common = small @ small.T
    size = small.sum(axis=1)
    found: Bools = (common == size[:, None]) & (size[:, None] < size[None, :])
    return found
