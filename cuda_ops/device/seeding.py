"""The random numbers that user code draws from the generators that every program shares."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

__all__ = ["seed_generators", "seeded"]

_DRAWING = threading.RLock()
"""The generators are the process's: ranks that are threads take turns."""


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """What the global generators of torch, numpy and ``random`` give inside follows from ``seed``; no trace is left.

    Generators of user code's own are its own to seed, and those of accelerators are left alone.
    """
    with _DRAWING, torch.random.fork_rng(devices=[]):
        numbers = np.random.get_state()  # noqa: NPY002  # as user code has it
        state = random.getstate()
        seed_generators(seed)
        try:
            yield
        finally:
            np.random.set_state(numbers)  # noqa: NPY002
            random.setstate(state)


def seed_generators(seed: int) -> None:
    """Sets the global generators of torch (on the processor), numpy and ``random``."""
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002
    random.seed(seed)
