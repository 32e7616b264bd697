"""What the check of a capture found is read where nothing has changed, and not believed where anything has."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from planner.ir.profile import ModelSource
from profiler.capture import graph, kept_checks
from profiler.capture.graph import capture
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
