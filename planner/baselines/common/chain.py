"""A network as a chain of layers on devices of several types: what DAPPLE and BaPipe plan."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from planner.baselines.pipedream.format import LayerGraph
from planner.ir.errors import UsageError


@dataclass(frozen=True, slots=True)
class Chain:
    """Layers in the order they run, with their costs for one mini-batch.

    Attributes:
        names: of the layers.
        forward_s, backward_s: by layer, on a device of speed 1.
        saved_bytes: by layer, what it keeps from forward to backward.
        parameter_bytes: by layer.
        crossing_bytes: by layer, what crosses a cut behind it, one way; 0 behind the last.
    """

    names: tuple[str, ...]
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    saved_bytes: tuple[float, ...]
    parameter_bytes: tuple[float, ...]
    crossing_bytes: tuple[float, ...]

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return len(self.names)

    def scaled(self, factor: float) -> Chain:
        """The chain for ``factor`` mini-batches; parameters stay."""
        seconds = [tuple(factor * s for s in found) for found in (self.forward_s, self.backward_s)]
        sizes = [tuple(factor * s for s in found) for found in (self.saved_bytes, self.crossing_bytes)]
        return Chain(self.names, seconds[0], seconds[1], sizes[0], self.parameter_bytes, sizes[1])


def chain_of(graph: LayerGraph) -> Chain:
    """A graph's layers in their order; a value counts at every cut between its layer and its last reader."""
    order = graph.in_order()
    place = {index: position for position, index in enumerate(order)}
    last_read = {index: place[index] for index in order}
    for src, dst in graph.edges:
        if src in place and dst in place:
            last_read[src] = max(last_read[src], place[dst])
    changes = [0.0] * (len(order) + 1)
    for index in order:
        changes[place[index]] += graph.nodes[index].activation_bytes
        changes[last_read[index]] -= graph.nodes[index].activation_bytes
    nodes = [graph.nodes[index] for index in order]
    return Chain(
        tuple(node.name for node in nodes),
        tuple(node.forward_s for node in nodes),
        tuple(node.backward_s for node in nodes),
        tuple(node.activation_bytes for node in nodes),
        tuple(node.parameter_bytes for node in nodes),
        tuple(max(0.0, size) for size in accumulate(changes[: len(order)])),
    )


def sums(values: Sequence[float]) -> tuple[float, ...]:
    """Running sums, from 0: those of layers i to j - 1 are ``[j] - [i]``."""
    return tuple(accumulate(values, initial=0.0))


def require_positive(**values: float) -> None:
    """Raises :class:`UsageError` if a number is not above 0."""
    wrong = [f"{name} {value:g}" for name, value in values.items() if not value > 0]
    if wrong:
        raise UsageError("a number must be above 0", wrong)


def coarse_ends(chain: Chain, blocks: int) -> tuple[int, ...]:
    """Ends of at most ``blocks`` blocks of about equal work, cut where least crosses: the last layer of each."""
    if chain.num_layers <= blocks:
        return tuple(range(chain.num_layers))
    work = sums([f + b for f, b in zip(chain.forward_s, chain.backward_s, strict=True)])
    ends = []
    for block in range(1, blocks):
        low, high = (work[-1] * share / (blocks - 1) for share in (block - 1, block))
        inside = [k for k in range(chain.num_layers - 1) if low < work[k + 1] <= high]
        if inside:
            ends.append(min(inside, key=lambda k: chain.crossing_bytes[k]))
    return (*ends, chain.num_layers - 1)


def merged(chain: Chain, ends: Iterable[int]) -> Chain:
    """The chain with one layer for each of ``ends``: the layers up to it and behind the one before."""
    bounds = [0, *(end + 1 for end in ends)]
    spans = list(pairwise(bounds))

    def added(values: Sequence[float]) -> tuple[float, ...]:
        return tuple(sum(values[first:last]) for first, last in spans)

    return Chain(
        tuple(chain.names[last - 1] for _, last in spans),
        added(chain.forward_s),
        added(chain.backward_s),
        added(chain.saved_bytes),
        added(chain.parameter_bytes),
        tuple(chain.crossing_bytes[last - 1] for _, last in spans),
    )
