"""Which messages hide behind compute: a convolution's halo travels while its local part is computed.

The runtime starts the exchange, convolves what is there, and adds what the halo contributes; backward it computes the
rim first, sends it, and computes the rest meanwhile.  So a halo costs what exceeds the layer's own compute on its
slowest rank.  Everything else is waited for: other layers' halos, values that change their layout, partial sums.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from planner.costs.messages import Crossing

Array = NDArray[np.float64]

HIDING = frozenset({"conv", "transposed_conv"})
"""Kinds of layer that compute while their halo travels."""


def exposed(crossing: Crossing, kind: str, forward_s: Array, backward_s: Array) -> tuple[Array, Array]:
    """Seconds that ranks wait for a crossing, forward and backward, ``[options of the maker, options of the reader]``.

    Args:
        kind: of the reader.
        forward_s, backward_s: the reader's compute, ``[options, ranks]``.
    """
    if kind not in HIDING:
        return crossing.forward_s, crossing.backward_s
    pairs = ((crossing.forward_s, forward_s), (crossing.backward_s, backward_s))
    forward, backward = (
        np.where(crossing.is_halo, np.maximum(0.0, moved - computing.max(axis=-1)[None, :]), moved)
        for moved, computing in pairs
    )
    return forward, backward
