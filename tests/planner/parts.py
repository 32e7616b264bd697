"""Profiles with measured parts: shares of the whole, times what a test says."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from math import prod

from planner.costs.layers.part_shapes import part_shapes
from planner.ir.graph import SAMPLE
from planner.ir.profile import Measurement, Profile
from planner.layers import kind

Factor = Callable[[str, int, tuple[int, ...]], float]
"""By layer, samples and extents: how many times its share of the whole a part takes."""


def with_parts(
    profile: Profile,
    sizes: Sequence[int],
    num_ranks: int,
    factor: Factor = lambda layer, samples, part: 1.0,
    allow: Collection[str] = ("sample", "spatial", "channel"),
) -> Profile:
    """``profile`` with all parts that :func:`part_shapes` says, on every kind of device."""
    shapes = part_shapes(profile.graph, sizes, allow, num_ranks)
    found: dict[str, tuple[Measurement, ...]] = {}
    for device_kind, measured in profile.measurements.items():
        whole = {(one.layer, one.samples): one for one in measured}
        found[device_kind] = tuple(
            scaled(whole[layer, shape.samples], shape.part, elements(profile, layer), factor)
            for shape in shapes
            for layer in shape.layers
            if (layer, shape.samples) in whole
        )
    return replace(profile, parts=found)


def scaled(whole: Measurement, part: tuple[int, ...], of_all: int, factor: Factor) -> Measurement:
    """A part that takes ``factor`` times its share."""
    share = prod(part) / of_all
    times = share * factor(whole.layer, whole.samples, part)
    return replace(
        whole,
        forward_s=whole.forward_s * times,
        backward_s=whole.backward_s * times,
        backward_input_s=whole.backward_input_s * times,
        backward_weight_s=whole.backward_weight_s * times,
        saved_bytes=round(whole.saved_bytes * share),
        workspace_bytes=round(whole.workspace_bytes * share),
        part=part,
    )


def elements(profile: Profile, layer: str) -> int:
    """Of the work of a layer for one sample."""
    values = profile.graph.values()
    found = profile.graph.by_name()[layer]
    work = kind(found.kind).work(found, tuple(values[name] for name in found.inputs))
    return prod(extent for dim, extent in zip(work.dims, work.shape, strict=True) if dim != SAMPLE)
