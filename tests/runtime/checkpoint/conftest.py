from __future__ import annotations

import os

import pytest


@pytest.fixture(autouse=True)
def quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is forced to disk, which takes time and shows only when the power fails; test_saving.py looks at it."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)
