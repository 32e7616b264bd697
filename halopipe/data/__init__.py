"""What a run trains on.

Read first :mod:`halopipe.data.factories` and ``sources`` (what a factory may give), then ``batch_sources`` (who reads;
digests by which ranks compare what they read), ``ahead`` and ``rank_slices`` (how a rank comes by its part). Factories
for demonstrations are called by their names here: ``halopipe.data:digits``.

Besides:

    demo_data       Data to train on, for demonstrations: a factory takes (global_batch, input_shape, seed) and yields
                    (inputs, targets)
    graphs          Batches of seeds of a graph, shuffled anew in every pass; each batch is a draw of its own
    laser_scans     Tiles of a laser scan, voxel by voxel, with labels that follow from its geometry: ground, or above
                    it
    point_clouds    Clouds to train on
    shared_source   A Dataset of which each rank reads the samples that its stages need, and no others
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from planner.ir.lazy import lazily

if TYPE_CHECKING:
    from halopipe.data.demo_data import digits, held_out_shapes, shapes, synthetic
    from halopipe.data.graphs import graph_seeds, seed_batches, small_graph_seeds

__all__ = ["digits", "graph_seeds", "held_out_shapes", "seed_batches", "shapes", "small_graph_seeds", "synthetic"]

_HOMES = {
    **dict.fromkeys(("digits", "held_out_shapes", "shapes", "synthetic"), "demo_data"),
    **dict.fromkeys(("graph_seeds", "seed_batches", "small_graph_seeds"), "graphs"),
}
"""Imported when first used: they load torch."""

__getattr__ = lazily(__name__, _HOMES)
