"""A convolution over cut space: which terms it is a sum of, and three ways to compute it.

Modules:

    gathered     Convolution of all that it reads, fetched first; of input channels that several ranks share
    layer        A convolution of the graph on one rank, transposed or not; which form its part takes
    overlapped   Convolution of a tensor that is cut in space, exchanged and computed at the same time
    term_call    One term of a convolution, computed: forward, and the gradients of its operands
    terms        A convolution as a sum of terms, one for each part of its input
"""

from __future__ import annotations

__all__: list[str] = []
