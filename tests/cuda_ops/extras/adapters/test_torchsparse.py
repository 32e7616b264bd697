from __future__ import annotations

import sys
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cuda_ops.extras.adapters.torchsparse import (
    from_torchsparse,
    load_torchsparse_state_dict,
    to_torchsparse,
    to_torchsparse_state_dict,
)
from cuda_ops.sparse import nn as spnn
from cuda_ops.sparse.nn import SparseInputError
from tests.cuda_ops.sparse.nn.clouds import cloud

Triple = tuple[int, int, int]


@dataclass
class TheirTensor:
    """A stand-in with the constructor and fields of torchsparse.SparseTensor."""

    feats: Tensor
    coords: Tensor
    stride: Any = 1


def their_offsets(kernel: Triple) -> list[Triple]:
    """By the rule of lookup_coords_kernel in `torchsparse/backend/hashmap/hashmap_cuda.cuh`."""
    volume = kernel[0] * kernel[1] * kernel[2]
    found = []
    for k in range(volume):
        offset = [0, 0, 0]
        rest = k
        for axis in range(3) if volume % 2 else reversed(range(3)):
            offset[axis] = rest % kernel[axis] - (kernel[axis] - 1) // 2
            rest //= kernel[axis]
        found.append((offset[0], offset[1], offset[2]))
    return found


def their_conv(x: spnn.SparseTensor, weight: Tensor, kernel: Triple) -> Tensor:
    """A submanifold convolution by dictionary, with offsets in their order."""
    rows = {tuple(place): row for row, place in enumerate(x.coords.tolist())}
    out = x.feats.new_zeros(len(x), weight.shape[-1])
    for row, (batch, *place) in enumerate(x.coords.tolist()):
        for k, offset in enumerate(their_offsets(kernel)):
            source = rows.get((batch, *(a + b for a, b in zip(place, offset, strict=True))))
            if source is not None:
                out[row] += x.feats[source] @ weight[k]
    return out


@pytest.fixture(autouse=True)
def _their_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchsparse", SimpleNamespace(SparseTensor=TheirTensor))


def test_a_tensor_goes_there_and_comes_back() -> None:
    x = spnn.MaxPool3d(2)(cloud(samples=3, empty=1))
    there = to_torchsparse(x)
    assert (there.stride, there.coords.dtype) == ((2, 2, 2), torch.int32)
    back = from_torchsparse(there, num_samples=3)
    assert (back.stride, back.num_samples) == ((2, 2, 2), 3)
    assert torch.equal(back.coords, x.coords)
    torch.testing.assert_close(back.feats, x.feats)


@pytest.mark.parametrize("kernel", [(3, 3, 3), (1, 3, 5), (2, 2, 2), (3, 2, 1), (1, 1, 2)])
def test_a_checkpoint_computes_the_same_here(kernel: Triple) -> None:
    x = cloud(sites=100)
    ours = spnn.Conv3d(3, 4, kernel).double()
    state = {"kernel": torch.randn(ours.kernel.shape, dtype=torch.float64)}
    load_torchsparse_state_dict(ours, state)
    torch.testing.assert_close(ours(x).feats, their_conv(x, state["kernel"], kernel))
    torch.testing.assert_close(to_torchsparse_state_dict(ours), state)


def test_names_and_shapes_are_the_same_on_both_sides() -> None:
    net = nn.Sequential(spnn.Conv3d(3, 4, 3, bias=True), spnn.BatchNorm(4), spnn.ReLU(), spnn.Conv3d(4, 2, 1))
    state = to_torchsparse_state_dict(net)
    assert {name: value.shape for name, value in state.items()} == {
        name: value.shape for name, value in net.state_dict().items()
    }
    assert torch.equal(state["3.kernel"], net[3].kernel)
    assert not torch.equal(state["0.kernel"], net[0].kernel)


def test_an_even_size_above_2_has_other_offsets_there() -> None:
    conv = spnn.Conv3d(3, 4, 4)
    with pytest.raises(SparseInputError, match=r"an even kernel size above 2: found \(4, 4, 4\)"):
        load_torchsparse_state_dict(conv, conv.state_dict())


def test_a_kernel_of_another_network_is_refused() -> None:
    conv = spnn.Conv3d(3, 4, 3)
    with pytest.raises(SparseInputError, match=r"shape of kernel: found \[8, 3, 4\], expected \[27, 3, 4\]"):
        load_torchsparse_state_dict(conv, {"kernel": torch.zeros(8, 3, 4)})


def test_what_is_missing_is_refused_unless_that_is_allowed() -> None:
    conv = spnn.Conv3d(3, 4, 3, bias=True)
    state = {"kernel": torch.randn(conv.kernel.shape)}
    with pytest.raises(SparseInputError, match="1 missing: bias"):
        load_torchsparse_state_dict(conv, state)
    load_torchsparse_state_dict(conv, state, strict=False)
    torch.testing.assert_close(to_torchsparse_state_dict(conv)["kernel"], state["kernel"])
