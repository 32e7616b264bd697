"""What a script does to its own module, loss and values while ranks train theirs: refused, with what tells them."""

from __future__ import annotations

import copy
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from halopipe.launch.parallelize import unbroken
from halopipe.launch.script_module import ModuleSettings, ScriptModule, require_no_autocast, require_planned
from halopipe.launch.script_rank import write
from halopipe.training.script_values import ScriptValues
from planner.ir.errors import UsageError
from profiler.source.model import owners


class Net(nn.Module):
    """Has what may be changed: weights, statistics, modes of torch's parts and of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.last = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(self.norm(self.first(x)))
        return found * 2 if self.training else found


def scale(net: Net) -> None:
    with torch.no_grad():
        net.last.weight.mul_(2)


def exchange(net: Net) -> None:
    net.last = nn.Linear(4, 2)


def freeze(net: Net) -> None:
    net.first.requires_grad_(requires_grad=False)


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (scale, r"same: last\.weight$"),
        (exchange, r"same: last\.weight, last\.bias$"),
        (
            lambda net: net(torch.ones(2, 3)),
            r"same: norm\.num_batches_tracked\ncall it in evaluation mode, module\.eval\(\)",
        ),
        (lambda net: net.load_state_dict(Net().state_dict()), r"first\.bias, norm\.weight, norm\.bias and 5 more$"),
    ],
)
def test_what_a_script_writes_into_its_module_is_refused_until_the_ranks_have_it(
    change: Callable[[Net], object], said: str
) -> None:
    net = Net()
    script = ScriptModule(net, None)
    net.eval()(torch.ones(2, 3))
    copy.deepcopy(net).load_state_dict(Net().state_dict())  # a copy is the script's own
    script.require_known()
    net.train()
    change(net)
    with pytest.raises(UsageError, match="ranks do not see") as caught:
        script.require_known()
    text = "\n".join((*caught.value.details, *caught.value.remedies))
    assert re.search(said, text, re.MULTILINE), text
    script.known()
    script.require_known()


def test_a_module_whose_parameters_are_all_written_is_another_one() -> None:
    net = Net()
    script = ScriptModule(net, None)
    assert not script.is_replaced
    scale(net)
    assert not script.is_replaced
    net.load_state_dict(Net().state_dict())
    assert script.is_replaced


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (freeze, "first.weight, first.bias: trained there, frozen now"),
        (lambda net: net.eval(), "the module itself, norm: in training mode there, in evaluation mode now"),
        (lambda net: net.norm.eval(), "norm: in training mode there, in evaluation mode now"),
    ],
)
def test_parts_that_are_frozen_or_put_into_another_mode_are_refused(change: Callable[[Net], object], said: str) -> None:
    net = Net()
    script = ScriptModule(net, None)
    planned = ModuleSettings.of(owners(Net(), None))
    change(net)
    with pytest.raises(UsageError, match="set up its module otherwise") as caught:
        script.require_settings()
    assert said in caught.value.details[0]
    with pytest.raises(UsageError, match="otherwise than when it was profiled") as caught:
        require_planned(planned, ModuleSettings.of(owners(net, None)))
    assert said in caught.value.details[0]
    net.train().requires_grad_(requires_grad=True)
    script.require_settings()
    require_planned(planned, ModuleSettings.of(owners(net, None)))


def test_the_mode_of_parts_that_do_not_ask_for_it_makes_no_difference() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    script = ScriptModule(net, nn.MSELoss())
    net.eval()
    script.require_settings()


def test_a_script_within_autocast_needs_a_plan_with_it() -> None:
    require_no_autocast("")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        require_no_autocast("bfloat16")
        with pytest.raises(UsageError, match=r"within torch\.autocast"):
            require_no_autocast("")


def test_a_batch_that_is_a_slice_brings_nothing_but_itself(tmp_path: Path) -> None:
    everything = torch.arange(100_000.0).view(-1, 10)
    batch = {"x": everything[3:5], "y": [everything[:, 1][:4], torch.ones(2, requires_grad=True)[:1]]}
    write(tmp_path / "call.pt", batch)
    assert (tmp_path / "call.pt").stat().st_size < 10_000
    found = torch.load(tmp_path / "call.pt", weights_only=False)
    torch.testing.assert_close(found, batch)
    assert [each.requires_grad for each in found["y"]] == [False, True]


@pytest.fixture
def heard() -> Iterator[None]:
    """SIGINT is heard as in a terminal; what is started in the background ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heard")
def test_ctrl_c_waits_until_what_ranks_did_is_noted_and_a_second_one_does_not() -> None:
    noted = []

    def interrupted(times: int) -> None:
        with unbroken():
            for _ in range(times):
                os.kill(os.getpid(), signal.SIGINT)
            noted.append(times)

    for times in (1, 2):
        with pytest.raises(KeyboardInterrupt):
            interrupted(times)
    interrupted(0)
    assert noted == [1, 0]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.usefixtures("heard")
def test_elsewhere_than_in_the_main_thread_nothing_hears_ctrl_c() -> None:
    found = []

    def wait() -> None:
        with unbroken():
            found.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=wait)
    thread.start()
    thread.join()
    assert found == [signal.default_int_handler]


WEIGHT = 0.5
OTHER = 0.5


def scaled(x: Tensor) -> Tensor:
    return x * WEIGHT


class Annealed(nn.Module):
    """Reads a temperature, a helper's global variable, its own counter; keeps a note that no code reads."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.1))
        self.tau = 1.0
        self.is_hard = False
        self.calls = 0
        self.note = "first"

    @property
    def divisor(self) -> float:
        return self.tau

    def forward(self, x: Tensor) -> Tensor:
        self.count()
        y = scaled(self.inside(x)) / self.divisor
        return y.round() if self.is_hard else y

    def count(self) -> None:
        self.calls += 1

    def anneal(self) -> None:
        self.tau *= 0.9


class Weighted:
    """A loss that is an object."""

    def __init__(self) -> None:
        self.beta = 0.0

    def __call__(self, out: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(out, y) + self.beta * out.square().mean()


def nested() -> tuple[Callable[..., Tensor], Callable[[float], None]]:
    """A loss of an outer function's variable, and what changes that."""
    beta = 0.0

    def loss(out: Tensor, y: Tensor, *, scale: float = 1.0) -> Tensor:
        return scale * F.mse_loss(out, y) + beta * out.square().mean()

    def change(value: float) -> None:
        nonlocal beta
        beta = value

    return loss, change


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda module, loss: module.anneal(), r"tau of the module: 1\.0 then, 0\.9 now"),
        (lambda module, loss: setattr(module, "is_hard", True), r"is_hard of the module: False then, True now"),
        (lambda module, loss: setattr(module.inside[1], "p", 0.3), r"p of inside\.1: 0\.1 then, 0\.3 now"),
        (lambda module, loss: setattr(loss, "beta", 0.25), r"beta of loss_fn: 0\.0 then, 0\.25 now"),
    ],
)
def test_an_attribute_that_is_read_and_changed_is_refused(change: Callable[..., object], said: str) -> None:
    module = Annealed()
    loss = Weighted()
    values = ScriptValues(owners(module, loss), loss)
    values.require_same()
    change(module, loss)
    with pytest.raises(UsageError, match=rf"captured graph has as it was\s+{said}[\s\S]*part of the batch"):
        values.require_same()


def test_variables_of_the_script_and_of_an_outer_function_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    loss, change = nested()
    values = ScriptValues(owners(Annealed(), None), partial(loss, scale=2.0))
    monkeypatch.setattr(f"{__name__}.OTHER", 1.0)  # which nothing reads
    values.require_same()
    change(0.1)
    with pytest.raises(UsageError, match=r"beta, which nested\.<locals>\.loss reads: 0\.0 then, 0\.1 now"):
        values.require_same()
    change(0.0)
    monkeypatch.setattr(f"{__name__}.WEIGHT", 0.7)
    with pytest.raises(UsageError, match=r"WEIGHT, which scaled reads: 0\.5 then, 0\.7 now"):
        values.require_same()


def test_what_nothing_reads_and_what_forward_writes_itself_may_change() -> None:
    module: Any = Annealed()
    values = ScriptValues(owners(module, nn.MSELoss()), nn.MSELoss())
    module.note = "second"
    module.calls = 7
    module.epoch = 3
    module.eval()  # looked at elsewhere
    values.require_same()
