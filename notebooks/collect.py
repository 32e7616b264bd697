"""Measures what ``02_compare_strategies.ipynb`` reads: a profile of VGG-16, and its plans with measured steps.

    rm notebooks/data/*.profile.json notebooks/data/*.plan.json; python notebooks/collect.py

A profile that is there is kept and its plans are run again; one of ResNet-50, which benchmarks read, is measured beside
it.  About five minutes on two cores that do nothing else.  The notebook itself, from the folder ``notebooks``:

    halopipe notebook data/vgg16.profile.json data/vgg16-*.plan.json -o 02_compare_strategies.ipynb
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path

from collected import stamp

import halopipe as hp
from halopipe.launch.run import run_plan
from halopipe.run_spec.options import RunOptions
from planner.ir.codec import dump, load
from planner.ir.plan import Plan
from planner.ir.profile import Profile

DATA = Path(__file__).resolve().parent / "data"
SHOWN = ("best-first", "data-parallel", "even-split", "one-device")
OPTIONS = RunOptions(steps=12, data="halopipe.data:digits")


@dataclass(frozen=True, slots=True)
class Network:
    """What to measure."""

    name: str
    factory: str
    input_shape: tuple[int, ...]


NETWORKS = (
    Network("resnet50", "profiler.models.resnet:resnet50", (8, 3, 64, 64)),
    Network("vgg16", "profiler.models.vgg:vgg16", (8, 3, 32, 32)),
)


def main() -> int:
    """Fills ``notebooks/data``."""
    DATA.mkdir(exist_ok=True)
    _, vgg16 = map(_profile, NETWORKS)
    for plan in (hp.plan(vgg16), *hp.baselines(vgg16)):
        if plan.search.solver in SHOWN:
            dump(_measured(plan), DATA / f"vgg16-{plan.search.solver}.plan.json")
    stamp(".")
    return 0


def _profile(network: Network) -> Profile:
    path = DATA / f"{network.name}.profile.json"
    if not path.exists():
        _say(f"profiling {network.name}")
        dump(hp.profile(network.factory, input_shape=network.input_shape, arguments={"num_classes": 10}), path)
    return load(path, Profile)


def _measured(plan: Plan) -> Plan:
    _say(f"running {plan.inputs.model.factory} by {plan.search.solver}")
    result = run_plan(plan, OPTIONS)
    return plan if result is None else replace(plan, measured=result.measured(plan.prediction))


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")


if __name__ == "__main__":
    sys.exit(main())
