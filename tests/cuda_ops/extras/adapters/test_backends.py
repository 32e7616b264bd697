from __future__ import annotations

import subprocess
import sys
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from cuda_ops.extras.adapters import backends
from cuda_ops.sparse import reference
from cuda_ops.sparse.geometry import MapSpec, RouteStep
from tests.cuda_ops.sparse.nn.clouds import cloud

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
