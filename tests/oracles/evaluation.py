"""A second, plain evaluation of a decision: what each action lasts, when it runs, and what is held meanwhile.

Prices of layers and links are those of the cost model (``prices``); sums over layers, ranks and micro-batches are made
here, the order of events in ``events`` and memory in ``memory``, with none of the simulator's code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from planner.costs.cost_model import CostModel
from planner.ir.plan import Decision
from planner.ir.profile import Profile
from planner.ir.program import Program
from planner.ir.schedule import COMPUTE, RECEIVE, SEND, Action, Op
from planner.layers.boundary import Boundaries
from tests.oracles.action_times import ActionTimes
from tests.oracles.events import Spans, Step
from tests.oracles.memory import peaks_of
from tests.oracles.stages import Stages


@dataclass(frozen=True, slots=True)
class Times:
    """The four parts of a rank's step, as in :class:`planner.ir.plan.RankPrediction`."""

    compute_s: float
    communication_s: float
    bubble_s: float
    idle_s: float
    is_used: bool


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The step, the most that each rank holds, and where its time goes.

    Attributes:
        on_chip_bytes: by rank, of parameters, gradients and optimiser state in a memory on chip.
        times: by rank.
        longest_sum_s: the longest that a rank is in a sum of gradients.
        most_messages_s: the most communication that a rank has beside it.
    """

    step_s: float
    peak_bytes: tuple[int, ...]
    on_chip_bytes: tuple[int, ...]
    times: tuple[Times, ...]
    longest_sum_s: float
    most_messages_s: float

    @property
    def bubble_fraction(self) -> float:
        """Of the time of the ranks that are used, what is bubble or idle."""
        used = [times for times in self.times if times.is_used]
        lost_s = sum(times.bubble_s + times.idle_s for times in used)
        return lost_s / (self.step_s * len(used)) if used and self.step_s > 0 else 0.0


def evaluate(profile: Profile | CostModel, decision: Decision) -> Evaluation:
    """Of a decision whose program is legal.

    Args:
        profile: or its prices, looked up before.

    Raises:
        ValueError: it never ends.
        HalopipeError: the profile lacks a measurement.
    """
    cost_model = profile if isinstance(profile, CostModel) else CostModel(profile)
    program = Boundaries.of_decision(cost_model.profile.graph, decision).program(decision)
    stages = Stages(cost_model, decision, program)
    plain = ActionTimes(stages)
    step = Step(cost_model.network, program, plain.action_s, plain.summed, plain.next_step(), plain.meetings())
    step_s = step.seconds()
    times = tuple(times_of(program, step.spans, step_s, plain.exchanged_s, step.left_s))
    sums = [sum_of_gradients_s(program.rows[rank], spans) for rank, spans in enumerate(step.spans)]
    messages_s = max((rank.communication_s - last for rank, (_, last) in zip(times, sums, strict=True)), default=0.0)
    on_chip = tuple(stages.on_chip_bytes(rank) for rank in range(len(program.rows)))
    longest_s = max((longest for longest, _ in sums), default=0.0)
    return Evaluation(step_s, peaks_of(stages), on_chip, times, longest_s, messages_s)


def times_of(
    program: Program,
    spans: Spans,
    step_s: float,
    exchanged_s: Callable[[Action], float],
    left_s: Sequence[float] = (),
) -> Iterator[Times]:
    """The parts of the step by rank.

    Args:
        exchanged_s: of a forward or backward, how long ranks exchange parts of tensors in it.
        left_s: by rank, of preparing the next step behind its row; empty: nothing.
    """
    began: dict[Action, list[float]] = {}
    for row, times in zip(program.rows, spans, strict=True):
        for action, (start_s, _) in zip(row, times, strict=True):
            if action.op in SEND or action.op is Op.REDUCE_GRAD:
                began.setdefault(action, []).append(start_s)
    behind_s = left_s or [0.0] * len(program.rows)
    for row, times, more_s in zip(program.rows, spans, behind_s, strict=True):
        compute_s = communication_s = bubble_s = end_s = 0.0
        for action, (start_s, stop_s) in zip(row, times, strict=True):
            bubble_s += max(0.0, start_s - end_s)
            end_s = stop_s
            if action.op in RECEIVE or action.op is Op.REDUCE_GRAD:
                ready_s = _ready_s(action, began, stop_s)
                waited_s = 0.0 if ready_s is None else min(max(ready_s, start_s), stop_s) - start_s
                bubble_s += waited_s
                communication_s += stop_s - start_s - waited_s
            elif action.op in SEND:
                communication_s += stop_s - start_s
            else:
                moved_s = min(exchanged_s(action), stop_s - start_s) if action.op in COMPUTE else 0.0
                compute_s += stop_s - start_s - moved_s
                communication_s += moved_s
        idle_s = max(0.0, step_s - end_s)
        behind = min(idle_s, more_s)
        yield Times(compute_s + behind, communication_s, bubble_s, idle_s - behind, bool(row))


def _ready_s(action: Action, began: dict[Action, list[float]], stop_s: float) -> float | None:
    """When what is waited for began: the last member of a sum, the last sender that began in time."""
    if action.op is Op.REDUCE_GRAD:
        return max(began[action])
    if action.peer is None:
        return None
    op = Op.SEND_FORWARD if action.op is Op.RECV_FORWARD else Op.SEND_BACKWARD
    sent = began.get(Action(action.peer, op, action.microbatch, action.stage), ())
    return max((at_s for at_s in sent if at_s <= stop_s), default=None)


def sum_of_gradients_s(row: Sequence[Action], spans: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """How long a rank is in sums of gradients that are made once a step: the longest, and the last."""
    pairs = zip(row, spans, strict=True)
    sums = [b - a for action, (a, b) in pairs if action.op is Op.REDUCE_GRAD and action.microbatch is None]
    return max(sums, default=0.0), sums[-1] if sums else 0.0
