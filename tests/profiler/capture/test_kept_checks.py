"""What the check of a capture found is read where nothing has changed, and not believed where anything has."""

from __future__ import annotations

import dataclasses
import math
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.nn import functional

from planner.ir.profile import ModelSource
from profiler.capture import graph, kept_checks
from profiler.capture.graph import capture
from profiler.source import source
from profiler.source.model import LoadedModel
from profiler.source.source import load_model
from runtime.captured import CapturedModule

TEXT = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.Linear(width, 2))
        self.unused = nn.Parameter(torch.ones(1))
        self.scale = 2.0

    def forward(self, x):
        return self.layers(x) * 3.0

def net(width=8):
    return Net(width), (torch.randn(6, 4), torch.randn(6, 2)), nn.MSELoss()
"""


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(kept_checks, "_STARTED_S", math.inf)  # files of tests are younger than their process
    for name, module in [*sys.modules.items()]:  # of other tests in this process, whose folders are gone
        file = getattr(module, "__file__", None) or __file__
        if os.path.isabs(file) and not os.path.exists(file):
            monkeypatch.delitem(sys.modules, name)


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """One entry for each check that is made."""
    made: list[str] = []
    for name in ("require_same_loss", "evaluation_fault", "dependence"):
        monkeypatch.setattr(graph, name, noting(made, name, getattr(graph, name)))
    return made


def noting(made: list[str], name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def called(*arguments: Any) -> Any:
        made.append(name)
        return function(*arguments)

    return called


def loaded(folder: Path, text: str = TEXT, *, seed: int = 0, width: int = 8) -> LoadedModel:
    path = folder / "nets.py"
    if not path.exists() or path.read_text("utf-8") != text:
        path.write_text(text, "utf-8")
    return load_model(ModelSource(f"{path}:net", {"width": str(width)}), seed)


def test_a_second_capture_of_the_same_is_traced_and_not_checked(tmp_path: Path, checks: list[str]) -> None:
    first = capture(loaded(tmp_path))
    assert checks == ["require_same_loss", "evaluation_fault", "dependence"]
    second = capture(loaded(tmp_path))
    assert len(checks) == 3
    assert without_module(first) == without_module(second)
    assert "unused" not in second.graph.parameters
    assert first.graph_module.code == second.graph_module.code
    assert second.graph_module.get_parameter("layers.0.weight") is not first.graph_module.get_parameter(
        "layers.0.weight"
    )


def without_module(captured: CapturedModule) -> dict[str, object]:
    return {each.name: getattr(captured, each.name) for each in dataclasses.fields(captured)} | {"graph_module": None}


CHANGES = {
    "a comment": lambda folder: loaded(folder, f"# another\n{TEXT}"),
    "code that the graph shows": lambda folder: loaded(folder, TEXT.replace("3.0", "4.0")),
    "code that no graph shows": lambda folder: loaded(
        folder, TEXT.replace("return self.l", "self.x = 1; return self.l")
    ),
    "a number of the module": lambda folder: with_scale(loaded(folder)),
    "a buffer": lambda folder: with_mean(loaded(folder)),
    "an argument": lambda folder: loaded(folder, width=16),
    "the seed": lambda folder: loaded(folder, seed=1),
    "the mode of a part": lambda folder: in_evaluation(loaded(folder)),
    "the example": lambda folder: dataclasses.replace(loaded(folder), inputs=(torch.ones(6, 4),)),
    "autocast": lambda folder: dataclasses.replace(loaded(folder), autocast=torch.bfloat16),
}


def with_scale(model: LoadedModel) -> LoadedModel:
    model.module.scale = 1.0  # type: ignore[assignment]  # a number, of which torch's types do not know
    return model


def with_mean(model: LoadedModel) -> LoadedModel:
    model.module.get_buffer("layers.1.running_mean").fill_(0.5)
    return model


def in_evaluation(model: LoadedModel) -> LoadedModel:
    model.module.get_submodule("layers.0").eval()
    return model


@pytest.mark.every_case
@pytest.mark.parametrize("change", CHANGES)
def test_whatever_changes_is_checked_again(tmp_path: Path, checks: list[str], change: str) -> None:
    capture(loaded(tmp_path))
    capture(CHANGES[change](tmp_path))
    assert checks.count("require_same_loss") == 2


UNSEEN = """
import importlib.util, os, torch
from torch import nn
HERE = os.path.dirname(__file__)
{before}

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.gate = nn.Parameter(torch.ones(()))

    def forward(self, x{argument}):
        y = self.layer(x)
        return y if self.training else {evaluated}

def net():
    made = Net()
    {prepared}
    return made, (torch.randn(6, 4), torch.randn(6, 2)), nn.MSELoss()
"""
"""A module of which training shows nothing of what evaluation reads."""

BY_FILE = """
spec = importlib.util.spec_from_file_location("helper", f"{HERE}/helper.py")
helper = importlib.util.module_from_spec(spec)
spec.loader.exec_module(helper)
"""
READERS = {
    "a global variable": {"before": "SCALE = float(os.environ['SCALE'])", "evaluated": "y * SCALE"},
    "a constant in a tuple": {"before": "SCALES = (float(os.environ['SCALE']),)", "evaluated": "y * SCALES[0]"},
    "an array of numpy": {
        "before": "import numpy\nS = numpy.full(1, float(os.environ['SCALE']))",
        "evaluated": "y * S[0]",
    },
    "a default": {"argument": ", s=float(os.environ['SCALE'])", "evaluated": "y * s"},
    "the environment": {"evaluated": "y * float(os.environ['SCALE'])"},
    "a file that is no module of Python's list": {"before": BY_FILE, "evaluated": "helper.scaled(y)"},
    "code that was executed": {
        "before": "import pathlib\nexec(pathlib.Path(HERE, 'helper.py').read_text())",
        "evaluated": "scaled(y)",
    },
    "a function without a name": {
        "prepared": "Net.scaled = (lambda self, y: y) if os.environ['SCALE'] == '1' else (lambda self, y: y * 2)",
        "evaluated": "self.scaled(y)",
    },
    "weights": {"prepared": "made.gate.data.mul_(float(os.environ['SCALE']))", "evaluated": "y * self.gate"},
    "a function of torch's that was replaced": {
        "before": "from torch.nn import functional",
        "prepared": "functional.relu6 = (lambda y: y) if os.environ['SCALE'] == '1' else (lambda y: y * 2)",
        "evaluated": "functional.relu6(y)",
    },
}


@pytest.mark.every_case
@pytest.mark.parametrize("reader", READERS)
def test_what_evaluation_alone_reads_is_not_believed_to_be_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reader: str
) -> None:
    monkeypatch.setattr(functional, "relu6", functional.relu6)  # the module puts another one there
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # which stands for any file of the same size and second
    faults = []
    for scale in ("1", "2"):
        monkeypatch.setenv("SCALE", scale)
        (tmp_path / "helper.py").write_text(f"def scaled(y):\n    return y * {scale}\n", "utf-8")
        source._run.cache_clear()
        parts = dict.fromkeys(("before", "argument"), "") | {"prepared": "pass"} | READERS[reader]
        (tmp_path / "nets.py").write_text(UNSEEN.format(**parts), "utf-8")
        faults.append(capture(load_model(ModelSource(f"{tmp_path}/nets.py:net"))).evaluation)
    assert not faults[0]
    assert "something else in evaluation" in faults[1]


def test_a_package_that_is_installed_again_under_one_release_is_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "site-packages" / "net-1.0.dist-info"
    folder.mkdir(parents=True)
    monkeypatch.setattr("sys.path", [str(folder.parent)])
    before = kept_checks._installed()
    os.utime(folder, (1.0, 1.0))
    assert len(before) == 1
    assert kept_checks._installed() != before


def test_the_files_of_the_parts_of_a_network_count_though_they_are_installed() -> None:
    file = str(torch.nn.modules.linear.__file__)
    assert not any(file in line for line in kept_checks._file_digests(set()))
    assert any(file in line for line in kept_checks._file_digests({"torch.nn.modules.linear"}))


def test_a_file_that_is_gone_may_have_been_anything(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gone = ModuleType("gone")
    gone.__file__ = str(tmp_path / "gone.py")
    monkeypatch.setitem(sys.modules, "gone", gone)
    assert "" in kept_checks._file_digests(set())


def test_a_file_copied_over_another_with_its_own_old_time_is_a_younger_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "net.py"
    path.write_text("", "utf-8")
    os.utime(path, (1.0, 1.0))
    monkeypatch.setattr(kept_checks, "_STARTED_S", path.stat().st_ctime)
    assert not kept_checks._digest(path)


def test_a_process_began_before_it_loaded_the_profiler() -> None:
    assert kept_checks._started_s() <= time.time() - time.thread_time() + 2 / os.sysconf("SC_CLK_TCK")


def test_another_release_of_ours_or_of_a_package_is_checked_again(
    tmp_path: Path, checks: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    capture(loaded(tmp_path))
    monkeypatch.setattr(kept_checks, "_own_digests", lambda: ["another"])
    capture(loaded(tmp_path))
    monkeypatch.setattr(torch, "__version__", "9.9")
    capture(loaded(tmp_path))
    assert checks.count("require_same_loss") == 3


def test_nothing_is_kept_of_files_that_may_have_changed_since_they_were_read(
    tmp_path: Path, checks: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = loaded(tmp_path)
    monkeypatch.setattr(kept_checks, "_STARTED_S", os.stat(tmp_path / "nets.py").st_mtime)
    capture(model)
    capture(loaded(tmp_path))
    assert checks.count("require_same_loss") == 2
    assert not list((tmp_path / "cache").rglob("checks/*"))


def test_a_folder_that_others_may_write_to_is_not_read(tmp_path: Path, checks: list[str]) -> None:
    capture(loaded(tmp_path))
    folder = tmp_path / "cache" / "halopipe" / "checks"
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o777)
    capture(loaded(tmp_path))
    assert checks.count("require_same_loss") == 2


def test_a_file_that_says_nothing_is_not_believed(tmp_path: Path, checks: list[str]) -> None:
    capture(loaded(tmp_path))
    (file,) = (tmp_path / "cache" / "halopipe" / "checks").iterdir()
    file.write_text('{"idle": "all"', "utf-8")
    capture(loaded(tmp_path))
    capture(loaded(tmp_path))
    assert checks.count("require_same_loss") == 2  # and is written anew


def test_a_module_that_keeps_a_tensor_without_values_is_checked_each_time(tmp_path: Path, checks: list[str]) -> None:
    for _ in range(2):
        model = loaded(tmp_path)
        model.module.place = torch.empty(2, device="meta")
        capture(model)
    assert checks.count("require_same_loss") == 2


def test_models_of_unknown_origin_are_checked_each_time(tmp_path: Path, checks: list[str]) -> None:
    for _ in range(2):
        capture(dataclasses.replace(loaded(tmp_path), origin=""))
    assert checks.count("require_same_loss") == 2
