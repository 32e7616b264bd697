"""A checkpoint as runs read it: what it holds beside the model's state, and whether it is this model's.

    data/epoch, data/batches, data/samples     the position in the data
    run/step, run/seed                         steps done; what data and dropout are drawn with

Its fingerprint is the model's: plans are made anew as machines come and go, and any plan of the model goes on.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from halopipe import units
from halopipe.datasets import Position
from planner.ir.errors import MissingFileError, StaleFileError
from planner.ir.files import replaced
from planner.ir.fingerprint import fingerprint
from planner.ir.graph import Graph
from runtime.checkpoint import Checkpoint, complete_steps, whole_state_dict
from runtime.checkpoint.state import MODEL
from runtime.training_state import STEP

SEED = "run/seed"
DATA = "data"
_NONE = "none"


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint, and where the run stood."""

    checkpoint: Checkpoint

    @property
    def step(self) -> int:
        """Training steps done."""
        return int(self.checkpoint.number(STEP) or 0)

    def seed(self, otherwise: int) -> int:
        """Of what was drawn."""
        return int(self.checkpoint.number(SEED) or 0) if SEED in self.checkpoint else otherwise

    @property
    def position(self) -> Position:
        """In the data."""
        keys = [f"{DATA}/{name}" for name in ("epoch", "batches", "samples")]
        return Position(*(int(self.checkpoint.number(key) or 0) for key in keys if key in self.checkpoint))


def fingerprints_of(graph: Graph) -> dict[str, str]:
    """What a checkpoint and whoever reads it must agree on."""
    return {"model": fingerprint(graph)}


def open_saved(folder: str | Path, graph: Graph, step: int | None = None) -> Saved:
    """The checkpoint of ``step``, by default the newest complete one, of the model that ``graph`` is of.

    Raises:
        MissingFileError, CorruptFileError: there is none, or it is damaged.
        StaleFileError: it is another model's.
    """
    saved = Saved(Checkpoint.open(folder, step))
    mine = fingerprints_of(graph)["model"]
    theirs = saved.checkpoint.manifest.fingerprints.get("model", _NONE)
    if theirs != mine:
        raise StaleFileError(
            f"{saved.checkpoint.path} belongs to another model",
            [f"checkpoint: {theirs}", f"here: {mine}"],
            ["run the plan of the model that was saved, in the same dtype", "another --checkpoint folder"],
        )
    return saved


def describe(checkpoint: Checkpoint) -> str:
    """What a checkpoint holds, in a few lines."""
    saved, manifest = Saved(checkpoint), checkpoint.manifest
    at, num_bytes = saved.position, sum(files.data_bytes for files in manifest.folders.values())
    num_weights = sum(key.startswith(MODEL) for key in manifest.tensors)
    ranks = units.count(manifest.num_ranks, "rank")
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

    Raises:
        CorruptFileError: the checkpoint is damaged.
        MissingFileError: the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replaced(path) as stream:
            torch.save(whole_state_dict(checkpoint), stream)
    except (OSError, RuntimeError) as error:  # torch says RuntimeError where there is no folder
        raise MissingFileError(f"cannot write {path}", str(error).splitlines()[:1]) from error
