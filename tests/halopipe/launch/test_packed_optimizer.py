"""An optimiser object of a script's does in a rank, with the rank's parameters, what it does in the script."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn

from halopipe.launch.packed_optimizer import Packed
from planner.ir.errors import UsageError
from tests.runtime.optim import test_user_object
from tests.runtime.optim.test_user_object import Own, network, stepped


def named(module: nn.Module) -> dict[str, nn.Parameter]:
    return dict(module.named_parameters())


def test_it_steps_the_ranks_parameters_as_the_scripts() -> None:
    class Local(Own):
        def _rate(self, parameter: torch.Tensor) -> float:
            return 0.5 * super()._rate(parameter)

    module = network()
    other = network()
    optimizer = Local(module.parameters())
    optimizer.state["k"] = torch.zeros(())
    stepped(optimizer, 1)
    other.load_state_dict(module.state_dict())
    for parameter in other.parameters():
        del parameter.lr_scale
    made = Packed.of(optimizer, named(module)).made(named(other))
    assert all(map(torch.equal, stepped(made), stepped(optimizer)))
    assert made.param_groups[0]["params"] == list(other.parameters())
    assert (made.counts, made.state["k"]) == ({"steps": 3}, 0)
    assert made.rule.__self__ is made


def test_what_cannot_be_pickled_is_refused_with_the_reason() -> None:
    module = network()
    lock: Any = threading.Lock()

    class Locked(Own):
        def step(self, closure: None = None) -> None:
            with lock:
                super().step()

    with pytest.raises(
        UsageError, match=r"this Locked cannot be given to the ranks[\s\S]*cannot pickle '_thread.lock'"
    ):
        Packed.of(Locked(module.parameters()), named(module))


def test_what_its_code_reads_is_in_the_rank_as_in_the_script(monkeypatch: pytest.MonkeyPatch) -> None:
    module = network()
    with monkeypatch.context() as script:
        script.setattr(test_user_object, "FACTOR", 0.25)
        packed = Packed.of(Own(module.parameters()), named(module))
    with pytest.raises(UsageError, match=r"FACTOR, which Own\._rate reads: 0\.25 in the script, 1\.0 in the ranks"):
        packed.made(named(network()))
