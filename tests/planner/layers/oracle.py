"""The oracle for access relations: spoil everything outside the boxes that a rule names, and see no difference."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from math import prod

import torch

from planner.ir.box import Box, Interval, intersect, whole
from planner.ir.graph import Layer, TensorSpec
from planner.layers import kind

Run = Callable[[list[torch.Tensor], list[torch.Tensor]], torch.Tensor]
"""(inputs, parameters) -> the work's tensor."""


def spec_of(tensor: torch.Tensor, dims: str) -> TensorSpec:
    return TensorSpec(tuple(dims.split()), tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))


def slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(interval.start, interval.stop) for interval in box)


def outside_spoilt(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    """NaN (or, of integers, another one) everywhere outside ``box``."""
    clipped = tuple(interval & full for interval, full in zip(box, whole(tuple(tensor.shape)), strict=True))
    spoilt = torch.full_like(tensor, torch.nan) if tensor.is_floating_point() else 1 - tensor.clamp(0, 1)
    if all(len(interval) for interval in clipped):
        spoilt[slices(clipped)] = tensor[slices(clipped)]
    return spoilt


def random_boxes(shape: tuple[int, ...], rng: random.Random, count: int) -> Iterator[Box]:
    yield whole(shape)
    for _ in range(count if prod(shape) else 0):
        starts = [rng.randrange(extent) for extent in shape]
        yield tuple(Interval(a, rng.randint(a + 1, extent)) for a, extent in zip(starts, shape, strict=True))


def assert_reads_no_more(
    layer: Layer,
    inputs: list[torch.Tensor],
    input_specs: tuple[TensorSpec, ...],
    parameters: list[torch.Tensor],
    run: Run,
    work_box: Box,
    is_smallest: bool = False,
) -> None:
    """The work box comes out of the boxes alone; if ``is_smallest``, not without the box's outermost slabs."""
    relation = kind(layer.kind)
    expected = run(inputs, parameters)[slices(work_box)]
    boxes = relation.input_boxes(layer, input_specs, work_box)
    assert len(boxes) == len(inputs)
    weights = tuple(TensorSpec(("dim",) * p.dim(), tuple(p.shape), "float64") for p in parameters)
    weight_boxes = relation.weight_boxes(layer, weights, work_box)
    spoilt = [outside_spoilt(x, box) for x, box in zip(inputs, boxes, strict=True)]
    spoilt_weights = [outside_spoilt(p, box) for p, box in zip(parameters, weight_boxes, strict=True)]
    found = run(spoilt, spoilt_weights)[slices(work_box)]
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-13, msg=lambda text: f"{work_box} {boxes}: {text}")
    if is_smallest:
        _assert_edges_are_read(inputs, boxes[0], run, parameters, work_box)


def _assert_edges_are_read(
    inputs: list[torch.Tensor], box: Box, run: Run, parameters: list[torch.Tensor], work_box: Box
) -> None:
    shape = tuple(inputs[0].shape)
    if intersect(box, whole(shape)) is None:
        return  # nothing is read
    for dim, interval in enumerate(box):
        for index in {interval.start, interval.stop - 1} & set(range(shape[dim])):
            slab = tuple(Interval(index, index + 1) if d == dim else i for d, i in enumerate(box))
            inside = intersect(slab, whole(shape))
            if inside is None:
                continue  # all of it is padding
            data = inputs[0].clone()
            data[slices(inside)] = torch.nan
            found = run([data, *inputs[1:]], parameters)[slices(work_box)]
            assert bool(torch.isnan(found).any()), f"{work_box} does not read {index} of dim {dim} of {box}"
