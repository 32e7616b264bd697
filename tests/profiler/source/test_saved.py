from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import halopipe as hp
from halopipe.planning.measure import source_of
from planner.ir.errors import (
    FactoryError,
    ModelNotFoundError,
    StaleFileError,
    UnsupportedModelError,
    UsageError,
)
from planner.ir.profile import ModelSource
from profiler.capture.graph import capture
from profiler.source.source import load_model
from tests.processes import Program

CELL = """
import torch
from torch import nn

class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return 2 * x * gradient

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(3, 4), nn.Linear(4, 3)
        self.down.weight = nn.Parameter(torch.randn(3, 4))
        self.up.weight = self.tied = nn.Parameter(torch.randn(4, 3))
        pair = torch.randn(2, 3)
        self.register_buffer("first", pair[0])
        self.register_buffer("second", pair[1])
        self.drop = nn.Dropout(0.5).eval()

    def forward(self, x):
        return Square.apply(self.down(self.drop(self.up(x)))) + self.first * self.second
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    sys.modules.pop("a_cell", None)


@pytest.fixture
def net() -> Any:
    """Of a class that no other process can import, as those of a notebook are."""
    cell = types.ModuleType("a_cell")
    sys.modules["a_cell"] = cell
    exec(CELL, cell.__dict__)
    return cell.Net()


BATCH = torch.randn(4, 3), torch.randn(4, 3)


BIAS = torch.zeros(3)


def test_a_module_is_loaded_as_it_is(net: Any, folder: Path) -> None:
    """Weights, modes, what is tied and what shares memory, whatever the seed; and the one given is left as it was."""
    before = {name: value.clone() for name, value in net.state_dict().items()}
    source = source_of(net, example=BATCH, loss_fn=lambda y, target: (y - target + BIAS).square().mean())
    assert source.digest[:12] in source.factory
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    model = load_model(source, seed=7)
    found = model.module
    assert found is not net
    assert found.up.weight is found.tied
    assert found.first.untyped_storage().data_ptr() == found.second.untyped_storage().data_ptr()
    assert found.training
    assert not found.drop.training
    assert all(torch.equal(value, before[name]) for name, value in found.state_dict().items())
    assert model.loss(*model.fed) == (net(BATCH[0]) - BATCH[1]).square().mean()


def test_a_module_is_called_by_one_thread_while_it_is_saved(net: Any) -> None:
    """As where it is loaded; threads that wait for one another would take their cores' time meanwhile."""

    def loss(y: Tensor, target: Tensor) -> Tensor:
        if torch.get_num_threads() > 1:
            raise RuntimeError("several threads")
        return nn.functional.mse_loss(y, target)

    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        source_of(net, example=BATCH, loss_fn=loss)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


@pytest.mark.exhaustive("a profile takes 8 s; that another process finds classes of this one, a command shows below")
def test_a_module_is_profiled_in_a_process_that_does_not_have_its_class(net: Any, folder: Path) -> None:
    profile = hp.profile(net, BATCH[0], quick=True, cluster=1, sizes=(4,))
    assert profile.graph == capture(load_model(profile.model)).graph


def test_a_file_that_is_gone_or_another_one_is_told(net: Any, folder: Path) -> None:
    source = source_of(net, example=BATCH[0])
    other = source_of(net, example=BATCH[1])
    Path(source.factory).write_bytes(Path(other.factory).read_bytes())
    with pytest.raises(StaleFileError, match="holds another module than was profiled"):
        load_model(source)
    Path(source.factory).unlink()
    with pytest.raises(ModelNotFoundError, match="is not there") as caught:
        load_model(source)
    assert str(folder) in caught.value.details[1]


def test_a_class_that_is_another_one_elsewhere_is_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an imported class the file holds the name; a patch of it would be lost without a word."""
    with monkeypatch.context() as patched:
        patched.setattr(nn.Identity, "forward", lambda self, x: 2 * x)
        source = source_of(nn.Sequential(nn.Linear(3, 3), nn.Identity()), example=BATCH[0])
    with pytest.raises(StaleFileError, match="computes something else here"):
        load_model(source)


class Ramp(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.linspace(0, 1 / 3, 3)


def test_a_default_dtype_that_is_another_one_elsewhere_is_told(folder: Path) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        source = source_of(Ramp(), example=torch.randn(4, 3))
    finally:
        torch.set_default_dtype(torch.float32)
    with pytest.raises(StaleFileError, match="computes something else here") as caught:
        load_model(source)
    assert "torch.float64 there, torch.float32 here" in caught.value.details[1]
    assert "dtype=x.dtype" in caught.value.remedies[0]


def test_an_example_that_is_a_slice_of_all_data_does_not_bring_the_rest_along(folder: Path) -> None:
    data = torch.arange(300_000.0).view(-1, 3)
    source = source_of(
        nn.Linear(3, 3), example=(data[2:6], {"y": data[6:10]}), loss_fn=lambda out, y: (out - y["y"]).mean()
    )
    assert Path(source.factory).stat().st_size < 100_000
    torch.testing.assert_close(load_model(source).fed, ((data[2:6],), (data[6:10],)))


def test_what_a_file_would_lose_is_refused(net: Any, folder: Path) -> None:
    net.generator = (each for each in range(3))
    with pytest.raises(UsageError, match="cannot be written to a file") as caught:
        source_of(net, example=BATCH[0])
    assert "generator" in caught.value.details[0]
    del net.generator
    handle = net.up.bias.register_hook(lambda gradient: 2 * gradient)
    with pytest.raises(UnsupportedModelError, match=r"parameter up\.bias has a hook"):
        source_of(net, example=BATCH[0])
    handle.remove()
    with pytest.raises(FactoryError, match="does not run on its example: RuntimeError"):
        source_of(net, example=torch.ones(2, 5))
    net.up.half()
    with pytest.raises(UsageError, match="several dtypes"):
        source_of(net, example=BATCH[0])
    with pytest.raises(UsageError, match="a module has no arguments: width"):
        source_of(nn.Linear(3, 3), arguments={"width": 3}, input_shape=(2, 3))
    assert not list(folder.glob(".halopipe/.*"))


def test_a_module_keeps_its_dtype_and_may_be_given_a_shape_alone(folder: Path) -> None:
    source = source_of(nn.Linear(3, 2).double(), (5, 3))
    found = load_model(source)
    assert source.dtype == "float64"
    assert {found.inputs[0].dtype, found.module.weight.dtype} == {torch.float64}
    assert tuple(found.inputs[0].shape) == (5, 3)


class Halved(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / 2


def test_files_of_torch_are_models_too(folder: Path) -> None:
    module = Halved(3, 2)
    torch.save((module, BATCH[0]), "own.pt")
    found = load_model(source_of("own.pt"))
    assert torch.equal(found.module(BATCH[0]), module(BATCH[0]))
    torch.save(module, "bare.pt")
    assert load_model(source_of("bare.pt", (2, 3))).samples == 2
    program = torch.export.export(module, BATCH[:1], dynamic_shapes=({0: torch.export.Dim("samples")},))
    torch.export.save(program, "net.pt2")
    exported = load_model(source_of("net.pt2"))
    assert torch.equal(exported.module(BATCH[0]), module(BATCH[0]))
    assert capture(exported).polymorphic
    with pytest.raises(ModelNotFoundError, match="is not there"):
        load_model(ModelSource("none.pt2"))


def test_a_module_of_a_script_is_found_by_a_command(folder: Path) -> None:
    """Classes of ``__main__`` are in the file; those of a module beside the script are found by the kept folders."""
    (folder / "scripts").mkdir()
    (folder / "scripts/parts.py").write_text("from torch import nn\n\nclass Head(nn.Linear):\n    pass\n")
    script = f"""{CELL}
from parts import Head
from halopipe.planning.measure import source_of
print(source_of(nn.Sequential(Net(), Head(3, 2)), example=torch.ones(4, 3)).factory)
"""
    (folder / "scripts/train.py").write_text(script)
    code, made, errors = Program.start(folder / "scripts/train.py").end()
    assert code == 0, errors
    found = load_model(ModelSource(made.strip()))
    assert type(found.module[1]).__module__ == "parts"
    assert len(capture(found).graph.layers) > 3
    del sys.modules["parts"]


LISTENING = """
import torch
from torch import nn

heard = []

class Listening(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.utils.parametrizations.weight_norm(nn.Linear(3, 3))
        self.outer = nn.utils.parametrizations.spectral_norm(nn.Linear(3, 2))
        def hook(module, given, made):
            heard.append(made)
        self.inner.register_forward_hook(hook)

    def forward(self, x):
        heard.clear()
        return self.outer(self.inner(x)) + heard[0].sum(-1, keepdim=True)
"""


def test_hooks_find_their_module_and_parametrised_weights_their_class(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "listening.py").write_text(LISTENING, "utf-8")
    monkeypatch.syspath_prepend(folder)
    import listening  # type: ignore[import-not-found]  # of this test

    net = listening.Listening()
    x = torch.randn(4, 3)
    source = source_of(net, example=(x, torch.zeros(4, 2)), loss_fn=nn.functional.mse_loss)
    loaded = load_model(source).module
    assert list(dict(loaded.named_parameters())) == list(dict(net.named_parameters()))
    torch.testing.assert_close(loaded.eval()(x), net.eval()(x))
    loaded.train()(x).sum().backward()
    assert loaded.inner.parametrizations.weight.original0.grad is not None
    monkeypatch.delitem(sys.modules, "listening")
    assert load_model(source).module(x).shape == (4, 2)  # as in a process that has not imported it yet


def test_transformers_is_told_of_models_that_were_made_elsewhere(net: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    registry: dict[object, Any] = {}
    place = types.ModuleType("transformers.utils.output_capturing")
    monkeypatch.setattr(place, "_CAN_RECORD_REGISTRY", registry, raising=False)
    monkeypatch.setitem(sys.modules, place.__name__, place)
    net.up._can_record_outputs = {"hidden_states": "Layer"}
    model = load_model(source_of(net, example=BATCH[0]))
    assert registry == {model.module.up: {"hidden_states": "Layer"}}


def test_a_package_built_for_another_torch_is_told_apart_from_one_that_is_missing(tmp_path: Path) -> None:
    (tmp_path / "vision.py").write_text("import torch\ntorch.library.register_fake('no_vision::nms')(lambda x: x)\n")
    with pytest.raises(ModelNotFoundError, match="cannot be imported: RuntimeError") as caught:
        load_model(ModelSource(f"{tmp_path / 'vision.py'}:make"))
    assert caught.value.remedies[0].startswith("no_vision was built for another torch: `halopipe doctor`")
    (tmp_path / "missing.py").write_text("import no_such_package\n")
    with pytest.raises(ModelNotFoundError) as caught:
        load_model(ModelSource(f"{tmp_path / 'missing.py'}:make"))
    assert caught.value.remedies == ("put what it imports where Python finds it: PYTHONPATH",)


class Wide(nn.Module):
    """Its second layer takes other features than the first makes."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 8)
        self.b = nn.Linear(7, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x))


def test_a_width_that_does_not_fit_is_named_by_the_users_line() -> None:
    with pytest.raises(FactoryError) as caught:
        load_model(source_of(Wide(), example=(torch.randn(4, 3), torch.randn(4, 2)), loss_fn=nn.MSELoss()))
    (place,) = (each for each in caught.value.details if each.startswith("at "))
    assert __file__ in place
    assert place.endswith("in forward")


def test_a_loss_that_counts_its_calls_is_not_another_module() -> None:
    calls = [0]

    def fading(output: Tensor, aim: Tensor) -> Tensor:
        calls[0] += 1
        return (output - aim).square().mean() * 0.5 ** calls[0]

    saved = source_of(nn.Linear(3, 2), example=(torch.randn(4, 3), torch.randn(4, 2)), loss_fn=fading)
    with pytest.raises(UnsupportedModelError, match="something else when it is called again") as caught:
        capture(load_model(saved))
    assert "the first call changes calls" in str(caught.value)


def test_what_is_loaded_are_the_bytes_that_were_compared(net: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    saved, other = (source_of(each, example=BATCH[0]) for each in (net, nn.Linear(3, 2)))
    load = torch.load
    path = Path(saved.factory)

    def late(*arguments: Any, **named: Any) -> Any:
        path.write_bytes(Path(other.factory).read_bytes())
        return load(*arguments, **named)

    monkeypatch.setattr(torch, "load", late)
    assert type(load_model(saved).module).__name__ == type(net).__name__
    with pytest.raises(StaleFileError, match="holds another module than was profiled"):
        load_model(saved)


class Exact(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (2 if torch.are_deterministic_algorithms_enabled() else 1)


def test_a_setting_of_torch_that_a_module_asks_for_is_named() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        saved = source_of(Exact(3, 2), example=BATCH[0])
    finally:
        torch.use_deterministic_algorithms(False)
    with pytest.raises(StaleFileError, match="computes something else here") as caught:
        load_model(saved)
    assert "torch.are_deterministic_algorithms_enabled(): True there, False here" in caught.value.details
    assert caught.value.remedies == (
        "ask once, in __init__: self.exact = torch.are_deterministic_algorithms_enabled()",
    )
