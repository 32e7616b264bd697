"""What ``halopipe serve`` and ``hp.serve`` say before anything is loaded."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import halopipe as hp
from halopipe.extras.serving.options import ServeOptions
from planner.ir.errors import UsageError
from tests.halopipe.api.test_arguments import PLAN
from tests.halopipe.planning.test_options import require_options

HOME = Path(__file__).resolve().parents[4]


def test_every_option_is_one_of_the_command_line_with_its_help_default_and_limits() -> None:
    require_options("serve", ServeOptions)


@pytest.mark.parametrize("streams", ["--stdin json <&-", "--stdin npy >&-"])
def test_a_shell_that_closes_what_programs_rely_on_is_told(tmp_path: Path, streams: str) -> None:
    line = f"cd '{tmp_path}'; PYTHONPATH='{HOME}' timeout 60 '{sys.executable}' -m halopipe serve plan.json {streams}"
    result = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False)
    assert result.returncode == 3, result.stderr
    assert result.stderr.startswith("error[H301] standard input or output is closed")
    assert "Traceback" not in result.stderr


def test_a_class_is_no_module() -> None:
    with pytest.raises(UsageError, match="dict is a class, not a module"):
        hp.serve(PLAN, dict)
