"""Networks with the habits of real ones: equal to their own module, or refused with a reason."""

from __future__ import annotations

import pytest
import torch

from tests.zoo import ALL
from tests.zoo.entries import Entry
from tests.zoo.judging import judge


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


KNOWN_FAULTS = {
    "attention:fourier_mixing": "refused, though its samples are apart",
    "autograd:binary_weights": "refused, though its samples are apart",
    "inputs:lazy_uninitialised": "raw error",
    "losses:contrastive": "a loss over pairs is trained in micro-batches",
    "vision:modulated_convolution": "groups by the number of samples end in a raw error at capture",
}
"""Networks that are neither equal nor rightly refused yet; one that is mended leaves this table."""


def _parameters() -> list[object]:
    return [
        pytest.param(
            entry,
            id=name,
            marks=[pytest.mark.xfail(strict=False, reason=KNOWN_FAULTS[name])] if name in KNOWN_FAULTS else [],
        )
        for name, entry in ALL.items()
    ]


@pytest.mark.parametrize("entry", _parameters())
def test_a_network_is_equal_to_its_module_or_refused(entry: Entry) -> None:
    wrong = [verdict for verdict in judge(entry) if not verdict.is_as(entry)]
    assert not wrong, "\n".join(f"{verdict.plan}: {verdict.outcome}: {verdict.text}" for verdict in wrong)


def test_there_are_sixty_networks() -> None:
    assert len(ALL) >= 60
