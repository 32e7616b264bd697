"""What the check of a capture found, kept for this user: the same graph of the same code need not be checked again.

    profile:  traces, checks  ── JSON in the cache folder ──>  run: each capture traces, and reads what was found

A graph is traced anew by every process; the check, which calls module and graph half a dozen times, takes far longer.
It finds the same where all of this is the same: the graph, what the module keeps in Python, its weights, the code of
the user's functions and the global variables that they name, the example, the source with its arguments and seed, the
processor, the installed packages, size and time of our own files, and what the files of other Python modules hold that
are loaded.  In doubt a capture is checked: where a file has changed since this process began, which may have read an
older one; where functions read files or the environment; where some of torch's were replaced; of sparse networks; where
torch read the module's code instead of running it.  Nothing is unpickled, and the folder is this user's alone.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import sys
import time
from collections.abc import Set
from contextlib import suppress
from dataclasses import dataclass
from os.path import exists, isabs
from pathlib import Path

import torch

from cuda_ops.device.compiling import cache_folder, foreign, processor
from cuda_ops.device.fork_server import OURS
from cuda_ops.device.host import process_state
from planner.ir.codec import canonical, from_json
from planner.ir.errors import HalopipeError
from planner.ir.files import read_text, write_text
from profiler.capture.kinds import Rules
from profiler.capture.operators import name_read
from profiler.capture.sample_independence import Dependence
from profiler.capture.trace import TracedModel
from profiler.capture.user_state import INSTALLED, UserState, digest_of, replaced_in_torch
from profiler.source.model import LoadedModel
from runtime.captured import attribute


def _started_s() -> float:
    """When this process began, or the one that it is a fork of, which may have read files long before it loads us."""
    own = process_state(os.getpid())
    if own is None:
        return time.time()
    return time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - own.started / os.sysconf("SC_CLK_TCK"))


_STARTED_S = _started_s()
_ROOT = Path(__file__).resolve().parents[2]
_MOST_KEPT = 256


@dataclass(frozen=True, slots=True)
class CheckFindings:
    """What is known of a graph that computes what its module does.

    Attributes:
        idle: the trained parameters that get no gradient.
        evaluation: as of :class:`runtime.captured.CapturedModule`.
        layers: which of them depend on other samples.
    """

    idle: tuple[str, ...]
    evaluation: str
    layers: tuple[Dependence, ...]


def key_of(traced: TracedModel, model: LoadedModel, rules: Rules, state: UserState) -> str:
    """The name that findings are kept under; empty: they are not.

    Args:
        state: that ``model.stateful`` is in.
    """
    if not model.origin or model.clouds is not None or traced.refusal is not None or rules.kinds:
        return ""
    parts = {type(part).__module__ for owner in model.owners.values() for part in owner.modules()}
    files = _file_digests(parts)
    if "" in files or replaced_in_torch():
        return ""
    nodes = list(traced.module.graph.nodes)
    graph = [(node.format_node(), str(node.meta.get("val"))) for node in nodes]
    read = (name_read(node) for node in nodes if node.op == "get_attr")
    constants = [attribute(traced.module, name) for name in read if name not in traced.parameters]
    processors = [platform.platform(), processor(), sys.version, torch.__version__]
    asked = [model.origin, str(sorted(rules.elementwise)), str(model.autocast), str(model.varying)]
    try:
        weights = traced.parameters.values()
        tensors = [digest_of(tensor) for tensor in (*weights, *constants, *model.inputs, *model.targets)]
        described = state.described()
    except (AttributeError, RuntimeError, TypeError, ValueError):  # inner graphs, tensors without values, open(...)
        return ""
    return hashlib.sha256(canonical([graph, tensors, described, files, processors, asked]).encode()).hexdigest()


def kept(key: str) -> CheckFindings | None:
    """What was found of a capture of that name; None: it is to be checked."""
    try:
        return from_json(read_text(_folder() / key), CheckFindings) if key and not foreign(_folder()) else None
    except (HalopipeError, ValueError, OSError):
        return None


def keep(key: str, findings: CheckFindings) -> None:
    """Keeps what was found, unless ``key`` is empty or the folder somebody else's; of all files the newest stay."""
    folder = _folder()
    with suppress(HalopipeError, OSError):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if key and not foreign(folder):
            write_text(folder / key, canonical(findings))
            for path in sorted(folder.iterdir(), key=os.path.getmtime)[:-_MOST_KEPT]:
                path.unlink()


def _folder() -> Path:
    return cache_folder(os.environ) / "checks"


def _file_digests(parts: Set[str]) -> list[str]:
    """Of all files that may decide what a module does; an empty one where it cannot be told which text was read.

    Args:
        parts: the Python modules of its parts, whose files count also where they are an installed package's.
    """
    loaded = {name: getattr(module, "__file__", None) or "" for name, module in [*sys.modules.items()]}
    files = {
        (name, file)
        for name, file in loaded.items()
        if name.partition(".")[0] not in OURS and (isabs(file) or exists(file))
    }
    users = {file for name, file in files if name in parts or not any(part in file for part in INSTALLED)}
    return [*_installed(), *_own_digests(), *map(_digest, sorted(users))]


def _installed() -> list[str]:
    """The packages that are installed, with their releases, and when they were."""
    folders = (Path(folder) for folder in sys.path if any(part in f"{folder}{os.sep}" for part in INSTALLED))
    return [_digest(path, of_content=False) for path in sorted({each for f in folders for each in f.glob("*-info")})]


@functools.cache
def _own_digests() -> list[str]:
    return [_digest(path, of_content=False) for name in OURS for path in sorted((_ROOT / name).rglob("*.py"))]


def _digest(path: str | Path, *, of_content: bool = True) -> str:
    try:
        status = os.stat(path)
        content = Path(path).read_bytes() if of_content else b""
    except OSError:
        return ""
    about = hashlib.sha256(content).hexdigest() if of_content else f"{status.st_size} {status.st_mtime_ns}"
    changed_s = max(status.st_mtime, status.st_ctime)  # a copy may have its original's time
    return f"{path} {about}" if changed_s < _STARTED_S else ""
