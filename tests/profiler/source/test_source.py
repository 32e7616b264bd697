from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from planner.ir.errors import FactoryError, HalopipeError, ModelNotFoundError
from planner.ir.profile import ModelSource
from profiler import load_model, mean_of_squares
from profiler.source.source import find_factory

FACTORIES = """
from __future__ import annotations
import torch
from torch import nn

def needing(input_shape, deep, *rest, wide=2):
    return nn.Linear(3, wide), torch.randn(input_shape)

def bare(width=4):
    return nn.Linear(3, width)

def with_input():
    return nn.Linear(3, 2), torch.randn(5, 3)

def shaped(*, input_shape=(2, 3)):
    return nn.Linear(input_shape[1], 2), (torch.randn(input_shape), torch.zeros(input_shape[0], 2)), nn.MSELoss()

def two_targets():
    return nn.Linear(3, 2), ((torch.ones(2, 3),), (torch.zeros(2, 2), torch.ones(2, 2))), two

def two(output, targets):
    return (output - targets[0] * targets[1]).square().mean()

def with_lengths():
    inputs, targets = (torch.ones(2, 6, 3),), torch.ones(2, 6, 2)
    return nn.Linear(3, 2), (inputs, targets), nn.MSELoss(), {"time": [("inputs", 1), ("targets", 1)]}

def with_wrong_lengths():
    return nn.Linear(3, 2), (torch.ones(2, 6, 3), ()), two, {"time": [("targets", 1)]}

def evaluating():
    return nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3).eval()).eval(), torch.ones(2, 3)

def depths(sizes):
    assert isinstance(sizes, tuple)
    return nn.Linear(*sizes), torch.ones(1, sizes[0])

def failing():
    raise KeyError("no such weights")

def wrong():
    return 3

def wrong_inputs():
    return nn.Linear(3, 2), [1]

class Net(nn.Linear):
    def __init__(self):
        super().__init__(3, 2)

class Spectral(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.full((3,), 1 + 2j, dtype=torch.complex64))
        self.scale = nn.Parameter(torch.ones(3))
        self.register_buffer("times", torch.arange(3, dtype=torch.float64) + 1e9)

    def forward(self, x):
        return (x * self.weight).imag * self.scale

class Filters(nn.Linear):
    def __init__(self):
        super().__init__(3, 2)
        self.register_buffer("bank", torch.fft.fft(torch.eye(3))[:2])

def signals():
    return Filters(), torch.ones(2, 3, dtype=torch.complex64)

instance = Net()
number = 3
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "nets_for_tests.py").write_text(FACTORIES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    for name in [name for name in sys.modules if "nets_for_tests" in name]:
        del sys.modules[name]


def load(factory: str, shape: tuple[int, ...] = (), dtype: str = "float32", seed: int = 0, **arguments: str) -> Any:
    return load_model(ModelSource(factory, arguments, shape, dtype), seed)


@pytest.mark.parametrize("place", ["nets_for_tests", "nets_for_tests.py", "./nets_for_tests.py"])
def test_a_model_is_found_by_module_and_by_file(folder: Path, place: str) -> None:
    model = load(f"{place}:with_input")
    assert [tuple(tensor.shape) for tensor in model.inputs] == [(5, 3)]
    assert model.samples == 5
    assert model.targets == ()
    torch.testing.assert_close(model.loss(model.inputs, ()), model.module(*model.inputs).square().mean())


def test_the_working_folder_hides_no_installed_package(folder: Path) -> None:
    (folder / "torch.py").write_text("raise RuntimeError('hidden')")
    load("nets_for_tests:with_input")
    assert sys.path[-1] == str(folder)


def test_a_seed_fixes_parameters_and_inputs_and_touches_no_other_random_number(folder: Path) -> None:
    state = torch.get_rng_state()
    first, again, other = (load("nets_for_tests:with_input", seed=seed) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(first.inputs[0], again.inputs[0])
    assert torch.equal(first.module.weight, again.module.weight)
    assert not torch.equal(first.inputs[0], other.inputs[0])


def test_arguments_shape_and_dtype_reach_the_model(folder: Path) -> None:
    assert load("nets_for_tests:bare", (7, 3), width="6").module.weight.shape == (6, 3)
    shaped = load("nets_for_tests:shaped", (7, 5), "float64")
    assert shaped.inputs[0].shape == (7, 5)
    assert {shaped.inputs[0].dtype, shaped.targets[0].dtype, shaped.module.weight.dtype} == {torch.float64}
    assert load("nets_for_tests:depths", sizes="[4, 2]").inputs[0].shape == (1, 4)
    assert load("nets_for_tests:Net", (1, 3)).module.weight.shape == (2, 3)


def test_complex_numbers_keep_both_parts_and_buffers_their_dtype_unless_another_is_asked_for(folder: Path) -> None:
    own = load("nets_for_tests:Spectral", (2, 3)).module
    assert (own.weight.dtype, own.times.dtype) == (torch.complex64, torch.float64)
    wide = load("nets_for_tests:Spectral", (2, 3), "float64").module
    assert torch.equal(wide.weight, torch.full((3,), 1 + 2j, dtype=torch.complex128))
    assert {wide.scale.dtype, wide.times.dtype} == {torch.float64}
    with pytest.raises(FactoryError, match=r"complex numbers, of which there are none in torch\.bfloat16"):
        load("nets_for_tests:Spectral", (2, 3), "bfloat16")


def test_complex_inputs_go_with_the_precision_of_the_module_and_buffers_are_no_views_of_another(folder: Path) -> None:
    wide = load("nets_for_tests:signals", (), "float64")
    assert wide.inputs[0].dtype == wide.module.bank.dtype == torch.complex128
    assert wide.module.bank._base is None
    assert load("nets_for_tests:signals").inputs[0].dtype == torch.complex64


def test_a_bare_target_and_a_tuple_of_targets_reach_the_loss_as_they_were(folder: Path) -> None:
    one = load("nets_for_tests:shaped")
    several = load("nets_for_tests:two_targets")
    for model, targets in ((one, one.targets[0]), (several, several.targets)):
        expected = model.loss_fn.function(model.module(*model.inputs), targets)
        assert torch.equal(model.loss(*model.fed), expected)


def test_sizes_that_vary_are_a_fourth_part(folder: Path) -> None:
    model = load("nets_for_tests:with_lengths")
    assert model.varying == {"time": (("inputs", 1), ("targets", 1))}
    assert model.extents == {"time": 6}
    assert list(model.tensors) == ["inputs", "targets"]
    assert load("nets_for_tests:shaped").varying == {}
    with pytest.raises(FactoryError, match=r"time is said to be in 'targets'[\s\S]*there are inputs"):
        load("nets_for_tests:with_wrong_lengths")


def test_autocast_is_for_parameters_in_float32(folder: Path) -> None:
    model = load_model(ModelSource("nets_for_tests:shaped", autocast="bfloat16"))
    assert model.autocast is torch.bfloat16
    assert model.module.weight.dtype is model.inputs[0].dtype is torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        expected = model.loss_fn(model.module(*model.inputs), *model.targets)
    assert torch.equal(model.loss(model.inputs, model.targets), expected)
    assert not torch.equal(load("nets_for_tests:shaped").loss(model.inputs, model.targets), expected)
    with pytest.raises(FactoryError, match=r"float32[\s\S]*asked for in float64"):
        load_model(ModelSource("nets_for_tests:shaped", dtype="float64", autocast="bfloat16"))
    with pytest.raises(FactoryError, match="autocast to 'float16' is not supported"):
        load_model(ModelSource("nets_for_tests:shaped", autocast="float16"))


def test_each_part_of_a_model_stays_in_its_mode(folder: Path) -> None:
    assert not any(part.training for part in load("nets_for_tests:evaluating").module.modules())


def test_the_default_loss_sums_the_means_of_all_float_outputs() -> None:
    output = {"a": torch.tensor([1.0, 3.0]), "b": [torch.tensor([[2.0]]), torch.tensor([7])]}
    assert mean_of_squares(output).item() == 5 + 4
    with pytest.raises(TypeError, match="no float tensor"):
        mean_of_squares(torch.tensor([1]))


@pytest.mark.parametrize(
    ("text", "kind", "parts"),
    [
        ("nets_for_tests", ModelNotFoundError, ["names no factory", "with_input", "pkg.mod:factory"]),
        ("nets_for_tests:", ModelNotFoundError, ["names no factory", "with_input"]),
        ("nets_for_tests:with_inputs", ModelNotFoundError, ["has no 'with_inputs'", "did you mean", ":with_input?"]),
        ("no_such:net", ModelNotFoundError, ["there is no module 'no_such'", "neither installed nor in"]),
        ("planner.no_such:net", ModelNotFoundError, ["no module 'planner.no_such'", "in package planner"]),
        (
            "missing.py:net",
            ModelNotFoundError,
            ["missing.py is not there", "nets_for_tests.py", "as the path is relative"],
        ),
        ("no/missing.py:net", ModelNotFoundError, ["nor is its folder"]),
        ("broken_nets_for_tests.py:net", ModelNotFoundError, ["SyntaxError", "broken_nets_for_tests.py:1"]),
        ("importing_nets_for_tests:net", ModelNotFoundError, ["ModuleNotFoundError", "no_such_library", ":1"]),
        ("nets_for_tests:number", ModelNotFoundError, ["'number' of nets_for_tests is no factory", "int"]),
        ("nets_for_tests:instance", ModelNotFoundError, ["is no factory", "Net"]),
        (
            "nets_for_tests:failing",
            FactoryError,
            ["raised KeyError", "no such weights", "tests.py:", "failing"],
        ),
        ("nets_for_tests:wrong", FactoryError, ["returned no model", "returned int"]),
        ("nets_for_tests:wrong_inputs", FactoryError, ["no example inputs", "no tensor is in list"]),
        ("nets_for_tests:bare", FactoryError, ["no example inputs", "--input"]),
    ],
)
def test_an_error_says_which_part_failed(folder: Path, text: str, kind: type[HalopipeError], parts: list[str]) -> None:
    (folder / "broken_nets_for_tests.py").write_text("def net(:\n")
    (folder / "importing_nets_for_tests.py").write_text("import no_such_library\n")
    with pytest.raises(kind) as caught:
        load(text)
    for part in parts:
        assert part in caught.value.render()


def test_arguments_that_do_not_fit_are_refused(folder: Path) -> None:
    with pytest.raises(FactoryError, match=r"takes no argument 'widht'[\s\S]*did you mean 'width'"):
        load("nets_for_tests:bare", widht="3")
    with pytest.raises(FactoryError, match=r"needs 'input_shape', 'deep'[\s\S]*--input 8,3,64,64 --arg deep=VALUE"):
        load("nets_for_tests:needing", wide="3")
    with pytest.raises(FactoryError, match=r"'width' .* is not JSON[\s\S]*wide: "):
        load("nets_for_tests:bare", width="wide")
    with pytest.raises(FactoryError, match="'int32' is no floating-point dtype"):
        load("nets_for_tests:bare", (2, 3), "int32")
    with pytest.raises(FactoryError, match=r"asked for \(9, 3\), its example has \(5, 3\)"):
        load("nets_for_tests:with_input", (9, 3))


def test_a_file_is_run_once_as_long_as_it_stays_as_it_is(tmp_path: Path) -> None:
    """An operator that it registers with torch again would leave models that use it with one that is gone."""
    path = tmp_path / "own.py"
    path.write_text("def model(): pass\ndef data(): pass\n")
    model = find_factory(f"{path}:model")
    data = find_factory(f"{path}:data")
    assert model.__globals__ is data.__globals__
    path.write_text("def model(): return 1\n")
    assert find_factory(f"{path}:model")() == 1
