"""The implementations of sparse operators that are tried."""

from __future__ import annotations

import pytest

from cuda_ops.sparse import native
from cuda_ops.sparse.native.functions import NativeOperators


@pytest.fixture(scope="session")
def native_operators() -> NativeOperators:
    """Those compiled by this machine's compiler."""
    operators = native.load()
    if operators is None:
        pytest.skip("no compiler for the native operators")
    return operators


@pytest.fixture(params=["torch", "native"])
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every implementation that runs on the CPU, one after another."""
    if request.param == "native":
        request.getfixturevalue("native_operators")
    monkeypatch.setenv("HALOPIPE_SPARSE", request.param)
    return str(request.param)
