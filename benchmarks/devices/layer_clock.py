"""Processor time of every layer inside a running stage, forward and backward, as the stage runs it.

Each operator of the captured graph is called through a function that reads the clock; the nodes that it leaves in
autograd's graph read it before and after they run.  What a backward puts off (``runtime.spatial.deferred``) counts
for the layer that put it, wherever it is done.  Time belongs to the innermost layer alone.

The clock is this thread's processor time, so that waiting for another rank is not counted; packing and unpacking of
messages, sums over ranks and Python's own time in a layer's local form are.  A profile has none of these three in a
layer's seconds.

What ranks do together, done by one alone: it gets what it would get if the others had what it has.

So a rank does its part of a stage that it shares without any other, and never waits amid it.  Nothing is sent.
"""

from __future__ import annotations

import operator
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, fx
from torch.autograd.graph import Node

from cuda_ops._torch import tree_leaves
from runtime.spatial.deferred import DeferredGradients
from runtime.stage.cut import NodeRule, StageFunction
from runtime.stage.functions import StageCut
from runtime.transport.base import Pending, parts


class _Done:
    """Of which nothing is left to wait for."""

    def wait(self) -> None:
        """Returns at once."""


class Mirror:
    """The part of a :class:`runtime.transport.base.Transport` that does things in groups, for ``rank`` alone."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    @torch.no_grad()
    def all_reduce(self, tensor: Tensor, ranks: tuple[int, ...]) -> None:
        """As many times ``tensor`` as there are ranks."""
        tensor.mul_(len(ranks))

    def start_sum(self, tensor: Tensor, ranks: tuple[int, ...]) -> Pending:
        """As :meth:`all_reduce`."""
        self.all_reduce(tensor, ranks)
        return _Done()

    @torch.no_grad()
    def start_exchange(
        self, sent: Mapping[int, Tensor], received: Mapping[int, Tensor], key: int | None = None
    ) -> Pending:
        """From each rank comes what goes to it; zeros, if that has another size."""
        for source, tensor in received.items():
            _fill(tensor, sent.get(source))
        return _Done()

    @torch.no_grad()
    def reduce_scatter(self, flat: Tensor, counts: Sequence[int], ranks: tuple[int, ...]) -> None:
        """As many times this rank's part as there are ranks."""
        parts(flat, counts, ranks)[ranks.index(self._rank)].mul_(len(ranks))

    @torch.no_grad()
    def all_gather(self, flat: Tensor, counts: Sequence[int], ranks: tuple[int, ...]) -> None:
        """This rank's part in the place of each; zeros, where that has another size."""
        pieces = parts(flat, counts, ranks)
        own = pieces[ranks.index(self._rank)]
        for rank, piece in zip(ranks, pieces, strict=True):
            if rank != self._rank:
                _fill(piece, own)

    def all_max(self, tensor: Tensor, ranks: tuple[int, ...]) -> None:
        """``tensor`` itself."""


def _fill(tensor: Tensor, values: Tensor | None) -> None:
    if values is not None and values.numel() == tensor.numel() and values.dtype == tensor.dtype:
        tensor.copy_(values.view_as(tensor))
    else:
        tensor.zero_()


FORWARD = "forward"
BACKWARD = "backward"
Key = tuple[str, str]
"""A layer and a pass."""


class LayerClock:
    """Seconds by layer and pass, step by step; made before the engine whose stages it watches (:meth:`watching`)."""

    def __init__(self) -> None:
        self._steps: list[dict[Key, float]] = []
        self._seconds: defaultdict[Key, float] = defaultdict(float)
        self._open: list[Key] = []
        self._last_s = 0.0

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Stages that are built, and backwards that are run, inside the context are watched."""
        function = StageCut.function
        put = DeferredGradients.put

        def watched(cut: StageCut, rule: NodeRule, **options: Any) -> StageFunction:
            return function(cut, self._rule(rule, cut.model.layer_of_node), **options)

        def noted(later: DeferredGradients, compute: Callable[[], None]) -> None:
            put(later, self._within(self._open[-1], compute) if self._open else compute)

        with patch.object(StageCut, "function", watched), patch.object(DeferredGradients, "put", noted):
            yield

    def next_step(self) -> None:
        """What was counted since the last call is a step."""
        self._steps.append(dict(self._seconds))
        self._seconds.clear()

    def medians(self, warm_up: int = 0) -> dict[str, tuple[float, float]]:
        """Forward and backward seconds of each layer, medians of the steps after ``warm_up``."""
        steps = self._steps[warm_up:]
        layers = {layer: None for step in steps for layer, _ in step}
        return {layer: (self._median(steps, layer, FORWARD), self._median(steps, layer, BACKWARD)) for layer in layers}

    @staticmethod
    def _median(steps: list[dict[Key, float]], layer: str, way: str) -> float:
        return statistics.median(step.get((layer, way), 0.0) for step in steps)

    def _rule(self, inner: NodeRule, layer_of_node: Mapping[str, str]) -> NodeRule:
        def rule(node: fx.Node) -> Callable[..., Any] | None:
            layer = layer_of_node.get(node.name)
            found = inner(node)
            if layer is None or node.op != "call_function" or node.target is operator.getitem:
                return found
            return self._timed(layer, found or node.target)

        return rule

    def _timed(self, layer: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            before = {tensor.grad_fn for tensor in _tensors((args, kwargs))}  # of an operator in place, gone afterwards
            self._enter((layer, FORWARD))
            result = function(*args, **kwargs)
            self._leave()
            self._watch((layer, BACKWARD), result, before)
            return result

        return run

    def _watch(self, key: Key, result: Any, before: set[Node | None]) -> None:
        """Have the nodes between the results and what was there ``before`` read the clock."""
        waiting = [tensor.grad_fn for tensor in _tensors(result)]
        seen = {None, *before}
        while waiting:
            node = waiting.pop()
            if node is None or node in seen or node.name().endswith("AccumulateGrad"):
                continue
            seen.add(node)
            node.register_prehook(lambda _: self._enter(key))
            node.register_hook(lambda *_: self._leave())
            waiting += [each for each, _ in node.next_functions]

    def _within(self, key: Key, compute: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            self._enter(key)
            compute()
            self._leave()

        return run

    def _enter(self, key: Key) -> None:
        now_s = time.thread_time()
        if self._open:
            self._seconds[self._open[-1]] += now_s - self._last_s
        self._open.append(key)
        self._last_s = time.thread_time()

    def _leave(self) -> None:
        now_s = time.thread_time()
        self._seconds[self._open.pop()] += now_s - self._last_s
        self._last_s = time.thread_time()


def _tensors(values: Any) -> list[Tensor]:
    return [each for each in tree_leaves(values) if isinstance(each, Tensor)]
