"""Thirty networks of users, each by a script of its own: import, profile, plan, a first step that is checked.

    python -m benchmarks.journey --quick        three networks, and no clocks
    python -m benchmarks.journey --json > benchmarks/results/journey.json
    python -m benchmarks.journey --only bert,clip

A script is what its user would write: the source of a function of :mod:`tests.zoo.scripts`, then

    profile = hp.profile(model, batch, quick=True); hp.save(hp.plan(profile), "plan.json")

without a wrapper around the module or the batch, run by an interpreter of its own, from standard input (so it is a
notebook's cell as much as a script: nothing can be imported from it).  ``halopipe run plan.json --check-numerics`` then
trains two steps, and compares losses, gradients, parameters and buffers with the user's own module on one device.  The
plan is of two stages, since on one device there would be little to compare; where none exists, or the run refuses it,
the plan is the one that is best.

A row of a network is 1 if it was equal, 0 if it was refused; a refusal holds if it says what to do, and is what the
network's entry of the zoo expects: one for a branch names the line.  Last come the seconds from the start of the
interpreter to the first plan.
"""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.report import Row, at_least, at_most, run
from tests.zoo.entries import Entry
from tests.zoo.scripts import HABITS, PACKAGES

HOME = Path(__file__).resolve().parents[1]
NETWORKS: Mapping[str, Entry] = {**PACKAGES, **HABITS}
QUICK = ("dict_inputs", "buffer_by_hand", "control_flow")
MOST_REFUSED = 3
_DEADLINE_S = 900.0

_SCRIPT = """
from typing import Any

import halopipe as hp
from planner.ir.errors import InfeasibleError


{source}
model, *example = {name}()
profile = hp.profile(model, *example[:1], **dict(zip(["loss_fn"], example[1:])), quick=True)
layers = profile.graph.layers
ends = [layers[0].name + "=stage:0", layers[-1].name + "=stage:1"]
hp.save(hp.plan(profile, time_limit_s=20), "best.json")
try:
    hp.save(hp.plan(profile, fix=ends, time_limit_s=20), "stages.json")
except InfeasibleError:
    pass
"""
_BESIDE_ANOTHER_TORCH = """
import sys


class Before:
    def find_spec(self, name, path=None, target=None):
        if name == "torchvision":
            sys.meta_path.remove(self)
            from tests.missing_operators import declare_missing

            declare_missing()


sys.meta_path.insert(0, Before())
"""
"""``sitecustomize``, for torchvision where it was built for another torch."""
_FIRST_PLANS = {
    "ResNet-18": (
        """
import halopipe as hp
import torch
from torch import nn
from torchvision.models import resnet18

batch = torch.randn(8, 3, 64, 64), torch.randint(10, (8,))
plan = hp.plan(hp.profile(resnet18(num_classes=10), batch, loss_fn=nn.CrossEntropyLoss(), quick=True))
""",
        20.0,
    ),
    "GPT-2 small": (
        """
import halopipe as hp
import torch
from transformers import GPT2Config, GPT2LMHeadModel

words = torch.randint(50257, (2, 64))
plan = hp.plan(hp.profile(GPT2LMHeadModel(GPT2Config()), {"input_ids": words, "labels": words}, quick=True))
""",
        30.0,
    ),
}


@dataclass(frozen=True, slots=True)
class Journey:
    """What became of a network.

    Attributes:
        is_equal: its first steps were those of the module on one device.
        num_stages: of the plan; 0: there was none.
        text: what was said instead, the error of the script or of the run.
    """

    name: str
    is_equal: bool
    num_stages: int = 0
    text: str = ""

    @property
    def is_refused(self) -> bool:
        """Refused by an error of halopipe's before the first step, which says what to do, as it may be."""
        is_typed = "error[H2" in self.text or "error[H4" in self.text
        is_expected = NETWORKS[self.name].is_expected("", self.text)
        return not self.is_equal and is_typed and is_expected and "\n  try: " in self.text


def measure(quick: bool, only: str) -> list[Row]:
    """All rows; each is said when it is there."""
    rows = []
    names = QUICK if quick else only.split(",") if only else tuple(NETWORKS)
    for row in measured(names, clocks=not quick and not only):
        rows.append(row)
        sys.stderr.write(f"{row.name}: {row.value:g} {row.unit}\n")
    return rows


def measured(names: Sequence[str], *, clocks: bool) -> Iterator[Row]:
    """A row for each network, then how many were equal, and the clocks."""
    found = []
    for name in names:
        found.append(journey(name, NETWORKS[name]))
        yield row_of(found[-1])
    equal = sum(one.is_equal for one in found)
    label = "equal to their own module" if len(names) == len(NETWORKS) else f"equal, of the {len(names)} asked for"
    yield at_least(label, equal, "networks", len(names) - min(MOST_REFUSED, len(names) - 1))
    for name, (script, limit_s) in _FIRST_PLANS.items() if clocks else ():
        with tempfile.TemporaryDirectory() as folder:
            start = time.perf_counter()
            text = _told(["-"], folder, script)
            elapsed = time.perf_counter() - start
        yield at_most(f"{name}: seconds to the first plan{': ' + text[-200:] if text else ''}", elapsed, "s", limit_s)


def row_of(found: Journey) -> Row:
    """A refusal holds where it is one."""
    about = NETWORKS[found.name].habit
    if found.is_equal:
        return Row(f"{found.name}: {about}", 1.0, "equal", "equal or refused")
    lines = [line for line in found.text.splitlines() if "error[" in line] or found.text.splitlines()[-1:]
    return Row(f"{found.name}: {about}: {' '.join(lines)[:200]}", 0.0, "equal", "equal or refused", found.is_refused)


def journey(name: str, network: Entry) -> Journey:
    """Runs a network's script in an empty folder, then the plan that it left there."""
    script = _SCRIPT.format(source=inspect.getsource(network.factory), name=name)
    with tempfile.TemporaryDirectory() as folder:
        text = _told(["-"], folder, script)
        for plan in [] if text else filter(Path.exists, (Path(folder) / "stages.json", Path(folder) / "best.json")):
            text = _told(["-m", "halopipe", "run", plan.name, "--steps", "2", "--check-numerics"], folder)
            if not text:
                decision = json.loads(plan.read_text("utf-8"))["decision"]
                return Journey(name, is_equal=True, num_stages=len(decision["stages"]))
            if "error[H2" not in text:  # no refusal
                break
        return Journey(name, is_equal=False, text=text)


def _told(command: Sequence[str], folder: str, given: str = "") -> str:
    """What an interpreter wrote of its error; empty if it ended well."""
    path = Path(folder) / "path"
    path.mkdir(exist_ok=True)
    (path / "sitecustomize.py").write_text(_BESIDE_ANOTHER_TORCH, "utf-8")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (path, HOME)))}
    try:
        done = subprocess.run(
            [sys.executable, *command],
            input=given,
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=_DEADLINE_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"no end after {_DEADLINE_S:g} s"
    return (done.stderr or done.stdout or f"exit code {done.returncode}") if done.returncode else ""


main = partial(
    run,
    "Networks of users, from import to a checked first step",
    measure,
    own={"--only": {"default": "", "metavar": "NAME,...", "help": "these networks, no clocks"}},
)

if __name__ == "__main__":
    raise SystemExit(main())
