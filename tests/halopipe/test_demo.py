from __future__ import annotations

import json
from pathlib import Path

import pytest

from halopipe import demo
from planner.ir.codec import load
from planner.ir.errors import MissingFileError
from planner.ir.plan import Plan, Prediction
from planner.ir.timeline import TimelineFile
from tests.halopipe.commands import good

TINY = demo.DemoNetwork(
    "profiler.models.resnet:resnet18",
    (8, 3, 16, 16),
    {"num_classes": 10, "width": 16, "depths": [1]},
    "AdamW:lr=0.01",
    global_batch=16,
)
SMALL = pytest.param(demo.SMALL, marks=pytest.mark.exhaustive("eight processes that capture all of a ResNet-18"))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("network", [TINY, SMALL], ids=["tiny", "small"])
def test_the_quick_demonstration_goes_from_profile_to_a_loss_that_falls(
    network: demo.DemoNetwork, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of it, a run of the best rival included: ten seconds of processes that profile and train."""
    monkeypatch.setattr(demo, "SMALL", network)
    monkeypatch.chdir(tmp_path)
    result = good("demo", "--quick", "-o", "out")
    titles = [line.strip("= ") for line in result.stdout.splitlines() if line.startswith("== ")]
    assert titles[:6] == ["1. Profile", "2. Plan", "3. Explain", "4. Compare", "5. Check", "6. Run"]
    assert titles[6:] == ["7. Run the best rival", "Done"] or "there is no rival to run" in result.stdout
    files = {path.name for path in (tmp_path / "out").iterdir()}
    assert files == {"plan.json", "profile.json", "step.svg", "timeline.json", "trace.json"}
    losses = load(tmp_path / "out" / "timeline.json", TimelineFile).losses
    assert len(losses) == demo.NUM_STEPS
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])
    assert load(tmp_path / "out" / "plan.json", Plan).measured is not None
    trace = json.loads((tmp_path / "out" / "trace.json").read_text())
    assert {event["pid"] for event in trace["traceEvents"]} == {0, 1}
    assert "numerics: as one device" in result.stdout


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(MissingFileError, match="cannot make the folder"):
        demo.travel(tmp_path / "file" / "inside", demo.SMALL)


def prediction(step_s: float) -> Prediction:
    return Prediction(step_s, 1 / step_s, 0.0, (), "measured")


@pytest.mark.parametrize(
    ("sure", "verdict"),
    [
        (None, "predicted 1.10 times as fast as gpipe; "),
        (0.68, "predicted a tie (1.10 times as fast as gpipe at the mean; which is the faster is 68 % sure); "),
    ],
)
def test_a_gain_that_is_a_tie_is_called_so_with_how_sure_it_is(sure: float | None, verdict: str) -> None:
    text = demo.gain("plan.json", (prediction(1.0), 0.9), "gpipe", (prediction(1.1), 1.08), sure)
    assert verdict in text
    assert text.endswith("measured 1.20 times as fast")
    assert [line.split()[0] for line in text.splitlines() if line.strip()][:3] == ["plan", "plan.json", "gpipe"]
