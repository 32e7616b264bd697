from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.timeout(900)  # without a cache of earlier runs, beside other tests
def test_mypy_finds_no_fault() -> None:
    checked = subprocess.run([sys.executable, "-m", "mypy"], cwd=ROOT, capture_output=True, text=True)

    assert checked.returncode == 0, checked.stdout + checked.stderr
