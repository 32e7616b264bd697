"""What each layer takes: forward, backward, and the two halves of backward, each measured.

A captured graph is run one layer at a time (:class:`SegmentedPass`), many times, by the device's clock; on the
processor that is thread CPU time.  Kept of each layer's times are the 20 %-trimmed mean (Tukey) and, as spread, the
interquartile range over the median.

Layers run in order on each other's real values (a hot loop over one layer is off by -18 ... +11 %, this by 3 %).  A
layer's inputs are detached, so that its backward ends there; gradients are handed on and added up as autograd would.

Backward in halves is the runtime's own: weight gradients that can be deferred
(:mod:`cuda_ops.dense.deferred_gradients`) are the second half, everything else is the first.
"""

from __future__ import annotations

import gc
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from cuda_ops.dense.deferred_gradients import CurrentQueue, WeightGradientQueue, deferred
from cuda_ops.dense.recurrent import autocast
from profiler.capture.layers import is_output_of, makes_tensors, tensor_arguments
from profiler.capture.operators import function_called
from profiler.capture.sizes import NUM_SAMPLES
from profiler.measure.contention import spread, trimmed_mean
from profiler.measure.noise import LapClock, ThreadClock
from runtime.captured import CapturedModule, attribute


@dataclass(frozen=True, slots=True)
class LayerSegment:
    """One layer of a captured graph.

    Attributes:
        name: of the layer.
        calls: its operators, in order.
        reads: values of other layers, and graph inputs, that it reads.
        results: the nodes that hold its outputs.
        parameters: trained parameters that it uses.
    """

    name: str
    calls: tuple[fx.Node, ...]
    reads: tuple[fx.Node, ...]
    results: tuple[fx.Node, ...]
    parameters: tuple[nn.Parameter, ...]


def segments(captured: CapturedModule) -> tuple[LayerSegment, ...]:
    """The layers of ``captured``, in the order of its graph."""
    members: dict[str, list[fx.Node]] = {layer.name: [] for layer in captured.graph.layers}
    for node in captured.graph_module.graph.nodes:
        if node.name in captured.layer_of_node:
            members[captured.layer_of_node[node.name]].append(node)
    value_nodes = set(captured.node_of_value.values())
    parts = []
    for layer in captured.graph.layers:
        nodes = members[layer.name]
        arguments = dict.fromkeys(argument for node in nodes for argument in tensor_arguments(node))
        reads = tuple(a for a in arguments if a.op != "get_attr" and a not in nodes)
        results = tuple(node for node in nodes if node.name in value_nodes)
        parameters = tuple(captured.graph_module.get_parameter(name) for name in layer.parameters)
        parts.append(LayerSegment(layer.name, tuple(nodes), reads, results, parameters))
    return tuple(parts)


@dataclass(frozen=True, slots=True)
class BackwardTimes:
    """Seconds of a layer's backward: in one go, or its two halves, each on its own.

    ``weight_s`` is 0 where nothing can be deferred; then ``input_s`` is the whole.
    """

    both_s: float = 0.0
    input_s: float = 0.0
    weight_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Laps:
    """Laps of one layer: of its forward, of its backward (but that of deferred weight gradients), and of those."""

    forward: list[Any] = field(default_factory=list)
    backward: list[Any] = field(default_factory=list)
    weight: list[Any] = field(default_factory=list)


class SegmentedPass:
    """One forward and backward pass.  Call ``forward`` on every segment in order, then ``backward`` in reverse.

    Args:
        tensors: by name, the graph's inputs for ``samples`` samples, on the device of the parameters.
        clock: of that device; by default that of the processor.
        split: run backward in halves, one after another.
    """

    def __init__(
        self,
        captured: CapturedModule,
        tensors: Mapping[str, Tensor],
        samples: int,
        clock: LapClock | None = None,
        split: bool = False,
    ) -> None:
        self._clock = clock or ThreadClock()
        self._laps: dict[str, Laps] = {}
        self._split = split
        self._autocast = captured.autocast
        self._device = next((tensor.device.type for tensor in tensors.values()), "cpu")
        self._current = CurrentQueue()
        self._queues: dict[str, WeightGradientQueue] = {}
        self._values: dict[fx.Node, Any] = {}
        self._leaves: dict[str, list[tuple[fx.Node, Tensor]]] = {}
        self._gradients: dict[fx.Node, Tensor] = {}
        for node in captured.graph_module.graph.nodes:
            if node.op == "placeholder" and node.target in captured.sizes:
                name, dim = captured.sizes[node.target]
                self._values[node] = tensors[name].shape[dim]
            elif node.op == "placeholder":
                self._values[node] = samples if node.target == NUM_SAMPLES else tensors[node.target]
            elif node.op == "get_attr":
                self._values[node] = attribute(captured.graph_module, node.target)
            elif node.op == "output":
                self._loss = node.args[0]
            elif not makes_tensors(node):
                self._values[node] = node.target(*fx.node.map_arg(node.args, self._values.__getitem__), **node.kwargs)

    def value(self, node: fx.Node) -> Any:
        """What ``node`` is, once its segment has run; sizes, inputs and parameters from the start."""
        return self._values[node]

    @property
    def loss(self) -> Tensor:
        """The loss, once every segment has run."""
        loss: Tensor = self._values[self._loss]
        return loss

    def times(self) -> dict[str, tuple[float, BackwardTimes]]:
        """Seconds of each segment's forward and backward, as far as they were run; asked once, after the pass."""
        self._clock.settle()
        return {name: (self._seconds(laps.forward), self._backward_times(laps)) for name, laps in self._laps.items()}

    def laps(self, segment: LayerSegment) -> Laps:
        """Those of ``segment``, as far as it was run."""
        return self._laps[segment.name]

    def forward(self, segment: LayerSegment) -> None:
        """Runs ``segment``, and times its operators."""
        local = {node: self._values[node] for node in segment.reads}
        leaves = []
        for node, value in local.items():
            if value.is_floating_point() or value.is_complex():
                local[node] = value.detach().requires_grad_(value.requires_grad)
                leaves.append((node, local[node]))
        self._leaves[segment.name] = [(node, leaf) for node, leaf in leaves if leaf.requires_grad]

        def read(node: fx.Node) -> Any:
            return local[node] if node in local else self._values[node]

        self._current.queue = self._queues[segment.name] = WeightGradientQueue()
        laps = self._laps[segment.name] = Laps()
        with autocast(self._device, self._autocast):
            for node in segment.calls:
                arguments = fx.node.map_arg(node.args, read)
                keywords = fx.node.map_arg(node.kwargs, read)
                function = (deferred(node, self._current) if self._split else None) or function_called(node)
                if is_output_of(node):
                    self._values[node] = function(*arguments, **keywords)
                    continue
                started = self._clock.start((node.name, self._split))
                value = function(*arguments, **keywords)
                laps.forward.append(self._clock.stop(started))
                self._values[node] = value

    def start_backward(self) -> None:
        """Puts the gradient of the loss in place."""
        self._gradients[self._loss] = torch.ones_like(self.loss)

    def gradients_of(self, segment: LayerSegment) -> tuple[list[Tensor], list[Tensor]]:
        """Outputs of ``segment`` that the loss depends on, and their gradients."""
        pairs = [
            (self._values[node], self._gradients[node])
            for node in segment.results
            if node in self._gradients and self._values[node].requires_grad
        ]
        return [value for value, _ in pairs], [gradient for _, gradient in pairs]

    def backward(self, segment: LayerSegment) -> None:
        """Runs and times the backward of ``segment``, adding into ``.grad`` of its parameters; frees what it kept."""
        self.backward_input(segment)
        self.backward_weight(segment)

    def backward_input(self, segment: LayerSegment) -> None:
        """As :meth:`backward`, but where it is split the gradients of weights are left to :meth:`backward_weight`."""
        outputs, gradients = self.gradients_of(segment)
        leaves = self._leaves.pop(segment.name)
        if not outputs:
            return
        laps = self._laps[segment.name]
        started = self._clock.start((segment.name, "backward", self._split))
        torch.autograd.backward(outputs, gradients)
        laps.backward.append(self._clock.stop(started))
        for node in segment.results:
            self._gradients.pop(node, None)
        input_gradients = [(node, leaf.grad) for node, leaf in leaves if leaf.grad is not None]
        for _, leaf in leaves:
            leaf.grad = None
        laps.backward.extend(self._hand_on(segment, input_gradients))

    def backward_weight(self, segment: LayerSegment) -> None:
        """What :meth:`backward_input` left."""
        queue = self._queues.pop(segment.name)
        if self._split and len(queue) > 0:
            started = self._clock.start((segment.name, "weight"))
            queue.run()
            self._laps[segment.name].weight.append(self._clock.stop(started))

    def gradients_under_way(self) -> list[Tensor]:
        """Gradients of values whose makers' backward is still to come."""
        return list(self._gradients.values())

    def left_of(self, segment: LayerSegment) -> list[Tensor]:
        """What the gradients of the weights of ``segment`` will be computed from."""
        return self._queues[segment.name].held()

    def _backward_times(self, laps: Laps) -> BackwardTimes:
        first_s = self._seconds(laps.backward)
        return BackwardTimes(0.0, first_s, self._seconds(laps.weight)) if self._split else BackwardTimes(first_s)

    def _seconds(self, laps: Iterable[Any]) -> float:
        return sum((self._clock.seconds(lap) for lap in laps), 0.0)

    def _hand_on(self, segment: LayerSegment, input_gradients: Sequence[tuple[fx.Node, Tensor]]) -> list[Any]:
        """Adds gradients of what ``segment`` reads to those that other readers gave; the laps that took."""
        laps = []
        for node, gradient in input_gradients:
            if node in self._gradients:
                started = self._clock.start((segment.name, node.name, "sum"))
                self._gradients[node] = self._gradients[node] + gradient
                laps.append(self._clock.stop(started))
            else:
                self._gradients[node] = gradient
        return laps


_CHAIN = 20


@dataclass(frozen=True, slots=True)
class TimingEffort:
    """How often to measure.

    Attributes:
        num_warm_ups: passes whose times are thrown away.
        min_runs, max_runs: passes; more than the least until the standard error of a pass is below ``error``.
        split_runs: passes for the halves of backward.
        split_warm_ups: the same before those.
    """

    num_warm_ups: int = 3
    min_runs: int = 10
    max_runs: int = 20
    split_runs: int = 6
    error: float = 0.01
    split_warm_ups: int = 1


QUICK = TimingEffort(num_warm_ups=1, min_runs=4, max_runs=4, split_runs=3)


def shared(effort: TimingEffort, num_processes: int) -> TimingEffort:
    """What each of several processes does, so that all together run about as many passes as one with ``effort``.

    One warm-up is enough: whole steps are timed before.  Medians want no fewer than 4 runs a process.
    """
    if num_processes == 1:
        return effort

    def share(runs: int, least: int) -> int:
        return max(least, math.ceil(1.5 * runs / num_processes))

    return replace(
        effort,
        num_warm_ups=1,
        min_runs=share(effort.min_runs, 4),
        max_runs=share(effort.max_runs, 4),
        split_runs=share(effort.split_runs, 3),
        error=effort.error * math.sqrt(num_processes),
    )


@dataclass(frozen=True, slots=True)
class TimedLayer:
    """Seconds of one layer, and how they were found; ``raw_s`` and ``alike`` as of a ``Measurement`` of a profile."""

    forward_s: float
    backward_s: float
    backward_input_s: float
    backward_weight_s: float
    num_runs: int
    spread: float
    raw_s: tuple[float, ...] = ()
    alike: str = ""


@dataclass(slots=True)
class _Samples:
    forward_s: list[float] = field(default_factory=list)
    backward_s: list[float] = field(default_factory=list)
    input_s: list[float] = field(default_factory=list)
    weight_s: list[float] = field(default_factory=list)


def time_layers(
    captured: CapturedModule,
    tensors: Mapping[str, Tensor],
    samples: int,
    effort: TimingEffort,
    after_pass: Callable[[str, float, float], None],
    clock: LapClock | None = None,
) -> dict[str, TimedLayer]:
    """The times of every layer for ``samples`` samples.

    Args:
        tensors: the graph's inputs by name.
        after_pass: called after every pass with the layer that takes longest, its seconds and its spread.
        clock: of the device that the tensors are on; by default that of the processor.
    """

    def start(split: bool) -> SegmentedPass:
        return SegmentedPass(captured, tensors, samples, clock, split)

    return time_segments(segments(captured), start, effort, after_pass, clock)


def time_segments(
    parts: Sequence[LayerSegment],
    start: Callable[[bool], SegmentedPass],
    effort: TimingEffort,
    after_pass: Callable[[str, float, float], None],
    clock: LapClock | None = None,
) -> dict[str, TimedLayer]:
    """The times of ``parts``, run in passes that ``start`` makes, backward in halves or whole."""
    samples_of = {part.name: _Samples() for part in parts}
    call_s = backward_call_s(clock)

    def once(split: bool) -> dict[str, tuple[float, BackwardTimes]]:
        return run_pass(parts, start, split)

    for _ in range(effort.num_warm_ups):
        once(split=False)
        after_pass("warm-up", 0.0, 0.0)
    totals: list[float] = []
    while len(totals) < effort.min_runs or (len(totals) < effort.max_runs and _error(totals) > effort.error):
        times = once(split=False)
        for name, (forward_s, backward) in times.items():
            samples_of[name].forward_s.append(forward_s)
            samples_of[name].backward_s.append(max(0.0, backward.both_s - call_s))
        totals.append(sum(forward_s + backward.both_s for forward_s, backward in times.values()))
        after_pass(*_slowest(samples_of))
    for index in range(effort.split_warm_ups + effort.split_runs):
        times = once(split=True)
        if index >= effort.split_warm_ups:
            for name, (_, backward) in times.items():
                samples_of[name].input_s.append(max(0.0, backward.input_s - call_s))
                samples_of[name].weight_s.append(backward.weight_s)
        after_pass(*_slowest(samples_of))
    return {part.name: _summary(samples_of[part.name]) for part in parts}


def backward_call_s(clock: LapClock | None = None) -> float:
    """What a call of autograd takes beside the operators: a stage makes one, a segmented pass one a layer.

    A chain of one view against a chain of many tells the call from the node.  Beside a GPU nothing: the call runs while
    the GPU works on what it was given before, and what of it shows in the time between events cannot be told.
    """
    if clock is not None and not isinstance(clock, ThreadClock):
        return 0.0
    one_s = _chain_s(1)
    many_s = _chain_s(_CHAIN)
    return max(0.0, one_s - (many_s - one_s) / (_CHAIN - 1))


def _chain_s(length: int) -> float:
    leaf = torch.ones(1, requires_grad=True)
    gradient = torch.ones(1)
    clock = ThreadClock()
    times = []
    for _ in range(30):
        value = leaf
        for _ in range(length):
            value = value.view_as(value)
        leaf.grad = None
        started = clock.start()
        torch.autograd.backward([value], [gradient])
        times.append(clock.seconds(clock.stop(started)))
    return statistics.median(times)


def run_pass(
    parts: Sequence[LayerSegment],
    start: Callable[[bool], SegmentedPass],
    split: bool,
    before_each: Callable[[], None] | None = None,
) -> dict[str, tuple[float, BackwardTimes]]:
    """The times of one pass over ``parts``, with nothing in their parameters' gradients.

    Args:
        before_each: called before each forward and backward, untimed.
    """
    for part in parts:
        for parameter in part.parameters:
            parameter.grad = None
    gc.collect()
    gc.disable()
    try:
        run = start(split)
        for part in parts:
            if before_each is not None:
                before_each()
            run.forward(part)
        run.start_backward()
        for part in reversed(parts):
            if before_each is not None:
                before_each()
            run.backward(part)
        return run.times()
    finally:
        gc.enable()


def _error(totals: Sequence[float]) -> float:
    """Relative standard error of the median, from the interquartile range of a normal distribution."""
    return 1.25 * spread(totals) / 1.35 / math.sqrt(len(totals))


def _slowest(samples_of: Mapping[str, _Samples]) -> tuple[str, float, float]:
    name = max(samples_of, key=lambda layer: samples_of[layer].forward_s[-1] + samples_of[layer].backward_s[-1])
    whole = _whole(samples_of[name])
    return name, statistics.median(whole), spread(whole)


def _whole(values: _Samples) -> list[float]:
    return [forward_s + backward_s for forward_s, backward_s in zip(values.forward_s, values.backward_s, strict=True)]


def _summary(values: _Samples) -> TimedLayer:
    backward_s = trimmed_mean(values.backward_s)
    input_s = trimmed_mean(values.input_s)
    weight_s = trimmed_mean(values.weight_s)
    if not weight_s:  # there is one half only, and it is the whole
        input_s = backward_s
    whole = _whole(values)
    return TimedLayer(
        trimmed_mean(values.forward_s),
        backward_s,
        input_s,
        weight_s,
        len(whole),
        round(spread(whole), 4),
        tuple(float(f"{value:.4g}") for value in whole),
    )
