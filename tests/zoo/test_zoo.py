"""Networks with the habits of real ones: equal to their own module, or refused with a reason."""

from __future__ import annotations

import pytest

from tests.missing_operators import declare_missing
from tests.zoo import ALL
from tests.zoo.entries import Entry, of_module
from tests.zoo.judging import judge


@pytest.mark.cases(60, at_least=60)
@pytest.mark.parametrize("entry", [pytest.param(entry, id=name) for name, entry in ALL.items()])
def test_a_network_is_equal_to_its_module_or_refused(entry: Entry) -> None:
    require_right(entry)


LEFT_TO_THE_JOURNEY = ("timm_efficientnet", "timm_vit", "torch_transformer")
"""Scripts that ``benchmarks.journey`` alone runs: not judged under four plans so far."""
SCRIPTS = {name: entry for name, entry in of_module("scripts").items() if name not in LEFT_TO_THE_JOURNEY}


@pytest.mark.cases(4)
@pytest.mark.timeout(300)
@pytest.mark.parametrize("entry", [pytest.param(entry, id=name) for name, entry in SCRIPTS.items()])
def test_a_network_of_a_users_script_is_equal_to_its_module_or_refused(entry: Entry) -> None:
    declare_missing()
    require_right(entry)


def require_right(entry: Entry) -> None:
    """Fails unless each verdict is one that the entry says is right."""
    wrong = [verdict for verdict in judge(entry) if not verdict.is_as(entry)]
    assert not wrong, "\n".join(f"{verdict.plan}: {verdict.outcome}: {verdict.text}" for verdict in wrong)


def test_there_are_sixty_networks() -> None:
    assert len(ALL) >= 60
