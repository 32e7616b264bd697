"""What a run trains on.

Read first :mod:`halopipe.data.factories` and ``sources`` (what a factory may give), then ``batch_sources`` (who reads;
digests by which ranks compare what they read), ``ahead`` and ``rank_slices`` (how a rank comes by its part). Factories
for demonstrations are called by their names here: ``halopipe.data:digits``.

Besides:

    demo_data       Data to train on, for demonstrations: a factory takes (global_batch, input_shape, seed) and yields
                    (inputs, targets)
    laser_scans     Tiles of a laser scan, for users; they are an extra's
    point_clouds    Solids to classify, for users; they are an extra's
    shared_source   A Dataset of which each rank reads the samples that its stages need, and no others
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from planner.ir.extras import public, public_names
from planner.ir.lazy import lazily

if TYPE_CHECKING:
    from halopipe.data.demo_data import digits, synthetic

__all__ = ["digits", "synthetic", *public_names("halopipe.data")]

_HOMES = dict.fromkeys(("digits", "synthetic"), "demo_data")
"""Imported when first used: they load torch.  Other names are extras' (:func:`planner.ir.extras.public`)."""

__getattr__, __dir__ = public(__name__, lazily(__name__, _HOMES))
