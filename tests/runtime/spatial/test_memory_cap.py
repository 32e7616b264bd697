"""A sample too large for the memory of one process is trained on four, under a limit that the system enforces."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

MIB = 2**20


def outputs(world_size: int, cap_bytes: int, folder: Path) -> list[str]:
    """What each rank prints."""
    store = folder / f"store-{world_size}-{cap_bytes}"
    found = subprocess.run(
        [sys.executable, "-m", "tests.runtime.spatial.capped", *map(str, (world_size, store, cap_bytes))],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
        timeout=120,
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"},  # what is freed is free for the system as well
    )
    return found.stdout.split("\n")[:-1]


@pytest.mark.exhaustive("four ranks at a hard limit of memory")
@pytest.mark.skipif(sys.platform != "linux", reason="the limit is Linux's")
def test_a_sample_too_large_for_one_process_is_trained_on_four(tmp_path: Path) -> None:
    cap_bytes = 150 * MIB
    assert outputs(1, cap_bytes, tmp_path) == ["out of memory"]
    (roomy,) = outputs(1, 2000 * MIB, tmp_path)
    found = outputs(4, cap_bytes, tmp_path)
    assert all(float(loss) == pytest.approx(float(roomy), rel=1e-5) for loss in found)
