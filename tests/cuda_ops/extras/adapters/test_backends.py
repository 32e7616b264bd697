"""Other libraries' names and layers."""

from __future__ import annotations

import subprocess
import sys
import warnings
from dataclasses import dataclass
from importlib import import_module
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

from cuda_ops.extras.adapters import backends
from cuda_ops.extras.adapters.spconv import from_spconv, load_spconv_state_dict, to_spconv, to_spconv_state_dict
from cuda_ops.extras.adapters.torchsparse import (
    from_torchsparse,
    load_torchsparse_state_dict,
    to_torchsparse,
    to_torchsparse_state_dict,
)
from cuda_ops.sparse import dispatch, reference
from cuda_ops.sparse import nn as spnn
from cuda_ops.sparse.errors import SparseImplementationError
from cuda_ops.sparse.geometry import MapSpec, RouteStep
from cuda_ops.sparse.nn import SparseInputError, SparseTensor
from tests.cuda_ops.sparse.nn.clouds import SIDE, cloud
from tests.cuda_ops.sparse.test_dispatch import _forgets
from tests.profiler.models.test_sparse_models import Factory, _plain_one_thread_float64, each_network, example, plain

DOWN = (RouteStep("strided", (3, 3, 3), (2, 2, 2)),)
MAPS = [MapSpec((), (), (3, 3, 3)), MapSpec((), DOWN, (3, 3, 3), (2, 2, 2))]


def case(spec: MapSpec) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    x = cloud(sites=150)
    found = x.geometry.map(spec)
    generator = torch.Generator().manual_seed(2)
    weight = torch.randn(27, 3, 4, generator=generator)
    dy = torch.randn(found.num_outputs, 4, generator=generator)
    return x.feats.float(), weight, dy, found.neighbours, found.reverse


def spconv_functions() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return backends.load() or pytest.skip("spconv is not installed")


@pytest.mark.parametrize("spec", MAPS, ids=["submanifold", "strided"])
def test_spconv_computes_what_the_reference_does(spec: MapSpec) -> None:
    functions = spconv_functions()
    x, weight, dy, neighbours, reverse = case(spec)
    torch.testing.assert_close(
        functions.sparse_conv(x, weight, neighbours, reverse), reference.sparse_conv(x, weight, neighbours, reverse)
    )
    back = weight.transpose(1, 2).contiguous()
    torch.testing.assert_close(
        functions.sparse_conv(dy, back, reverse, neighbours), reference.sparse_conv(dy, back, reverse, neighbours)
    )
    torch.testing.assert_close(
        functions.sparse_conv_weight(x, dy, neighbours), reference.sparse_conv_weight(x, dy, neighbours)
    )


def test_spconv_runs_with_one_thread_and_gives_the_others_back() -> None:
    functions = spconv_functions()
    x, weight, _, neighbours, reverse = case(MAPS[0])
    torch.set_num_threads(2)
    torch.testing.assert_close(
        functions.sparse_conv(x, weight, neighbours, reverse), reference.sparse_conv(x, weight, neighbours, reverse)
    )
    assert torch.get_num_threads() == 2


def test_what_spconv_cannot_take_goes_to_the_reference() -> None:
    functions = spconv_functions()
    x, weight, _, neighbours, reverse = case(MAPS[0])
    half = functions.sparse_conv(x.half(), weight.half(), neighbours, reverse)
    assert torch.equal(half, reference.sparse_conv(x.half(), weight.half(), neighbours, reverse))
    nothing = torch.empty(27, 0, dtype=torch.int32)
    assert functions.sparse_conv(x[:0], weight, nothing, nothing).shape == (0, 4)


def test_what_is_not_installed_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "find_spec", lambda name: None)
    assert backends.load() is None


def test_the_adapters_import_none_of_the_libraries() -> None:
    code = (
        "import sys; import cuda_ops.extras.adapters, cuda_ops.extras.adapters.backends; "
        "assert not {'spconv', 'torchsparse', 'MinkowskiEngine'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=sys.path[0] or None, timeout=120)


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
    (one, x, _, _), (other, *_) = example(factory), example(factory)
    adapter.load_torchsparse_state_dict(other, adapter.to_torchsparse_state_dict(one))
    torch.testing.assert_close(plain(other(x)), plain(one(x)))


Triple = tuple[int, int, int]


@dataclass
class TheirTensor:
    """A stand-in with the constructor and fields of torchsparse.SparseTensor."""

    feats: Tensor
    coords: Tensor
    stride: Any = 1


def their_offsets(kernel: Triple) -> list[Triple]:
    """By the rule of lookup_coords_kernel in `torchsparse/backend/hashmap/hashmap_cuda.cuh`."""
    volume, found = kernel[0] * kernel[1] * kernel[2], []
    for k in range(volume):
        offset, rest = [0, 0, 0], k
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
    x, ours = cloud(sites=100), spnn.Conv3d(3, 4, kernel).double()
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


Order = Literal["zyx", "xyz"]
SHAPE = (SIDE, SIDE - 2, SIDE - 4)
each_order = pytest.mark.parametrize("order", ["zyx", "xyz"])


@pytest.fixture(scope="module")
def library() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("spconv.pytorch")


def float_cloud(**keywords: Any) -> SparseTensor:
    return cloud(**keywords).float()


def turned(sizes: tuple[int, int, int], order: Order) -> tuple[int, ...]:
    return sizes[::-1] if order == "zyx" else sizes


@each_order
def test_a_tensor_of_spconv_goes_there_and_comes_back(library: Any, order: Order) -> None:
    x = float_cloud(samples=3, empty=1)
    there = to_spconv(x, SHAPE, order=order)
    assert (there.batch_size, tuple(there.spatial_shape)) == (3, turned(SHAPE, order))
    if order == "zyx":
        assert torch.equal(there.indices[:, 1], x.coords[:, 3])
    back = from_spconv(there, order=order)
    assert torch.equal(back.coords, x.coords)
    torch.testing.assert_close(back.feats, x.feats)
    assert back.num_samples == 3


def test_dense_grids_and_views_from_above_agree(library: Any) -> None:
    x = float_cloud(samples=3, empty=1)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Using a non-tuple sequence", UserWarning)  # spconv's
        grid = to_spconv(x, SHAPE, order="xyz").dense()
    torch.testing.assert_close(spnn.to_dense(x, SHAPE), grid)
    view = spnn.ToBEVHeightCompression(3, SHAPE, dim=2)(x)  # as detectors make it: channels of one height side by side
    torch.testing.assert_close(view, grid.permute(0, 4, 1, 2, 3).flatten(1, 2))


def test_the_shape_of_the_grid_is_found_or_given(library: Any) -> None:
    x = SparseTensor(torch.ones(2, 1), torch.tensor([[0, 4, 2, 0], [0, 1, 5, 0]], dtype=torch.int32))
    assert to_spconv(x).spatial_shape == [1, 6, 5]
    with pytest.raises(SparseInputError, match=r"found 0 to \[5, 6, 1\], expected 0 to \[5, 5, 5\]"):
        to_spconv(x, (5, 5, 5))
    below = SparseTensor(torch.ones(1, 1), torch.tensor([[0, -1, 0, 0]], dtype=torch.int32))
    with pytest.raises(SparseInputError, match="outside of the spatial shape"):
        to_spconv(below)


@each_order
@pytest.mark.parametrize(("kernel", "dilation"), [((3, 3, 3), 1), ((1, 3, 5), 1), ((3, 3, 3), 2), ((1, 1, 1), 1)])
def test_submanifold_convolutions_agree(library: Any, order: Order, kernel: Any, dilation: int) -> None:
    theirs = library.SubMConv3d(3, 4, turned(kernel, order), dilation=dilation, bias=True)
    ours = spnn.Conv3d(3, 4, kernel, dilation=dilation, bias=True)
    load_spconv_state_dict(ours, theirs.state_dict(), order=order)
    x = float_cloud()
    with torch.no_grad():
        wanted = from_spconv(theirs(to_spconv(x, SHAPE, order=order)), order=order)
        torch.testing.assert_close(ours(x).feats, wanted.feats)


@each_order
@pytest.mark.parametrize(("kernel", "stride"), [((2, 2, 2), 2), ((3, 3, 3), 2), ((3, 2, 1), (2, 2, 1)), ((3, 3, 3), 3)])
def test_strided_and_inverse_convolutions_agree(library: Any, order: Order, kernel: Any, stride: Any) -> None:
    padding = tuple((n - 1) // 2 if n % 2 else 0 for n in kernel)
    steps = turned(stride, order) if isinstance(stride, tuple) else stride
    theirs = nn.ModuleList(
        [
            library.SparseConv3d(
                3, 4, turned(kernel, order), steps, turned(padding, order), bias=False, indice_key="down"
            ),
            library.SparseInverseConv3d(4, 2, turned(kernel, order), indice_key="down", bias=True),
        ]
    )
    ours = nn.ModuleList(
        [spnn.Conv3d(3, 4, kernel, stride), spnn.Conv3d(4, 2, kernel, stride, transposed=True, bias=True)]
    )
    load_spconv_state_dict(ours, theirs.state_dict(), order=order)
    x = float_cloud(sites=40)
    with torch.no_grad():
        middle = theirs[0](to_spconv(x, SHAPE, order=order))
        wanted = from_spconv(middle, 2, order=order)
        down = ours[0](x)
        assert torch.equal(down.coords, wanted.coords)
        torch.testing.assert_close(down.feats, wanted.feats)
        back = from_spconv(theirs[1](middle), order=order)
        torch.testing.assert_close(ours[1](down).feats, back.feats)


@each_order
def test_weights_go_there_and_come_back(library: Any, order: Order) -> None:
    ours = nn.Sequential(spnn.Conv3d(3, 4, (1, 2, 3), bias=True), spnn.BatchNorm(4), spnn.Conv3d(4, 2, 1))
    theirs = nn.Sequential(
        library.SparseConv3d(3, 4, turned((1, 2, 3), order)), nn.BatchNorm1d(4), library.SubMConv3d(4, 2, 1, bias=False)
    )
    theirs.load_state_dict(to_spconv_state_dict(ours, order=order))
    twin = nn.Sequential(spnn.Conv3d(3, 4, (1, 2, 3), bias=True), spnn.BatchNorm(4), spnn.Conv3d(4, 2, 1))
    load_spconv_state_dict(twin, theirs.state_dict(), order=order)
    for one, other in zip(ours.state_dict().values(), twin.state_dict().values(), strict=True):
        assert torch.equal(one, other)


def test_state_dicts_that_do_not_fit_are_refused() -> None:
    ours = nn.Sequential(spnn.Conv3d(3, 4, 3), spnn.BatchNorm(4))
    state = to_spconv_state_dict(ours)
    older = {**state, "0.weight": torch.zeros(3, 3, 3, 3, 4)}
    with pytest.raises(SparseInputError, match=r"found \[3, 3, 3, 3, 4\], expected \[4, 3, 3, 3, 3\]"):
        load_spconv_state_dict(ours, older)
    with pytest.raises(SparseInputError, match=r"found 1 unknown: extra, expected 1 missing: 1.running_var"):
        load_spconv_state_dict(
            ours, {**{k: v for k, v in state.items() if k != "1.running_var"}, "extra": state["1.bias"]}
        )
    with pytest.raises(SparseInputError, match=r"shape of 1.weight: found \[5\], expected \[4\], of 1.weight here"):
        load_spconv_state_dict(ours, {**state, "1.weight": torch.zeros(5)})
    load_spconv_state_dict(ours, {"0.weight": state["0.weight"]}, strict=False)
