"""What the check of a capture found, kept for this user: the same graph of the same code need not be checked again.

    profile:  traces, checks  ── JSON in the cache folder ──>  run: each capture traces, and reads what was found

A graph is traced anew by every process; the check, which calls module and graph half a dozen times, takes far longer.
It finds the same where all of this is the same: the graph, what the module keeps in Python, the example, the source
with its arguments and seed, the processor, the releases of all installed packages, and what our own files hold and
those of the Python modules that are loaded beside these.  In doubt a capture is checked: where a file is younger than
this process, which may have read an older one; of sparse networks; where torch read the module's code instead of
running it.  Nothing is unpickled, and the folder is this user's alone.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from cuda_ops.device.compiling import cache_folder, foreign, processor
from cuda_ops.device.fork_server import OURS
from planner.ir.codec import canonical, from_json
from planner.ir.errors import HalopipeError
from planner.ir.files import read_text, write_text
from profiler.capture.kinds import Rules
from profiler.capture.operators import name_read
from profiler.capture.sample_independence import Dependence
from profiler.capture.trace import TracedModel
from profiler.capture.user_state import INSTALLED, UserState, digest_of
from profiler.source.model import LoadedModel
from runtime.captured import attribute

_STARTED_S = time.time()
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


def key_of(traced: TracedModel, model: LoadedModel, rules: Rules) -> str:
    """The name that findings are kept under; empty: they are not."""
    files = _file_digests()
    if not model.origin or model.clouds is not None or traced.refusal is not None or rules.kinds or "" in files:
        return ""
    nodes = list(traced.module.graph.nodes)
    graph = [(node.format_node(), str(node.meta.get("val"))) for node in nodes]
    read = (name_read(node) for node in nodes if node.op == "get_attr")
    constants = [attribute(traced.module, name) for name in read if name not in traced.parameters]
    processors = [platform.platform(), processor(), sys.version, torch.__version__]
    asked = [model.origin, str(sorted(rules.elementwise)), str(model.autocast), str(model.varying)]
    try:
        tensors = [digest_of(tensor) for tensor in (*constants, *model.inputs, *model.targets)]
        state = UserState(model.stateful).described()
    except RuntimeError:  # of tensors without values
        return ""
    return hashlib.sha256(canonical([graph, tensors, state, files, processors, asked]).encode()).hexdigest()


def kept(key: str) -> CheckFindings | None:
    """What was found of a capture of that name; None: it is to be checked."""
    folder = _folder()
    try:
        return from_json(read_text(folder / key), CheckFindings) if key and not foreign(folder) else None
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


def _file_digests() -> list[str]:
    """Of all files that may decide what a module does; an empty one where it cannot be told which text was read."""
    loaded = {name: getattr(module, "__file__", None) or "" for name, module in [*sys.modules.items()]}
    files = {file for name, file in loaded.items() if name.partition(".")[0] not in OURS and os.path.isabs(file)}
    users = (file for file in sorted(files) if not any(part in file for part in INSTALLED))
    return [*_installed(), *_own_digests(), *map(_digest, users)]


@functools.cache
def _installed() -> list[str]:
    """The packages that are installed, with their releases."""
    folders = (Path(folder) for folder in sys.path if any(part in f"{folder}{os.sep}" for part in INSTALLED))
    return sorted({str(path) for folder in folders for path in folder.glob("*-info")})


@functools.cache
def _own_digests() -> list[str]:
    return [_digest(str(path)) for name in OURS for path in sorted((_ROOT / name).rglob("*.py"))]


def _digest(path: str) -> str:
    try:
        content = Path(path).read_bytes()
        return f"{path} {hashlib.sha256(content).hexdigest()}" if os.stat(path).st_mtime < _STARTED_S else ""
    except OSError:
        return ""
