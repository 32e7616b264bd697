"""Flat places in space, as pooling with indices gives them: from those in a part to those in the whole tensor."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def global_places(places: Tensor, local: Sequence[int], starts: Sequence[int], extents: Sequence[int]) -> Tensor:
    """Places in a tensor with dims ``extents``, of ``places`` in a part of it.

    Args:
        places: counted along the last dims together, the last one fastest.
        local: extents of the part.
        starts: where the part begins.
    """
    found = torch.zeros_like(places)
    step = 1
    for length, start, extent in reversed(list(zip(local, starts, extents, strict=True))):
        found += (places % length + start) * step
        places = places // length
        step *= extent
    return found
