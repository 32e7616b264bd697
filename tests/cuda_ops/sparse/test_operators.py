"""Every operator as torch registers it: schema, gradients, refusals; which implementation runs; export."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.utils.flop_counter import FlopCounterMode

from cuda_ops.sparse import dispatch, operators, reference
from cuda_ops.sparse.checks import CHECKS
from cuda_ops.sparse.errors import SparseImplementationError, SparseInputError
from cuda_ops.sparse.registrations import SCHEMAS
from tests.cuda_ops.sparse.clouds import ONES, cloud, maps, random, sites

OPS = torch.ops.halopipe
TWOS = (2, 2, 2)


def _arguments() -> dict[str, tuple[Any, ...]]:
    """Arguments of every operator, by its name."""
    keys = sites(30, extent=3)
    coarse = operators.strided_sites(keys, TWOS, TWOS, ONES)
    found = neighbours, reverse = maps(keys, coarse, TWOS, TWOS)
    x = random(len(keys), 2, grad=True)
    dy = random(len(coarse), 3, grad=True)
    segments = torch.tensor([3, 0]), torch.tensor([2, 3])
    index = torch.tensor([[0, 1, -1], [2, 2, 0]], dtype=torch.int32)
    weight = random(2, 3, grad=True)
    two = random(2, 2, seed=1, grad=True)
    rows = torch.tensor([1, 0, 1])
    boxes = [0, 2, 0, 1, 3, 4, 1, 2]
    return {
        "sorted_sites": (cloud(),),
        "strided_sites": (keys, TWOS, TWOS, ONES),
        "generated_sites": (keys, TWOS, TWOS, ONES),
        "kernel_map": (keys, coarse, TWOS, TWOS, ONES, False),
        "reversed_map": (neighbours, len(keys)),
        "sparse_conv": (x, random(8, 2, 3, grad=True), *found),
        "sparse_conv_weight": (x, dy, neighbours),
        "sparse_max_pool": (x, *found),
        "sparse_max_pool_backward": (
            dy[:, :2].detach().requires_grad_(),
            reference.sparse_max_pool(x.detach(), *found)[1],
            reverse,
        ),
        "sparse_sum_pool": (x, *found),
        "segment_sum": (x, *segments),
        "segment_max": (x, *segments),
        "segment_grid": (x, torch.arange(len(keys)) % 7, *segments, 7),
        "segment_expand": (two, *segments, 6),
        "interpolate": (x, index, weight),
        "interpolate_backward": (two, index, weight, 5),
        "interpolate_weight": (x, two, index),
        "pack_rows": (x, rows),
        "unpack_add": (x, rows, random(3, 2, seed=2, grad=True)),
        "pack_boxes": (x, boxes),
        "unpack_boxes": (random(3, grad=True), x, boxes, False),
    }


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("name", SCHEMAS)
def test_schema_fake_and_gradient_agree_with_the_kernel(name: str) -> None:
    torch.library.opcheck(getattr(OPS, name).default, _arguments()[name])


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("name", SCHEMAS)
def test_results_share_no_memory_with_arguments(name: str) -> None:
    arguments = _arguments()[name]
    results = getattr(OPS, name)(*arguments)
    given = {each.data_ptr() for each in arguments if isinstance(each, torch.Tensor)}
    for result in results if isinstance(results, tuple | list) else [results]:
        assert result.data_ptr() not in given
        assert result.is_contiguous()


def test_every_operator_has_a_check_and_a_reference() -> None:
    assert set(CHECKS) == set(SCHEMAS) == set(reference.__all__) == set(_arguments())


def test_tensors_in_another_order_of_memory_are_taken() -> None:
    arguments = _arguments()["sparse_conv"]
    turned = [each.transpose(0, 1).contiguous().transpose(0, 1) for each in arguments]
    assert not turned[2].is_contiguous()
    assert torch.equal(OPS.sparse_conv(*turned), OPS.sparse_conv(*arguments))


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("name", "position", "change", "message"),
    [
        ("sparse_conv", 0, lambda x: x.float(), r"dtypes that differ: found torch.float64, expected torch.float32"),
        ("sparse_conv", 0, lambda x: x.int(), "dtype of features: found torch.int32"),
        ("sparse_conv", 0, lambda x: x[1:], "rows of features against the map's inputs: found"),
        ("sparse_conv", 0, lambda x: x[:, :1], "channels of the features: found 1, expected 2"),
        ("sparse_conv", 1, lambda w: w[1:], "offsets of the weight: found 7, expected 8"),
        ("sparse_conv", 1, lambda w: w[0], "number of dimensions: found 2, expected 3"),
        ("sparse_conv", 2, lambda n: n.long(), r"dtype of indices: found torch.int64, expected torch.int32"),
        ("sparse_conv", 3, lambda r: r[1:], "offsets of reverse: found 7, expected 8"),
        ("sparse_conv_weight", 1, lambda dy: dy[1:], "rows of the gradient: found"),
        ("sparse_max_pool", 0, lambda x: x[1:], "rows of features against the map's inputs"),
        ("sparse_max_pool_backward", 0, lambda dy: dy[1:], "shape of the gradient"),
        ("segment_expand", 0, lambda y: y[1:], "rows against segments: found 1, expected 2"),
        ("segment_expand", 3, lambda rows: 2**31, "too many rows: found 2147483648"),
        ("interpolate", 1, lambda i: i.long(), "dtype of indices"),
        ("interpolate_backward", 0, lambda dy: dy[1:], "rows of the gradient: found 1, expected 2"),
        ("interpolate_weight", 1, lambda dy: dy[1:], "rows of the gradient: found 1, expected 2"),
        ("pack_rows", 1, lambda i: i.double(), "dtype of indices"),
        ("unpack_boxes", 0, lambda b: b.float(), "dtypes that differ"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(name: str, position: int, change: Any, message: str) -> None:
    arguments = list(_arguments()[name])
    arguments[position] = change(arguments[position])
    with pytest.raises(SparseInputError, match=f"{name}: {message}"):
        getattr(OPS, name)(*arguments)


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


TWO = (2, 2, 2)
THREES = (3, 3, 3)


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
        coarse = operators.strided_sites(keys, TWO, TWO, ONES)
        neighbours = operators.kernel_map(keys, coarse, TWO, TWO, ONES)
        reverse = operators.reversed_map(neighbours, keys.shape[0])
        y = operators.sparse_conv(x.index_select(0, order), self.weight, neighbours, reverse)
        wide = operators.generated_sites(coarse, TWO, TWO, ONES)
        back = operators.kernel_map(coarse, wide, TWO, TWO, ONES, True)
        z = operators.sparse_max_pool(y, back, operators.reversed_map(back, coarse.shape[0]))[0]
        return y, operators.unpack_add(z, torch.zeros(1, dtype=torch.int64), y[:1])


def _layers_input(count: int, seed: int = 0) -> tuple[Tensor, ...]:
    keys = sites(count, seed)
    coarse = operators.strided_sites(keys, TWO, TWO, ONES)
    bounds = torch.tensor([0, len(coarse) // 2, len(coarse)])
    x = random(len(keys), 2, dtype=torch.float32)
    return x, *maps(keys, keys, THREES), *maps(keys, coarse, TWO, TWO), bounds[:-1], bounds.diff()


def _sites_input(count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    from cuda_ops.sparse.keys import unpack

    coordinates = unpack(sites(count, seed)).flip(0)
    return random(len(coordinates), 2, dtype=torch.float32), coordinates


def _close(one: object, other: object) -> None:
    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_layers_export_with_numbers_of_sites_that_vary() -> None:
    model = _Layers()
    rows = Dim("rows")
    coarse = Dim("coarse")
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
