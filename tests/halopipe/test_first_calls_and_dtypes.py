"""What a module does at its first call alone, and tensors of other dtypes than its weights, where users meet them."""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import halopipe as hp
from halopipe.planning.measure import source_of
from planner.ir.errors import UnsupportedModelError
from profiler.capture.graph import capture
from profiler.source.source import load_model
from tests.halopipe.commands import call, process
from tests.halopipe.plans import plan_of

CENTRED = """
import torch
from torch import nn

torch.manual_seed(0)
MEANS = {}
BATCH = torch.randn(8, 6) + 2, torch.randn(8, 3)


class Net(nn.Module):
    scale = None

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x):
        if "mean" not in MEANS:
            MEANS["mean"] = x.mean(0).detach()
        if Net.scale is None:
            Net.scale = x.std().detach()
        return self.b(torch.tanh(self.a((x - MEANS["mean"]) / Net.scale)))


class Kept(Net):
    mean = None

    def forward(self, x):
        if self.mean is None:
            self.mean, self.scale = x.mean(0).detach(), x.std().detach()
        return self.b(torch.tanh(self.a((x - self.mean) / self.scale)))


def first():
    return Net(), BATCH, nn.MSELoss()


def called():
    net = Net()
    net(BATCH[0])
    return net, BATCH, nn.MSELoss()


def data(global_batch):
    torch.manual_seed(1)
    while True:
        yield torch.randn(global_batch, 6) - 1, torch.randn(global_batch, 3)
"""
MIXED = """
import numpy as np
import torch
from torch import nn

EPOCH = 1.7e9
HOUR = 3600.0


class Net(nn.Module):
    '''A picture in half precision, a time stamp in float64, features as numpy has them.'''

    def __init__(self):
        super().__init__()
        self.picture, self.features = nn.Linear(16, 8), nn.Linear(5, 8)
        self.time, self.head = nn.Linear(2, 8), nn.Linear(8, 3)

    def forward(self, picture, stamp, features):
        hours = ((stamp - EPOCH) / HOUR).float()  # in float32 seconds of an epoch are lost
        clock = torch.stack([hours.sin(), hours.cos()], 1)
        h = self.picture(picture.float().flatten(1)) + self.features(features.float()) + self.time(clock)
        return self.head(torch.tanh(h))


def loss(out, target):
    return ((out - target["value"]).square() * target["weight"][:, None]).mean()


def batch(rows, seed):
    rng = np.random.default_rng(seed)
    inputs = {
        "picture": torch.from_numpy(rng.random((rows, 4, 4)).astype(np.float16)),
        "stamp": torch.from_numpy(EPOCH + rng.random(rows) * HOUR),
        "features": torch.from_numpy(rng.standard_normal((rows, 5))),
    }
    targets = {
        "value": torch.from_numpy(rng.standard_normal((rows, 3))),
        "weight": torch.from_numpy(rng.random(rows).astype(np.float16)),
    }
    return inputs, targets


def model():
    torch.manual_seed(0)
    return Net(), batch(8, 0), loss


def data(global_batch):
    seed = 0
    while True:
        seed += 1
        yield batch(global_batch, seed)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "centred.py").write_text(CENTRED)
    (tmp_path / "mixed.py").write_text(MIXED)
    yield tmp_path
    for name in ("centred", "mixed"):
        sys.modules.pop(name, None)


def numerics_of(folder: Path, model: str, data: str) -> dict[str, Any]:
    """Of a run of four steps, beside one device, of what ``profile`` and ``plan`` make of a factory."""
    for arguments in (
        ("profile", model, "--quick", "--sizes", "4,8", "-o", "profile.json"),
        ("plan", "profile.json", "--solver", "even-split", "--micro-batch", "4", "-o", "plan.json"),
        ("run", "plan.json", "--data", data, "--steps", "4", "--check-numerics", "--no-learn", "--json"),
    ):
        result = process(*arguments, cwd=folder)
        assert result.returncode == 0, result.stderr
    found: dict[str, Any] = json.loads(result.stdout)["numerics"]
    return found


def test_what_is_kept_from_the_first_call_is_refused_with_its_line_and_the_remedy(folder: Path) -> None:
    """In the globals of the file, and in an attribute of the class."""
    result = call("profile", "centred.py:first", "--quick")
    assert result.exit_code
    assert "keeps from its first call" in result.output
    assert "the first call changes Net.scale, MEANS.mean" in result.output
    assert "centred.py:21 in forward" in result.output
    assert "call it, and the loss, once on a batch before it is given" in result.output
    assert "keep it in an attribute of the module first" in result.output


@pytest.mark.exhaustive("commands that measure, plan and train: 20 s each")
@pytest.mark.parametrize(
    ("model", "data"),
    [("centred.py:called", "centred.py:data"), ("mixed.py:model", "mixed.py:data")],
    ids=["called once before it is given", "dtypes of its own"],
)
def test_a_run_equals_one_device(folder: Path, model: str, data: str) -> None:
    numerics = numerics_of(folder, model, data)
    assert numerics["worst"]["loss"]["error"] <= 1e-6


def imported(name: str) -> Any:
    __import__(name)
    return sys.modules[name]


@pytest.mark.parametrize("name", ["centred", "mixed"])
def test_a_module_trains_from_a_script_as_in_its_own_loop(folder: Path, name: str) -> None:
    """Starts two processes, which load torch: 8 s.  The one that has a first call keeps what it had then."""
    sys.path.append(str(folder))
    user = imported(name)
    module, example, loss_fn = user.first() if name == "centred" else user.model()
    if name == "centred":
        with pytest.raises(UnsupportedModelError, match="keeps from its first call"):
            capture(load_model(source_of(module, example=example, loss_fn=loss_fn)))
        module = user.Kept()
        module(example[0])
    twin = copy.deepcopy(module)
    optimizer, own = (torch.optim.AdamW(each.parameters(), lr=0.1) for each in (module, twin))
    plan = plan_of(source_of(module, example=example, loss_fn=loss_fn), [0.5], (4, 4))
    feed = user.data(8)
    with hp.parallelize(module, plan=plan, optimizer=optimizer) as run:
        for _ in range(4):
            inputs, targets = next(feed)
            loss = run.step((inputs, targets))
            own.zero_grad()
            output = twin(**inputs) if isinstance(inputs, dict) else twin(inputs)
            expected: Tensor = loss_fn(output, targets)
            expected.backward()
            own.step()
            assert loss == pytest.approx(expected.item(), rel=1e-5)
    pairs = zip(module.parameters(), twin.parameters(), strict=True)
    assert all(torch.allclose(mine, its, rtol=1e-4, atol=1e-5) for mine, its in pairs)
