"""What papers, peers and particular machines brought: a folder each, which the runtime does without.

As in :mod:`planner.extras`: an extra states in ``HOOKS`` what it adds, and the core never imports it.

Modules:

    compiling        Divided stages under torch.compile: collectives that the compiler sees
    distcp           Checkpoints of earlier releases, which kept tensors as torch.distributed.checkpoint does
    sampled_graphs   Graph networks on sampled neighbours: each rank samples those of its own seeds
    streams          Batches without an end, of which each stage has its own at the same time
    tiles            Layers of a divided stage in blocks, tile by tile
    token_slices     Token slices of one stage on one rank, which read those before them
"""

from __future__ import annotations

__all__: list[str] = []
