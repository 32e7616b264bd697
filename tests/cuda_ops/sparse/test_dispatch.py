from __future__ import annotations

import logging
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from cuda_ops.sparse import dispatch, operators, reference
from cuda_ops.sparse.errors import SparseImplementationError
from tests.cuda_ops.sparse.clouds import cloud


@pytest.fixture(autouse=True)
def _forgets(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("HALOPIPE_SPARSE", raising=False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    _forget()
    yield
    _forget()


def _forget() -> None:
    for cached in (dispatch._implementation, dispatch._chosen, dispatch._loaded):
        cached.cache_clear()


def _have(monkeypatch: pytest.MonkeyPatch, **modules: SimpleNamespace | None) -> None:
    """What loading the implementations gives."""
    found = {name: SimpleNamespace(load=lambda functions=functions: functions) for name, functions in modules.items()}
    monkeypatch.setattr(dispatch, "_MODULES", found)


def test_the_device_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    _have(monkeypatch, native=SimpleNamespace(), triton=SimpleNamespace())
    assert [dispatch.chosen(device) for device in ("cpu", "cuda", "xpu")] == ["native", "triton", "torch"]


@pytest.mark.parametrize(("device", "lines"), [("cpu", 0), ("cuda", 1)])  # native says itself why it is not there
def test_plain_torch_runs_where_nothing_else_can_and_says_so_once(
    device: str, lines: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _have(monkeypatch, native=None, triton=None)
    with caplog.at_level(logging.WARNING):
        for name in ("sparse_conv", "kernel_map", "sparse_conv"):
            assert dispatch.implementation(name, device) is getattr(reference, name)
    assert len(caplog.records) == lines
    assert ("plain torch" in caplog.text) == bool(lines)


def test_what_an_implementation_lacks_comes_from_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    def sparse_conv() -> None: ...

    _have(monkeypatch, native=SimpleNamespace(sparse_conv=sparse_conv), triton=None)
    assert dispatch.implementation("sparse_conv", "cpu") is sparse_conv
    assert dispatch.implementation("kernel_map", "cpu") is reference.kernel_map


def test_the_operators_call_what_was_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def sorted_sites(coordinates: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        calls.append(coordinates.is_contiguous())
        return reference.sorted_sites(coordinates)

    _have(monkeypatch, native=SimpleNamespace(sorted_sites=sorted_sites), triton=None)
    operators.sorted_sites(cloud().T.contiguous().T)
    assert calls == [True]
    monkeypatch.setenv("HALOPIPE_SPARSE", "torch")
    operators.sorted_sites(cloud())
    assert calls == [True]


@pytest.mark.parametrize(
    ("forced", "device", "message"),
    [
        ("native", "cuda", "runs on cpu, the tensors are on cuda"),
        ("triton", "cpu", "runs on cuda, the tensors are on cpu"),
        ("native", "cpu", r"needs a C\+\+ compiler and torch"),
        ("triton", "cuda", "needs the package triton"),
        ("cuda", "cuda", "there are torch, native, triton"),
    ],
)
def test_what_is_forced_and_cannot_be_had_is_an_error(
    forced: str, device: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _have(monkeypatch, native=None, triton=None)
    monkeypatch.setenv("HALOPIPE_SPARSE", forced)
    with pytest.raises(SparseImplementationError, match=f"HALOPIPE_SPARSE={forced}.*{message}|{message}"):
        dispatch.implementation("sparse_conv", device)


def test_interpreted_triton_runs_on_the_cpu_when_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    _have(monkeypatch, native=None, triton=SimpleNamespace())
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("HALOPIPE_SPARSE", "triton")
    assert dispatch.chosen("cpu") == "triton"
