"""The same random numbers for every test of the profiler."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def a_seed() -> None:
    torch.manual_seed(0)
