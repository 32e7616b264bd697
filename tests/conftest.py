"""Settings of the whole suite: one thread a process, no display, reproducible examples, and what is skipped where."""

from __future__ import annotations

import os

import pytest
from hypothesis import settings

# Set before torch or matplotlib are imported, and inherited by every worker that a test spawns.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MPLBACKEND", "Agg")

# No deadline, since no test asserts a time; the same examples every time, since a red suite should stay red.
settings.register_profile("suite", deadline=None, derandomize=True)
settings.load_profile("suite")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("cuda")]
    if not marked:
        return
    import torch  # only where it is needed: collecting the planner's tests loads no torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="torch finds no NVIDIA GPU"))
