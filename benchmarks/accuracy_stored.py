"""The committed results of :mod:`benchmarks.accuracy`, read back."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.accuracy_cases import SETTINGS, TIMED
from benchmarks.accuracy_rows import Outcome


@dataclass(frozen=True, slots=True)
class Parts:
    """Where the time of a plan went: seconds of a step by action (stage and kind), by rank; measured: medians."""

    predicted_by_action_s: tuple[Mapping[str, float], ...]
    measured_by_action_s: tuple[Mapping[str, float], ...]


def outcomes(folder: Path) -> list[Outcome]:
    """Every plan, predicted and measured."""
    return outcomes_of(*_read(folder))


def outcomes_of(predicted: Mapping[str, Any], measured: Mapping[str, Any]) -> list[Outcome]:
    """The same from what the two files hold, by setting."""
    setting_of = {setting.name: setting for setting in SETTINGS}
    found = []
    for name, plans in predicted.items():
        for each in plans:
            seen, said = measured[name][each["plan"]], each["prediction"]
            steps = seen["steps"]
            ranks = range(0 if setting_of[name].device == TIMED else len(said["ranks"]))
            peaks = [max(step["ranks"][rank]["peak_bytes"] for step in steps) for rank in ranks]
            found.append(
                Outcome(
                    name,
                    setting_of[name].network,
                    setting_of[name].rate,
                    each["plan"],
                    said["step_s"],
                    said["p10_s"],
                    said["p90_s"],
                    statistics.median(step["seconds"] for step in steps),
                    tuple((rank["peak_bytes"], peak) for rank, peak in zip(said["ranks"], peaks, strict=False)),
                    tuple(seen["rounds_s"]),
                )
            )
    return found


def steps_of(folder: Path, setting: str, plan: str) -> Parts:
    """Where the time of a plan went."""
    predicted, measured = _read(folder)
    said = next(each for each in predicted[setting] if each["plan"] == plan)
    steps = measured[setting][plan]["steps"]
    found = []
    for rank in range(len(said["by_action_s"])):
        actions = steps[0]["ranks"][rank]["by_action_s"]
        found.append(
            {a: statistics.median(step["ranks"][rank]["by_action_s"].get(a, 0.0) for step in steps) for a in actions}
        )
    return Parts(tuple(said["by_action_s"]), tuple(found))


def _read(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    predicted = json.loads((folder / "predictions.json").read_text(encoding="utf-8"))
    return predicted, json.loads((folder / "measured.json").read_text(encoding="utf-8"))["settings"]
