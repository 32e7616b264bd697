"""What several schedules are made of: rows of one stage, windows, and where the backward for the weights goes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from planner.ir.errors import UsageError
from planner.ir.schedule import Action, Op, Pipeline, StageGraph
from planner.schedules._registry import ENTRIES

Row = tuple[Action, ...]


def by_position(name: str, pipeline: Pipeline, rows: Sequence[Row]) -> tuple[Row, ...]:
    """Rows given by stage, ordered by position.

    Raises:
        UsageError: a position runs several stages, which the schedule ``name`` cannot.
    """
    stages_of = stages_by_position(pipeline)
    crowded = next((position for position, stages in enumerate(stages_of) if len(stages) != 1), None)
    if crowded is not None:
        count = len(stages_of[crowded])
        text = f"position {crowded} has {count} of the {pipeline.stages.num_stages} stages, {name} runs one on each"
        raise UsageError(f"{name} cannot order these stages", [text], ["--schedule interleaved", "--schedule greedy"])
    return tuple(rows[stages[0]] for stages in stages_of)


def stages_by_position(pipeline: Pipeline) -> tuple[tuple[int, ...], ...]:
    """The stages of each position."""
    members: list[list[int]] = [[] for _ in range(pipeline.num_positions)]
    for stage in range(pipeline.stages.num_stages):
        members[pipeline.position(stage)].append(stage)
    return tuple(tuple(stages) for stages in members)


def depths(stages: StageGraph) -> tuple[int, ...]:
    """By stage, how many stages the longest path downstream has that gradients come back along, itself included."""
    longest = [1] * stages.num_stages
    for edge in sorted(stages.edges, key=lambda edge: edge.src, reverse=True):  # stages are in topological order
        if edge.gradient:
            longest[edge.src] = max(longest[edge.src], longest[edge.dst] + 1)
    return tuple(longest)


def clamped(windows: Iterable[int], stages: StageGraph) -> tuple[int, ...]:
    """``windows`` made free of deadlock on any DAG: at least 1, and none larger than that of a stage upstream.

    Proof: let row s be W_s forwards, then B and F in turn, and call i the number of F_s(i) and i + W_s - 1 that of
    B_s(i).  F_s(i) waits, within its row, for B_s(i - W_s) of number i - 1, and B_s(i) for F_s(i + W_s - 1) of its own
    number; across an edge s to t, F_t(i) waits for F_s(i) of its own number, and B_s(i) for B_t(i), whose number is not
    larger since W_t <= W_s.  Among equal numbers forwards come first and in the order of stages, backwards in reverse.
    So nothing waits in a circle.  (Windows are lowered, never raised: a window is a promise about memory.)
    """
    lowered = [max(1, min(window, stages.num_microbatches)) for window in windows]
    if len(lowered) != stages.num_stages:
        raise ValueError(f"{len(lowered)} windows are given for {stages.num_stages} stages")
    for edge in sorted(stages.edges, key=lambda edge: edge.src):
        if edge.gradient:
            lowered[edge.dst] = min(lowered[edge.dst], lowered[edge.src])
    return tuple(lowered)


def depth_of(pipeline: Pipeline) -> tuple[int, ...]:
    """:func:`depths` of a pipeline: what 1F1B keeps in flight."""
    return depths(pipeline.stages)


def twice_depth(pipeline: Pipeline) -> tuple[int, ...]:
    """One micro-batch more for every hop downstream: what 1F1B keeps whose messages travel while others compute."""
    return tuple(2 * depth - 1 for depth in depths(pipeline.stages))


def turns(name: str, pipeline: Pipeline, windows: Iterable[int] | None = None) -> tuple[Row, ...]:
    """Rows of 1F1B, by position, given the forwards of each stage before its first backward.

    Args:
        windows: None: as many as the schedule states (``registered``).

    Raises:
        UsageError: as of :func:`by_position`.
    """
    count = pipeline.stages.num_microbatches
    stated = ENTRIES[name].max_in_flight
    if windows is None:
        windows = stated(pipeline) if stated is not None else ()
    return by_position(name, pipeline, [in_turn(s, window, count) for s, window in enumerate(windows)])


def in_turn(stage: int, window: int, num_microbatches: int) -> Row:
    """``window`` forwards, then one backward and one forward in turn, then the backwards that remain."""
    forwards = [Action(stage, Op.FORWARD, m) for m in range(num_microbatches)]
    backwards = [Action(stage, Op.BACKWARD, m) for m in range(num_microbatches)]
    steady = [action for pair in zip(backwards, forwards[window:], strict=False) for action in pair]
    drain = backwards[len(forwards[window:]) :]
    return (*forwards[:window], *steady, *drain)


def split(row: Row, backlog: int | None = None, held: int | None = None) -> Row:
    """``row`` with every B as an I, and its W later.

    Args:
        backlog: most W that are put off beyond the next I; None: all, to the end of the row.
        held: most micro-batches between their F and their W; a W that is put off comes before an F that would be one
            more.  None: any number.  Where the row itself holds more, it holds that many.
    """
    halves: list[Action] = []
    late: deque[Action] = deque()
    num_held = 0
    for action in row:
        if action.op is Op.FORWARD:
            while late and held is not None and num_held >= held:
                halves.append(late.popleft())
                num_held -= 1
            halves.append(action)
            num_held += 1
            continue
        halves.append(Action(action.stage, Op.BACKWARD_INPUT, action.microbatch))
        late.append(Action(action.stage, Op.BACKWARD_WEIGHT, action.microbatch))
        while backlog is not None and len(late) > backlog:
            halves.append(late.popleft())
            num_held -= 1
    return (*halves, *late)


def updating(row: Row, every: int, version: Callable[[int, int], int]) -> Row:
    """``row`` (of whole backwards, of one stage) with an update after every ``every`` micro-batches and the last.

    Args:
        version: of the weights that a micro-batch runs on, of its number and the number of updates before its forward.
    """
    count = sum(action.op is Op.FORWARD for action in row)
    if every >= count:
        return row
    updated: list[Action] = []
    num_updates = 0
    version_of: dict[int, int] = {}
    for action in row:
        m = action.microbatch or 0
        if action.op is Op.FORWARD:
            version_of[m] = version(m, num_updates)
        updated.append(replace(action, version=version_of[m]))
        if action.op is Op.BACKWARD and ((m + 1) % every == 0 or m + 1 == count):
            updated.append(Action(action.stage, Op.UPDATE, m))
            num_updates += 1
    return tuple(updated)


def zigzag(num_positions: int, stages_per_position: int) -> tuple[int, ...]:
    """The position of each stage where they lie down and up again: 0 1 2 2 1 0 0 1 2 ..."""
    sweeps = (range(num_positions), range(num_positions)[::-1])
    return tuple(position for number in range(stages_per_position) for position in sweeps[number % 2])


def require_positions(name: str, pipeline: Pipeline, expected: tuple[int, ...]) -> None:
    """Raises :class:`UsageError` unless the stages lie at the positions that the schedule ``name`` is made for."""
    actual = tuple(map(pipeline.position, range(pipeline.stages.num_stages)))
    if actual != expected:
        shown = [f"{name} on {pipeline.num_positions} positions has them at {_listed(expected)}"]
        raise UsageError(f"{name} cannot order stages at positions {_listed(actual)}", shown, ["--schedule greedy"])


def _listed(positions: tuple[int, ...]) -> str:
    return ", ".join(map(str, positions[:16])) + (", ..." if len(positions) > 16 else "")
