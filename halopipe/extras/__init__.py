"""What few users need: a folder each, which the face does without (:mod:`planner.ir.extras`).

Modules:

    point_clouds     Clouds to train on, for sparse networks
    sampled_graphs   Graph networks on sampled neighbours: data, and the names of ``halopipe.graphs``
"""

from __future__ import annotations

__all__: list[str] = []
