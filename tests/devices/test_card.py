"""The card that is not there tells what crosses between it and the host, and where."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from tests.devices.card import COPY, DEVICE, MADE, READ, ROOT, WAIT, Card, Crossings, DeviceError, card


@pytest.fixture
def crossings() -> Crossings:
    return Crossings(allowed={})


@pytest.fixture
def own(crossings: Crossings) -> Iterator[Card]:
    """A rank's view of a card, within a step."""
    with card() as made, torch.autograd.set_multithreading_enabled(False):
        entered = made(crossings)
        with entered, entered.step():
            yield entered


def ours(body: str) -> Callable[[Tensor], object]:
    """What a line of the runtime would do to a tensor of the card."""
    names: dict[str, Callable[[Tensor], object]] = {}
    source = f"import torch\ndef crosses(there):\n    return {body}\n"
    exec(compile(source, str(ROOT / "runtime" / "made_up.py"), "exec"), names)
    return names["crosses"]


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ("there.cpu()", COPY),
        ("torch.empty(3).copy_(there)", COPY),
        ("there.sum().item()", READ),
        ("float(there[0])", READ),
        ("bool((there > 0).any())", READ),
        ("torch.equal(there, there)", READ),
        ("torch.zeros(3).to(there.device)", WAIT),
        ("there[torch.zeros(2, dtype=torch.int64)]", WAIT),
        ("torch.zeros(3)", MADE),
    ],
)
def test_what_crosses_within_a_step_is_a_fault_with_its_line(
    body: str, kind: str, own: Card, crossings: Crossings
) -> None:
    ours(body)(torch.ones(3, device=DEVICE))
    assert [fault for fault in crossings.faults if fault.startswith(f"{kind} (")] != []
    assert all(fault.endswith("at runtime/made_up.py:3, in crosses") for fault in crossings.faults)


@pytest.mark.every_case
@pytest.mark.parametrize(
    "body",
    [
        "there * 2 + torch.zeros_like(there)",
        "torch.ones(3, device=there.device).to(torch.float64)",
        "there.new_zeros(3).copy_(there)",
    ],
)
def test_what_stays_on_the_card_is_none(body: str, own: Card, crossings: Crossings) -> None:
    ours(body)(torch.ones(3, device=DEVICE))
    assert not crossings.faults


def test_a_copy_that_does_not_wait_and_what_is_done_between_steps_are_none(own: Card, crossings: Crossings) -> None:
    own.in_step = False
    batch = torch.zeros(3)
    own.in_step = True
    assert batch.to(DEVICE, non_blocking=True).device == DEVICE
    assert not crossings.faults


def test_operators_do_not_mix_devices(own: Card) -> None:
    layer = nn.Linear(3, 2)
    with pytest.raises(RuntimeError, match=r"same device|two different devices"):
        layer(torch.ones(3, device=DEVICE))


def test_the_card_draws_by_its_own_generators(own: Card) -> None:
    from cuda_ops.device import driver

    there = torch.ones(3, device=DEVICE)
    assert there.bernoulli_(0.5, generator=driver.generator(DEVICE)).device == DEVICE
    with pytest.raises(DeviceError, match="generator of the host"):
        there.bernoulli_(0.5, generator=torch.Generator())


def test_autocast_is_that_of_the_card(own: Card) -> None:
    layer = nn.Linear(3, 2, device=DEVICE)
    with torch.autocast("cuda", torch.bfloat16):
        loss = layer(torch.ones(4, 3, device=DEVICE)).square().mean()
    assert loss.dtype == torch.float32  # a power is one of those that CUDA's autocast computes in it
    loss.backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.device == DEVICE
    with torch.autocast("cuda", torch.bfloat16):
        assert layer(torch.ones(4, 3, device=DEVICE)).dtype == torch.bfloat16
