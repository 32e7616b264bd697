from __future__ import annotations

from pathlib import Path

import pytest

from planner.ir.codec import dump
from tests.halopipe.commands import PROFILE
from tests.planner.factories import chain_decision, plan_of


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a profile and a plan made from it; in ``alone`` the same plan, no profile beside it."""
    monkeypatch.chdir(tmp_path)
    dump(PROFILE, "profile.json")
    (tmp_path / "alone").mkdir()
    plan = plan_of(PROFILE, chain_decision(PROFILE, cuts=(3,), micro_batches=(2, 2, 2, 2)))
    for path in ("by_hand.json", "alone/by_hand.json"):
        dump(plan, path)
    return tmp_path
