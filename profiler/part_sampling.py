"""Which parts of layers are measured, of those that plans may use: few where costs are smooth over the samples.

Parts of equal extents form a line over numbers of samples.  Its ends are measured; between them, for layers that make
up more than ``Limits.share`` of the step, the middle of every stretch longer than a factor of 2, and on by halves where
reading and measuring disagree (:mod:`profiler.sampling`).  Others are read off the line.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from math import log

from planner.ir.profile import Measurement, PartShape
from profiler.sampling import TESTED_RATIO, Limits, Read, reading_error

Line = Sequence[PartShape]
"""Parts of the same layers and extents, by growing number of samples."""


def next_parts(
    shapes: Sequence[PartShape],
    tried: Collection[PartShape],
    measured: Sequence[Measurement],
    shares: Mapping[str, float],
    limits: Limits,
    read: Read,
) -> tuple[PartShape, ...]:
    """The parts to measure next, in the order of ``shapes``; none if there are enough.

    Args:
        shapes: that plans may use.
        tried: so far; those of them that can be run alone are in ``measured``.
        shares: of the step, by layer.
    """
    known = {(one.layer, one.samples, one.part): one for one in measured}
    lines: dict[tuple[tuple[str, ...], tuple[int, ...]], list[PartShape]] = {}
    for shape in shapes:
        lines.setdefault((shape.layers, shape.part), []).append(shape)
    wanted: set[PartShape] = set()
    for line in lines.values():
        line.sort(key=lambda shape: shape.samples)
        ends = [shape for shape in dict.fromkeys((line[0], line[-1])) if shape not in tried]
        matters = max(shares.get(name, 0.0) for name in line[0].layers) > limits.share
        wanted.update(ends or (_inside(line, tried, known, limits, read) if matters else ()))
    return tuple(shape for shape in shapes if shape in wanted)


def _inside(
    line: Line,
    tried: Collection[PartShape],
    known: Mapping[tuple[str, int, tuple[int, ...]], Measurement],
    limits: Limits,
    read: Read,
) -> Iterator[PartShape]:
    """Parts between the ends of ``line``, which were tried."""
    found = {shape: known.get((shape.layers[0], shape.samples, shape.part)) for shape in line if shape in tried}

    def halve(stretch: Line) -> Iterator[PartShape]:
        low, high = stretch[0].samples, stretch[-1].samples
        if len(stretch) < 3:
            return
        at = min(range(1, len(stretch) - 1), key=lambda k: abs(2 * log(stretch[k].samples) - log(low * high)))
        one = found.get(stretch[at])
        if stretch[at] not in tried:
            yield stretch[at]
            return
        if one is None:  # it cannot be run alone, nor can others of these extents
            return
        outside = [each for shape, each in found.items() if each is not None and not low < shape.samples < high]
        if reading_error([one], {one.layer: sorted(outside, key=lambda each: each.samples)}, limits, read) > 1:
            yield from halve(stretch[: at + 1])
            yield from halve(stretch[at:])

    if line[-1].samples > TESTED_RATIO * line[0].samples:
        yield from halve(line)
