"""An image that is too large for the memory, planned from a smaller one, run in tiles and compared."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from halopipe.cli.app import app


@pytest.mark.exhaustive("profiles, plans and runs two ranks")
def test_an_image_is_planned_from_a_smaller_one_and_run_in_tiles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str) -> str:
        result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return result.stdout

    network = ("profiler.models.unet2d:unet2d", "--input", "1,1,32,32", "--arg", "width=2")
    call("profile", *network, "--quick", "--sizes", "1", "--size", "height=128,width=128")
    asked = ("--objective", "latency", "--allow", "spatial", "--global-batch", "1", "--fix", "*=replicas:2")
    call("plan", "profile.json", *asked, "--memory", "512KiB")
    assert "tiles" in call("explain", "plan.json", "--profile", "profile.json")
    call("check", "plan.json", "--profile", "profile.json")
    told = json.loads(call("run", "plan.json", "--steps", "2", "--memory-limit", "512KiB", "--json"))
    assert max(told["measured"]["peak_bytes"]) <= 512 * 1024
    assert told["numerics"]["worst"]["loss"]["error"] < 1e-5
