"""What is asked of a run must fit together, and fit the plan: looked at before any process starts."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from halopipe.run_spec.options import (
    ALWAYS,
    DATA_FROM,
    IF_ANY,
    LONE_PASSES,
    ON_NAN,
    REPLAN,
    RESUME,
    SHARE,
    SKIP,
    TRANSPORTS,
    RunOptions,
    flag_of,
)
from halopipe.run_spec.schema import limit_faults
from halopipe.terminal import units
from halopipe.training.metrics import require_writer
from planner.ir.errors import UsageError
from planner.ir.plan import Plan
from planner.ir.profile import Optimizer
from planner.passes.versions import updates_within


def require_consistent(plan: Plan, options: RunOptions) -> None:
    """Raises :class:`UsageError` for the first of ``options`` that lacks another, or contradicts the plan.

    Raises:
        UnknownNameError: there is no such way to read data, optimiser or schedule.
    """
    units.require_known("way to read data", [options.data_from], DATA_FROM)
    units.require_known("way to calibrate", [options.lone_passes], LONE_PASSES)
    units.require_known("transport", [options.transport], TRANSPORTS)
    units.require_known("way to resume", [options.resume] if isinstance(options.resume, str) else [], RESUME)
    if isinstance(options.checkpoint_every, str):
        units.parse_interval(options.checkpoint_every)
    units.require_known("thing to do about NaN", [options.on_nan], ON_NAN)
    units.require_known("way to replan", [options.replan] if isinstance(options.replan, str) else [], REPLAN)
    for fault in chain(limit_faults(options), _lacking(options), _at_odds(plan, options)):
        raise fault
    _require_known_optimizer(options)
    _require_known_compiler(options.compiler)
    require_writer(options.metrics)
    if options.profile_steps:
        from halopipe.training.torch_traces import steps_of  # late: it loads torch

        steps_of(options)
    if options.checkpoint and options.resume is not True:
        _require_new(Path(options.checkpoint), options.resume == IF_ANY)


_DIGITS = "halopipe.data:digits --eval-batches 8"
"""Data without end, of which so much is evaluated on."""


def _lacking(options: RunOptions) -> Iterator[UsageError]:
    """Options that say something of what was not asked for."""
    for name, needed, example in (
        ("eval_every", "eval_data", _DIGITS),
        ("eval_batches", "eval_data", "halopipe.data:digits"),
        ("eval_metric", "eval_data", _DIGITS),
        ("eval_outputs", "eval_data", _DIGITS),
        ("checkpoint_every", "checkpoint", "checkpoints"),
        ("mtbf_s", "checkpoint_every", "auto"),
        ("keep", "checkpoint", "checkpoints"),
        ("resume", "checkpoint", "checkpoints"),
        ("restarts", "checkpoint", "checkpoints"),
        ("profile_folder", "profile_steps", "3:5"),
    ):
        if getattr(options, name) and not getattr(options, needed):
            yield UsageError(f"{flag_of(name)} needs {flag_of(needed)}", [], [f"{flag_of(needed)} {example}"])
    if options.data_from == SHARE and not options.data:
        yield UsageError(
            "--data-from share needs --data", ["ranks share the samples of a Dataset"], ["--data FACTORY of a Dataset"]
        )


def _at_odds(plan: Plan, options: RunOptions) -> Iterator[UsageError]:
    if (options.resume or options.restarts) and options.check_numerics:
        goes_on = "--resume" if options.resume else "--restarts"
        yield UsageError(
            "--check-numerics needs a run from the first step",
            [f"with {goes_on} the steps that would be compared may be done"],
            ["leave one of them out"],
        )
    if options.compiler and options.lone_passes == ALWAYS:
        yield UsageError(
            "--calibrate on times stages as they were profiled, which was without --compile",
            [f"--compile is {options.compiler}"],
            ["leave one of them out"],
        )
    if options.check_numerics and options.steps < options.accumulate:
        yield UsageError(
            f"--check-numerics needs an update, the first is after {options.accumulate} steps",
            [f"--steps is {options.steps}"],
            [f"--steps {options.accumulate}"],
        )
    if options.on_nan == SKIP and updates_within(plan.decision.rows()):
        yield UsageError(
            "--on-nan skip needs a schedule that updates the weights at the end of a step",
            [f"{plan.decision.schedule} updates them within a step: what was updated cannot be left out"],
            ["--on-nan stop", "halopipe plan --schedule 1f1b"],
        )
    if options.check_numerics and updates_within(plan.decision.rows()):
        yield UsageError(
            "--check-numerics needs a schedule that updates the weights at the end of a step, as one device does",
            [f"{plan.decision.schedule} updates them within a step"],
            ["halopipe plan --schedule 1f1b"],
        )
    for name in ("steps", "checkpoint_every"):
        value = getattr(options, name)
        if options.checkpoint and isinstance(value, int) and value % options.accumulate:
            yield UsageError(
                f"{flag_of(name)} {value} is no multiple of --accumulate {options.accumulate}",
                ["a checkpoint between updates would lose the gradients gathered so far"],
                [f"{flag_of(name)} {value + options.accumulate - value % options.accumulate}"],
            )
    if not plan.decision.trains:
        wrong = [
            name
            for name in ("optimizer", "scheduler", "clip_norm", "checkpoint", "eval_data", "check_numerics")
            if getattr(options, name)
        ] + (["accumulate"] if options.accumulate > 1 else [])
        if wrong:
            yield UsageError(
                f"{flag_of(wrong[0])} is for training, this plan has forward passes alone",
                [f"its schedule is {plan.decision.schedule}: a run of it evaluates"],
                [f"leave out {flag_of(wrong[0])}", "halopipe plan --schedule 1f1b"],
            )


def _require_known_compiler(name: str) -> None:
    if name:
        import torch

        units.require_known("compiler", [name], torch.compiler.list_backends(exclude_tags=()))


def _require_known_optimizer(options: RunOptions) -> None:
    from halopipe.training.optimizer_spec import makers_of

    if options.optimizer or options.scheduler:
        makers_of(options, Optimizer())


def _require_new(folder: Path, goes_on: bool) -> None:
    from runtime.checkpoint import complete_steps

    if folder.exists() and not folder.is_dir():
        raise UsageError(f"--checkpoint {folder} is no folder", [], ["another name"])
    steps = () if goes_on else complete_steps(folder)
    if steps:
        raise UsageError(
            f"{folder} has checkpoints of another run",
            [f"steps {', '.join(map(str, steps))}"],
            [
                "--resume, to go on from the newest",
                "--resume auto, to begin anew where there is none",
                "another --checkpoint folder",
            ],
        )
