"""How the ranks of a group may divide a layer, and what they sum; the boxes are in ``planner.layers.shards``.

    grids       factorisations of the group over dims; shares in proportion to speed       ``device_mesh.layout_on``
    a layout    cuts by dim, margin, ranks that share channels, recomputed or not     ``sharding_spec.ShardingSpec``
    sums        of gradients, statistics and classes over ranks with equal parts           ``partial_sums.sums_of``

Arrays over options and ranks throughout.
"""
