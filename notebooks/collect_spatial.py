"""Measures what ``05_spatial_decomposition.ipynb`` reads, by the functions of ``benchmarks.strong_scaling``.

    python notebooks/collect_spatial.py [PART ...]

Run it from the folder that holds ``benchmarks``.  Without an argument all parts are collected; each goes to a file of
its own in ``notebooks/data/spatial``, with the load of the machine before and after.  About a quarter of an hour on two
cores that do nothing else.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from collected import stamp

from benchmarks.strong_scaling.__main__ import (
    MOST_OPTIONS,
    RUN_ON,
    SAMPLES,
    SOURCES,
    Network,
    large,
    predicted,
    profiled,
    strong,
    weak,
)
from benchmarks.strong_scaling.layouts import Point, Ways, num_cores
from planner.ir.codec import dump, load
from planner.ir.profile import Profile

DATA = Path(__file__).resolve().parent / "data" / "spatial"
FAR = {"mesh-tangling 128": (8, 16, 32, 64), "ResNet-50": (16, 64)}
SHORT = {"mesh-tangling 128": "mesh", "ResNet-50": "resnet"}


def main(wanted: Sequence[str]) -> int:
    """Fills ``notebooks/data/spatial``."""
    DATA.mkdir(parents=True, exist_ok=True)
    for name, collect in parts().items():
        if not wanted or name in wanted:
            sys.stderr.write(f"collecting {name}\n")
            before = os.getloadavg()
            found = {"data": collect(), "machine": _machine(before, os.getloadavg())}
            (DATA / f"{name}.json").write_text(_text(found), encoding="utf-8")
    stamp("spatial")
    return 0


def parts() -> Mapping[str, Callable[[], Any]]:
    """What is collected, by the name of its file."""
    found: dict[str, Callable[[], Any]] = {}
    for network, short in SHORT.items():
        found[f"{short}-strong"] = lambda network=network: _plain(
            strong(network, _profile(network), Network(SOURCES[network]))
        )
    found["mesh-weak"] = lambda: _plain(
        weak("mesh-tangling 128", _profile("mesh-tangling 128"), _network("mesh"), FAR["mesh-tangling 128"])
    )
    for network, short in SHORT.items():
        found[f"{short}-far"] = lambda network=network: _plain(predicted(network, _profile(network), FAR[network]))
        found[f"{short}-winners"] = lambda network=network: _winners(network)
    found["mesh-1k"] = lambda: _plain(large((4, 8, 16, 32, 64)))
    return found


def _network(short: str) -> Network:
    return Network(SOURCES[next(name for name, each in SHORT.items() if each == short)])


def _profile(network: str) -> Profile:
    """The one that is there, else a new one."""
    path = DATA / f"{SHORT[network]}.profile.json"
    if not path.exists():
        sys.stderr.write(f"profiling {network}\n")
        dump(profiled(SOURCES[network], quick=False, weak=True), path)
    return load(path, Profile)


def _winners(network: str) -> dict[str, Any]:
    found = {}
    for ranks in (max(RUN_ON), max(FAR[network])):
        most = 0 if ranks in RUN_ON else MOST_OPTIONS
        ways = Ways(_profile(network), SAMPLES, ranks)
        mix = ways.mix(most)
        leads = [dataclasses.asdict(lead) for lead in ways.leads(mix, most)]
        found[str(ranks)] = {"step_s": mix.step_s, "layers": leads}
    return found


def _plain(points: Iterable[Point]) -> list[dict[str, Any]]:
    """For JSON; a layer as (name, rank, pass, predicted, measured, whether its part was profiled)."""
    found = []
    for point in points:
        sys.stderr.write(f"  {point.name}: {point.predicted_s:.4f} s, measured {point.measured_s}\n")
        plain = dataclasses.asdict(point)
        plain["layers"] = [
            [each.layer, each.rank, each.way, round(each.predicted_s, 7), round(each.measured_s, 7), each.is_measured]
            for each in point.layers
        ]
        found.append(plain)
    return found


def _text(found: Mapping[str, Any]) -> str:
    """JSON with a line for each point."""
    machine = json.dumps(found["machine"])
    data = found["data"]
    points = ",\n".join(json.dumps(each) for each in data) if isinstance(data, list) else ""
    return f'{{"machine": {machine},\n"data": ' + (f"[\n{points}\n]" if points else json.dumps(data)) + "}\n"


def _machine(before: tuple[float, float, float], after: tuple[float, float, float]) -> dict[str, Any]:
    return {
        "cores": num_cores(),
        "system": platform.machine(),
        "load_before": [round(value, 2) for value in before],
        "load_after": [round(value, 2) for value in after],
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
