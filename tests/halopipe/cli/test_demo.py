from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from halopipe.cli import demo
from planner.ir.codec import load
from planner.ir.errors import MissingFileError
from planner.ir.plan import Plan
from planner.ir.timeline import TimelineFile

HOME = Path(__file__).resolve().parents[3]


@pytest.mark.timeout(300)
def test_the_quick_demonstration_goes_from_profile_to_a_loss_that_falls(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "halopipe", "demo", "--quick", "-o", "out"]
    environment = {**os.environ, "PYTHONPATH": str(HOME)}
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    titles = ["1. Profile", "2. Plan", "3. Explain", "4. Compare", "5. Check", "6. Run", "Done"]
    assert [line.strip("= ") for line in result.stdout.splitlines() if line.startswith("== ")] == titles
    files = {path.name for path in (tmp_path / "out").iterdir()}
    assert files == {"plan.json", "profile.json", "step.svg", "timeline.json", "trace.json"}
    losses = load(tmp_path / "out" / "timeline.json", TimelineFile).losses
    assert len(losses) == 20
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])
    assert load(tmp_path / "out" / "plan.json", Plan).measured is not None
    trace = json.loads((tmp_path / "out" / "trace.json").read_text())
    assert {event["pid"] for event in trace["traceEvents"]} == {0, 1}
    assert "numerics: as one device" in result.stdout


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(MissingFileError, match="cannot make the folder"):
        demo.travel(tmp_path / "file" / "inside", demo.SMALL)
