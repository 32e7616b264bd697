"""What ``halopipe profile`` hands to the profiler."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import halopipe
from halopipe.cli import app
from planner.ir.codec import load
from planner.ir.profile import ModelSource, Profile
from tests.planner.networks import plain, priced
from tests.planner.parts import with_parts

PROFILE = with_parts(priced(*plain()), (4,), 2)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """What the profiler is asked, by name; it measures nothing."""
    found: dict[str, Any] = {}

    def profile(source: ModelSource, **options: Any) -> Profile:
        found.update(source=source, **options)
        return PROFILE

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("profiler.session.profile", profile)
    return found


def test_parts_are_asked_for_by_families_of_dims_and_ranks(asked: dict[str, Any]) -> None:
    result = CliRunner().invoke(app, ["profile", "a:b", "--allow", "sample,spatial", "--ranks", "8"])
    assert result.exit_code == 0, result.output
    assert asked["shapes"].keywords == {"allow": ("sample", "spatial"), "num_ranks": 8}
    assert "parts of 4 layers" in result.output
    assert load("profile.json", Profile) == PROFILE


def test_without_them_whole_layers_alone_are_measured(asked: dict[str, Any]) -> None:
    assert CliRunner().invoke(app, ["profile", "a:b"]).exit_code == 0
    assert asked["shapes"] is None


def test_operators_said_to_be_elementwise_are_kept_with_the_model(asked: dict[str, Any]) -> None:
    given = ["--elementwise", "lib::a", "--elementwise", "lib::b"]
    assert CliRunner().invoke(app, ["profile", "a:b", *given]).exit_code == 0
    assert asked["source"].elementwise == ("lib::a", "lib::b")


def test_an_unknown_family_of_dims_is_refused(asked: dict[str, Any]) -> None:
    assert CliRunner().invoke(app, ["profile", "a:b", "--allow", "space"]).exit_code != 0
    assert not asked


def test_the_call_asks_for_the_same(asked: dict[str, Any]) -> None:
    halopipe.profile("a:b", allow=("channel",), num_ranks=4, elementwise=["lib::a"])
    assert asked["shapes"].keywords == {"allow": ("channel",), "num_ranks": 4}
    assert asked["source"] == ModelSource("a:b", elementwise=("lib::a",))
