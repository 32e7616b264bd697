"""What sharing sites costs inside a stage, for the checker; ``planner.costs.communication.halo`` says the model."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

from planner.check.reading import message_s
from planner.ir.graph import BYTES_PER_ELEMENT, Layer, TensorSpec
from planner.ir.profile import Profile
from planner.ir.schedule import Op


def site_exchange_s(
    profile: Profile,
    layer: Layer,
    x: TensorSpec,
    group: tuple[int, ...],
    op: Op,
    samples: int,
    sum_s: Callable[[int], float],
) -> float:
    """Of one layer in a forward or backward (for inputs).

    Args:
        x: the layer's first input.
        sum_s: seconds of a sum of so many bytes over the group.
    """
    if layer.kind in ("segment", "segment_expand"):
        spec = layer.outputs[0]
        return sum_s(samples * spec.shape[-1] * BYTES_PER_ELEMENT[spec.dtype])
    if layer.kind not in ("sparse_conv", "sparse_pool"):
        return 0.0
    if op is not Op.FORWARD and layer.inputs[0] in profile.graph.inputs:
        return 0.0
    cluster, others = profile.cluster, len(group) - 1
    size = _rows(profile, layer, x, len(group), samples) * x.shape[-1] * BYTES_PER_ELEMENT[x.dtype] / others
    if size <= 0:
        return 0.0
    between = cluster.group_link_class(group)
    links = [cluster.link(a, b) for a in group for b in group if a != b and cluster.link_class(a, b) == between]
    each = max(message_s(link, size) for link in links)
    return others * each if all(link.duplex for link in links) else 2 * others * each


def _rows(profile: Profile, layer: Layer, x: TensorSpec, parts: int, samples: int) -> float:
    points = sorted((h.parts / h.samples, max(1e-9, h.rows)) for h in profile.site_halos if h.layer == layer.name)
    if not points:
        total = x.shape[0] * samples / profile.graph.samples
        return float(min(total * (1 - 1 / parts), 6 * (total / parts) ** (2 / 3)))
    cut = parts / samples
    if cut <= points[0][0]:
        return float(points[0][1])
    for (a, low), (b, high) in pairwise(points):
        if cut <= b:
            return float(low * (high / low) ** (math.log(cut / a) / math.log(b / a)))
    return float(points[-1][1] * (points[-1][0] / cut) ** (2 / 3))
