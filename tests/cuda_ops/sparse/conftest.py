"""One thread, so that nothing waits for other tests' threads."""

from __future__ import annotations

import pytest

from cuda_ops.sparse import native


@pytest.fixture(params=["torch", "native"])
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every implementation that runs on the CPU, one after another."""
    if request.param == "native" and native.load() is None:
        pytest.skip("no compiler for the native operators")
    monkeypatch.setenv("HALOPIPE_SPARSE", request.param)
    return str(request.param)
