from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cuda_ops.sparse import nn as spnn
from cuda_ops.sparse.adapters.minkowski import (
    from_minkowski,
    load_minkowski_state_dict,
    to_minkowski,
    to_minkowski_state_dict,
)
from cuda_ops.sparse.nn import SparseInputError
from tests.cuda_ops.sparse.nn.clouds import cloud

Triple = tuple[int, int, int]


class TheirTensor:
    """A stand-in with the constructor and fields of MinkowskiEngine.SparseTensor."""

    def __init__(self, features: Tensor, coordinates: Tensor, tensor_stride: Any = 1) -> None:
        self.F, self.C, self.tensor_stride = features, coordinates, tensor_stride


def their_offsets(kernel: Triple) -> list[Triple]:
    """By the iterator of `src/kernel_region.hpp`: axis 0 first; an even size from the site on."""
    first = [-(n // 2) if n % 2 else 0 for n in kernel]
    return [
        (first[0] + x, first[1] + y, first[2] + z)
        for z in range(kernel[2])
        for y in range(kernel[1])
        for x in range(kernel[0])
    ]


def their_conv(x: spnn.SparseTensor, out: Tensor, weight: Tensor, kernel: Triple, stride: int) -> Tensor:
    """At the sites ``out``, in units of the input's stride times ``stride``, by dictionary."""
    rows = {tuple(place): row for row, place in enumerate(x.coords.tolist())}
    found = x.feats.new_zeros(len(out), weight.shape[-1])
    for row, (batch, *place) in enumerate(out.tolist()):
        for k, offset in enumerate(their_offsets(kernel)):
            source = rows.get((batch, *(stride * a + b for a, b in zip(place, offset, strict=True))))
            if source is not None:
                found[row] += x.feats[source] @ weight[k]
    return found


@pytest.fixture(autouse=True)
def _their_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "MinkowskiEngine", SimpleNamespace(SparseTensor=TheirTensor))


def test_a_tensor_goes_there_in_units_of_the_input_and_comes_back() -> None:
    x = spnn.MaxPool3d(2)(cloud())
    there = to_minkowski(x)
    assert there.tensor_stride == [2, 2, 2]
    assert torch.equal(there.C[:, 1:], 2 * x.coords[:, 1:])
    assert torch.equal(there.C[:, 0], x.coords[:, 0])
    back = from_minkowski(there)
    assert back.stride == (2, 2, 2)
    assert torch.equal(back.coords, x.coords)
    torch.testing.assert_close(back.feats, x.feats)


@pytest.mark.parametrize(
    ("kernel", "stride"), [((3, 3, 3), 1), ((1, 3, 5), 1), ((2, 2, 2), 2), ((3, 3, 3), 2), ((2, 4, 1), 1)]
)
def test_a_checkpoint_computes_the_same_here(kernel: Triple, stride: int) -> None:
    x, ours = cloud(sites=80), spnn.Conv3d(3, 4, kernel, stride, bias=True).double()
    state = {
        "kernel": torch.randn(ours.kernel.shape, dtype=torch.float64),
        "bias": torch.randn(1, 4, dtype=torch.float64),
    }
    load_minkowski_state_dict(ours, state)
    y = ours(x)
    torch.testing.assert_close(y.feats, their_conv(x, y.coords, state["kernel"], kernel, stride) + state["bias"])
    torch.testing.assert_close(to_minkowski_state_dict(ours), state)


def test_norms_and_linear_layers_hold_torchs_own_there() -> None:
    net = nn.Sequential(spnn.Conv3d(3, 4, 3, bias=True), spnn.BatchNorm(4), spnn.ReLU(), spnn.Linear(4, 2))
    state = to_minkowski_state_dict(net)
    assert list(state) == [
        "0.kernel",
        "0.bias",
        "1.bn.weight",
        "1.bn.bias",
        "1.bn.running_mean",
        "1.bn.running_var",
        "1.bn.num_batches_tracked",
        "3.linear.weight",
        "3.linear.bias",
    ]
    twin = nn.Sequential(spnn.Conv3d(3, 4, 3, bias=True), spnn.BatchNorm(4), spnn.ReLU(), spnn.Linear(4, 2))
    load_minkowski_state_dict(twin, state)
    for one, other in zip(net.state_dict().values(), twin.state_dict().values(), strict=True):
        assert torch.equal(one, other)


def test_a_single_offset_is_a_matrix_there_too_and_a_strided_one_is_not() -> None:
    single, strided = spnn.Conv3d(3, 4, 1), spnn.Conv3d(3, 4, 1, 2)
    assert to_minkowski_state_dict(single)["kernel"].shape == (3, 4)
    assert to_minkowski_state_dict(strided)["kernel"].shape == (1, 3, 4)
    load_minkowski_state_dict(strided, to_minkowski_state_dict(strided))


def test_missing_entries_are_named_as_they_are_there() -> None:
    net = nn.Sequential(spnn.BatchNorm(4))
    with pytest.raises(SparseInputError, match=r"5 missing: 0.bn.bias, 0.bn.num_batches_tracked, 0.bn.running_mean"):
        load_minkowski_state_dict(net, {})
