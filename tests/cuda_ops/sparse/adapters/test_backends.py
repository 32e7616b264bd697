from __future__ import annotations

import importlib.machinery
import subprocess
import sys
import warnings
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from cuda_ops.sparse import reference
from cuda_ops.sparse.adapters import backends
from cuda_ops.sparse.geometry import MapSpec, Step
from tests.cuda_ops.sparse.nn.clouds import cloud

DOWN = (Step("strided", (3, 3, 3), (2, 2, 2)),)
MAPS = [MapSpec((), (), (3, 3, 3)), MapSpec((), DOWN, (3, 3, 3), (2, 2, 2))]


def case(spec: MapSpec) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    x = cloud(sites=150)
    found = x.geometry.map(spec)
    generator = torch.Generator().manual_seed(2)
    weight = torch.randn(27, 3, 4, generator=generator)
    dy = torch.randn(found.num_outputs, 4, generator=generator)
    return x.feats.float(), weight, dy, found.neighbours, found.reverse


class TheirBackend(ModuleType):
    """A stand-in with the calls of torchsparse.backend that are used, as its Python sources call them."""

    def __init__(self) -> None:
        super().__init__("torchsparse.backend")
        self.calls: list[str] = []

    def conv_forward_gather_scatter_cpu(
        self, x: Tensor, out: Tensor, weight: Tensor, pairs: Tensor, counts: Tensor, transposed: bool
    ) -> None:
        self.calls.append("forward")
        assert not transposed
        start = 0
        for k, count in enumerate(counts.tolist()):
            rows = pairs[start : start + count].long()
            out.index_add_(0, rows[:, 1], x[rows[:, 0]] @ weight[k])
            start += count

    def conv_backward_gather_scatter_cpu(
        self,
        x: Tensor,
        dx: Tensor,
        dy: Tensor,
        weight: Tensor,
        dweight: Tensor,
        pairs: Tensor,
        counts: Tensor,
        transposed: bool,
    ) -> None:
        self.calls.append("backward")
        start = 0
        for k, count in enumerate(counts.tolist()):
            rows = pairs[start : start + count].long()
            dx.index_add_(0, rows[:, 0], dy[rows[:, 1]] @ weight[k].t())
            dweight[k] += x[rows[:, 0]].t() @ dy[rows[:, 1]]
            start += count

    def conv_forward_implicit_gemm_cuda(
        self, x: Tensor, weight: Tensor, out_in_map: Tensor, outputs: int, channels: int, tf32: bool, fp16: bool
    ) -> Tensor:
        """Out row by row through the map, padding included, as `convolution_forward_implicit_gemm_cuda.cu` writes."""
        assert len(out_in_map) % 128 == 0
        assert len(out_in_map) >= outputs
        out = x.new_zeros(len(out_in_map), channels)
        for k, rows in enumerate(out_in_map.t().long()):
            out += torch.where(rows[:, None] >= 0, x[rows.clamp(min=0)], 0) @ weight[k]
        return out

    def conv_backward_wgrad_implicit_gemm_cuda(
        self, dy: Tensor, x: Tensor, in_out_map: Tensor, split_k: int, tf32: bool, fp16: bool
    ) -> Tensor:
        """(offsets * out channels, in channels): it is given the transposed map, from inputs to outputs."""
        found = []
        for rows in in_out_map[: len(x)].t().long():
            found.append(torch.where(rows[:, None] >= 0, dy[rows.clamp(min=0)], 0).t() @ x)
        return torch.cat(found)


@pytest.fixture
def their_backend(monkeypatch: pytest.MonkeyPatch) -> TheirBackend:
    backend, package = TheirBackend(), ModuleType("torchsparse")
    package.__spec__ = importlib.machinery.ModuleSpec("torchsparse", None)
    monkeypatch.setitem(sys.modules, "torchsparse", package)
    monkeypatch.setitem(sys.modules, "torchsparse.backend", backend)
    monkeypatch.setitem(
        sys.modules,
        "torchsparse.backends",
        SimpleNamespace(allow_tf32=False, allow_fp16=False),  # type: ignore[arg-type]
    )
    return backend


def spconv_functions() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return backends.load("spconv") or pytest.skip("spconv is not installed")


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


@pytest.mark.parametrize("spec", MAPS, ids=["submanifold", "strided"])
def test_torchsparse_gets_pairs_by_offset(their_backend: TheirBackend, spec: MapSpec) -> None:
    functions = backends.load("torchsparse")
    assert functions is not None
    x, weight, dy, neighbours, reverse = case(spec)
    torch.testing.assert_close(
        functions.sparse_conv(x, weight, neighbours, reverse), reference.sparse_conv(x, weight, neighbours, reverse)
    )
    torch.testing.assert_close(
        functions.sparse_conv_weight(x, dy, neighbours), reference.sparse_conv_weight(x, dy, neighbours)
    )
    assert their_backend.calls == ["forward", "backward"]
    double = functions.sparse_conv(x.double(), weight.double(), neighbours, reverse)
    assert their_backend.calls == ["forward", "backward"]
    torch.testing.assert_close(double, reference.sparse_conv(x.double(), weight.double(), neighbours, reverse))


@pytest.mark.parametrize("spec", MAPS, ids=["submanifold", "strided"])
def test_its_implicit_gemm_gets_our_maps(their_backend: TheirBackend, spec: MapSpec) -> None:
    functions = backends.blockwise(their_backend, SimpleNamespace(allow_tf32=False, allow_fp16=False))
    x, weight, dy, neighbours, reverse = case(spec)
    torch.testing.assert_close(
        functions.sparse_conv(x, weight, neighbours), reference.sparse_conv(x, weight, neighbours, reverse)
    )
    torch.testing.assert_close(
        functions.sparse_conv_weight(x, dy, neighbours), reference.sparse_conv_weight(x, dy, neighbours)
    )


def test_its_implicit_gemm_gets_whole_blocks_of_rows() -> None:
    *_, neighbours, _ = case(MAPS[0])
    rows = backends._blocks(neighbours)
    assert rows.shape == (256, 27)
    assert torch.equal(rows[:150].t(), neighbours)
    assert (rows[150:] == -1).all()


def test_what_is_not_installed_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "find_spec", lambda name: None)
    assert backends.load("torchsparse") is None
    assert backends.load("spconv") is None


def test_the_adapters_import_none_of_the_libraries() -> None:
    code = (
        "import sys; import cuda_ops.sparse.adapters, cuda_ops.sparse.adapters.backends; "
        "assert not {'spconv', 'torchsparse', 'MinkowskiEngine'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=sys.path[0] or None, timeout=120)
