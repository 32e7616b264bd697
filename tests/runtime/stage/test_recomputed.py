"""Spans of a stage's layers that run again in the backward: as they ran, once, and keeping what they read alone."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor, fx

from cuda_ops.dense.deferred_gradients import CurrentQueue
from planner.ir.errors import UnsupportedModelError
from runtime.stage.modes import MicrobatchShard
from runtime.stage.recomputed import SpanRecompute, enclosed

F64 = torch.float64
PORTION = MicrobatchShard(3, 2, 0, 2)


class Heard:
    """What an ``SpanRecompute`` tells, in order."""

    def __init__(self) -> None:
        self.microbatch_shards: list[MicrobatchShard] = []

    def at(self, microbatch_shard: MicrobatchShard) -> None:
        self.microbatch_shards.append(microbatch_shard)


def traced(function: Callable[..., object]) -> fx.Graph:
    """A graph as stages have it: placeholders, calls, and a tuple of outputs."""
    return fx.symbolic_trace(function).graph


def run(graph: fx.Graph, *arguments: Tensor) -> tuple[Tensor, ...]:
    found: tuple[Tensor, ...] = fx.GraphModule(torch.nn.Module(), graph)(*arguments)
    return found


def again(*told: Heard) -> SpanRecompute:
    found = SpanRecompute(told, CurrentQueue())
    found.at(PORTION)
    return found


def by_target(graph: fx.Graph, of: Mapping[object, str]) -> dict[str, str]:
    """The layer of each node, by what it calls."""
    return {node.name: of[node.target] for node in graph.nodes if node.target in of}


def sine(made: list[weakref.ref[Tensor]], calls: list[str]) -> Callable[[Tensor], Tensor]:
    def sin(x: Tensor) -> Tensor:
        result = torch.sin(x)
        made.append(weakref.ref(result.untyped_storage()))
        calls.append("sin")
        return result

    return sin


def chain(middle: Callable[[Tensor], Tensor]) -> tuple[fx.Graph, dict[str, str]]:
    """x -> exp -> [middle -> exp] -> tanh, the layers in brackets a span."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    first = graph.call_function(torch.exp, (x,))
    inside = graph.call_function(middle, (first,))
    last = graph.call_function(torch.exp, (inside,))
    end = graph.call_function(torch.tanh, (last,))
    graph.output((end,))
    return graph, {first.name: "first", inside.name: "a", last.name: "b", end.name: "end"}


def test_a_span_runs_again_once_of_its_own_micro_batch_and_keeps_nothing_between() -> None:
    made: list[weakref.ref[Tensor]] = []
    calls: list[str] = []
    heard = Heard()
    graph, layers = chain(sine(made, calls))
    found = enclosed(graph, layers, {}, (("a", "b"),), again(heard))
    x = torch.tensor([0.1, 0.2], dtype=F64, requires_grad=True)
    (y,) = run(found, x)
    gc.collect()
    assert made[0]() is None, "what the span made is dropped"
    assert not heard.microbatch_shards
    y.sum().backward()
    assert calls == ["sin", "sin"]
    assert heard.microbatch_shards == [PORTION]
    z = x.detach().clone().requires_grad_()
    torch.tanh(torch.exp(torch.sin(torch.exp(z)))).sum().backward()
    assert torch.equal(x.grad, z.grad)
    del y
    gc.collect()
    assert all(each() is None for each in made)


def test_without_gradients_a_span_runs_once() -> None:
    calls: list[str] = []
    graph, layers = chain(sine([], calls))
    with torch.no_grad():
        run(enclosed(graph, layers, {}, (("a", "b"),), again()), torch.ones(2, dtype=F64))
    assert calls == ["sin"]


def counting() -> tuple[fx.Graph, dict[str, str], dict[str, str]]:
    """y = (w x n) x 2, after the buffer n has been raised by one."""
    graph = fx.Graph()
    x, w, n = (graph.placeholder(name) for name in "xwn")
    raised = graph.call_function(torch.Tensor.add_, (n, 1))
    y = graph.call_function(torch.mul, (graph.call_function(torch.mul, (w, x)), raised))
    graph.output((graph.call_function(torch.mul, (y, 2)),))
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    return graph, dict(zip([node.name for node in nodes], "abcd", strict=True)), {"n": "n", raised.name: "n"}


def test_a_buffer_is_written_once_and_seen_as_the_forward_saw_it() -> None:
    graph, layers, state = counting()
    found = enclosed(graph, layers, state, (("a", "b", "c"),), again())
    x, w, n = (torch.tensor(each, dtype=F64) for each in (3.0, 2.0, 0.0))
    w.requires_grad_()
    outputs = [run(found, x, w, n)[0] for _ in range(2)]
    assert [each.item() for each in outputs] == [12, 24]
    assert n.item() == 2
    for output in outputs:
        output.backward()
    assert w.grad.item() == 2 * (3 * 1 + 3 * 2)
    assert n.item() == 2


def test_a_buffer_that_a_span_reads_by_two_ways_is_refused() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    n = graph.placeholder("n")
    view = graph.call_function(torch.Tensor.view, (n, -1))
    raised = graph.call_function(torch.Tensor.add_, (n, 1))
    y = graph.call_function(torch.mul, (graph.call_function(torch.mul, (x, raised)), view))
    graph.output((y,))
    layers = {node.name: name for node, name in zip(list(graph.nodes)[3:6], "abc", strict=True)}
    with pytest.raises(UnsupportedModelError, match="the buffer n twice"):
        enclosed(graph, layers, {"n": "n", view.name: "n"}, (("a", "b", "c"),), again())


def test_an_input_that_is_overwritten_before_the_backward_is_refused() -> None:
    graph, layers = chain(torch.sin)
    first = next(node for node in graph.nodes if node.target is torch.exp)
    with graph.inserting_before(next(node for node in graph.nodes if node.op == "output")):
        graph.call_function(torch.Tensor.mul_, (first, 2))
    found = enclosed(graph, layers, {}, (("a", "b"),), again())
    x = torch.ones(2, dtype=F64, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation"):
        run(found, x)[0].sum().backward()


def test_a_layer_between_runs_before_and_one_that_lies_across_is_refused() -> None:
    def between(x: Tensor) -> tuple[Tensor, ...]:
        a = torch.sin(x)
        beside = torch.cos(x)
        return (torch.exp(a) * beside, a)

    graph = traced(between)
    layers = by_target(graph, {torch.sin: "a", torch.cos: "beside", torch.exp: "b"})
    found = enclosed(graph, layers, {}, (("a", "b"),), again())
    order = [node.target for node in found.nodes if node.op == "call_function"]
    assert order.index(torch.cos) < next(at for at, each in enumerate(order) if getattr(each, "__name__", "") == "span")
    x = torch.tensor([0.3], dtype=F64)
    assert all(map(torch.equal, run(found, x), between(x)))

    def across(x: Tensor) -> tuple[Tensor, ...]:
        a = torch.sin(x)
        return (torch.exp(a + torch.cos(a)),)

    graph = traced(across)
    layers = by_target(graph, {torch.sin: "a", torch.cos: "beside", torch.exp: "b"})
    with pytest.raises(UnsupportedModelError, match="cannot be run as one"):
        enclosed(graph, layers, {}, (("a", "b"),), again())


def test_sizes_that_are_worked_out_between_belong_to_the_span() -> None:
    def sized(x: Tensor) -> tuple[Tensor, ...]:
        a = torch.sin(x)
        return (torch.exp(a) / a.numel(), torch.cos(x) * a.numel())

    graph = traced(sized)
    layers = by_target(graph, {torch.sin: "a", torch.exp: "b", torch.cos: "c"})
    div = next(node for node in graph.nodes if "truediv" in node.name)
    layers[div.name] = "b"
    size = next(node for node in graph.nodes if node.target == "numel")
    size.op = "call_function"
    size.target = torch.Tensor.numel
    x = torch.tensor([0.3, 0.5], dtype=F64)
    found = enclosed(graph, layers, {}, (("a", "b"),), again())
    assert all(map(torch.equal, run(found, x), sized(x)))
