"""Zoo networks with their stages on a card that is not there: nothing is made, read or awaited on the wrong device."""

from __future__ import annotations

import zlib

import pytest
import torch

from planner.ir.errors import HalopipeError
from profiler.capture.graph import capture
from profiler.source.source import load_model
from tests import sampling
from tests.devices.card import Crossings
from tests.devices.networks import SEED, by_one_device, by_plan, compare, decided, plans_of
from tests.zoo import ALL
from tests.zoo.entries import Entry
from tests.zoo.judging import source_of

RUN = {name: entry for name, entry in ALL.items() if not entry.expected_refusal("")}
"""Networks that can be captured."""

NOT_RUN: dict[str, str] = {}
"""What fake tensors cannot run of the stages of a network, by its name."""

ONE_DEVICE_CANNOT: dict[str, str] = {}
"""Why the user's own module does not run on a card, fake or not, or not on a fake one; stages do."""


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("entry", [pytest.param(entry, id=name) for name, entry in RUN.items()])
def test_a_network_stays_on_its_card(entry: Entry) -> None:
    """Under one plan, drawn by its name, or under all."""
    model = load_model(source_of(entry), SEED)
    network = model, capture(model)
    crossings, plans = Crossings(), plans_of(network[1])
    if not sampling.everything:
        plans = (plans[zlib.crc32(entry.name.encode()) % len(plans)],)
    for plan in plans:
        try:
            decision = decided(entry, plan, network[1])
        except HalopipeError:  # which tests of the zoo look at
            continue
        if entry.name in NOT_RUN:
            with pytest.raises(HalopipeError, match=NOT_RUN[entry.name]):
                by_plan(network, plan, decision, crossings, evaluates=False)
            continue
        found = by_plan(network, plan, decision, crossings, evaluates=not entry.draws)
        if entry.name in ONE_DEVICE_CANNOT:
            with pytest.raises(RuntimeError, match=ONE_DEVICE_CANNOT[entry.name]):
                by_one_device(network, decision)
        else:
            compare(found, by_one_device(network, decision))
    assert not crossings.faults, "\n".join(crossings.faults)


def test_there_are_a_hundred_networks() -> None:
    assert len(RUN.keys() - NOT_RUN.keys()) >= 100
