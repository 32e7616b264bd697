"""Folders of checkpoints as people look after them: what is there and whether it is sound, weights out and in."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from halopipe.terminal import tables, units
from halopipe.training.checkpointing import PLAN, SEED
from halopipe.training.resuming import Saved
from planner.ir.errors import CorruptFileError, InputFileError, MissingFileError, UsageError
from planner.ir.files import open_plain, replaced
from planner.ir.plan import Plan
from profiler.source.model import LoadedModel, load_state, state_of
from profiler.source.source import load_model
from runtime.checkpoint import Checkpoint, Number, RankState, complete_steps, save, whole_state_dict
from runtime.checkpoint.folders import complete_path
from runtime.checkpoint.state import MODEL
from runtime.checkpoint.training_state import STEP, WEIGHTS_ALONE

DCP = ".dcp"
"""Ends the name of a folder in the format of torch.distributed.checkpoint."""

_NONE = "none"


@dataclass(frozen=True, slots=True)
class CheckpointEntry:
    """A checkpoint of a folder.

    Attributes:
        fault: what is wrong with it; empty: it is sound, as far as was looked.
        plan: in words, that it was saved by; empty where it does not say.
        age_s: since it was complete.
    """

    step: int
    num_bytes: int
    fault: str
    plan: str
    age_s: float


def entries(folder: Path, *, every_byte: bool = False, step: int | None = None) -> tuple[CheckpointEntry, ...]:
    """The checkpoints in ``folder``, growing; or that of ``step`` alone.

    Args:
        every_byte: whether all hashes are compared, not only that of the manifest, and sizes.

    Raises:
        MissingFileError: there is none.
    """
    steps = complete_steps(folder)
    if not steps or (step is not None and step not in steps):
        Checkpoint.open(folder, step)  # raises
    return tuple(_entry(folder, each, every_byte) for each in (steps if step is None else [step]))


def _entry(folder: Path, step: int, every_byte: bool) -> CheckpointEntry:
    path = complete_path(folder, step)
    age_s = max(0.0, time.time() - path.stat().st_mtime)
    num_bytes = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    try:
        opened = Checkpoint.open(folder, step)
        if every_byte:
            opened.verify()
    except InputFileError as error:
        return CheckpointEntry(step, num_bytes, "; ".join(error.details) or error.title, "", age_s)
    plan = str(opened.number(PLAN)) if PLAN in opened else units.count(opened.manifest.num_ranks, "rank")
    return CheckpointEntry(step, num_bytes, "", plan, age_s)


def listing(checkpoints: tuple[CheckpointEntry, ...], *, every_byte: bool = False) -> str:
    """Checkpoints as a table."""
    good = "sound" if every_byte else "complete"
    rows = [
        [str(each.step), units.size(each.num_bytes), units.duration(each.age_s), each.plan, each.fault or good]
        for each in checkpoints
    ]
    return tables.table(["step", "size", "age", "plan", "state"], rows)


def require_sound(folder: Path, checkpoints: tuple[CheckpointEntry, ...]) -> None:
    """Raises :class:`CorruptFileError` where one is damaged; it names all that are, and the newest that is not."""
    damaged = [each for each in checkpoints if each.fault]
    if damaged:
        sound = [each.step for each in checkpoints if not each.fault]
        raise CorruptFileError(
            f"{units.count(len(damaged), 'checkpoint')} of {len(checkpoints)} in {folder} "
            + ("is damaged" if len(damaged) == 1 else "are damaged"),
            [f"{complete_path(folder, each.step)}: {each.fault}" for each in damaged],
            [f"the newest sound one: {complete_path(folder, sound[-1])}"] if sound else [],
        )


def describe(checkpoint: Checkpoint) -> str:
    """What a checkpoint holds, in a few lines."""
    saved = Saved(checkpoint)
    manifest = checkpoint.manifest
    at = saved.position
    num_bytes = sum(files.data_bytes for files in manifest.folders.values())
    num_weights = sum(key.startswith(MODEL) for key in manifest.tensors)
    by = f", by {checkpoint.number(PLAN)}" if PLAN in checkpoint else ""
    ranks = f"{units.count(manifest.num_ranks, 'rank')}{by}"
    weights = units.count(num_weights, "parameter or buffer", "parameters and buffers")
    others = [str(step) for step in complete_steps(checkpoint.path.parent) if step != manifest.step]
    lines = [
        f"{checkpoint.path}: {units.count(saved.step, 'step')} done",
        f"  {units.size(num_bytes)}, saved by {ranks}, torch {manifest.torch_version}",
        f"  {weights}, model {manifest.fingerprints.get('model', _NONE)}",
        f"  data: {units.count(at.batches, 'batch', 'batches')} of epoch {at.epoch}",
    ]
    return "\n".join([*lines, *([f"  other steps there: {', '.join(others)}"] if others else [])])


def write_state_dict(checkpoint: Checkpoint, path: Path) -> None:
    """Parameters and buffers as a plain file of torch, for ``module.load_state_dict(torch.load(path))``.

    Where the name ends in ``.dcp`` they become a folder that ``torch.distributed.checkpoint.load`` reads.

    Raises:
        CorruptFileError: the checkpoint is damaged.
        MissingFileError: the file or folder cannot be written; a folder that is there is left alone.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == DCP:
            from torch.distributed.checkpoint.state_dict_saver import save as save_sharded  # late, as few ask for it

            part = path.with_name(f"{path.name}.part")
            with warnings.catch_warnings(action="ignore", category=UserWarning):  # no other rank takes part
                save_sharded(whole_state_dict(checkpoint), checkpoint_id=part, no_dist=True)
            part.rename(path)
            return
        with replaced(path) as stream:
            torch.save(whole_state_dict(checkpoint), stream)
    except (OSError, RuntimeError) as error:  # torch says RuntimeError where there is no folder
        raise MissingFileError(f"cannot write {path}", str(error).splitlines()[:1]) from error


def read_state_dict(path: Path, plan: Plan, folder: Path) -> Path:
    """Makes a checkpoint of a plain state dict, ``folder/step-0``, for runs of ``plan`` to begin from.

    Runs go on from it, with optimisers and schedules of their own: it has weights alone, in the plan's dtype.

    Raises:
        MissingFileError, CorruptFileError: the file cannot be read, or holds no state dict.
        UsageError: it is not of the plan's model, or ``folder`` has checkpoints.
    """
    if complete_steps(folder):
        steps = ", ".join(map(str, complete_steps(folder)))
        raise UsageError(f"{folder} has checkpoints already", [f"steps {steps}"], ["another folder"])
    state = _state_dict(path)
    model = load_model(plan.inputs.model)
    load_weights(model, state)
    tensors = {MODEL + name: value for name, value in state_of(model.owners).items() if isinstance(value, Tensor)}
    numbers: dict[str, Number] = {STEP: 0, SEED: 0, WEIGHTS_ALONE: True}
    everything = RankState(tensors, {}, numbers, frozenset(tensors) | frozenset(numbers))
    save(folder, 0, everything, 0, 1, lambda: None, {"model": plan.inputs.model_fingerprint})
    return complete_path(folder, 0)


def load_weights(model: LoadedModel, state: Mapping[str, Any], *, whole_loss: bool = True) -> None:
    """Loads ``state``, in which what belongs to a loss that is a module is called ``loss_fn.*``.

    Args:
        whole_loss: whether all of the loss's state has to be there; else it keeps what it has.

    Raises:
        UsageError: it is another model's.
    """
    try:
        load_state(model.owners, state, whole_loss=whole_loss)
    except RuntimeError as error:
        raise UsageError(
            "the module is not the one that the plan was made for", str(error).splitlines()[1:], ["plan again"]
        ) from error


def _state_dict(path: Path) -> dict[str, Tensor]:
    try:
        with os.fdopen(open_plain(os.path.realpath(path)), "rb") as stream:  # no wait for who writes to a pipe
            loaded = torch.load(stream, map_location="cpu", weights_only=True)
    except OSError as error:
        raise MissingFileError(f"cannot read {path}", [error.strerror or str(error)]) from None
    except Exception as error:  # noqa: BLE001 - a file that somebody made may raise anything
        raise CorruptFileError(f"{path} is no state dict", str(error).splitlines()[:1], [_HOW]) from None
    if not isinstance(loaded, Mapping) or not all(isinstance(key, str) for key in loaded):
        raise CorruptFileError(f"{path} is no state dict", [f"it holds a {type(loaded).__name__}"], [_HOW])
    if not loaded or not all(isinstance(value, Tensor) for value in loaded.values()):
        inside = [key for key, value in loaded.items() if isinstance(value, Mapping)]
        within = [f"{key} is a mapping: perhaps the state dict is that" for key in inside[:1]]
        raise CorruptFileError(f"{path} is no state dict", ["not all of its values are tensors", *within], [_HOW])
    return dict(loaded)


_HOW = "torch.save(module.state_dict(), FILE)"
