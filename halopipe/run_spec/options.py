"""What to run: the one list of options, from which the command line, the calls and the checks of limits take theirs.

A new option is a field here, with the help that ``halopipe run`` shows, and is used where it acts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypedDict

EACH, FIRST, SHARE = DATA_FROM = ("each", "first", "share")
"""Who reads the data of a run."""

PATH, SIZE = "path", "size"
_OPTION = "option"


@dataclass(frozen=True, slots=True)
class Option:
    """How a field is asked for.

    Attributes:
        help: for the command line; empty: it is no option there.
        metavar: stands for its value.
        flag: on the command line; empty: the field's name.
        least: limit of a number.
        kind: ``path``: a file or folder, kept as absolute; ``size``: bytes, written such as ``2GiB``.
    """

    help: str
    metavar: str = ""
    flag: str = ""
    least: float | None = None
    kind: str = ""


def _option(default: Any, help: str = "", metavar: str = "", **others: Any) -> Any:
    return dataclasses.field(default=default, metadata={_OPTION: Option(help, metavar, **others)})


@dataclass(frozen=True, slots=True)
class RunOptions:
    """What to run.  The help of each field says what it is; here is what is longer to say.

    Attributes:
        warmup: the first steps that are run here, which no median counts; the last one of these is watched for its
            memory.
        data: ``pkg.mod:factory``, called with (global_batch, input_shape, seed), gives batches, a Dataset or a
            DataLoader, see :mod:`halopipe.data.sources`; if empty, every batch is the model's own example, repeated to
            the global batch.
        data_from: ``each`` rank reads all of it, the ``first`` rank for all others, or the ranks ``share`` the samples
            of a Dataset, each reading those that it needs.
        optimizer: see :mod:`halopipe.training.optimizer_spec`.
        scheduler: stepped once an update; empty for none.
        eval_data: its mean loss is found at the end, and every ``eval_every`` steps unless that is 0.
        resume: whatever plan the checkpoint was made under; its seed counts then.
        deadline_s: the longest that one rank may wait for another, or do one thing.
        memory_limit_bytes: from the first step on; 0: no limit.
        device: empty: the devices that the plan names.
        check_first_step: the job ends before its second step where they differ.
    """

    steps: int = _option(20, "Steps to train, those before a checkpoint included.", least=1)
    warmup: int = _option(2, least=0)
    data: str = _option(
        "",
        "Data, as 'pkg.mod:factory' that gives batches, a Dataset or a DataLoader; "
        "the model's own example if not given.",
        "FACTORY",
    )
    data_from: str = _option(
        EACH, "Who reads it: 'each' rank all, the 'first' for all, or they 'share' a Dataset's samples.", "WHO"
    )
    optimizer: str = _option("", "Instead of the plan's: 'AdamW:lr=0.001', or a factory.", "TEXT")
    scheduler: str = _option("", "Learning rates: 'CosineAnnealingLR:T_max=100', or a factory.", "TEXT")
    clip_norm: float = _option(0.0, "Largest norm of all gradients together; 0: they are not clipped.", "X", least=0.0)
    accumulate: int = _option(1, "Steps whose gradients make up one update.", "K", least=1)
    compiler: str = _option("", "Compile the stages by torch.compile, such as 'inductor'.", "BACKEND", flag="--compile")
    device: str = _option("", "cpu: compute there, whatever devices the plan names.", "WHAT")
    eval_data: str = _option("", "Data to evaluate on, as --data; at the end at least.", "FACTORY")
    eval_every: int = _option(0, "Evaluate every N steps too.", "N", least=0)
    eval_batches: int = _option(0, "Evaluate on N batches; 0: on all of the data.", "N", least=0)
    metrics: str = _option("", "Gets a line of JSON a step: loss, rate, gradient norm, ...", "FILE", kind=PATH)
    checkpoint: str = _option("", "Folder of checkpoints, which all hosts share.", "FOLDER", kind=PATH)
    checkpoint_every: int = _option(0, "Save every N steps; 0: at the end alone.", "N", least=0)
    keep: int = _option(0, "Keep the newest K checkpoints; 0: all.", "K", least=0)
    resume: bool = _option(False, "Go on from the newest checkpoint, also of another plan.")
    check_numerics: bool = _option(False, "Compare losses and gradients of the first steps with one device.")
    check_first_step: bool = _option(
        True, "Compare the first step with one device, where that fits into memory, and end if it differs."
    )
    seed: int = _option(0, "Of parameters and data.", least=0)
    dtype: str = _option("", "Instead of the plan's, such as float64.")
    deadline_s: float = _option(120.0, "Seconds that a wait may last.", flag="--deadline", least=1.0)
    memory_limit_bytes: int = _option(
        0,
        "Most memory of a rank's tensors, such as 2GiB; else H506.",
        "SIZE",
        flag="--memory-limit",
        least=0,
        kind=SIZE,
    )


class ScriptOptions(TypedDict, total=False):
    """Those of :class:`RunOptions` that ``hp.execute`` takes, of the same defaults and limits.

    A scheduler may be a function that makes a schedule of an optimiser, or the schedule of an optimiser object; a
    compiler whatever torch.compile takes; both may be None.  A device may be one of torch's.
    """

    scheduler: Any
    clip_norm: float
    accumulate: int
    seed: int
    deadline_s: float
    compiler: str | Callable[..., Any] | None
    device: Any
    check_first_step: bool


FIELDS: Mapping[str, dataclasses.Field[Any]] = {each.name: each for each in dataclasses.fields(RunOptions)}
"""By name, in the order of the command line."""


def option_of(name: str) -> Option:
    """How the field is asked for."""
    found: Option = FIELDS[name].metadata[_OPTION]
    return found


def flag_of(name: str) -> str:
    """What the field is called on the command line."""
    return option_of(name).flag or f"--{name.replace('_', '-')}"
