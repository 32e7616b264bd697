"""Seeds of the generators that user code draws from."""

from __future__ import annotations

import random
import threading

import numpy as np
import pytest
import torch

from cuda_ops.device.seeding import seeded


def draw() -> tuple[float, float, float]:
    return float(torch.rand(())), float(np.random.rand()), random.random()  # noqa: NPY002


def test_numbers_follow_from_the_seed_and_leave_no_trace() -> None:
    with seeded(3):
        before = draw()
        with seeded(2**62 + 1):
            inner = draw()
        after = draw()
    with seeded(3):
        assert (draw(), draw()) == (before, after)
    with seeded(2**62 + 1):
        assert draw() == inner
    with seeded(4):
        assert all(a != b for a, b in zip(draw(), before, strict=True))


def test_an_error_leaves_no_trace_either() -> None:
    with seeded(3):
        expected = draw(), draw()
    with seeded(3):
        first = draw()
        with pytest.raises(ValueError, match="user"), seeded(5):
            raise ValueError(f"user code that drew {draw()}")
        assert (first, draw()) == expected


def test_threads_take_turns() -> None:
    found: list[tuple[float, float, float]] = []

    def one() -> None:
        for _ in range(50):
            with seeded(7):
                found.append(draw())

    threads = [threading.Thread(target=one) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert len(set(found)) == 1
