"""What may be asked of a plan, and of a profile: the lists of options that ``halopipe plan`` and ``profile`` take.

A new option of ``plan`` is a field here, with the help that the command line shows, a key of
:class:`halopipe.planning.problem.Asked`, under which Python calls know it, and is used where it acts.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

from halopipe.run_spec.options import flag, option
from planner.ir.errors import UsageError
from planner.ir.problem import SPATIAL_DIMS

if TYPE_CHECKING:
    from halopipe.planning.problem import Asked

SPACE, SEARCH = "What plans may use", "Search"
"""Headings in the help, below the common options, which have none."""

_OF_A_SEARCH = (
    "schedule",
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
    "ranks",
    "max_stages",
    "without",
    "pareto",
    "jobs",
    "measure_missing",
)
"""What says nothing where a way says what the plan is."""


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """What a plan is to be, and how it is searched for.  The help of each field says what it is.

    See :func:`halopipe.planning.problem.make_problem` for what there is more to say, and :meth:`asked` for how the
    fields are called there.
    """

    global_batch: int = option(0, "Samples a step; 0: as many as the profile's example has.", least=0)
    micro_batch: tuple[int, ...] = option(
        (), "Samples a micro-batch that may be used; repeatable.", panel=SPACE, least=1
    )
    schedule: tuple[str, ...] = option(
        (),
        "Schedule that may be used, such as 1f1b, gpipe or zb-h1; repeatable; those that can run if not given.",
        "NAME",
        SPACE,
    )
    objective: str = option(
        "throughput", "throughput (the step; a stream's rate with --schedule forward), memory or latency.", "NAME"
    )
    rate: float = option(
        0.0,
        "Forward plans: what a stream must sustain, at the least latency; 0: any.",
        "SAMPLES/S",
        least=0.0,
    )
    recompute: str = option(
        "never",
        "Compute activations again for the backward: never, auto, selective (attention alone), always.",
        "WHEN",
        SPACE,
    )
    shard: str = option("never", "Divide a stage's optimiser state over its ranks: never, auto, always.", "WHEN", SPACE)
    zero: int = option(
        1,
        "What --shard divides: 1 the optimiser's state, 2 gradients too, 3 parameters too.",
        panel=SPACE,
        least=1,
    )
    batch_statistics: str = option(
        "micro",
        "Batch norm sees a micro-batch, or the whole batch, which is then the only micro-batch: micro, whole.",
        "OF",
        SPACE,
    )
    allow: str = option(
        "sample",
        "Dims that may be cut: layers along sample, spatial, channel; sequences along time.",
        "DIM,...",
        SPACE,
    )
    token_slices: str = option(
        "",
        "Cut sequences into slices of these tokens, such as 256+192+64; --allow time finds some.",
        "TOKENS+...",
        SPACE,
    )
    halo_depth: int = option(0, "Most rows that may be computed twice to save halos; 0: none.", "ROWS", SPACE, least=0)
    fix: tuple[str, ...] = option((), "Side constraint, such as 'enc.*=spatial:2'; repeatable.", "RULE", SPACE)
    forbid: tuple[str, ...] = option((), "What must not be, such as 'fc=device:n0/*'; repeatable.", "RULE", SPACE)
    solver: str = option(
        "best-first",
        "How to search: best-first, or a strategy: one-device, data-parallel, even-split, pipedream, dapple, ...",
        "NAME",
        SEARCH,
    )
    ranks: int = option(0, "Devices that may be used; 0: all.", panel=SPACE, least=0)
    without: str = option(
        "", "Plan on what is left without these devices, such as 'n0/cpu1' or 'n1/*'.", "DEVICE,...", SPACE
    )
    max_stages: int = option(0, "Most stages; 0: no limit.", panel=SPACE, least=0)
    memory: str = option("", "Most memory a device may use, such as 2GiB or 512MB.", "SIZE")
    gap: float = option(
        0.0, "Stop once the plan is proved to be this close to the best (0.01 = 1 %).", panel=SEARCH, least=0.0
    )
    confidence: float = option(
        0.8,
        "More devices are used only where that is faster with this probability; 0: the fastest plan at the mean.",
        panel=SEARCH,
        least=0.0,
        most=0.999,
    )
    time_limit: float = option(60.0, "Seconds to search at most.", least=0.0)
    no_calibration: bool = option(False, "Costs as profiled, without what runs of plans corrected.", panel=SEARCH)
    pareto: int | None = option(
        None, "The best step for N sizes of memory (0: for all), a plan file each.", "N", SEARCH, least=0
    )
    jobs: int = option(
        1,
        "Processes that share out the searches of --pareto N; one search is one process. The plans are the same.",
        "N",
        SEARCH,
        least=1,
    )
    measure_missing: bool = option(
        False,
        "Measure on this machine what the plan and close rivals use and the profile lacks; then plan again.",
        panel=SEARCH,
    )
    quick: bool = option(False, "With --measure-missing: fewer repetitions.", panel=SEARCH)
    ways: str = option(
        "",
        "No search: the plan that a way of a transformer is; 'ways -o' wrote it, or tensor=2,pipeline=2,...",
        "WAYS",
        SEARCH,
    )

    @property
    def of_a_search(self) -> list[str]:
        """Flags of what was asked of a search, which a way has no use for."""
        fields = {each.name: each for each in dataclasses.fields(self)}
        return [flag(fields[name]) for name in _OF_A_SEARCH if getattr(self, name) != fields[name].default]

    def asked(self) -> Asked:
        """The same in the words of Python calls, texts taken apart.

        Raises:
            UsageError: a text is none that can be taken apart, or an option is of no use without another one.
        """
        from halopipe.terminal import units

        for asked_flag, has_use, needed in (
            ("--quick", not self.quick or self.measure_missing, "--measure-missing"),
            (
                "--halo-depth",
                not self.halo_depth or SPATIAL_DIMS in units.names_in(self.allow),
                "--allow sample,spatial",
            ),
        ):
            if not has_use:
                raise UsageError(
                    f"{asked_flag} is of no use without {needed}", [], [f"add {needed}", f"leave out {asked_flag}"]
                )
        return {
            "global_batch": self.global_batch,
            "micro_batch": self.micro_batch,
            "schedules": self.schedule,
            "num_ranks": self.ranks,
            "max_stages": self.max_stages,
            "gap": self.gap,
            "time_limit_s": self.time_limit,
            "objective": self.objective,
            "rate_per_s": self.rate,
            "allow": units.names_in(self.allow),
            "recompute": self.recompute,
            "shard": self.shard,
            "zero": self.zero,
            "batch_statistics": self.batch_statistics,
            "halo_depth": self.halo_depth,
            "fix": self.fix,
            "forbid": self.forbid,
            "without": units.names_in(self.without),
            "token_slices": units.parse_sum(self.token_slices, "--token-slices") if self.token_slices else (),
            "calibration": not self.no_calibration,
            "confidence": self.confidence,
        }


MODEL, MEASURED, EFFORT = "The model", "What is measured", "How often"
ELSEWHERE = "Machines that are not here"
"""Headings in the help of ``halopipe profile``."""


@dataclass(frozen=True, slots=True)
class ProfileOptions:
    """What is profiled, where, and how often.  The help of each field says what it is; see :func:`halopipe.profile`."""

    input_shape: str = option("", "Shape of the example, samples first: 8,3,64,64.", "SHAPE", MODEL, flag="--input")
    arg: tuple[str, ...] = option((), "Keyword argument of the factory; repeatable.", "KEY=VALUE", MODEL)
    workers: int = option(
        0, "Workers to plan for, each a CPU core or a GPU; 0: two cores, or all GPUs.", panel=MEASURED, least=0
    )
    device: str = option(
        "auto", "What to measure: cpu, cuda, or auto: GPUs if there are enough of them.", "WHAT", MEASURED
    )
    sizes: str = option(
        "", "Micro-batch sizes to measure; if not given, as many as reading between them needs.", "N,N,...", MEASURED
    )
    optimizer: str = option("SGD", "Of torch.optim, such as SGD:lr=0.1,momentum=0.9.", "NAME[:KEY=N,...]", MEASURED)
    dtype: str = option(
        "",
        "Of parameters and activations; if not given, float32, or that of the module in a file.",
        "DTYPE",
        MODEL,
    )
    autocast: str = option("", "Mixed precision: bfloat16, with parameters in float32.", "DTYPE", MODEL)
    allow: str = option(
        "sample",
        "Dims that plans may cut: sample, spatial, channel, time; parts are then measured too.",
        "DIM,...",
        MEASURED,
    )
    ranks: int = option(0, "Ranks that parts are measured for; 0: the workers.", panel=MEASURED, least=0)
    elementwise: tuple[str, ...] = option(
        (), "Operator that treats each element by itself, such as lib::op; repeatable.", "OP", MODEL
    )
    local_loss: str = option(
        "0",
        "Train the model as N blocks ('stage': a block a worker), each by a loss of its own: changes the "
        "optimisation; 0: as it is.",
        "N",
        MODEL,
    )
    quick: bool = option(False, "Fewer sizes and runs, one process: faster, less exact.")
    processes: int = option(0, "Fresh processes that measure the same; 0: 3, or 1 with --quick.", "N", EFFORT, least=0)
    transport: str = option(
        "", "What cores exchange by, as of run: 'shared' (the default) or 'gloo'.", "NAME", MEASURED
    )
    resume: bool = option(False, "Go on with what an interrupted profile of the same job measured.", panel=EFFORT)
    on: str = option(
        "", "h100-dgx, a100-dgx or a cluster file: no device runs, kernel models tell the times.", "NAME", ELSEWHERE
    )
    tables: tuple[str, ...] = option(
        (), "Kernels that you measured, for --on; see halopipe fit. Repeatable.", "CSV", ELSEWHERE
    )
    size: str = option(
        "",
        "Sizes to plan for, of dims that the factory says vary (height=8192); measured on the example.",
        "DIM=N,...",
    )
