"""The processor's clock, as far as the operating system tells it."""

from __future__ import annotations

import contextlib
from pathlib import Path

_FOLDER = Path("/sys/devices/system/cpu")
_INFO = Path("/proc/cpuinfo")
_KHZ = {"now": "scaling_cur_freq", "least": "scaling_min_freq", "most": "scaling_max_freq"}


def clocks(core: int | None, folder: Path = _FOLDER, info: Path = _INFO) -> dict[str, float]:
    """Hertz of ``core`` (None: the first): ``now``, ``least``, ``most``; what cannot be read is left out."""
    of_core = folder / f"cpu{core or 0}" / "cpufreq"
    found = {}
    for name, file in _KHZ.items():
        with contextlib.suppress(OSError, ValueError):
            found[name] = int((of_core / file).read_text(encoding="ascii")) * 1e3
    if "now" not in found:
        with contextlib.suppress(OSError, ValueError, IndexError):
            lines = info.read_text(encoding="utf-8").splitlines()
            speeds = [line.partition(":")[2] for line in lines if line.startswith("cpu MHz")]
            found["now"] = float(speeds[core or 0]) * 1e6
    return found


def governor(core: int | None, folder: Path = _FOLDER) -> str:
    """What chooses the clock of ``core``, such as ``performance``; empty where that cannot be read."""
    try:
        return (folder / f"cpu{core or 0}" / "cpufreq" / "scaling_governor").read_text(encoding="ascii").strip()
    except OSError:
        return ""
