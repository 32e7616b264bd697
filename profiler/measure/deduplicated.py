"""Layers that do the same work on the same shapes: of the twelve blocks of a GPT two are timed, the first and the last.

    forward     1  2  3  4 ...  loss        a layer between the first and the last of its kind is stood in for: it gives
    timed       x  .  .  x       x          what the first gave, and hands back the gradients that the last handed back

The layers that are timed thus run in order, on values of their true shapes, behind the layers that feed them.  Before
that come the two passes over all layers whose memory is watched.  They are timed as well, and say which are alike
(operators, constants, shapes, strides, dtypes, which gradients flow, and where they are added up), and whether they
take alike, too; those that do not are all timed.  So are all layers where the sum comes out another one than that pass
says, and one more (:data:`MOST_SUM`), and those of a network whose passes are short (:data:`LEAST_PASS_S`): where
everything fits into a cache, what lies between two layers matters, and all of them are soon timed.

Layers whose outputs are not all floating point (indices, masks, maps of sites) or that depend on data run as they are.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx

from cuda_ops.dense.data_dependent import is_unit
from profiler.measure.memory import Footprint, metered, watched_passes
from profiler.measure.noise import LapClock
from profiler.measure.timing import (
    BackwardTimes,
    LayerSegment,
    SegmentedPass,
    TimedLayer,
    TimingEffort,
    run_pass,
    segments,
    time_segments,
)
from runtime.captured import CapturedModule, attribute

LEAST_PASS_S = 0.2
MOST_APART = 0.1
MOST_SUM = 0.1
"""By how much layers that are alike may be apart, as a whole and in the sum, for some to stand for the others."""
_MOST_OF_ONE = 0.5  # by how much a single layer may, timed once
_MATTERS = 0.005  # a share of the pass
_FEWEST = 4

LayerSeconds = Mapping[str, tuple[float, BackwardTimes]]
"""A pass: seconds of forward and backward, by layer."""


@dataclass(frozen=True, slots=True)
class StandIn:
    """The layers that are timed in place of one.

    Attributes:
        first, last: of all that are alike, in the order of the graph.
        nearer: that of the two whose figures count.
    """

    first: LayerSegment
    last: LayerSegment
    nearer: str


@dataclass(frozen=True, slots=True)
class FirstPasses:
    """What passes over all layers say before any is timed; they warm up, too.

    Attributes:
        samples: that they ran with.
        footprints: bytes of every layer.
        seconds: of forward and backward.
        stand_ins: by name, of the layers that need not be timed.
    """

    samples: int
    footprints: Mapping[str, Footprint] = field(default_factory=dict)
    seconds: float = 0.0
    stand_ins: Mapping[str, StandIn] = field(default_factory=dict)


def first_passes(
    captured: CapturedModule,
    tensors: Mapping[str, Tensor],
    samples: int,
    clock: LapClock | None,
    *,
    deduplicates: bool,
) -> FirstPasses:
    """Two passes over all layers, watched, backward whole and in halves; parameters are left without gradients.

    Args:
        tensors: the graph's inputs by name, for ``samples`` samples.
        deduplicates: whether some layers may stand for others.
    """
    with metered(next((tensor.device for tensor in tensors.values()), torch.device("cpu"))) as meter:
        footprints, whole, _ = watched_passes(captured, tensors, samples, meter, clock)
    times = whole.times()
    whole_s = sum(map(_seconds, times.values()))
    stand_ins = (
        stand_ins_of(captured, segments(captured), whole, times) if deduplicates and whole_s >= LEAST_PASS_S else {}
    )
    return FirstPasses(samples, footprints, whole_s, stand_ins)


def time_deduplicated(
    captured: CapturedModule,
    tensors: Mapping[str, Tensor],
    effort: TimingEffort,
    after_pass: Callable[[str, float, float], None],
    clock: LapClock | None,
    first: FirstPasses,
) -> dict[str, TimedLayer]:
    """As :func:`profiler.measure.timing.time_layers`, with some layers' times standing for others that are alike."""
    parts = segments(captured)
    rest = replace(effort, num_warm_ups=max(0, effort.num_warm_ups - 1), split_warm_ups=0)

    def timed(without: Mapping[str, StandIn]) -> dict[str, TimedLayer]:
        asked = [part for part in parts if part.name not in without]

        def start(split: bool) -> SegmentedPass:
            return ShorterPass(parts, without, captured, tensors, first.samples, clock, split)

        of_asked = time_segments(asked, start, rest, after_pass, clock)
        others = {name: replace(of_asked[each.nearer], alike=each.nearer) for name, each in without.items()}
        return {part.name: (of_asked | others)[part.name] for part in parts}

    measured = timed(first.stand_ins)
    sum_s = sum(each.forward_s + each.backward_s for each in measured.values())
    if not first.stand_ins or abs(sum_s / first.seconds - 1) <= MOST_SUM:
        return measured

    def start_whole(split: bool) -> SegmentedPass:
        return SegmentedPass(captured, tensors, first.samples, clock, split)

    whole_s = sum(map(_seconds, run_pass(parts, start_whole, split=False).values()))
    return timed({}) if abs(sum_s / whole_s - 1) > MOST_SUM else measured


def stand_ins_of(
    captured: CapturedModule, parts: Sequence[LayerSegment], run: SegmentedPass, times: LayerSeconds
) -> dict[str, StandIn]:
    """By name, the layers that others stand for.

    Args:
        run: a pass over all ``parts``, which took ``times``.
    """
    whole_s = sum(map(_seconds, times.values()))
    stand_ins: dict[str, StandIn] = {}
    for layers in _classes(captured, parts, run):
        first = layers[0]
        last = layers[-1]
        between = layers[1:-1]
        if len(layers) < _FEWEST:
            continue
        ends_s = [_seconds(times[each.name]) for each in (first, last)]
        between_s = [_seconds(times[each.name]) for each in between]
        end_s = statistics.fmean(ends_s)
        apart_s = abs(statistics.median(between_s) - end_s)
        is_among = min(between_s) <= end_s <= max(between_s)
        if not is_among and apart_s > MOST_APART * end_s and apart_s * len(between) > _MATTERS * whole_s:
            continue
        for index, (part, own_s) in enumerate(zip(between, between_s, strict=True)):
            end = 0 if 2 * index < len(between) else 1
            off_s = abs(own_s - ends_s[end])
            if off_s <= max(_MOST_OF_ONE * ends_s[end], _MATTERS * whole_s):
                stand_ins[part.name] = StandIn(first, last, (first, last)[end].name)
    return stand_ins


class ShorterPass(SegmentedPass):
    """A pass in which some layers are stood in for; ``forward`` and ``backward`` are called on the others.

    Args:
        parts: all layers, in order.
        stand_ins: by name, of those that do not run.
    """

    def __init__(self, parts: Sequence[LayerSegment], stand_ins: Mapping[str, StandIn], *arguments: Any) -> None:
        super().__init__(*arguments)
        self._stand_ins = stand_ins
        self._lasts = {each.last.name for each in stand_ins.values()}
        self._handed: dict[str, dict[int, Tensor]] = {}
        self._ahead: dict[str, list[LayerSegment]] = {}
        waiting: list[LayerSegment] = []
        for part in parts:
            if part.name in stand_ins:
                waiting.append(part)
            else:
                self._ahead[part.name] = waiting
                waiting = []

    def forward(self, segment: LayerSegment) -> None:
        """Runs ``segment``; what lies before it and does not run is there first."""
        for part in self._ahead[segment.name]:
            for node, twin in zip(part.calls, self._stand_ins[part.name].first.calls, strict=True):
                self._values[node] = self._values[twin]
        super().forward(segment)

    def backward(self, segment: LayerSegment) -> None:
        """As of all passes; gradients go on through what lies before ``segment``."""
        super().backward(segment)
        for part in reversed(self._ahead[segment.name]):
            for node in part.results:
                self._gradients.pop(node, None)
            handed = self._handed.get(self._stand_ins[part.name].last.name, {})
            self._hand_on(part, [(part.reads[index], gradient) for index, gradient in handed.items()])

    def _hand_on(self, segment: LayerSegment, gradients: Sequence[tuple[fx.Node, Tensor]]) -> list[Any]:
        if segment.name in self._lasts:
            self._handed[segment.name] = {segment.reads.index(node): gradient for node, gradient in gradients}
        return super()._hand_on(segment, gradients)


def _classes(captured: CapturedModule, parts: Sequence[LayerSegment], run: SegmentedPass) -> list[list[LayerSegment]]:
    """Layers that are alike, each class in order; of those that nothing can stand in for nothing."""
    readers: dict[object, list[int]] = {}
    for index, part in enumerate(parts):
        for each in (*part.reads, *part.parameters):
            readers.setdefault(each, []).append(index)
    classes: dict[object, list[LayerSegment]] = {}
    for index, part in enumerate(parts):
        values = [run.value(node) for node in part.results]
        if all(isinstance(value, Tensor) and value.is_floating_point() for value in values) and not any(
            map(is_unit, part.calls)
        ):
            later = [each for each in (*part.reads, *part.parameters) if readers[each][-1] > index]
            key = _key(captured, part, run, frozenset(map(id, later)))
            classes.setdefault(key, []).append(part)
    return list(classes.values())


def _key(captured: CapturedModule, part: LayerSegment, run: SegmentedPass, later: frozenset[int]) -> object:
    """What decides what a layer does, and how long it takes.

    Args:
        later: what of its inputs and parameters is read by a later layer, too, so that gradients are added.
    """
    places: dict[fx.Node, object] = {node: ("input", index) for index, node in enumerate(part.reads)}
    places.update((node, ("own", index)) for index, node in enumerate(part.calls))

    def described(node: fx.Node) -> object:
        if node in places:
            return places[node]
        value = attribute(captured.graph_module, str(node.target)) if node.op == "get_attr" else run.value(node)
        return _described(value) if isinstance(value, Tensor) else (type(value).__name__, repr(value))

    calls = []
    for node in part.calls:
        arguments = fx.node.map_arg((node.args, dict(node.kwargs)), lambda each: _Word(repr(described(each))))
        calls.append((node.target, repr(arguments)))
    reads = tuple((_described(run.value(node)), id(node) in later) for node in part.reads)
    weights = tuple((_described(weight), id(weight) in later) for weight in part.parameters)
    results = tuple((part.calls.index(node), bool(node.users), _described(run.value(node))) for node in part.results)
    return tuple(calls), reads, weights, results


class _Word(str):
    """Shown without quotes."""

    __slots__ = ()
    __repr__ = str.__str__


def _described(value: Tensor) -> object:
    strides = tuple(value.stride()) if value.layout == torch.strided else ()
    return tuple(value.shape), strides, str(value.dtype), value.requires_grad


def _seconds(times: tuple[float, BackwardTimes]) -> float:
    return times[0] + times[1].both_s
