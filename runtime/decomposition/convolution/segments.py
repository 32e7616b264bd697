"""Which filters of a rank belong to which groups of a convolution.  Pure integers.

A cut along the filters may run through a group.  Then the filters fall into up to three calls, each of whole groups or
of part of one:

    3 groups of 4 filters       0 0 0 0  1 1 1 1  2 2 2 2
    a rank's filters                [0 0][1 1 1 1][2]           part of group 0, group 1, part of group 2
"""

from __future__ import annotations

from dataclasses import dataclass

from planner.ir.box import Interval
from runtime.decomposition.convolution.terms import Window
from runtime.pieces import Cuts


@dataclass(frozen=True, slots=True)
class Segment:
    """Filters that one call of the operator makes.

    Attributes:
        outputs: the filters, as channels of the whole output.
        source, weight, bias: what of this rank's input, weight and bias goes in; everything where empty.
    """

    groups: int
    outputs: Interval
    source: Cuts = ()
    weight: Cuts = ()
    bias: Cuts = ()

    @property
    def is_whole(self) -> bool:
        """Whether the call takes all that the rank has."""
        return not (self.source or self.weight or self.bias)


def segments(window: Window, filters: Interval, read: Interval, channels: tuple[int, int]) -> tuple[Segment, ...]:
    """The calls that make ``filters``, in order.

    Args:
        filters: of this rank.  Its weight holds those of a convolution; of a transposed one in several groups it holds
            all that there are.
        read: the input channels that this rank reads.
        channels: of the whole input and of the whole output.
    """
    if window.groups == 1:
        return (Segment(1, filters),)
    inputs_each, outputs_each = channels[0] // window.groups, channels[1] // window.groups
    found, start = [], filters.start
    while start < filters.stop:
        group, offset = divmod(start, outputs_each)
        whole = 0 if offset else (filters.stop - start) // outputs_each
        stop = start + whole * outputs_each if whole else min(filters.stop, (group + 1) * outputs_each)
        number = max(1, whole)
        its = Interval(start, stop)
        source = (group * inputs_each - read.start, number * inputs_each)
        if window.transposed:
            rows = (group * inputs_each, number * inputs_each)
            columns = (0, outputs_each) if whole else (offset, len(its))
            weight = _cuts(((0, rows, channels[0]), (1, columns, outputs_each)))
            bias = _cuts(((0, (start, len(its)), channels[1]),))
        else:
            weight = bias = _cuts(((0, (start - filters.start, len(its)), len(filters)),))
        found.append(Segment(number, its, _cuts(((1, source, len(read)),)), weight, bias))
        start = stop
    return tuple(found)


def _cuts(parts: tuple[tuple[int, tuple[int, int], int], ...]) -> Cuts:
    return tuple((dim, *part) for dim, part, extent in parts if part != (0, extent))
