"""What messages cost: links, collectives, resharding between layers, halos, and the least that stages hand over.

Modules:

    collectives       What sums over several ranks cost (all-reduce and others): measured tables, scaled by the theory
                      of rings
    halo              What a halo costs: in the backward of a convolution over cut space, and of ranks that share sites
    links             What messages cost on the cluster's links, and how well that is known
    resharding        Seconds and bytes of what moves between two layers, for every pair of their options
    stage_transfers   What a stage hands to the next one at least, before a plan says more: bytes of layers, pieces
                      between members
"""

from __future__ import annotations

__all__: list[str] = []
