"""Parts of layers, measured at their own shapes: a shard's kernel may run at another speed than a share of the whole.

In each pass every layer does one part, in the order of the network, forward and then backward, so that caches see about
as much between a layer's forward and its backward as they do on a rank.

Which parts of layers are measured, of those that plans may use: few where costs are smooth over the samples.

Parts of equal extents form a line over numbers of samples.  Its ends are measured; between them, for layers that make
up more than ``Limits.share`` of the step, the middle of every stretch longer than a factor of 2, and on by halves where
reading and measuring disagree (:mod:`profiler.measure.sizes`).  Others are read off the line.

The parts that are worth measuring, round by round, each turn chosen by what the turns before it found.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import log

from torch import Tensor

from planner.ir.profile import Measurement, PartShape
from profiler.measure.back_ends import back_end_keys
from profiler.measure.contention import RunDelay
from profiler.measure.host_time import OF_CALLS, added
from profiler.measure.memory import workspace_bytes
from profiler.measure.noise import CallClock, CudaClock, LapClock
from profiler.measure.partial_results import PartCosts, SizeCosts
from profiler.measure.progress import ProgressCounter
from profiler.measure.sizes import TESTED_RATIO, Limits, ReadBetween, reading_error
from profiler.measure.timing import SegmentedPass, TimedLayer, TimingEffort, segments, time_segments
from profiler.shards.arguments import ValueOf
from profiler.shards.network import PartNetwork, PartPass, part_network
from profiler.source.model import LoadedModel, example_of
from runtime.captured import CapturedModule

AfterPass = Callable[[str, float, float], None]


@dataclass(frozen=True, slots=True)
class Round:
    """Parts that are measured in one go: at most one of each layer.

    Attributes:
        samples: of the pass over the whole network that they are cut from.
        shapes: in the order of the graph.
    """

    samples: int
    shapes: tuple[PartShape, ...]


def rounds(shapes: Sequence[PartShape], sizes: Sequence[int]) -> tuple[Round, ...]:
    """All ``shapes``, each cut from the least of ``sizes`` (which ascend) that has enough samples."""
    waiting: dict[tuple[int, str], list[PartShape]] = {}
    for shape in shapes:
        size = next((size for size in sizes if size >= shape.samples), None)
        if size is not None:
            waiting.setdefault((size, shape.layers[0]), []).append(shape)
    turns = []
    for size in sizes:
        mine = [queue for (samples, _), queue in waiting.items() if samples == size]
        for turn in range(max(map(len, mine), default=0)):
            turns.append(Round(size, tuple(queue[turn] for queue in mine if len(queue) > turn)))
    return tuple(turns)


def whole_values(captured: CapturedModule, tensors: Mapping[str, Tensor], samples: int) -> ValueOf:
    """What every node is in a forward pass over the whole network."""
    run = SegmentedPass(captured, tensors, samples)
    for segment in segments(captured):
        run.forward(segment)
    return run.value


def measure_round(
    captured: CapturedModule,
    value_of: ValueOf,
    each: Round,
    whole: SizeCosts,
    effort: TimingEffort,
    after_pass: AfterPass,
    clock: LapClock | None = None,
) -> Iterator[Measurement]:
    """Measurements of the parts, for every layer that has such a part; nothing of parts that cannot be run alone.

    Args:
        value_of: what every node is for ``each.samples`` samples.
        whole: of whole layers at as many.  What a part saves is its share of what the layer saves in
            the network, where another one may keep its inputs; halos that it received are counted with the messages.
    """
    network = part_network(captured, value_of, each.samples, each.shapes)
    if network.shapes:
        yield from _measured(network, whole, effort, after_pass, clock)


def _measured(
    network: PartNetwork,
    whole: SizeCosts,
    effort: TimingEffort,
    after_pass: AfterPass,
    clock: LapClock | None,
) -> Iterator[Measurement]:
    parts = segments(network.captured)

    def timed(effort: TimingEffort, after_pass: AfterPass, clock: LapClock | None) -> Mapping[str, TimedLayer]:
        return time_segments(parts, lambda split: PartPass(network, clock, split), effort, after_pass, clock)

    times = timed(effort, after_pass, clock)
    if whole.calls_share and isinstance(clock, CudaClock):
        calls = timed(OF_CALLS, lambda *slowest: None, CallClock(clock.device))
        times = added(times, calls, whole.calls_share)
    saved_bytes = {one.layer: one.saved_bytes for one in whole.measurements}
    workspace = workspace_bytes(parts, PartPass(network))
    keys = back_end_keys(network.captured, network.captured.graph.samples)
    for name, shape in network.shapes.items():
        for layer in shape.layers:
            yield Measurement(
                layer=layer,
                samples=shape.samples,
                forward_s=times[name].forward_s,
                backward_s=times[name].backward_s,
                backward_input_s=times[name].backward_input_s,
                backward_weight_s=times[name].backward_weight_s,
                saved_bytes=round(saved_bytes[layer] * network.shares[name]),
                workspace_bytes=workspace[name],
                num_runs=times[name].num_runs,
                spread=times[name].spread,
                key=keys[name],
                part=shape.part,
                before=shape.before,
                raw_s=times[name].raw_s,
            )


ShapeSizes = Sequence[PartShape]
"""Parts of the same layers and extents, by growing number of samples."""


def next_parts(
    shapes: Sequence[PartShape],
    tried: Collection[PartShape],
    measured: Sequence[Measurement],
    shares: Mapping[str, float],
    limits: Limits,
    read: ReadBetween,
) -> tuple[PartShape, ...]:
    """The parts to measure next, in the order of ``shapes``; none if there are enough.

    Args:
        shapes: that plans may use.
        tried: so far; those of them that can be run alone are in ``measured``.
        shares: of the step, by layer.
    """
    by_part = {(one.layer, one.samples, one.part, one.before): one for one in measured}
    lines: dict[tuple[tuple[str, ...], tuple[int, ...], int], list[PartShape]] = {}
    for shape in shapes:
        lines.setdefault((shape.layers, shape.part, shape.before), []).append(shape)
    wanted: set[PartShape] = set()
    for line in lines.values():
        line.sort(key=lambda shape: shape.samples)
        ends = [shape for shape in dict.fromkeys((line[0], line[-1])) if shape not in tried]
        matters = max(shares.get(name, 0.0) for name in line[0].layers) > limits.share
        wanted.update(ends or (_inside(line, tried, by_part, limits, read) if matters else ()))
    return tuple(shape for shape in shapes if shape in wanted)


def _inside(
    line: ShapeSizes,
    tried: Collection[PartShape],
    by_part: Mapping[tuple[str, int, tuple[int, ...], int], Measurement],
    limits: Limits,
    read: ReadBetween,
) -> Iterator[PartShape]:
    """Parts between the ends of ``line``, which were tried."""
    measured = {s: by_part.get((s.layers[0], s.samples, s.part, s.before)) for s in line if s in tried}

    def halve(stretch: ShapeSizes) -> Iterator[PartShape]:
        low = stretch[0].samples
        high = stretch[-1].samples
        if len(stretch) < 3:
            return
        at = min(range(1, len(stretch) - 1), key=lambda k: abs(2 * log(stretch[k].samples) - log(low * high)))
        one = measured.get(stretch[at])
        if stretch[at] not in tried:
            yield stretch[at]
            return
        if one is None:  # it cannot be run alone, nor can others of these extents
            return
        outside = [each for shape, each in measured.items() if each is not None and not low < shape.samples < high]
        if reading_error([one], {one.layer: sorted(outside, key=lambda each: each.samples)}, limits, read) > 1:
            yield from halve(stretch[: at + 1])
            yield from halve(stretch[at:])

    if line[-1].samples > TESTED_RATIO * line[0].samples:
        yield from halve(line)


def likely_rounds(
    shapes: Sequence[PartShape],
    tried: Collection[PartShape],
    measured: Sequence[Measurement],
    whole: Sequence[SizeCosts],
    sizes: Sequence[int],
    limits: Limits,
    read: ReadBetween | None,
) -> list[float]:
    """What a pass over each round takes that is likely to be measured, in seconds.

    Those that :func:`next_parts` says now and those that it says then for certain; later ones depend on what is found.

    Args:
        whole: that are measured; ``sizes``: that are, or will be, ascending.
        read: None: all are measured.
    """
    waiting = [shape for shape in shapes if shape not in tried]
    if read is not None:
        now = next_parts(shapes, tried, measured, _shares(whole), limits, read)
        waiting = [*now, *next_parts(shapes, {*tried, *now}, measured, _shares(whole), limits, read)]
    return [round_s(each, whole) for each in rounds(waiting, sizes)]


def round_s(each: Round, whole: Sequence[SizeCosts]) -> float:
    """About what a pass over a round takes: what its layers take at the nearest size, in proportion to the samples."""
    nearest = min(whole, key=lambda size: abs(log(size.samples / each.samples)))
    layer_s = {one.layer: one.passes_s for one in nearest.measurements}
    return sum(layer_s.get(shape.layers[0], 0.0) * shape.samples / nearest.samples for shape in each.shapes)


def _shares(whole: Sequence[SizeCosts]) -> dict[str, float]:
    """Of the step, by layer, at the largest size."""
    largest = max(whole, key=lambda size: size.samples).measurements
    step_s = sum(one.passes_s for one in largest)
    return {one.layer: one.passes_s / max(1e-12, step_s) for one in largest}


CostsByRound = Iterator[tuple[Round, PartCosts]]


class PartRounds:
    """Measures parts of the layers of ``captured``.

    Args:
        whole: what was measured of whole layers, at the sizes at which the model runs.
        progress: told of every turn and pass.
    """

    def __init__(
        self,
        captured: CapturedModule,
        model: LoadedModel,
        whole: Sequence[SizeCosts],
        effort: TimingEffort,
        progress: ProgressCounter,
        clock: LapClock,
    ) -> None:
        self._captured = captured
        self._model = model
        self._effort = effort
        self._progress = progress
        self._clock = clock
        self._sized = whole
        self._whole = {size.samples: size for size in whole}
        self._sizes = tuple(sorted(self._whole))

    def every(self, wanted: Sequence[PartShape], done: Sequence[PartCosts]) -> CostsByRound:
        """All of ``wanted`` that is not in ``done``."""
        tried = {shape for each in done for shape in each.shapes}
        yield from self._measured([shape for shape in wanted if shape not in tried])

    def chosen(
        self, wanted: Sequence[PartShape], done: Sequence[PartCosts], limits: Limits, read: ReadBetween
    ) -> CostsByRound:
        """As many of ``wanted`` as reading the others off them needs (:mod:`profiler.shards.measure`)."""
        tried = {shape for each in done for shape in each.shapes}
        measured = [one for each in done for one in each.measurements]
        shares = _shares(self._sized)
        while turn := next_parts(wanted, tried, measured, shares, limits, read):
            after = next_parts(wanted, {*tried, *turn}, measured, shares, limits, read)
            for each, costs in self._measured(turn, after):
                measured += costs.measurements
                yield each, costs
            tried.update(turn)

    def _measured(self, shapes: Sequence[PartShape], after: Sequence[PartShape] = ()) -> CostsByRound:
        planned = rounds(shapes, self._sizes)
        likely = (*planned, *rounds(after, self._sizes))
        self._progress.start_parts([round_s(each, self._sized) for each in likely], len(shapes) + len(after))
        for samples in dict.fromkeys(each.samples for each in planned):
            tensors = example_of(self._captured.graph.inputs, self._model, samples)
            value_of = whole_values(self._captured, tensors, samples)
            whole = self._whole[samples]
            for each in planned:
                if each.samples == samples:
                    delay = RunDelay()
                    measurements = measure_round(
                        self._captured, value_of, each, whole, self._effort, self._progress.passed_part, self._clock
                    )
                    yield each, PartCosts(each.shapes, tuple(measurements), delay.share())
