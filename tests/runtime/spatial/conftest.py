"""Convolutions of these tests are small: the form of large ones is what they are about."""

from __future__ import annotations

import pytest

from runtime.spatial.convolution import layer


@pytest.fixture(autouse=True)
def overlapped_whatever_the_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer, "FEWEST", 0)
