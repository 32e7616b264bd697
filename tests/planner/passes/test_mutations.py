"""Every way to break a program is refused, with the culprit marked and the reason given; what stays legal is not."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache

import pytest

from planner.ir.errors import IllegalProgramError
from planner.ir.program import Program
from planner.ir.schedule import ADDS_GRADIENTS, COMPUTE, MESSAGE, RECEIVE, SEND, Action, Op
from planner.passes import validate
from planner.passes.ending import stuck
from planner.passes.numbering import Numbering
from planner.schedules import names
from tests.planner.passes.requirements import requirements
from tests.planner.random_programs import random_program

Row = tuple[Action, ...]
Mutation = Callable[[Row, int, random.Random, Program], Row | None]
WholeMutation = Callable[[Program, int, int], Program | None]
"""Of a program, a rank and an index in its row."""

BACKWARD = (Op.BACKWARD, Op.BACKWARD_INPUT)


def put(row: Row, i: int, *actions: Action) -> Row:
    """With ``actions`` in place of the one at ``i``."""
    return (*row[:i], *actions, *row[i + 1 :])


def moved(row: Row, i: int, j: int) -> Row:
    """With the action at ``i`` before the one at ``j``, which stands earlier."""
    return (*row[:j], row[i], *row[j:i], *row[i + 1 :])


def drop(row: Row, i: int, rng: random.Random, program: Program) -> Row | None:
    return put(row, i) if len(row) > 1 else None


def duplicate(row: Row, i: int, rng: random.Random, program: Program) -> Row:
    j = rng.randint(0, len(row))
    return (*row[:j], row[i], *row[j:])


def _changed(name: str, others: Callable[[Action, Program], Sequence[Action]]) -> Mutation:
    """One of ``others`` in place of an action."""

    def mutate(row: Row, i: int, rng: random.Random, program: Program) -> Row | None:
        found = others(row[i], program)
        return put(row, i, rng.choice(found)) if found else None

    mutate.__name__ = name
    return mutate


def _fields(name: str, of: Collection[Op], values: Callable[[Program], Iterable[object]]) -> Mutation:
    """Any other value of a field, where an action of these operations has it."""

    def others(action: Action, program: Program) -> list[Action]:
        is_of = action.op in of and getattr(action, name) is not None
        return [replace(action, **{name: v}) for v in values(program) if is_of and v != getattr(action, name)]

    return _changed(f"another_{name}", others)


def _ops(name: str, turned: Mapping[Op, Sequence[Op]]) -> Mutation:
    return _changed(name, lambda action, program: [replace(action, op=op) for op in turned.get(action.op, ())])


def _stages(program: Program) -> range:
    return range(-1, program.stages.num_stages + 1)


WAYS = ((Op.SEND_FORWARD, Op.RECV_FORWARD), (Op.SEND_BACKWARD, Op.RECV_BACKWARD))


CHANGED: tuple[Mutation, ...] = (
    _fields("microbatch", Op, lambda program: range(program.stages.num_microbatches + 3)),
    _fields("stage", Op, _stages),
    _fields("peer", Op, _stages),
    _fields("version", COMPUTE, lambda program: range(3) if program.trains else ()),
    _fields("blocking", MESSAGE, lambda program: (False, True)),
    _ops("another_direction", {op: (a if op is b else b,) for a, b in WAYS for op in (a, b)}),
    _ops("half_a_backward", {Op.BACKWARD: (Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)}),
    _ops("whole_beside_halves", {Op.BACKWARD_INPUT: (Op.BACKWARD,)}),
)


def weights_before_inputs(row: Row, i: int, rng: random.Random, program: Program) -> Row | None:
    if row[i].op is not Op.BACKWARD_WEIGHT:
        return None
    return moved(row, i, row.index(replace(row[i], op=Op.BACKWARD_INPUT)))


def backward_before_forward(row: Row, i: int, rng: random.Random, program: Program) -> Row | None:
    return moved(row, i, row.index(replace(row[i], op=Op.FORWARD))) if row[i].op in BACKWARD else None


def receive_too_late(row: Row, i: int, rng: random.Random, program: Program) -> Row | None:
    return moved(row, i + 1, i) if row[i].op in RECEIVE and row[i + 1].op not in RECEIVE else None


def send_too_early(row: Row, i: int, rng: random.Random, program: Program) -> Row | None:
    return moved(row, i, i - 1) if row[i].op in SEND and row[i - 1].op not in SEND else None


def micro_batches_in_another_order(row: Row, i: int, rng: random.Random, program: Program) -> Row | None:
    """Two micro-batches change places on this rank alone, so that what it sends or receives comes out of order."""
    alike = [a.microbatch for a in row if (a.stage, a.op, a.peer) == (row[i].stage, row[i].op, row[i].peer)]
    if row[i].op not in MESSAGE or len(alike) < 2:
        return None
    a = row[i].microbatch
    b = rng.choice([m for m in alike if m != row[i].microbatch])
    turned = {a: b, b: a}
    return tuple(replace(each, microbatch=turned.get(each.microbatch, each.microbatch)) for each in row)


def update_too_early(row: Row, i: int, rng: random.Random, program: Program) -> Row | None:
    """Before what it counts, or before the last thing that its stage does."""
    if row[i].op is not Op.UPDATE or row[i - 1].stage != row[i].stage:
        return None
    is_last = not any(a.op is Op.UPDATE and a.stage == row[i].stage for a in row[i + 1 :])
    return moved(row, i, i - 1) if is_last or row[i - 1].op in (*ADDS_GRADIENTS, Op.REDUCE_GRAD) else None


def update_before_the_hand_back(row: Row, i: int, rng: random.Random, program: Program) -> Row | None:
    """The last update of a stage before the last gradient that it sends."""
    if row[i].op is not Op.SEND_BACKWARD or any(a.op is row[i].op and a.stage == row[i].stage for a in row[i + 1 :]):
        return None
    return moved(row, max(j for j, a in enumerate(row) if a.op is Op.UPDATE and a.stage == row[i].stage), i)


def reduction_too_early(row: Row, i: int, rng: random.Random, program: Program) -> Row | None:
    if row[i].op is not Op.REDUCE_GRAD:
        return None
    return moved(row, i, max(j for j, a in enumerate(row[:i]) if a.op in ADDS_GRADIENTS and a.stage == row[i].stage))


def before_what_it_needs(row: Row, i: int, rng: random.Random, program: Program) -> Row | None:
    """Two neighbours, of which the second needs the first, change places."""
    is_needed = i + 1 < len(row) and needs(program, program.rows.index(row), row[i + 1], row[i])
    return moved(row, i + 1, i) if is_needed else None


def gradient_awaited_before_the_activation_is_sent(
    row: Row, i: int, rng: random.Random, program: Program
) -> Row | None:
    """A circle of waits: the gradient comes only once the activation has been there."""
    cause = replace(row[i], op=Op.SEND_FORWARD)
    return moved(row, i, row.index(cause)) if row[i].op is Op.RECV_BACKWARD and cause in row else None


def reductions_in_another_order(row: Row, i: int, rng: random.Random, program: Program) -> Row | None:
    """Those of two stages on the same ranks, on this rank alone; each is still between its gradients and its update."""
    if row[i].op is not Op.REDUCE_GRAD:
        return None
    for j in range(i + 1, len(row)):
        if row[j].op is Op.REDUCE_GRAD and program.ranks[row[j].stage] == program.ranks[row[i].stage]:
            between = row[i + 1 : j]
            if any(a.op is Op.UPDATE and a.stage == row[i].stage for a in between):
                return None
            return (*row[:i], *between, row[j], row[i], *row[j + 1 :])
    return None


MUTATIONS: tuple[Mutation, ...] = (
    *CHANGED,
    drop,
    duplicate,
    weights_before_inputs,
    backward_before_forward,
    receive_too_late,
    send_too_early,
    micro_batches_in_another_order,
    update_too_early,
    update_before_the_hand_back,
    reduction_too_early,
    before_what_it_needs,
    gradient_awaited_before_the_activation_is_sent,
    reductions_in_another_order,
)


def reduction_nowhere(program: Program, rank: int, i: int) -> Program | None:
    reduction = program.rows[rank][i]
    return _everywhere(program, reduction, ()) if reduction.op is Op.REDUCE_GRAD else None


def weights_of_an_update_to_come(program: Program, rank: int, i: int) -> Program | None:
    """A micro-batch, forward and backward and on all ranks, on weights that are not made by then."""
    forward = program.rows[rank][i]
    row = program.rows[rank]
    if forward.op is not Op.FORWARD or not program.trains:
        return None
    made = sum(a.op is Op.UPDATE and a.stage == forward.stage for a in row[:i])
    return _with_version(program, forward, made + 1)


def both_a_whole_and_halves(program: Program, rank: int, i: int) -> Program | None:
    whole = program.rows[rank][i]
    halves = [replace(whole, op=op) for op in (Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)]
    return _everywhere(program, whole, (whole, *halves)) if whole.op is Op.BACKWARD else None


WHOLE_MUTATIONS: tuple[WholeMutation, ...] = (reduction_nowhere, weights_of_an_update_to_come, both_a_whole_and_halves)


def halves_in_place_of_a_whole(program: Program, rank: int, i: int) -> Program | None:
    whole = program.rows[rank][i]
    halves = [replace(whole, op=op) for op in (Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)]
    return _everywhere(program, whole, tuple(halves)) if whole.op is Op.BACKWARD else None


def older_weights(program: Program, rank: int, i: int) -> Program | None:
    forward = program.rows[rank][i]
    return (
        _with_version(program, forward, forward.version - 1) if forward.op is Op.FORWARD and forward.version else None
    )


def neighbours_exchanged(program: Program, rank: int, i: int) -> Program | None:
    """Two that do not need each other, where no other rank can be kept waiting by it.

    One of them concerns this rank alone, or both only send, or both only receive, or a receive goes behind the other.
    """
    row = program.rows[rank]
    if i + 1 == len(row) or program.blocking:
        return None
    a = row[i]
    b = row[i + 1]
    concerns = [_concerns(program, each) for each in (a, b)]
    harmless = "nobody" in concerns or concerns in (["sends"] * 2, ["receives"] * 2) or concerns[0] == "receives"
    one_channel = (a.stage, a.op, a.peer) == (b.stage, b.op, b.peer) and a.op in MESSAGE
    one_update = a.stage == b.stage and Op.UPDATE in (a.op, b.op)
    if not harmless or one_channel or one_update or needs(program, rank, b, a):
        return None
    return _with_row(program, rank, (*row[:i], b, a, *row[i + 2 :]))


LEGAL: tuple[WholeMutation, ...] = (halves_in_place_of_a_whole, older_weights, neighbours_exchanged)


def needs(program: Program, rank: int, action: Action, other: Action) -> bool:
    """Whether ``action`` needs ``other`` on its own rank."""
    if action.op in RECEIVE:
        return False
    return any((rank, other) in alternatives for alternatives in requirements(program, rank, action))


def _concerns(program: Program, action: Action) -> str:
    if action.op in MESSAGE:
        return "sends" if action.op in SEND else "receives"
    is_alone = len(program.ranks[action.stage]) == 1 or action.op is Op.BACKWARD_WEIGHT
    return "nobody" if is_alone else "members"


def _with_row(program: Program, rank: int, row: Row) -> Program:
    return replace(program, rows=(*program.rows[:rank], row, *program.rows[rank + 1 :]))


def _everywhere(program: Program, action: Action, others: Row) -> Program:
    """``others`` in place of ``action`` on all ranks."""
    rows = (tuple(b for a in row for b in (others if a == action else (a,))) for row in program.rows)
    return replace(program, rows=tuple(rows))


def _with_version(program: Program, forward: Action, version: int) -> Program:
    """The micro-batch of ``forward`` on another version of its stage's weights."""
    rows = (
        tuple(
            replace(a, version=version)
            if a.op in COMPUTE and (a.stage, a.microbatch) == (forward.stage, forward.microbatch)
            else a
            for a in row
        )
        for row in program.rows
    )
    return replace(program, rows=tuple(rows))


SEEDS = range(10)


A_ROW = 2
"""Mutants of each row that are tried."""


each_schedule = pytest.mark.parametrize("name", names())


def called(function: object) -> str | None:
    return getattr(function, "__name__", None)


@cache
def program_of(name: str, seed: int) -> Program:
    return random_program(random.Random(seed), name)


@cache
def broken_rows(mutate: Mutation, name: str) -> tuple[Program, ...]:
    found: list[Program] = []
    for seed in SEEDS:
        rng = random.Random(seed)
        program = program_of(name, seed)
        for rank, row in enumerate(program.rows):
            mutants = [broken for i in range(len(row)) if (broken := mutate(row, i, rng, program)) is not None]
            for broken in rng.sample(mutants, min(A_ROW, len(mutants))):
                found.append(replace(program, rows=(*program.rows[:rank], broken, *program.rows[rank + 1 :])))
    return tuple(found)


@cache
def changed(mutate: WholeMutation, name: str, a_row: int = A_ROW) -> tuple[Program, ...]:
    found: list[Program] = []
    for seed in SEEDS:
        rng = random.Random(seed)
        program = program_of(name, seed)
        for rank, row in enumerate(program.rows):
            mutants = [other for i in range(len(row)) if (other := mutate(program, rank, i)) is not None]
            found += rng.sample(mutants, min(a_row, len(mutants)))
    return tuple(found)


def require_refused(program: Program) -> None:
    with pytest.raises(IllegalProgramError) as caught:
        validate(program)
    assert ">>" in str(caught.value), "no culprit is marked"
    assert "rank" in caught.value.details[0]


@pytest.mark.cases(40)
@each_schedule
@pytest.mark.parametrize("mutate", MUTATIONS, ids=called)
def test_a_broken_row_is_refused_and_the_culprit_shown(mutate: Mutation, name: str) -> None:
    for program in broken_rows(mutate, name):
        require_refused(program)


@each_schedule
@pytest.mark.parametrize("mutate", WHOLE_MUTATIONS, ids=called)
def test_a_program_broken_on_several_ranks_is_refused_and_the_culprit_shown(mutate: WholeMutation, name: str) -> None:
    for program in changed(mutate, name):
        require_refused(program)


@each_schedule
@pytest.mark.parametrize("mutate", LEGAL, ids=called)
def test_what_stays_legal_is_not_refused(mutate: WholeMutation, name: str) -> None:
    for program in changed(mutate, name, 6):
        validate(program)


def test_every_way_is_tried() -> None:
    rare = {"reductions_in_another_order": 2, "older_weights": 20}

    def is_tried(mutate: Mutation | WholeMutation, find: Callable[..., tuple[Program, ...]]) -> bool:
        """Often enough; no more schedules are looked at than that takes."""
        counts = itertools.accumulate(len(find(mutate, name)) for name in names())
        return any(count >= rare.get(called(mutate), 50) for count in counts)

    assert [called(each) for each in MUTATIONS if not is_tried(each, broken_rows)] == []
    assert [called(each) for each in (*WHOLE_MUTATIONS, *LEGAL) if not is_tried(each, changed)] == []


@each_schedule
def test_held_sends_end_only_if_receives_are_posted_ahead(name: str) -> None:
    """Rendezvous: of the windows that are enough, the next smaller one is a deadlock, and says of which messages."""
    for seed in SEEDS:
        program = program_of(name, seed)
        enough = (w for w in range(64) if not stuck(Numbering(program), True, [w] * len(program.rows)))
        window = next(enough)
        if window:
            waiting = stuck(Numbering(program), True, [window - 1] * len(program.rows))
            assert any("has not posted its receive" in each.why or "nothing has come" in each.why for each in waiting)
