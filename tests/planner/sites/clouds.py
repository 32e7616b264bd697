"""Small clouds for the tests of this folder."""

from __future__ import annotations

import numpy as np

from planner.sites.keys import pack
from planner.sites.work import BlockWork


def blocks(*samples: list[float], step: int = 1) -> BlockWork:
    """One row of blocks along x a sample, of the given work."""
    number = np.concatenate([np.full(len(work), sample) for sample, work in enumerate(samples)]).astype(np.int64)
    x = np.concatenate([np.arange(len(work)) * step for work in samples]).astype(np.int64)
    keys = pack(number, np.stack([x, 0 * x, 0 * x], axis=1))
    return BlockWork(keys, np.array([value for work in samples for value in work], np.float64))
