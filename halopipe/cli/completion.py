"""What the shell offers for a value (``halopipe --install-completion``): names that are known, files of the right kind.

Each is asked while somebody waits with a finger on a key: none loads torch, and files are told by their first line.
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import typer

from halopipe.run_spec.options import (
    DATA_FROM,
    LONE_PASSES,
    ON_NAN,
    REPLAN,
    RESUME,
    SERVING_MODES,
    STDIN_FORMATS,
    TRANSPORTS,
)
from planner.ir.constraints import FAMILIES
from planner.ir.problem import OBJECTIVES, RECOMPUTE

Completion = Callable[[str], list[str]]

_HEAD = re.compile(r'\s*{\s*"halopipe"\s*:\s*"(\w+)"')
_HEAD_BYTES = 200
_MOST_BYTES = 2**24
"""Of a plan whose layers are offered."""

DTYPES = ("bfloat16", "float16", "float32", "float64")
COMPILERS = ("inductor", "aot_eager", "eager")


def named(names: Callable[[], Iterable[str]]) -> Completion:
    """Offers these names."""

    def offered(incomplete: str) -> list[str]:
        return [name for name in names() if name.startswith(incomplete)]

    return offered


def several(names: Callable[[], Iterable[str]]) -> Completion:
    """Offers a list with commas of these names, the next of those that are not in it."""

    def offered(incomplete: str) -> list[str]:
        before, comma, last = incomplete.rpartition(",")
        return [f"{before}{comma}{name}" for name in names() if name.startswith(last) and name not in before.split(",")]

    return offered


def files(*kinds: str, suffixes: tuple[str, ...] = ()) -> Completion:
    """Offers files of ours of these kinds, those that end so, and folders that may have some."""

    def offered(incomplete: str) -> list[str]:
        typed = Path(incomplete or ".")
        folder = typed if incomplete.endswith("/") or not incomplete else typed.parent
        before = incomplete[: incomplete.rfind("/") + 1]
        names = []
        try:
            for path in sorted(folder.iterdir()):
                if path.name.startswith("."):
                    continue
                if path.is_dir():
                    names.append(f"{before}{path.name}/")
                elif path.suffix in suffixes or (path.suffix == ".json" and _kind(path) in kinds):
                    names.append(f"{before}{path.name}")
        except OSError:
            return []
        return [name for name in names if name.startswith(incomplete)]

    return offered


def layers(context: typer.Context, incomplete: str) -> list[str]:
    """Offers the layers of the plan that was typed before; it is not parsed where an option still lacks its value."""
    typed = [Path(str(word)) for word in (context.params.get("plan"), *context.args) if word]
    path = next((path for path in typed if _kind(path) == "plan"), None)
    try:
        if path is None or path.stat().st_size > _MOST_BYTES:
            return []
        names = json.loads(path.read_text("utf-8"))["decision"]["layers"]
    except (KeyError, OSError, TypeError, ValueError):
        return []
    return [name for name in names if name.startswith(incomplete)]


def _kind(path: Path) -> str:
    try:
        with path.open("rb") as file:
            head = _HEAD.match(file.read(_HEAD_BYTES).decode("utf-8", "replace"))
    except OSError:
        return ""
    return head[1] if head is not None else ""


def _late(place: str) -> Callable[[], Iterable[str]]:
    """The names that ``package.module:name`` holds, or gives; it is imported once somebody asks."""
    module, _, name = place.partition(":")

    def names() -> Iterable[str]:
        held: Any = getattr(importlib.import_module(module), name)
        listed: Iterable[str] = held() if callable(held) else held
        return listed

    return names


def _formats() -> Iterable[str]:
    from halopipe.run_spec.job_file import NAME
    from planner.ir.codec import FORMATS

    return (*FORMATS, NAME)


solvers, schedules = named(_late("planner.solvers:names")), named(_late("planner.schedules:names"))
objectives, devices = named(lambda: OBJECTIVES), named(_late("planner.catalogue:devices"))
choices, families = named(lambda: RECOMPUTE), several(lambda: FAMILIES)
optimizers, formats = named(_late("halopipe.training.optimizer_spec:OPTIMIZERS")), named(_formats)
dtypes = named(lambda: DTYPES)
plans, profiles, timelines, proofs = files("plan"), files("profile"), files("timeline"), files("proof")
jobs = files("plan", suffixes=(".yaml", ".yml"))
clusters = files(suffixes=(".yaml", ".yml"))
models = files(suffixes=(".py", ".pt", ".pt2"))

RUN: dict[str, Any] = {
    "optimizer": optimizers,
    "scheduler": named(_late("halopipe.training.optimizer_spec:SCHEDULES")),
    "dtype": dtypes,
    "compiler": named(lambda: COMPILERS),
    "device": named(lambda: ("cpu",)),
    "checkpoint_every": named(lambda: ("auto", "10min", "100")),
    "transport": named(lambda: TRANSPORTS[1:]),
    "lone_passes": named(lambda: LONE_PASSES),
    "on_nan": named(lambda: ON_NAN),
    "data": models,
    "eval_data": models,
    "data_from": named(lambda: DATA_FROM),
    "profile": profiles,
    "resume": named(lambda: RESUME),
    "replan": named(lambda: REPLAN),
}
"""By field of :mod:`halopipe.run_spec.options`; for others the shell offers files."""

PLAN: dict[str, Any] = {
    "schedule": schedules,
    "objective": objectives,
    "recompute": choices,
    "shard": choices,
    "allow": families,
    "solver": solvers,
}
"""By field of :class:`halopipe.planning.options.PlanOptions`."""

PROFILE: dict[str, Any] = {
    "device": named(lambda: ("auto", "cpu", "cuda")),
    "optimizer": optimizers,
    "dtype": dtypes,
    "autocast": named(lambda: ("bfloat16",)),
    "allow": families,
    "transport": named(lambda: ("shared", "gloo")),
    "on": named(_late("planner.kernels:SYSTEMS")),
}
"""By field of :class:`halopipe.planning.options.ProfileOptions`."""

SERVE: dict[str, Any] = {
    "stdin": named(lambda: STDIN_FORMATS),
    "mode": named(lambda: SERVING_MODES),
    "optimizer": optimizers,
}
"""By field of :class:`halopipe.serving.options.ServeOptions`."""

LISTS = {"RunOptions": RUN, "RunFiles": RUN, "PlanOptions": PLAN, "ProfileOptions": PROFILE, "ServeOptions": SERVE}
"""By the name of a list of options."""
