"""A convolution over cut space: which terms it is a sum of, and three ways to compute it.

Modules:

    gathered     Convolution of all that it reads, fetched first: no overlap, but for any division, channels and samples
                 too
    layer        A convolution of the graph on one rank, transposed or not: from the operator's arguments to the form of
                 its part
    overlapped   Convolution of a tensor that is cut in space, exchanged and computed at the same time
    terms        A convolution as a sum of terms, one for each part of its input
"""

from __future__ import annotations

__all__: list[str] = []
