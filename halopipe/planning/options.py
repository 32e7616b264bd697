"""What may be asked of a plan, and of a profile: the lists of options that ``halopipe plan`` and ``profile`` take.

A new option of ``plan`` is a field of :class:`PlanOptions`, with the help that the command line shows, and where it is
of the problem itself a key of :class:`Asked`, which gives calls of ``hp`` its type; it is used where it acts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict

from halopipe.run_spec.options import DTYPES, GLOO, OPTIMIZERS, SHARED
from halopipe.run_spec.schema import INTEGERS, MOST_JOBS, MOST_PLANS, NAMES, SIZE, SUM, flag, option
from planner.ir.extras import extras
from planner.ir.planner_extra import PlannerExtra
from planner.ir.problem import (
    CHANNEL_DIMS,
    DEFAULT_CONFIDENCE,
    MICRO,
    NEVER,
    OBJECTIVES,
    RECOMPUTE,
    SAMPLE_DIMS,
    SHARD,
    SPATIAL_DIMS,
    STATISTICS,
    THROUGHPUT,
    TIME_DIMS,
    Rule,
)
from planner.ir.profile import Optimizer

SPACE = "What plans may use"
SEARCH = "Search"
"""Headings in the help, below the common options, which have none."""

FAMILIES = (SAMPLE_DIMS, SPATIAL_DIMS, CHANNEL_DIMS, TIME_DIMS)
DEFAULT_SOLVER = "best-first"


def systems() -> list[str]:
    """Machines that extras know by name, for ``profile --on``."""
    return [name for extra in extras(PlannerExtra) for name in extra.systems()]


@dataclass(frozen=True, slots=True)
class SearchOptions:
    """How a plan is searched for, beside the problem.  The help of each field says what it is."""

    solver: str = option(
        DEFAULT_SOLVER,
        "How to search: best-first, or a strategy: one-device, data-parallel, even-split, pipedream, dapple, ...",
        "NAME",
        SEARCH,
        offers="planner.solvers:names",
    )
    pareto: int | None = option(
        None,
        "Find the best step for N sizes of memory (0: for all), and write a plan file for each.",
        "N",
        SEARCH,
        least=0,
        most=MOST_PLANS,
    )
    jobs: int = option(
        1,
        "Processes that share the searches of --pareto N. The plans are the same.",
        "N",
        SEARCH,
        least=1,
        most=MOST_JOBS,
    )
    measure_missing: bool = option(
        False,
        "Measure on this machine what the plan and close rivals use and the profile lacks; then plan again.",
        panel=SEARCH,
    )
    quick: bool = option(False, "With --measure-missing: fewer repetitions.", panel=SEARCH)
    ways: str = option(
        "",
        "Make a plan of a transformer's way, without a search: a file of 'ways -o', or tensor=2,pipeline=2,...",
        "WAYS",
        SEARCH,
    )


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """What a plan is to be: the problem without its profile.  The help of each field says what it is.

    Attributes:
        schedules: empty: those that the runtime executes as they are priced.
        memory_bytes: most bytes a plan may use on any device; 0: the device's memory less a margin.
        objective: of forward passes alone, throughput is that of a stream.
        rate_per_s: samples a second that a stream of forward passes must sustain, at the least latency; 0: any.
        allow: families of dims; along ``time`` sequences are cut into token slices that follow one another; empty:
            samples, and space where the network has it and the shortest training step is asked for.
        recompute: ``selective``: attention's cores alone, on all stages.
        shard: ``auto``: if nothing else fits.
        halo_depth: most rows of space by which a device may work beyond its part, so that the next layers need no halo.
        without: devices that are gone or not to be used, by name or pattern (``n1/*``).
        token_slices: of which length each is; they allow time to be cut.
        fix, forbid: side constraints, such as ``enc.*=spatial:2``; see :mod:`planner.ir.constraints`.
        calibration: whether what runs of plans showed corrects the profile's costs.
        confidence: from 0 to below 1: more ranks are used only where the plan is the faster with this probability; of
            plans on as many ranks the fastest at the mean is taken (:mod:`planner.costs.ties`); 0: that of all plans.
    """

    global_batch: int = option(0, "Samples a step; 0: as many as the profile's example has.", least=0)
    micro_batch: Sequence[int] = option(
        (), "Samples of a micro-batch that may be used; repeatable.", panel=SPACE, least=1
    )
    schedules: Sequence[str] = option(
        (),
        "Schedule that may be used, such as 1f1b, gpipe or zb-h1; repeatable. If not given: all that can run.",
        "NAME",
        SPACE,
        flag="--schedule",
        offers="planner.schedules:names",
    )
    objective: str = option(
        THROUGHPUT,
        "throughput (the step; a stream's rate with --schedule forward), memory or latency.",
        "NAME",
        offers=OBJECTIVES,
    )
    rate_per_s: float = option(
        0.0,
        "Forward plans: the rate that a stream must sustain, at the least latency; 0: any.",
        "SAMPLES/S",
        flag="--rate",
        least=0.0,
    )
    recompute: str = option(
        NEVER,
        "Compute activations again for the backward: never, auto, selective (attention alone), always.",
        "WHEN",
        SPACE,
        offers=RECOMPUTE,
    )
    shard: str = option(
        NEVER, "Divide a stage's optimiser state over its ranks: never, auto, always.", "WHEN", SPACE, offers=SHARD
    )
    zero: int = option(
        1,
        "What --shard divides: 1 the optimiser's state, 2 gradients too, 3 parameters too.",
        panel=SPACE,
        least=1,
    )
    batch_statistics: str = option(
        MICRO,
        "What batch norm sees: micro (each micro-batch), or whole (the batch is then one micro-batch).",
        "OF",
        SPACE,
        offers=STATISTICS,
    )
    allow: Sequence[str] = option(
        (),
        "Dims that may be cut: layers along sample, spatial, channel; sequences along time. If not given: samples, and "
        "space where the network has it.",
        "DIM,...",
        SPACE,
        kind=NAMES,
        offers=FAMILIES,
    )
    token_slices: Sequence[int] = option(
        (),
        "Cut sequences into slices of so many tokens, such as 256+192+64; --allow time searches for them.",
        "TOKENS+...",
        SPACE,
        kind=SUM,
    )
    halo_depth: int = option(0, "Most rows that may be computed twice to save halos; 0: none.", "ROWS", SPACE, least=0)
    fix: Sequence[str | Rule] = option((), "Side constraint, such as 'enc.*=spatial:2'; repeatable.", "RULE", SPACE)
    forbid: Sequence[str | Rule] = option(
        (), "Side constraint that must not hold, such as 'fc=device:n0/*'; repeatable.", "RULE", SPACE
    )
    num_ranks: int = option(0, "Devices that may be used; 0: all.", panel=SPACE, flag="--ranks", least=0)
    without: Sequence[str] = option(
        (), "Plan without these devices, such as 'n0/cpu1' or 'n1/*'.", "DEVICE,...", SPACE, kind=NAMES
    )
    max_stages: int = option(0, "Most stages; 0: no limit.", panel=SPACE, least=0)
    memory_bytes: int = option(
        0, "Most memory a device may use, such as 2GiB or 512MB.", "SIZE", flag="--memory", kind=SIZE
    )
    gap: float = option(
        0.0, "Stop once the plan is proved to be this close to the best (0.01 = 1 %).", panel=SEARCH, least=0.0
    )
    confidence: float = option(
        DEFAULT_CONFIDENCE,
        "Use more devices only where that is faster with this probability; 0: take the fastest plan at the mean.",
        panel=SEARCH,
        least=0.0,
        most=0.999,
    )
    time_limit_s: float = option(60.0, "Seconds to search at most.", flag="--time-limit", least=0.0)
    calibration: bool = option(
        True,
        "Plan with the costs as they were profiled, without corrections from runs.",
        panel=SEARCH,
        flag="--no-calibration",
    )


class Asked(TypedDict, total=False):
    """Those of :class:`PlanOptions` that calls of ``hp`` take as they are, of the same defaults."""

    global_batch: int
    micro_batch: Sequence[int]
    schedules: Sequence[str]
    num_ranks: int
    max_stages: int
    gap: float
    time_limit_s: float
    objective: str
    rate_per_s: float
    allow: Sequence[str]
    recompute: str
    shard: str
    halo_depth: int
    fix: Sequence[str | Rule]
    forbid: Sequence[str | Rule]
    without: Sequence[str]
    token_slices: Sequence[int]
    zero: int
    calibration: bool
    confidence: float
    batch_statistics: str


_OF_A_SEARCH = (
    "schedules",
    "fix",
    "forbid",
    "recompute",
    "shard",
    "zero",
    "batch_statistics",
    "allow",
    "objective",
    "solver",
    "halo_depth",
    "num_ranks",
    "max_stages",
    "without",
    "pareto",
    "jobs",
    "measure_missing",
)
"""What says nothing where a way says what the plan is."""


def of_a_search(*groups: PlanOptions | SearchOptions) -> list[str]:
    """Flags of what was asked of a search, which a way has no use for."""
    flags = {
        field.name: flag(field)
        for group in groups
        for field in dataclasses.fields(group)
        if getattr(group, field.name) != field.default
    }
    return [flags[name] for name in _OF_A_SEARCH if name in flags]


MODEL = "The model"
MEASURED = "What is measured"
EFFORT = "How often"
ELSEWHERE = "Machines that are not here"
"""Headings in the help of ``halopipe profile``."""


@dataclass(frozen=True, slots=True)
class ProfileOptions:
    """What is profiled, where, and how often.  The help of each field says what it is; see :func:`halopipe.profile`."""

    input_shape: Sequence[int] = option(
        (), "Shape of the example, samples first: 8,3,64,64.", "SHAPE", MODEL, flag="--input", kind=INTEGERS
    )
    arg: Sequence[str] = option((), "Keyword argument of the factory; repeatable.", "KEY=VALUE", MODEL)
    workers: int = option(
        0, "Workers to plan for, each a CPU core or a GPU; 0: two cores, or all GPUs.", panel=MEASURED, least=0
    )
    device: str = option(
        "auto",
        "What to measure: cpu, cuda, or auto: GPUs if there are enough of them.",
        "WHAT",
        MEASURED,
        offers=("auto", "cpu", "cuda"),
    )
    sizes: Sequence[int] = option(
        (),
        "Micro-batch sizes to measure; if not given, halopipe chooses them.",
        "N,N,...",
        MEASURED,
        kind=INTEGERS,
    )
    optimizer: str | Optimizer = option(
        "SGD",
        "Optimizer of torch.optim, such as SGD:lr=0.1,momentum=0.9.",
        "NAME[:KEY=N,...]",
        MEASURED,
        offers=OPTIMIZERS,
    )
    dtype: str = option(
        "",
        "Dtype of parameters and activations; if not given, float32, or that of the module in a file.",
        "DTYPE",
        MODEL,
        offers=DTYPES,
    )
    autocast: str = option(
        "", "Mixed precision: bfloat16, with parameters in float32.", "DTYPE", MODEL, offers=("bfloat16",)
    )
    allow: Sequence[str] = option(
        (SAMPLE_DIMS,),
        "Dims that plans may cut: sample, spatial, channel, time; parts are then measured too.",
        "DIM,...",
        MEASURED,
        kind=NAMES,
        offers=FAMILIES,
    )
    num_ranks: int = option(
        0, "Measure parts of layers for so many ranks; 0: for the workers.", flag="--ranks", panel=MEASURED, least=0
    )
    elementwise: Sequence[str] = option(
        (), "Operator that treats each element by itself, such as lib::op; repeatable.", "OP", MODEL
    )
    local_loss: str = option(
        "0",
        "Train the model as N blocks ('stage': a block a worker), each by a loss of its own. This changes the "
        "optimisation. 0: train it as it is.",
        "N",
        MODEL,
    )
    quick: bool = option(False, "Fewer sizes and runs, one process: faster, less exact.")
    num_processes: int = option(
        0,
        "Fresh processes that repeat the measurement; 0: 3, or 1 with --quick.",
        "N",
        EFFORT,
        flag="--processes",
        least=0,
        most=MOST_JOBS,
    )
    transport: str = option(
        "",
        "Transport between cores, as of run: 'shared' (the default) or 'gloo'.",
        "NAME",
        MEASURED,
        offers=(SHARED, GLOO),
    )
    measure_machine: bool = option(
        False, "Measure links within the host anew, also where an earlier profile has kept them.", panel=EFFORT
    )
    resume: bool = option(False, "Go on with what an interrupted profile of the same job measured.", panel=EFFORT)
    on: str = option(
        "",
        "Profile for h100-dgx, a100-dgx or a cluster file: kernel models give the times, no device runs.",
        "NAME",
        ELSEWHERE,
        offers="halopipe.planning.options:systems",
    )
    tables: Sequence[str] = option(
        (), "Kernels that you measured, for --on; see halopipe fit. Repeatable.", "CSV", ELSEWHERE
    )
    size: str = option(
        "",
        "Plan for other sizes than the example's (height=8192), of dims that the factory says vary.",
        "DIM=N,...",
    )


MEASURING = ("device", "allow", "num_ranks", "quick", "num_processes", "transport", "measure_machine")
"""Those of :class:`ProfileOptions` that say how to measure: of no use where nothing is measured."""
