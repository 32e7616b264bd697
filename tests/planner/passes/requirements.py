from __future__ import annotations

from planner.ir.program import Program
from planner.ir.schedule import RECEIVE, Action, Op, dependencies


def requirements(program: Program, rank: int, action: Action) -> tuple[tuple[tuple[int, Action], ...], ...]:
    """``dependencies`` with ranks: each element is a set of alternatives, any or all of which may exist."""
    if action.op in RECEIVE:
        forward = action.op is Op.RECV_FORWARD
        senders = [m.src if forward else m.dst for m in program.messages_of(rank, action)]
        return tuple(
            ((sender, alternative),)
            for sender in senders
            for alternatives in dependencies(action, program.stages)
            for alternative in alternatives
        )
    return tuple(
        tuple((rank, alternative) for alternative in sorted(alternatives, key=str))
        for alternatives in dependencies(action, program.stages)
    )
