"""Which weights each micro-batch runs on, in programs that update them in the middle of a step.

Version v of a stage's weights are those after v of its updates in this step; version 0 are those it began with.  A
stage updates after every k micro-batches, and after the last.  What is proved:

- an update counts each micro-batch up to its own once: none of a later micro-batch has been added before it;
- forward and backward of a micro-batch use one version, the same on all ranks of a stage, which has been made;
- a micro-batch is not staler, in updates, than allowed, if a limit is given.

How many micro-batches a schedule or program keeps, read off its order alone.

A micro-batch is in flight on a stage from its forward to its backward, B or W (a backward in halves needs its
activations until W).  A stage that is never run backward keeps none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from planner.ir.errors import UsageError
from planner.ir.program import Program
from planner.ir.schedule import ADDS_GRADIENTS, COMPUTE, Action, Op


@dataclass(frozen=True, slots=True)
class VersionFault:
    """An action on the wrong weights."""

    rank: int
    action: Action
    why: str


def is_versioned(program: Program) -> bool:
    """Whether any stage is updated in the middle of a step, or runs on weights made in it."""
    return updates_within(program.rows)


def updates_within(rows: Iterable[Iterable[Action]]) -> bool:
    """The same of the rows of a program."""
    return any(
        action.version or (action.op is Op.UPDATE and action.microbatch is not None) for row in rows for action in row
    )


def partial_batch_refused(schedule: str, details: Iterable[str], remedies: Iterable[str]) -> UsageError:
    """The refusal of a batch smaller than the plan's, under a schedule that updates the weights within a step."""
    return UsageError(
        f"schedule {schedule} updates the weights within a step, which needs a full batch",
        details,
        [*remedies, "halopipe plan --schedule 1f1b"],
    )


def updates_of(program: Program) -> tuple[int | None, ...]:
    """The micro-batches after which every stage is updated; (None,) if once a step.

    The first that any rank names says after how many.
    """
    count = program.stages.num_microbatches
    named = [a.microbatch for row in program.rows for a in row if a.op is Op.UPDATE and a.microbatch is not None]
    every = min(named, default=count - 1) + 1
    if not 0 < every < count:
        return (None,)
    return (*range(every - 1, count - 1, every), count - 1)


def staleness(program: Program) -> tuple[int, ...]:
    """By stage, the most updates that the weights of a micro-batch lack: made for micro-batches before it, not used."""
    most = [0] * program.stages.num_stages
    ends = [m for m in updates_of(program) if m is not None]
    for row in program.rows:
        for action in row:
            if action.op is Op.FORWARD:
                staleness = sum(end < (action.microbatch or 0) for end in ends) - action.version
                most[action.stage] = max(most[action.stage], staleness)
    return tuple(most)


def versions_kept(rows: Iterable[Sequence[Action]], num_stages: int) -> tuple[int, ...]:
    """By stage, the most versions of its weights that a rank needs at once, the newest included."""
    most = [1] * num_stages
    for row in rows:
        newest = [0] * num_stages
        running: dict[tuple[int, int | None], int] = {}
        users = [Counter[int]() for _ in range(num_stages)]  # micro-batches under way by the version they run on
        for action in row:
            stage = action.stage
            key = (action.stage, action.microbatch)
            if action.op is Op.UPDATE:
                newest[stage] += 1
            elif action.op is Op.FORWARD:
                _leave(users[stage], running.get(key))
                running[key] = action.version
                users[stage][action.version] += 1
            elif action.op in ADDS_GRADIENTS:
                _leave(users[stage], running.pop(key, None))
            needed = len(users[stage]) + (newest[stage] not in users[stage])
            most[stage] = max(most[stage], needed)
    return tuple(most)


def _leave(users: Counter[int], version: int | None) -> None:
    """A micro-batch that ran on ``version`` has ended; a version that nobody runs on is no longer a key."""
    if version is not None:
        users[version] -= 1
        if not users[version]:
            del users[version]


def faults(program: Program, staleness_limits: Sequence[int] = ()) -> Iterator[VersionFault]:
    """Everything that runs on the wrong weights.

    Args:
        staleness_limits: by stage; empty: any.
    """
    version_of: dict[tuple[int, int | None], Action] = {}
    ends = [m for m in updates_of(program) if m is not None]
    for rank, row in enumerate(program.rows):
        num_updates = [0] * program.stages.num_stages
        for action in row:
            stage = action.stage
            m = action.microbatch or 0
            if action.op is Op.UPDATE:
                num_updates[stage] += 1
            if action.op in ADDS_GRADIENTS and (uncounted := num_updates[stage]) < len(ends) and m > ends[uncounted]:
                update = Action(stage, Op.UPDATE, ends[uncounted])
                yield VersionFault(rank, action, f"{action} comes before {update}, which would count it")
            if action.op not in COMPUTE:
                continue
            first = version_of.setdefault((stage, action.microbatch), action)
            if first.version != action.version:
                yield VersionFault(
                    rank, action, f"{action} uses version {action.version} of the weights, {first} another"
                )
            if action.version > num_updates[stage]:
                made = f"{num_updates[stage]} updates have been made"
                yield VersionFault(rank, action, f"{action} uses version {action.version} of the weights, {made}")
            staleness = sum(end < m for end in ends) - action.version
            if staleness_limits and staleness > staleness_limits[stage]:
                limit = f"at most {staleness_limits[stage]} are claimed"
                yield VersionFault(rank, action, f"{action} runs on weights that lack {staleness} updates, {limit}")


def in_flight(rows: Iterable[Iterable[Action]], num_stages: int) -> tuple[int, ...]:
    """The most micro-batches in flight at once, by stage (on any rank)."""
    most = [0] * num_stages
    for row in rows:
        for forward, count in _counts(tuple(row)):
            most[forward.stage] = max(most[forward.stage], count)
    return tuple(most)


def _counts(row: tuple[Action, ...]) -> Iterator[tuple[Action, int]]:
    """Each forward that a backward follows, and how many micro-batches its stage then has in flight."""
    held = dict.fromkeys((action.stage for action in row if action.op in ADDS_GRADIENTS), 0)
    for action in row:
        if action.op is Op.FORWARD and action.stage in held:
            held[action.stage] += 1
            yield action, held[action.stage]
        elif action.op in ADDS_GRADIENTS:
            held[action.stage] -= 1
