"""What few runs need: a folder each, which the runtime does without (:mod:`planner.ir.extras`).

Modules:

    compiling        Divided stages under torch.compile: collectives that the compiler sees
    sampled_graphs   Graph networks on sampled neighbours: each rank samples those of its own seeds
"""

from __future__ import annotations

__all__: list[str] = []
