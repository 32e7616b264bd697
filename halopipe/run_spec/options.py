"""What to run: the one list of options, from which the command line, the calls and the checks of limits take theirs.

A new option is a field here (:mod:`planner.ir.options`), with the help that ``halopipe run`` shows, and is used
where it acts.  Other verbs have lists of the same make where they are at home (:mod:`halopipe.planning.options`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypedDict

from halopipe.run_spec.schema import asked_in, flag
from planner.ir.options import (
    DURATION,
    FACTORY,
    INTERVAL,
    METRICS,
    PATH,
    SIZE,
    WORD,
    OptionSpec,
    option,
    spec,
)
from runtime.timeouts import WAIT_S

EACH, FIRST, SHARE = DATA_FROM = ("each", "first", "share")
"""Who reads the data of a run."""

LONG_RUNS, ALWAYS, NEVER = LONE_PASSES = ("auto", "on", "off")
"""When a run times its stages alone."""

AUTO, SHARED, GLOO, MPI = TRANSPORTS = ("", "shared", "gloo", "mpi")
"""What ranks on processors exchange by; shared: memory within a host, gloo between hosts."""

DTYPES = ("bfloat16", "float16", "float32", "float64")
COMPILERS = ("inductor", "aot_eager", "eager")
OPTIMIZERS = "halopipe.training.optimizer_spec:OPTIMIZERS"
"""What is offered for dtypes, compilers and optimisers; others may be typed."""

STOP, SKIP, IGNORE = ON_NAN = ("stop", "skip", "ignore")
"""What is done about a step whose loss or gradients are NaN or infinite."""

(FREE,) = REPLAN = ("free",)
"""Micro-batches of another plan: of any size; else those of the job."""

(IF_ANY,) = RESUME = ("auto",)
"""What may follow ``--resume``: go on from a checkpoint if there is any; without it there must be one."""

TENSORBOARD = "tb:"
"""Before a folder that gets metrics for TensorBoard."""

TRAINING = "Training"
DATA = "Data and evaluation"
CHECKPOINTS = "Checkpoints"
CHECKS = "Checks and limits"
RECORDS = "Records"
LOSSES = "Machines that come and go"
"""Headings in the help of the command line, below the common options, which have none."""


@dataclass(frozen=True, slots=True)
class RunOptions:
    """What to run.  The help of each field says what it is; here is what is longer to say.

    Attributes:
        warmup: the first steps that are run here, which no median counts; the last one of these is watched for its
            memory.
        data: ``pkg.mod:factory`` of up to three parameters (global_batch, input_shape, seed) gives batches, a Dataset
            or a DataLoader, see :mod:`halopipe.data.sources`; if empty, every batch is the model's own example,
            repeated to the global batch.
        data_from: ``each`` rank reads all of it, the ``first`` rank for all others, or the ranks ``share`` the samples
            of a Dataset, each reading those that it needs.
        optimizer: see :mod:`halopipe.training.optimizer_spec`.
        scheduler: stepped once an update; empty for none.
        eval_data: its mean loss is found at the end, and every ``eval_every`` steps unless that is 0.
        eval_metric: see :mod:`halopipe.training.evaluate`.
        eval_outputs: names with commas between them, see there.
        metrics: see :mod:`halopipe.training.metrics`.
        profile_steps: ``3:5``, from the third to the fifth, counted from 1; empty for none.
        profile_folder: a Chrome trace a rank, see :mod:`halopipe.training.torch_traces`.
        checkpoint_every: a number of steps, or text: a time such as ``10min``, or ``auto``, see
            :mod:`halopipe.training.save_times`; 0: at the end alone.
        mtbf_s: seconds between two failures of the whole job, on the average, for ``auto``; 0: what clusters show.
        grace_s: the longest from a SIGTERM to the end of the job; it saves within.
        resume: whatever plan the checkpoint was made under; its seed counts then.  ``auto``: the newest that is
            sound, and anew where there is none (:func:`halopipe.training.resuming.resume_point`).
        resume_step: of the checkpoint that was settled on; -1: the newest.
        restarts: see :mod:`halopipe.launch.restart`.
        deadline_s: the longest that one rank may wait for another, or do one thing.
        tensors_limit_bytes: from the first step on; 0: no limit.
        transport: empty: NCCL where every rank has a GPU, MPI under mpiexec, else ``shared``, where that can be had.
        device: empty: the devices that the plan names.
        replan, patience_s, gone_after: see :mod:`halopipe.launch.replanning`.
        lone_passes: ``auto``: of runs of 20 steps and more, at most 5 % of their time
            (:mod:`halopipe.training.isolated_timing`).
        check_first_step: the job ends before its second step where they differ.
        on_nan: see :mod:`runtime.numerics.finite`; ``skip`` needs a schedule that updates at the end of a step.
    """

    steps: int = option(20, "Steps to train in all, with those before a checkpoint.", "N", least=1)
    warmup: int = option(2, least=0)
    data: str = option(
        "",
        "Data: 'pkg.mod:factory' or 'file.py:factory' gives batches, a Dataset or a DataLoader. It takes up to three "
        "parameters: global_batch, input_shape, seed. The model's own example if not given.",
        "FACTORY",
        kind=FACTORY,
    )
    optimizer: str = option(
        "",
        "Optimizer in place of the plan's: 'AdamW:lr=0.001', or a factory of the parameters.",
        "TEXT",
        kind=FACTORY,
        offers=OPTIMIZERS,
    )
    seed: int = option(0, "Seed of parameters and data.", "N", least=0, most=2**63 - 1)
    scheduler: str = option(
        "",
        "Learning rates: 'CosineAnnealingLR:T_max=100', or a factory.",
        "TEXT",
        TRAINING,
        kind=FACTORY,
        offers="halopipe.training.optimizer_spec:SCHEDULES",
    )
    clip_norm: float = option(
        0.0, "Largest norm of all gradients together; 0: they are not clipped.", "X", TRAINING, least=0.0
    )
    accumulate: int = option(1, "Steps whose gradients make up one update.", "K", TRAINING, least=1)
    dtype: str = option("", "Dtype in place of the plan's, such as float64.", "DTYPE", TRAINING, offers=DTYPES)
    compiler: str = option(
        "",
        "Compile the stages by torch.compile, such as 'inductor'.",
        "BACKEND",
        TRAINING,
        flag="--compile",
        offers=COMPILERS,
    )
    transport: str = option(
        AUTO,
        "What ranks exchange by: 'shared' (memory within a host, gloo between; the default), 'gloo' or 'mpi'.",
        "NAME",
        TRAINING,
        offers=TRANSPORTS[1:],
    )
    device: str = option(
        "", "'cpu': compute on cores, whatever devices the plan names.", "WHAT", TRAINING, offers=("cpu",)
    )
    replan: bool | str = option(
        False,
        "Plan again for what is left when a device is gone for good; 'free': with micro-batches of any size.",
        "free",
        LOSSES,
        kind=WORD,
        choices=REPLAN,
    )
    patience_s: float = option(
        0.0,
        "Seconds in which a device or host that is gone may come back before a plan is made without it.",
        "SECONDS",
        LOSSES,
        flag="--patience",
        least=0.0,
    )
    gone_after: int = option(
        2, "Losses of one rank in succession after which its device counts as gone.", "N", LOSSES, least=1
    )
    data_from: str = option(
        EACH,
        "Who reads the data: 'each' rank all of it, the 'first' for all, or the ranks 'share' a Dataset's samples.",
        "WHO",
        DATA,
        offers=DATA_FROM,
    )
    eval_data: str = option("", "Data to evaluate on at the end, given as --data is.", "FACTORY", DATA, kind=FACTORY)
    eval_every: int = option(0, "Also evaluate every N steps; 0: only at the end.", "N", DATA, least=0)
    eval_batches: int = option(0, "Evaluate on N batches; 0: on all of the data.", "N", DATA, least=0)
    eval_metric: str = option(
        "",
        "A factory of metrics with update(prediction, target) and compute(), such as torchmetrics has; one, or a dict.",
        "FACTORY",
        DATA,
        kind=FACTORY,
    )
    eval_outputs: str = option(
        "",
        "Outputs of the model and tensors of the batch for accuracy and metrics, such as 'logits,labels'; if not "
        "given, what the loss function is called with.",
        "NAMES",
        DATA,
    )
    checkpoint: str = option("", "Folder of checkpoints, which all hosts share.", "FOLDER", CHECKPOINTS, kind=PATH)
    checkpoint_every: int | str = option(
        0,
        "Save every so many steps (50), after so much time (10min), or as is best (auto); 0: at the end alone.",
        "INTERVAL",
        CHECKPOINTS,
        least=0,
        kind=INTERVAL,
        offers=("auto", "10min", "100"),
    )
    mtbf_s: float = option(
        0.0,
        "For auto: time between failures of the whole job, such as 6h; 154 days a host if not given.",
        "TIME",
        CHECKPOINTS,
        flag="--mtbf",
        least=0.0,
        kind=DURATION,
    )
    grace_s: float = option(
        30.0,
        "Time to save and end after SIGTERM or Ctrl-C.",
        "TIME",
        CHECKPOINTS,
        flag="--grace",
        least=0.0,
        kind=DURATION,
    )
    keep: int = option(0, "Keep the newest K checkpoints; 0: all.", "K", CHECKPOINTS, least=0)
    resume: bool | str = option(
        False,
        "Go on from the newest checkpoint, also of another plan; 'auto': begin anew where there is none, end where all "
        "steps are done.",
        "auto",
        CHECKPOINTS,
        kind=WORD,
        choices=RESUME,
    )
    resume_step: int = option(-1)
    restarts: int = option(
        0, "Start again up to N times where a rank is lost, from the newest checkpoint.", "N", CHECKPOINTS, least=0
    )
    check_numerics: bool = option(
        False, "Compare losses and gradients of the first steps with one device.", panel=CHECKS
    )
    check_first_step: bool = option(
        True,
        "Compare the first step with one device, where that fits into memory, and end if it differs.",
        panel=CHECKS,
    )
    on_nan: str = option(
        STOP,
        "What to do about a loss or gradient that is NaN or infinite: 'stop' and name the layer, 'skip' the update, or "
        "'ignore' it.",
        "WHAT",
        CHECKS,
        offers=ON_NAN,
    )
    deadline_s: float = option(WAIT_S, "Seconds that a wait may last.", "SECONDS", CHECKS, flag="--deadline", least=1.0)
    tensors_limit_bytes: int = option(
        0,
        "Most memory of a rank's tensors, such as 2GiB; a rank that needs more ends the run (H506).",
        "SIZE",
        CHECKS,
        flag="--memory-limit",
        least=0,
        kind=SIZE,
    )
    metrics: str = option(
        "",
        "Loss, rate, gradient norm, ... of each step: FILE.jsonl, FILE.csv, or tb:FOLDER for TensorBoard.",
        "FILE",
        RECORDS,
        kind=METRICS,
    )
    lone_passes: str = option(
        LONG_RUNS,
        "Also time the stages alone, to tell a changed machine from a wrong prediction: 'auto' (long runs), "
        "'on' or 'off'.",
        "WHEN",
        RECORDS,
        flag="--calibrate",
        offers=LONE_PASSES,
    )
    profile_steps: str = option(
        "",
        "Trace these steps, counted from 1, with torch.profiler: one Chrome trace for each rank.",
        "FIRST:LAST",
        RECORDS,
    )
    profile_folder: str = option(
        "", "Folder for those traces; torch-traces if not given.", "FOLDER", RECORDS, kind=PATH
    )


@dataclass(frozen=True, slots=True)
class RunFiles:
    """What a run reads beside its plan, and what it writes when it has ended; all paths are absolute."""

    output: str = option(
        "",
        "Timeline file to write; if not given, timeline.json for plan.json, NAME.timeline.json for NAME.json.",
        "FILE",
        short="-o",
        kind=PATH,
    )
    update: bool = option(False, "Write what was measured into the plan file too.")
    learn: bool = option(True, "Correct the plan's profile by what the run measured.", panel=RECORDS)
    profile: str = option(
        "",
        "Profile that the plan was made from; if not given, it is looked for where it was, and beside the plan.",
        "PROFILE",
        RECORDS,
        kind=PATH,
    )
    trace: str = option("", "Also write a trace for ui.perfetto.dev.", "FILE", RECORDS, kind=PATH)


class ScriptOptions(TypedDict, total=False):
    """Those of :class:`RunOptions` that ``hp.execute`` takes, of the same defaults and limits.

    A scheduler may be a function that makes a schedule of an optimiser, or the schedule of an optimiser object, or a
    list of such, which are stepped one after another; a compiler whatever torch.compile takes; both may be None.  A
    device may be one of torch's.
    """

    scheduler: Any
    clip_norm: float
    accumulate: int
    seed: int
    deadline_s: float
    compiler: str | Callable[..., Any] | None
    transport: str
    device: Any
    check_first_step: bool
    on_nan: str


FIELDS: Mapping[str, dataclasses.Field[Any]] = {each.name: each for each in dataclasses.fields(RunOptions)}
"""Of :class:`RunOptions` by name, in the order of the command line."""

_ALL = {**FIELDS, **{each.name: each for each in dataclasses.fields(RunFiles)}}

ASKED: Mapping[str, dataclasses.Field[Any]] = {**asked_in(RunOptions), **asked_in(RunFiles)}
"""Those of :class:`RunOptions` and :class:`RunFiles` that the command line and job files know."""


def option_of(name: str) -> OptionSpec:
    """How the field of a run is asked for."""
    return spec(_ALL[name])


def flag_of(name: str) -> str:
    """What the field of a run is called on the command line."""
    return flag(_ALL[name])
