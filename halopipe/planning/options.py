"""What may be asked of a plan, and of a profile: the lists of options that ``halopipe plan`` and ``profile`` take.

An option of a plan stands, with its help, limits and default, beside its field of :class:`planner.ir.problem.Request`;
:class:`PlanOptions` names it in the order of the help, with the type of what may be written for it.  Calls of ``hp``
take what these lists have fields for (:func:`halopipe.api.arguments.call_of`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from halopipe.run_spec.options import DTYPES, GLOO, OPTIMIZERS, SHARED
from halopipe.run_spec.schema import MOST_JOBS, MOST_PLANS, flag
from planner.ir.extras import extras
from planner.ir.options import INTEGERS, NAMES, asked_as, option
from planner.ir.planner_extra import PlannerExtra
from planner.ir.problem import DIM_FAMILIES, SAMPLE_DIMS, SEARCH, SPACE, Problem, Rule
from planner.ir.profile import Optimizer

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


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """What a plan is to be, as people write it: a problem without its profile (:class:`planner.ir.problem.Request`).

    Attributes:
        memory: bytes, or text such as ``2GiB``.
        allow: empty: samples, and space where the network has it and the shortest training step is asked for.
        without: devices that are gone or not to be used, by name or pattern (``n1/*``).
        token_slices: they allow time to be cut.
        fix, forbid: such as ``enc.*=spatial:2``.
        calibration: whether what runs of plans showed corrects the profile's costs.
    """

    global_batch: int = option(0, "Samples a step; 0: as many as the profile's example has.", least=0)
    micro_batch: Sequence[int] = asked_as(Problem, "micro_batch_sizes")
    schedules: Sequence[str] = asked_as(Problem, "schedules")
    objective: str = asked_as(Problem, "objective")
    rate_per_s: float = asked_as(Problem, "rate_per_s")
    recompute: str = asked_as(Problem, "recompute")
    shard: str = asked_as(Problem, "shard")
    zero: int = asked_as(Problem, "zero")
    batch_statistics: str = asked_as(Problem, "batch_statistics")
    allow: Sequence[str] = asked_as(Problem, "allow", default=())
    token_slices: Sequence[int] = asked_as(Problem, "token_slices")
    halo_depth: int = asked_as(Problem, "halo_depth")
    fix: Sequence[str | Rule] = asked_as(Problem, "fix")
    forbid: Sequence[str | Rule] = asked_as(Problem, "forbid")
    num_ranks: int = asked_as(Problem, "num_ranks")
    without: Sequence[str] = option(
        (), "Plan without these devices, such as 'n0/cpu1' or 'n1/*'.", "DEVICE,...", SPACE, kind=NAMES
    )
    max_stages: int = asked_as(Problem, "max_stages")
    memory: str | int = asked_as(Problem, "memory_bytes")
    gap: float = asked_as(Problem, "gap")
    confidence: float = asked_as(Problem, "confidence")
    time_limit_s: float = asked_as(Problem, "time_limit_s")
    calibration: bool = option(
        True,
        "Plan with the costs as they were profiled, without corrections from runs.",
        panel=SEARCH,
        flag="--no-calibration",
    )


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


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasurementOptions:
    """What is measured and how: what ``halopipe profile`` and :func:`halopipe.profile` both ask for, by these names."""

    input_shape: Sequence[int] = option(
        (), "Shape of the example, samples first: 8,3,64,64.", "SHAPE", MODEL, flag="--input", kind=INTEGERS
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
        offers=DIM_FAMILIES,
    )
    num_ranks: int = option(
        0, "Measure parts of layers for so many ranks; 0: for the workers.", flag="--ranks", panel=MEASURED, least=0
    )
    elementwise: Sequence[str] = option(
        (), "Operator that treats each element by itself, such as lib::op; repeatable.", "OP", MODEL
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
    on: str = option(
        "",
        "Profile for h100-dgx, a100-dgx or a cluster file: kernel models give the times, no device runs.",
        "NAME",
        ELSEWHERE,
        offers="halopipe.planning.options:systems",
    )
    tables: Sequence[str | Path] = option(
        (), "Kernels that you measured, for --on; see halopipe fit. Repeatable.", "CSV", ELSEWHERE
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileOptions(MeasurementOptions):
    """What is profiled, where, and how often.  The help of each field says what it is; see :func:`halopipe.profile`."""

    workers: int = option(
        0, "Workers to plan for, each a CPU core or a GPU; 0: two cores, or all GPUs.", panel=MEASURED, least=0
    )
    arg: Sequence[str] = option((), "Keyword argument of the factory; repeatable.", "KEY=VALUE", MODEL)
    local_loss: str = option(
        "0",
        "Train the model as N blocks ('stage': a block a worker), each by a loss of its own. This changes the "
        "optimisation. 0: train it as it is.",
        "N",
        MODEL,
    )
    resume: bool = option(False, "Go on with what an interrupted profile of the same job measured.", panel=EFFORT)
    size: str = option(
        "",
        "Plan for other sizes than the example's (height=8192), of dims that the factory says vary.",
        "DIM=N,...",
    )


MEASURING = ("device", "allow", "num_ranks", "quick", "num_processes", "transport", "measure_machine")
"""Those of :class:`MeasurementOptions` that say how to measure: of no use where nothing is measured."""
