"""Which random numbers the layers of a divided stage draw, from what each rank does of them.

An elementwise layer draws for its part, attention for the weights of its part's queries; any other layer draws for its
samples all that they have, of which its form cuts a part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from planner.ir.box import Box, Interval
from planner.ir.graph import SAMPLE, Layer
from planner.ir.plan import Placement
from runtime.spatial.step import Step
from runtime.stage.random.streams import Place

_IN_PARTS = frozenset({"pointwise", "attention"})


@dataclass(frozen=True, slots=True)
class DrawnPlaces:
    """The places of one rank, see :class:`runtime.stage.random.streams.Places`.

    Attributes:
        step: a layer of the stage as it is being run in training.
        layers: of the stage, by name.
        placements: by layer.
    """

    step: Callable[[str], Step]
    layers: Mapping[str, Layer]
    placements: Mapping[str, Placement]

    def place(self, layer: str, is_main: bool) -> Place:
        """What is drawn in the micro-batch that is being run."""
        step = self.step(layer)
        key = "place", is_main
        if key not in step.memo:
            step.memo[key] = place_of(step, is_main)
        found: Place = step.memo[key]
        return found

    def parts_of_samples(self, layer: str) -> int:
        """Into how many parts the samples of a layer are cut."""
        return _parts(self.placements[layer].cuts.get(SAMPLE, ()))

    def draws_all(self, layer: str) -> bool:
        """Whether every rank draws all that one device draws."""
        made, cuts = self.layers[layer], self.placements[layer].cuts
        dims = made.outputs[0].dims if made.kind in _IN_PARTS else (SAMPLE,)
        return all(_parts(cuts.get(dim, ())) == 1 for dim in dims)


def place_of(step: Step, is_main: bool = True) -> Place:
    """Which numbers a rank draws of a layer."""
    division = step.division
    start, count, total = 0, division.samples, division.samples
    if SAMPLE in division.work.dims and total:
        dim = division.work.dims.index(SAMPLE)
        each = division.work.shape[dim] // total
        start, count = step.done[dim].start // each, division.rows(step.position)
    shape = step.layer.outputs[0].shape
    if not is_main or step.layer.kind not in _IN_PARTS:
        return Place(start, count, total)
    if step.layer.kind == "pointwise":
        return Place(start, count, total, step.done, shape)
    keys = _num_keys(step)
    weights: Box = (*step.done[:-1], Interval(0, keys))
    return Place(start, count, total, weights, (*shape[:-1], keys))


def _num_keys(step: Step) -> int:
    index = step.input_of("key")
    if not isinstance(index, int):
        raise TypeError(f"the keys of {step.layer.name} are no value")
    return step.division.inputs[index].shape[-2]


def _parts(points: tuple[int, ...]) -> int:
    return max(1, len(points) - 1)
