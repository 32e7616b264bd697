from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.utils.flop_counter import FlopCounterMode

from cuda_ops.sparse import operators
from tests.cuda_ops.sparse.clouds import ONES, maps, random, sites

TWOS, THREES = (2, 2, 2), (3, 3, 3)


class _Layers(nn.Module):
    """What a network does with maps that are given: features, maps and segments in, one row a sample out."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(random(27, 2, 4, dtype=torch.float32))
        self.second = nn.Parameter(random(8, 4, 3, seed=1, dtype=torch.float32))

    def forward(
        self, x: Tensor, own: Tensor, own_back: Tensor, down: Tensor, up: Tensor, starts: Tensor, lengths: Tensor
    ) -> Tensor:
        x = torch.relu(operators.sparse_conv(x, self.first, own, own_back))
        x = x + operators.sparse_sum_pool(operators.sparse_max_pool(x, down, up)[0], up, down)
        y = operators.sparse_conv(x, self.second, down, up)
        largest, _ = operators.segment_max(y, starts, lengths)
        return operators.segment_sum(y, starts, lengths) + largest


class _Sites(nn.Module):
    """Sites and maps are made inside: sizes that nobody knows before."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(random(8, 2, 3, dtype=torch.float32))

    def forward(self, x: Tensor, coordinates: Tensor) -> tuple[Tensor, Tensor]:
        keys, order = operators.sorted_sites(coordinates)
        coarse = operators.strided_sites(keys, TWOS, TWOS, ONES)
        neighbours = operators.kernel_map(keys, coarse, TWOS, TWOS, ONES)
        reverse = operators.reversed_map(neighbours, keys.shape[0])
        y = operators.sparse_conv(x.index_select(0, order), self.weight, neighbours, reverse)
        wide = operators.generated_sites(coarse, TWOS, TWOS, ONES)
        back = operators.kernel_map(coarse, wide, TWOS, TWOS, ONES, True)
        z = operators.sparse_max_pool(y, back, operators.reversed_map(back, coarse.shape[0]))[0]
        return y, operators.unpack_add(z, torch.zeros(1, dtype=torch.int64), y[:1])


def _layers_input(count: int, seed: int = 0) -> tuple[Tensor, ...]:
    keys = sites(count, seed)
    coarse = operators.strided_sites(keys, TWOS, TWOS, ONES)
    bounds = torch.tensor([0, len(coarse) // 2, len(coarse)])
    x = random(len(keys), 2, dtype=torch.float32)
    return x, *maps(keys, keys, THREES), *maps(keys, coarse, TWOS, TWOS), bounds[:-1], bounds.diff()


def _sites_input(count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    from cuda_ops.sparse.keys import unpack

    coordinates = unpack(sites(count, seed)).flip(0)
    return random(len(coordinates), 2, dtype=torch.float32), coordinates


def _close(one: object, other: object) -> None:
    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_layers_export_with_numbers_of_sites_that_vary() -> None:
    model, rows, coarse = _Layers(), Dim("rows"), Dim("coarse")
    shapes = ({0: rows}, {1: rows}, {1: rows}, {1: coarse}, {1: rows}, None, None)
    exported = torch.export.export(model, _layers_input(60), dynamic_shapes=shapes)
    names = {str(node.target) for node in exported.graph.nodes}
    assert {"halopipe.sparse_conv.default", "halopipe.segment_sum.default"} <= names
    for count in (60, 90):
        arguments = _layers_input(count, seed=1)
        _close(exported.module()(*arguments), model(*arguments))


def test_sites_export_with_sizes_of_their_own() -> None:
    model = _Sites()
    exported = torch.export.export(model, _sites_input(60), dynamic_shapes=({0: Dim("rows")}, {0: Dim("rows")}))
    for count in (60, 90):
        arguments = _sites_input(count, seed=1)
        _close(exported.module()(*arguments), model(*arguments))


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")  # torch 2.11 of its own reading of the file
def test_an_exported_program_is_saved_and_loaded(tmp_path) -> None:
    model = _Sites()
    exported = torch.export.export(model, _sites_input(60), dynamic_shapes=({0: Dim("rows")}, {0: Dim("rows")}))
    torch.export.save(exported, tmp_path / "sites.pt2")
    arguments = _sites_input(40, seed=2)
    _close(torch.export.load(tmp_path / "sites.pt2").module()(*arguments), model(*arguments))


@pytest.mark.parametrize(
    ("model", "inputs"), [(_Layers(), _layers_input), (_Sites(), _sites_input)], ids=["layers", "sites"]
)
def test_compiled_values_and_gradients_are_those_of_eager(model: nn.Module, inputs) -> None:
    torch.compiler.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=True)
    for count in (60, 90):
        found = []
        for call in (compiled, model):
            x, *others = inputs(count)
            x.requires_grad_()
            results = call(x, *others)
            total = sum((each * each).sum() for each in (results if isinstance(results, tuple) else (results,)))
            found.append((results, torch.autograd.grad(total, [x, *model.parameters()])))
        _close(*found)


def test_convolutions_count_their_operations_by_pairs() -> None:
    x, own, back, *_ = _layers_input(60)
    weight = random(27, 2, 4, dtype=torch.float32, grad=True)
    pairs = int((own >= 0).sum())
    with FlopCounterMode(display=False) as counter:
        operators.sparse_conv(x.requires_grad_(), weight, own, back).sum().backward()
    assert counter.get_total_flops() == 3 * 2 * pairs * 2 * 4
