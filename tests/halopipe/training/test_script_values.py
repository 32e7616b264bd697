"""Python values that a module or a loss reads and a script changes are refused, with both of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from torch import Tensor, nn
from torch.nn import functional as F

from halopipe.training.script_values import ScriptValues
from planner.ir.errors import UsageError
from profiler.source.model import owners

WEIGHT = 0.5
OTHER = 0.5


def scaled(x: Tensor) -> Tensor:
    return x * WEIGHT


class Annealed(nn.Module):
    """Reads a temperature, a helper's global variable, its own counter; keeps a note that no code reads."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.1))
        self.tau, self.is_hard, self.calls, self.note = 1.0, False, 0, "first"

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


def drop_more(place: SimpleNamespace) -> None:
    place.module.inside[1].p = 0.3


def harden(place: SimpleNamespace) -> None:
    place.module.is_hard = True


def weigh_more(place: SimpleNamespace) -> None:
    place.loss.beta = 0.25


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda place: place.module.anneal(), r"tau of the module: 1\.0 then, 0\.9 now"),
        (harden, r"is_hard of the module: False then, True now"),
        (drop_more, r"p of inside\.1: 0\.1 then, 0\.3 now"),
        (weigh_more, r"beta of loss_fn: 0\.0 then, 0\.25 now"),
    ],
)
def test_an_attribute_that_is_read_and_changed_is_refused(change: Callable[[SimpleNamespace], None], said: str) -> None:
    place = SimpleNamespace(module=Annealed(), loss=Weighted())
    values = ScriptValues(owners(place.module, place.loss), place.loss)
    values.require_same()
    change(place)
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
    module.note, module.calls, module.epoch = "second", 7, 3
    module.eval()  # looked at elsewhere
    values.require_same()
