"""Zoo networks with their stages on a card that is not there: nothing is made, read or awaited on the wrong device."""

from __future__ import annotations

import zlib

import pytest
import torch

from planner.ir.errors import HalopipeError
from profiler.capture.graph import capture
from profiler.source.model import as_captured
from profiler.source.source import load_model
from tests import sampling
from tests.devices.card import Crossings
from tests.devices.networks import SEED, by_one_device, by_plan, compare, decided, line_of_user, plans_of
from tests.zoo import ALL
from tests.zoo.entries import Entry

RUN = {name: entry for name, entry in ALL.items() if not entry.expected_refusal("")}
"""Networks that can be captured."""

UNKNOWN_TO_FAKES = {
    "aten._thnn_fused_gru_cell.": "the GRU cell of CUDA has no rule for fake tensors",
    "aten._ctc_loss.": "nor has the CTC loss, whose lengths are values",
    "aten._use_cudnn_ctc_loss.": "nor has the CTC loss, whose lengths are values",
    "aten.bincount.": "nor have operators whose outputs are as large as values say",
    "aten.nonzero.": "nor have operators whose outputs are as large as values say",
    "deepcopy protocol": "the module keeps what it computed, which cannot be copied for each rank",
    "'aten::empty_strided'": "a tensor of a list of numbers is made on the card below what modes see",
}
"""By what torch says of an operator, why the stages of a network cannot be run."""


@pytest.mark.parametrize("entry", [pytest.param(entry, id=name) for name, entry in RUN.items()])
def test_a_network_stays_on_its_card(entry: Entry) -> None:
    """Under one plan, drawn by its name, or under all.

    It is compared with one device unless a line of the user's own module does not run on a card: where it makes tensors
    on the host, which stages make where they are, or calls what fake tensors have no rule for.
    """
    model = load_model(entry.source, SEED)
    captured = capture(model)
    network = as_captured(model, captured.graph.inputs, captured.graph.samples), captured
    crossings = Crossings()
    plans = plans_of(network[1])
    evaluates = not (entry.draws or network[1].evaluation)
    if not sampling.everything:
        plans = (plans[zlib.crc32(entry.name.encode()) % len(plans)],)
    for plan in plans:
        try:
            decision = decided(entry, plan, network[1])
        except HalopipeError:  # which tests of the zoo look at
            continue
        try:
            found = by_plan(network, plan, decision, crossings, evaluates=evaluates)
        except (HalopipeError, RuntimeError) as error:
            if isinstance(error.__cause__, torch.AcceleratorError):
                pytest.skip("a build with CUDA asks the driver, which is not there")
            unknown = [why for operator, why in UNKNOWN_TO_FAKES.items() if operator in str(error)]
            if not unknown:
                raise
            pytest.skip(unknown[0])
        try:
            expected = by_one_device(network, decision)
        except Exception as error:
            of_original = "at least two devices" in str(error)  # a forward bound to the module that was copied
            if not (line_of_user(error) or of_original):
                raise
        else:
            compare(found, expected)
    assert not crossings.faults, "\n".join(crossings.faults)


def test_there_are_a_hundred_networks() -> None:
    assert len(RUN) >= 100
