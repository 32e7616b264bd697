"""Spans of a stage's layers that are computed again when the backward comes to them.

        forward     q, k, v -> | scores -> softmax -> dropout -> y |            kept: q, k, v, until the backward
        backward    dy  ->  the span runs again, as it did, and saves  ->  dq, dk, dv

The nodes of a span become one call in the stage's function, which ``torch.utils.checkpoint`` makes (the form without
reentrant autograd: gradients flow through the graph of the first run, so that parameters, halves of a backward and
later sums are as without).  The second run is told the micro-batch again: layers draw what they drew, exchanges are
those of its sizes, operators that can be halved leave their weight gradients where the first run would.  What a span
writes, such as running statistics, it writes the first time; the second time it reads and writes a copy made before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

from cuda_ops.dense.data_dependent import cut_out
from cuda_ops.dense.deferred_gradients import CurrentQueue, WeightGradientQueue
from planner.ir.errors import UnsupportedModelError
from planner.layers.recomputed import Spans, running_order
from runtime.stage.cut import TensorFunction
from runtime.stage.modes import MicrobatchContext, MicrobatchShard


class SpanRecompute:
    """Runs parts of a stage once more as they ran: of that micro-batch, leaving weight gradients in the same place.

    Args:
        contexts: of the micro-batch, before each run: what layers draw by, how they are divided.
        current: where operators that can be halved leave their weight gradients.
    """

    def __init__(self, contexts: Sequence[MicrobatchContext], current: CurrentQueue) -> None:
        self._contexts = tuple(contexts)
        self._current = current
        self._microbatch_shard: MicrobatchShard | None = None

    def at(self, microbatch_shard: MicrobatchShard) -> None:
        """What is run next."""
        self._microbatch_shard = microbatch_shard

    def enclosing(self, spans: Spans) -> Callable[..., fx.Graph]:
        """Makes each of ``spans`` one call of a stage's graph that runs again by this, see :func:`enclosed`."""
        return partial(enclosed, spans=spans, span_recompute=self)

    def as_now(self) -> AbstractContextManager[None]:
        """A context, to be entered later, in which a part runs as it would now."""
        return self._as_of(self._microbatch_shard, self._current.queue)

    @contextmanager
    def _as_of(self, microbatch_shard: MicrobatchShard | None, queue: WeightGradientQueue | None) -> Iterator[None]:
        if microbatch_shard is not None:
            for each in self._contexts:
                each.at(microbatch_shard)
        before = self._current.queue
        self._current.queue = queue
        try:
            yield
        finally:
            self._current.queue = before


def enclosed(
    graph: fx.Graph, layers: Mapping[str, str], state: Mapping[str, str], spans: Spans, span_recompute: SpanRecompute
) -> fx.Graph:
    """A stage's graph with each span as one call.

    Args:
        layers: the layer of each node, by name; what makes sizes has none.
        state: by node, the buffer that the stage writes and of which the node is, or is a view.

    Raises:
        UnsupportedModelError: something outside a span both reads it and is read by it, or a span reads a buffer that
            is written by two ways.
    """
    nodes = [node for node in graph.nodes if node.op != "output"]
    members = [_members(nodes, layers, frozenset(span)) for span in spans]
    inside = {node for each in members for node in each}
    try:
        units = running_order(nodes, _reads(nodes, state), members)
    except ValueError:
        raise UnsupportedModelError(
            "layers that are computed again cannot be run as one",
            [f"{len(spans)} spans, the first of {len(spans[0])} layers from {spans[0][0]}; a node lies between"],
            ["plan with --recompute always, or never"],
        ) from None
    outer = fx.Graph()
    copies = dict[fx.Node, fx.Node]()
    for unit in units:
        if unit[0] in inside:
            _enclose(unit, outer, copies, state, span_recompute)
        else:
            copies[unit[0]] = outer.node_copy(unit[0], copies.__getitem__)
    (output,) = (node for node in graph.nodes if node.op == "output")
    outer.output(fx.map_arg(output.args[0], copies.__getitem__))
    return outer


def _members(nodes: Sequence[fx.Node], layers: Mapping[str, str], span: frozenset[str]) -> list[fx.Node]:
    """The nodes of a span's layers, and sizes that are worked out between them."""
    own = {node for node in nodes if layers.get(node.name) in span}
    sizes = [node for node in nodes if node.op == "call_function" and node.name not in layers]
    downstream = set(own)
    upstream = set(own)
    for node in sizes:
        if not downstream.isdisjoint(node.all_input_nodes):
            downstream.add(node)
    for node in reversed(sizes):
        if not upstream.isdisjoint(node.users):
            upstream.add(node)
    return [node for node in nodes if node in downstream and node in upstream]


def _reads(nodes: Sequence[fx.Node], state: Mapping[str, str]) -> dict[fx.Node, list[fx.Node]]:
    """What must run before each node: what it reads, and of what reads or writes a buffer that is written the last."""
    before = {node: list(node.all_input_nodes) for node in nodes}
    last: dict[str, fx.Node] = {}
    for node in nodes:
        for name in {state[each.name] for each in node.all_input_nodes if each.name in state}:
            if name in last:
                before[node].append(last[name])
            last[name] = node
    return before


def _enclose(
    unit: Sequence[fx.Node],
    outer: fx.Graph,
    copies: dict[fx.Node, fx.Node],
    state: Mapping[str, str],
    span_recompute: SpanRecompute,
) -> None:
    """Adds to ``outer`` the call of a span, and its results to ``copies``."""
    inner, inside, inputs, results = cut_out(unit)
    inner.output(tuple(inside[node] for node in results))
    written = {place: state[node.name] for place, node in enumerate(inputs) if node.name in state}
    if len(set(written.values())) < len(written):
        raise UnsupportedModelError(
            f"layers that are computed again read the buffer {next(iter(written.values()))} twice, and it is written",
            [f"{len(written)} of the {len(inputs)} values that they read are such buffers or views of them"],
            ["plan with --recompute always, or never"],
        )
    run = fx.GraphModule(nn.Module(), inner, "Span").forward
    call = outer.call_function(_named(run, frozenset(written), span_recompute), tuple(copies[node] for node in inputs))
    for index, node in enumerate(results):
        copies[node] = outer.call_function(getitem, (call, index))


def _named(run: TensorFunction, written: frozenset[int], span_recompute: SpanRecompute) -> Callable[..., Any]:
    """A span, as fx wants functions: with a name."""

    def span(*inputs: Any) -> tuple[Tensor, ...]:
        return _run_span(run, written, span_recompute, inputs)

    return span


def _run_span(
    run: TensorFunction, written: frozenset[int], span_recompute: SpanRecompute, inputs: Sequence[Any]
) -> tuple[Tensor, ...]:
    """Runs a span; with gradients it keeps ``inputs`` alone.

    Args:
        written: places of what it writes.
    """
    if not torch.is_grad_enabled():
        return run(*inputs)
    first = {place: inputs[place] for place in written}
    turns = [first, {place: tensor.detach().clone() for place, tensor in first.items()}]

    def function(*plain: Any) -> tuple[Tensor, ...]:
        own = turns.pop(0)
        rest = iter(plain)
        return run(*(own[place] if place in written else next(rest) for place in range(len(inputs))))

    plain = [each for place, each in enumerate(inputs) if place not in written]
    result: tuple[Tensor, ...] = checkpoint(
        function,
        *plain,
        use_reentrant=False,
        preserve_rng_state=False,  # layers draw by micro-batch, not from torch's own generator
        context_fn=lambda: (nullcontext(), span_recompute.as_now()),
        early_stop=False,  # an exchange that has begun must end
    )
    return result
