"""What the core of the operators takes from the adapters: kernels by name, and the names that users import."""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace

import pytest
import torch

from cuda_ops.extras.adapters import backends
from cuda_ops.sparse import dispatch
from cuda_ops.sparse.errors import SparseImplementationError
from tests.cuda_ops.sparse.test_operators import _forgets
from tests.profiler.models.test_sparse_models import Factory, _plain_one_thread_float64, each_network, example, plain

FIXTURES = (_forgets, _plain_one_thread_float64)
LIBRARIES = ("spconv", "torchsparse")


def test_the_kernels_of_a_package_run_on_any_device_when_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "find_spec", lambda name: name)
    monkeypatch.setattr(backends, "_spconv", SimpleNamespace)
    monkeypatch.setenv("HALOPIPE_SPARSE", "spconv")
    assert [dispatch.chosen(device) for device in ("cpu", "cuda")] == ["spconv", "spconv"]


@pytest.mark.parametrize(
    ("forced", "message"), [("spconv", "needs the package spconv"), ("cuda", "there are torch, native, triton, spconv")]
)
def test_what_is_forced_and_cannot_be_had_is_an_error(
    forced: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backends, "find_spec", lambda name: None)
    monkeypatch.setenv("HALOPIPE_SPARSE", forced)
    with pytest.raises(SparseImplementationError, match=f"HALOPIPE_SPARSE={forced}.*{message}"):
        dispatch.implementation("sparse_conv", "cpu")


@pytest.mark.parametrize("library", LIBRARIES)
def test_users_import_from_beside_the_operators(library: str) -> None:
    public = import_module(f"cuda_ops.sparse.adapters.{library}")
    own = import_module(f"cuda_ops.extras.adapters.{library}")
    for name in (f"from_{library}", f"to_{library}", f"load_{library}_state_dict", f"to_{library}_state_dict"):
        assert getattr(public, name) is getattr(own, name)
    with pytest.raises(AttributeError, match=f"adapters.{library}' has no attribute 'nothing'"):
        _ = public.nothing


@each_network
def test_state_dicts_go_to_torchsparse_and_back(factory: Factory) -> None:
    adapter = import_module("cuda_ops.sparse.adapters.torchsparse")
    one, x, _, _ = example(factory)
    other, *_ = example(factory)
    adapter.load_torchsparse_state_dict(other, adapter.to_torchsparse_state_dict(one))
    torch.testing.assert_close(plain(other(x)), plain(one(x)))
