"""What is known of messages at each place between two layers, whatever the layouts of these.

Who waits for a stage that ends before layer i is the stage with the first reader of layer i - 1
(``LayerLinks.reader``); what that one does before this layer counts for nothing. Where nobody reads it, nothing
follows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import numpy as np
from numpy.typing import NDArray

from planner.costs.calibration.apply_corrections import corrected_cluster
from planner.costs.communication.links import NetworkPrices, fastest, without_pairs
from planner.costs.communication.tables import transfer_s
from planner.costs.layers.cost_table import Array
from planner.ir.box import Interval, whole
from planner.ir.cluster import Link
from planner.ir.graph import Graph, TensorSpec, producer
from planner.ir.problem import Problem
from planner.layers.boundary import without_gradient
from planner.layers.sized import SizedLayer
from planner.solvers.candidates.feasibility import may_stream
from planner.solvers.layouts.stage import NONE


@dataclass(frozen=True, slots=True, eq=False)
class LayerLinks:
    """What is known of messages at each place to cut.

    Attributes:
        reader: the first later layer that reads from the layer just before, and answers with gradients; -1: none.
        num_bytes: what F brings there, at least.
        ways: 2 where B comes back, else 1.
        samples: of a micro-batch.
        within, across: no link is faster; none between two hosts.
        card_bytes_per_s: no network card carries more.
        ranks_of_host: the most that a host has.
    """

    reader: NDArray[np.intp]  # [places]
    num_bytes: Array  # [places]
    ways: int
    samples: int
    within: Link | None
    across: Link | None
    card_bytes_per_s: float
    ranks_of_host: int

    def message_s(self, maker: int, reader: int, on_one_host: bool) -> tuple[Array, Array]:
        """F's way between groups of two sizes, by place; and how long all of it is on a network card."""
        link = self.within if on_one_host else self.across
        is_even = {self.samples % count for count in (maker, reader)} <= {0, self.samples}
        each_s = transfer_s(link, self.num_bytes / (maker * reader)) if link else np.zeros_like(self.num_bytes)
        card_s = self.num_bytes / self.card_bytes_per_s * (is_even and not on_one_host)
        return np.maximum(each_s, card_s), card_s


def links_of(problem: Problem, samples: int, backward: str) -> LayerLinks:
    """For micro-batches of ``samples``.

    Nothing where gradients do not come back: then the stage before need not wait for the end of the next stage.

    Args:
        backward: ``Question.backward``.
    """
    reader, num_bytes = _first_readers(problem.graph, samples, backward)
    if may_stream(problem):
        num_bytes[:] = 0.0
    cluster = without_pairs(corrected_cluster(problem.profile))
    tiers = [tier.name for tier in cluster.nested_tiers]
    inside = tiers[: tiers.index(cluster.host_tier) + 1]
    across = [link for name, link in cluster.links.items() if name not in inside]
    return LayerLinks(
        reader=reader,
        num_bytes=num_bytes,
        ways=1 if backward == NONE else 2,
        samples=samples,
        within=fastest(list(cluster.links.values())) if cluster.links else None,
        across=fastest(across) if across else None,
        card_bytes_per_s=NetworkPrices(corrected_cluster(problem.profile)).most_card_bytes_per_s,
        ranks_of_host=max(Counter(cluster.devices[rank].host for rank in problem.ranks).values()),
    )


def _first_readers(graph: Graph, samples: int, backward: str) -> tuple[NDArray[np.intp], Array]:
    """``LayerLinks.reader`` and ``num_bytes``."""
    values = graph.values()
    silent = without_gradient(graph)
    place_of = {layer.name: index + 1 for index, layer in enumerate(graph.layers)}
    reader = np.full(len(graph.layers) + 1, -1)
    reader[0] = 0
    num_bytes = np.zeros(len(graph.layers) + 1)
    for index in reversed(range(len(graph.layers))):
        for value in graph.layers[index].inputs:
            answers = backward == NONE or (values[value].is_float and value not in silent)
            place = place_of.get(producer(value), 0)
            if place and answers:
                same_reader_bytes = num_bytes[place] if reader[place] == index else 0.0
                num_bytes[place] = max(_bytes_read(graph, index, value, values, samples), same_reader_bytes)
                reader[place] = index
    return reader, num_bytes


_READ_IN_ORDER = ("pointwise", "conv", "transposed_conv", "pool", "batch_norm", "global_pool", "concat")
"""Kinds whose windows all have one size and follow one another at one stride."""


def _bytes_read(graph: Graph, at: int, value: str, values: Mapping[str, TensorSpec], samples: int) -> float:
    """What is certainly read of the value, whatever the parts; of other kinds of layers a byte."""
    layer = graph.layers[at]
    if layer.kind not in _READ_IN_ORDER:
        return 1.0
    sized = SizedLayer.of(graph, layer, values, samples, False)
    position = layer.inputs.index(value)
    box = whole(sized.work.shape)
    read = [interval.stop - interval.start for interval in sized.input_boxes(box)[position]]
    for dim, extent in enumerate(sized.work.shape):
        if extent > 1:
            parts = ((*box[:dim], Interval(k, k + 1), *box[dim + 1 :]) for k in range(2))
            first, second = (sized.input_boxes(part)[position] for part in parts)
            for axis, (one, other) in enumerate(zip(first, second, strict=True)):
                if other.start > one.stop:  # windows are apart: what lies between is not read
                    read[axis] = min(read[axis], (extent - 1) * (other.stop - other.start))
    spec = sized.inputs[position]
    return max(1.0, spec.num_bytes * prod(read) / max(1, prod(spec.shape)))
