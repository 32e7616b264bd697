"""Decisions whose layers are divided along any dims, for the runtime's tests."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from planner.costs.shards.device_mesh import axes_of, candidate_layouts
from planner.ir.graph import Graph, Layer
from planner.ir.layout import Layout
from planner.ir.plan import Decision, Placement
from planner.layers import check_samples_apart
from planner.layers.sized import SPACE, SizedLayer
from tests.runtime.plans import decide

Cuts = Mapping[str, tuple[int, ...]]
"""Cut points by dim, in the order of the grid of ranks."""

CHANNELS = ("channel", "head", "feature")


def divided(
    graph: Graph,
    cuts: Cuts | Callable[[Layer], Cuts],
    micro_batches: tuple[int, ...] = (2,),
    **options: object,
) -> Decision:
    """One stage on as many ranks as the cuts make parts; each layer is cut along those dims that it can be cut along.

    Args:
        cuts: of all layers, or by layer; all of equally many parts.  ``channel`` stands for features and heads too.
        options: of :func:`tests.runtime.plans.decide`.
    """
    return by_stage(graph, (), [cuts], micro_batches, **options)


def by_stage(
    graph: Graph,
    places: Sequence[float | str],
    cuts: Sequence[Cuts | Callable[[Layer], Cuts]],
    micro_batches: tuple[int, ...] = (2,),
    ranks: Sequence[tuple[int, ...]] | None = None,
    **options: object,
) -> Decision:
    """Stages one after another, each with its cuts, and each on ranks of its own if ``ranks`` are not given."""
    by_layer = [each if callable(each) else partial(_always, each) for each in cuts]
    if ranks is None:
        counts = [_num_parts(each(graph.layers[0])) for each in by_layer]
        ranks = [tuple(range(sum(counts[:stage]), sum(counts[: stage + 1]))) for stage in range(len(counts))]
    values = graph.values()
    mixing = frozenset(check_samples_apart(graph))

    def place(layer: Layer, stage: int) -> Placement:
        sized = SizedLayer.of(graph, layer, values, max(micro_batches), layer.name in mixing)
        return Placement(stage, possible(sized, by_layer[stage](layer)))

    return decide(graph, places, micro_batches, ranks, place=place, **options)


def _always(cuts: Cuts, layer: Layer) -> Cuts:
    return cuts


def possible(sized: SizedLayer, cuts: Cuts) -> Cuts:
    """``cuts`` as far as the layer can be cut so; along other dims its ranks hold the same."""
    found: dict[str, tuple[int, ...]] = {}
    for dim, points in cuts.items():
        name = next((each for each in _names(dim) if each in sized.divisible), None)
        if name is None or dim.startswith("replica"):
            found[f"replica{len(found)}"] = tuple(range(len(points)))
        else:
            found[name] = points
    return found


def _names(dim: str) -> tuple[str, ...]:
    return CHANNELS if dim == "channel" else (dim,)


def _num_parts(cuts: Cuts) -> int:
    count = 1
    for points in cuts.values():
        count *= len(points) - 1
    return count


def at_random(
    graph: Graph,
    num_ranks: int,
    families: Sequence[str],
    rng: random.Random,
    micro_batches: tuple[int, ...] = (2,),
    halo_depth: int = 0,
    changes: float = 1.0,
) -> Decision:
    """One stage on all ranks, of devices of random speeds, with a layout from the planner's for each layer at random.

    Args:
        families: of dims that may be cut.
        halo_depth: most rows that may be computed beyond a part.
        changes: how often a layer does not keep to the kind of grid of the layer before.
    """
    values = graph.values()
    mixing = frozenset(check_samples_apart(graph))
    speeds = tuple(rng.choice([1.0, 1.0, 1.5, 2.0, 4.0]) for _ in range(num_ranks))
    axes = axes_of(graph, families)
    last = [Layout()]

    def place(layer: Layer, stage: int) -> Placement:
        sized = SizedLayer.of(graph, layer, values, max(micro_batches), layer.name in mixing)
        found = candidate_layouts(sized, speeds, axes)
        same = [each for each in found if _grid(each) == _grid(last[0])]
        last[0] = same[0] if same and rng.random() > changes else rng.choice(found)
        cut = [dim for dim in last[0].cuts if not dim.startswith("replica")]
        in_space = bool(cut) and set(cut) <= {"sample", *SPACE} and sized.work == sized.layer.outputs[0]
        margin = rng.randint(0, halo_depth) if in_space and set(cut) & set(SPACE) else 0
        return Placement(stage, last[0].cuts, margin=margin)

    return decide(graph, (), micro_batches, [tuple(range(num_ranks))], place=place)


def _grid(layout: Layout) -> tuple[tuple[str, int], ...]:
    return tuple((dim, len(points)) for dim, points in layout.cuts.items())
