"""The parts that are worth measuring, round by round, each turn chosen by what the turns before it found."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from planner.ir.profile import Measurement, PartShape
from profiler.capture import Captured
from profiler.clocks import Clock
from profiler.example import example_of
from profiler.finished import PartCosts, SizeCosts
from profiler.model import LoadedModel
from profiler.part_sampling import next_parts
from profiler.parts import AfterPass, Round, measure_round, rounds, whole_values
from profiler.sampling import Limits, Read
from profiler.timing import Effort

Found = Iterator[tuple[Round, PartCosts]]


class PartRounds:
    """Measures parts of the layers of ``captured``.

    Args:
        whole: what was measured of whole layers, at the sizes at which the model runs.
        after_pass: as of :func:`profiler.parts.measure_round`.
    """

    def __init__(
        self,
        captured: Captured,
        model: LoadedModel,
        whole: Sequence[SizeCosts],
        effort: Effort,
        after_pass: AfterPass,
        clock: Clock,
    ) -> None:
        self._captured, self._model, self._effort = captured, model, effort
        self._after_pass, self._clock = after_pass, clock
        self._whole = {size.samples: {one.layer: one for one in size.measurements} for size in whole}
        self._sizes = tuple(sorted(self._whole))

    def every(self, wanted: Sequence[PartShape], done: Sequence[PartCosts]) -> Found:
        """All of ``wanted`` that is not in ``done``."""
        tried = {shape for each in done for shape in each.shapes}
        yield from self._measured([shape for shape in wanted if shape not in tried])

    def chosen(self, wanted: Sequence[PartShape], done: Sequence[PartCosts], limits: Limits, read: Read) -> Found:
        """As many of ``wanted`` as reading the others off them needs (:mod:`profiler.part_sampling`)."""
        tried = {shape for each in done for shape in each.shapes}
        found = [one for each in done for one in each.measurements]
        shares = self._shares()
        while turn := next_parts(wanted, tried, found, shares, limits, read):
            for each, costs in self._measured(turn):
                found += costs.measurements
                yield each, costs
            tried.update(turn)

    def _measured(self, shapes: Sequence[PartShape]) -> Found:
        planned = rounds(shapes, self._sizes)
        for samples in dict.fromkeys(each.samples for each in planned):
            tensors = example_of(self._captured.graph.inputs, self._model, samples)
            value_of = whole_values(self._captured, tensors, samples)
            whole = self._whole[samples]
            for each in planned:
                if each.samples == samples:
                    found = measure_round(
                        self._captured, value_of, each, whole, self._effort, self._after_pass, self._clock
                    )
                    yield each, PartCosts(each.shapes, tuple(found))

    def _shares(self) -> dict[str, float]:
        """Of the step, by layer, at the largest size."""
        largest = self._whole[self._sizes[-1]]
        step_s = sum(map(_seconds, largest.values()))
        return {name: _seconds(one) / max(1e-12, step_s) for name, one in largest.items()}


def _seconds(one: Measurement) -> float:
    return one.forward_s + one.backward_s
