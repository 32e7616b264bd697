"""What each rank of a group has of a layer: device meshes, boxes, sharding specs and partial sums.

    meshes       factorisations of the group over dims, shares in proportion to speed     ``device_mesh.axes_of``
    boxes        work of each rank, hence inputs read and weights used                    ``sharding_spec.shards_of``
    moved        needed minus held, from the one owner                                    ``boxes.moved``
    contracted   c ranks share input channels: gathered for c = 1, summed for c = p       ``contraction.partial_sums``
    sums         of gradients, statistics, classes over ranks with equal parts            ``partial_sums.sums_of``
    in tiles     the same of each tile of a block                                         ``tiles.tile_shards``

Arrays over options and ranks throughout; the rules of single boxes are those of :mod:`planner.ir.box`.
"""

from __future__ import annotations

__all__: list[str] = []
