"""Files that do not go together, outputs of another form, names beyond ASCII: typed, or as they are meant."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.halopipe.commands import call


@pytest.mark.parametrize(
    "words",
    [
        "explain renamed.json", "explain renamed.json --layer l1", "explain renamed.json --what-if devices=2",
        "compare renamed.json", "run renamed.json", "check renamed.json",
    ],
)  # fmt: skip
def test_a_plan_with_a_renamed_layer_is_refused_by_every_verb_with_both_names(folder: Path, words: str) -> None:
    require_refused(words)


def require_refused(words: str) -> None:
    """A verb does not take a plan one of whose layers was renamed."""
    text = Path("by_hand.json").read_text("utf-8").replace('"l2"', '"l two"')
    Path("renamed.json").write_text(text, "utf-8")
    result = call(*words.split())
    assert (result.exit_code, "error[H602]" in result.stderr) == (6, True), result.stderr
    assert "layer l2 is in no stage" in result.stderr
    assert "layer l two is not in the model" in result.stderr


def test_one_measurement_is_of_one_host(folder: Path) -> None:
    shutil.copy("profile.json", "copy.json")
    assert "profile.json is given twice" in call("merge", "profile.json", "./profile.json").stderr
    assert "are the same profile" in call("merge", "profile.json", "copy.json").stderr
    assert not Path("merged.json").exists()


def test_one_point_of_a_front_is_one_plan_and_a_device_takes_all(folder: Path) -> None:
    assert call("plan", "profile.json", "--global-batch", "4", "--pareto", "1", "-o", "one.json").exit_code == 0
    assert sorted(path.name for path in folder.glob("one*")) == ["one.json"]
    (folder / "null").symlink_to("/dev/null")
    assert call("plan", "profile.json", "--global-batch", "4", "--pareto", "2", "-o", "null").exit_code == 0
    assert sorted(path.name for path in folder.glob("null*")) == ["null"]
    shutil.copy("profile.json", "q.2.json")
    refused = call("plan", "q.2.json", "--global-batch", "4", "--pareto", "2", "-o", "q.json")
    assert "q.2.json is read, and would be replaced" in refused.stderr
