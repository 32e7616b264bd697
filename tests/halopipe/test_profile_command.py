"""What ``halopipe profile`` hands to the profiler."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn
from typer.testing import CliRunner

import halopipe
from halopipe.cli.app import app
from halopipe.planning import measure
from planner.ir.codec import load
from planner.ir.errors import UsageError
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


@pytest.mark.parametrize(("given", "blocks"), [("3", 3), ("stage", 4), ("0", 0)])
def test_losses_of_blocks_are_kept_with_the_model(asked: dict[str, Any], given: str, blocks: int) -> None:
    assert CliRunner().invoke(app, ["profile", "a:b", "--local-loss", given, "--workers", "4"]).exit_code == 0
    assert asked["source"].local_losses == blocks


def test_blocks_that_are_no_number_are_refused() -> None:
    with pytest.raises(UsageError, match="'-1' says no number of blocks"):
        measure.local_blocks("-1", "cpu", 2)
    with pytest.raises(UsageError, match="module as it is"):
        measure.source_of(nn.Linear(1, 1), local_losses=2)


def test_an_unknown_family_of_dims_is_refused(asked: dict[str, Any]) -> None:
    assert CliRunner().invoke(app, ["profile", "a:b", "--allow", "space"]).exit_code != 0
    assert not asked


def test_the_call_asks_for_the_same(asked: dict[str, Any]) -> None:
    halopipe.profile("a:b", allow=("channel",), num_ranks=4, elementwise=["lib::a"])
    assert asked["shapes"].keywords == {"allow": ("channel",), "num_ranks": 4}
    assert asked["source"] == ModelSource("a:b", elementwise=("lib::a",))


def test_processes_and_resume_are_asked_for_and_what_is_unfinished_lies_beside_the_output(
    asked: dict[str, Any],
) -> None:
    result = CliRunner().invoke(app, ["profile", "a:b", "--processes", "5", "--resume", "-o", "x.json"])
    assert result.exit_code == 0, result.output
    assert (asked["num_processes"], asked["resume"], asked["unfinished"]) == (5, True, Path(".x.json.unfinished"))
    assert CliRunner().invoke(app, ["profile", "a:b"]).exit_code == 0
    assert (asked["num_processes"], asked["resume"], asked["unfinished"]) == (
        0,
        False,
        Path(".profile.json.unfinished"),
    )


@pytest.mark.parametrize("error", [KeyboardInterrupt, UsageError])
def test_a_profile_that_does_not_end_says_how_to_go_on_and_one_that_does_leaves_its_file_alone(
    asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    kept = Path(".profile.json.unfinished")

    def interrupted(source: ModelSource, unfinished: Path, **options: Any) -> Profile:
        unfinished.write_text("pieces")
        raise error("ended")

    with monkeypatch.context() as patched:
        patched.setattr("profiler.session.profile", interrupted)
        result = CliRunner().invoke(app, ["profile", "a:b"])
    assert result.exit_code == (130 if error is KeyboardInterrupt else 2)
    assert f"what was measured is kept in {kept}; the same command with --resume goes on with it" in result.stderr
    assert kept.read_text() == "pieces"
    assert CliRunner().invoke(app, ["profile", "a:b", "--resume"]).exit_code == 0
    assert not kept.exists()
    assert Path("profile.json").exists()


def test_the_call_goes_on_with_a_file_that_it_is_given(asked: dict[str, Any], tmp_path: Path) -> None:
    kept = tmp_path / "pieces"
    kept.write_text("pieces")
    halopipe.profile("a:b", num_processes=2, unfinished=kept)
    assert (asked["num_processes"], asked["resume"], asked["unfinished"]) == (2, True, kept)
    assert not kept.exists()
    halopipe.profile("a:b")
    assert (asked["resume"], asked["unfinished"]) == (False, None)


def test_links_are_measured_over_the_transport_that_is_named(asked: dict[str, Any]) -> None:
    assert CliRunner().invoke(app, ["profile", "a:b", "--transport", "gloo"]).exit_code == 0
    assert asked["transport"] == "gloo"
    halopipe.profile("a:b", transport="shared")
    assert asked["transport"] == "shared"
    asked.clear()
    for name in ("mpi", "pigeons"):
        assert CliRunner().invoke(app, ["profile", "a:b", "--transport", name]).exit_code == 2
    assert not asked
