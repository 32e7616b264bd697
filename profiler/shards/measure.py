"""Parts of layers, measured at their own shapes: a shard's kernel may run at another speed than a share of the whole.

In each pass every layer does one part, in the order of the network, forward and then backward, so that caches see about
as much between a layer's forward and its backward as they do on a rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from planner.ir.profile import Measurement, PartShape
from profiler.capture.graph import Captured
from profiler.measure.backends import back_end_keys
from profiler.measure.clocks import Clock
from profiler.measure.memory import workspace_bytes
from profiler.measure.segments import SegmentedPass, segments
from profiler.measure.timing import Effort, time_segments
from profiler.shards.arguments import ValueOf
from profiler.shards.network import PartNetwork, PartPass, part_network

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
    found = []
    for size in sizes:
        mine = [queue for (samples, _), queue in waiting.items() if samples == size]
        for turn in range(max(map(len, mine), default=0)):
            found.append(Round(size, tuple(queue[turn] for queue in mine if len(queue) > turn)))
    return tuple(found)


def whole_values(captured: Captured, tensors: Mapping[str, Tensor], samples: int) -> ValueOf:
    """What every node is in a forward pass over the whole network."""
    run = SegmentedPass(captured, tensors, samples)
    for segment in segments(captured):
        run.forward(segment)
    return run.value


def measure_round(
    captured: Captured,
    value_of: ValueOf,
    each: Round,
    whole: Mapping[str, Measurement],
    effort: Effort,
    after_pass: AfterPass,
    clock: Clock | None = None,
) -> Iterator[Measurement]:
    """Measurements of the parts, for every layer that has such a part; nothing of parts that cannot be run alone.

    Args:
        value_of: what every node is for ``each.samples`` samples.
        whole: the measurements of whole layers at as many.  What a part saves is its share of what the layer saves in
            the network, where another one may keep its inputs; halos that it received are counted with the messages.
    """
    network = part_network(captured, value_of, each.samples, each.shapes)
    if network.shapes:
        yield from _measured(network, whole, effort, after_pass, clock)


def _measured(
    network: PartNetwork,
    whole: Mapping[str, Measurement],
    effort: Effort,
    after_pass: AfterPass,
    clock: Clock | None,
) -> Iterator[Measurement]:
    parts = segments(network.captured)
    times = time_segments(parts, lambda split: PartPass(network, clock, split), effort, after_pass, clock)
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
                saved_bytes=round(whole[layer].saved_bytes * network.shares[name]),
                workspace_bytes=workspace[name],
                num_runs=times[name].num_runs,
                spread=times[name].spread,
                key=keys[name],
                part=shape.part,
                raw_s=times[name].raw_s,
            )
