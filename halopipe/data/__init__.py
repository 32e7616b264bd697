"""What a run trains on.

Read first :mod:`halopipe.data.sources` (what a factory may give), then ``batches``, ``feeds`` and ``rank_slices`` (how
a rank comes by its part).  Factories for demonstrations are called by their names here: ``halopipe.data:digits``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from halopipe.data.demo_data import digits, held_out_shapes, shapes, synthetic
    from halopipe.data.graphs import graph_seeds, seed_batches, small_graph_seeds

__all__ = ["digits", "graph_seeds", "held_out_shapes", "seed_batches", "shapes", "small_graph_seeds", "synthetic"]

_OF_GRAPHS = frozenset({"graph_seeds", "seed_batches", "small_graph_seeds"})


def __getattr__(name: str) -> Any:
    if name in __all__:
        module = "graphs" if name in _OF_GRAPHS else "demo_data"
        return getattr(import_module(f"{__name__}.{module}"), name)  # loads torch
    raise AttributeError(f"module 'halopipe.data' has no attribute {name!r}")
