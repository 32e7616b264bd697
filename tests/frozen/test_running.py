"""Ranks compute what they computed, by the messages that they sent."""

from __future__ import annotations

import json

import pytest
import torch

from tests.frozen.files import differences, read
from tests.frozen.running import ALONE, BESIDE, PAIRS, frozen


@pytest.mark.cases(12)
@pytest.mark.parametrize("pair", PAIRS)
def test_ranks_compute_and_send_what_they_did(pair: str) -> None:
    _assert_frozen(pair)


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize("pair", [*BESIDE, ALONE])
def test_sites_token_slices_and_what_training_asks_are_what_they_were(pair: str) -> None:
    _assert_frozen(pair)


def _assert_frozen(pair: str) -> None:
    torch.distributions.Distribution.set_default_validate_args(True)  # a test before that compiles turns it off
    now = json.loads(json.dumps(frozen(pair)))
    if now.get("code") == "H204" and torch.__version__ < (2, 13):
        pytest.skip(f"torch {torch.__version__} does not run this network")
    lines = [*differences(read("running", pair), now)]
    assert not lines, "\n".join([*lines, "if this is right: python -m tests.frozen running --why TEXT"])


def test_there_are_two_hundred_that_run() -> None:
    assert sum("losses" in (read("running", pair) or {}) for pair in PAIRS) >= 200
