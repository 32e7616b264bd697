"""What messages cost: links, collectives, resharding between layers, halos, and the least that stages hand over.

    t(x)        x bytes on a link: its table, or latency + x / bandwidth                ``links.NetworkPrices``
    tables      of (bytes, seconds), read between and beyond what was measured          ``tables.read_points``
    T(n, x)     a sum over n ranks: its table, or e(n, x) 2 (n - 1) t(x / n)            ``collectives.collective_s``
    (u, v)      from one layer's option to the next one's: bytes that a rank reads and
                does not hold, from their owners                                       ``resharding.resharding_of``
    exposed     of a convolution's halo max(0, exchange - compute); of all else, all   ``resharding.exposed``
    at least    of what crosses a cut, before a plan says how                          ``stage_transfers``

Bounds read ``stage_transfers``, and ``least_collective_s`` of ``collectives``.
"""
