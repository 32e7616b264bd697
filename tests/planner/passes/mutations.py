"""Ways to break a row of a legal program at one place; each gives None where it does not apply."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

from planner.ir.program import Program
from planner.ir.schedule import COMPUTE, MESSAGE, RECEIVE, SEND, Action, Op

Row = tuple[Action, ...]
Mutation = Callable[[Row, int, random.Random, Program], Row | None]

GRADIENT = (Op.BACKWARD, Op.BACKWARD_WEIGHT)
BACKWARD = (Op.BACKWARD, Op.BACKWARD_INPUT)


def drop(row: Row, i: int, rng: random.Random, program: Program) -> Row | None:
    return row[:i] + row[i + 1 :] if len(row) > 1 else None


def duplicate(row: Row, i: int, rng: random.Random, program: Program) -> Row:
    j = rng.randint(0, len(row))
    return (*row[:j], row[i], *row[j:])


def another_microbatch(row: Row, i: int, rng: random.Random, program: Program) -> Row | None:
    if row[i].microbatch is None:
        return None
    other = rng.choice([m for m in range(program.stages.num_microbatches + 1) if m != row[i].microbatch])
    return (*row[:i], replace(row[i], microbatch=other), *row[i + 1 :])


def another_stage(row: Row, i: int, rng: random.Random, program: Program) -> Row:
    stage = rng.choice([s for s in range(-1, program.stages.num_stages + 1) if s != row[i].stage])
    return (*row[:i], replace(row[i], stage=stage), *row[i + 1 :])


def another_peer(row: Row, i: int, rng: random.Random, program: Program) -> Row | None:
    if row[i].peer is None:
        return None
    peer = rng.choice([s for s in range(-1, program.stages.num_stages + 1) if s != row[i].peer])
    return (*row[:i], replace(row[i], peer=peer), *row[i + 1 :])


def another_direction(row: Row, i: int, rng: random.Random, program: Program) -> Row | None:
    turned = {
        Op.SEND_FORWARD: Op.RECV_FORWARD,
        Op.RECV_FORWARD: Op.SEND_FORWARD,
        Op.SEND_BACKWARD: Op.RECV_BACKWARD,
        Op.RECV_BACKWARD: Op.SEND_BACKWARD,
    }.get(row[i].op)
    return None if turned is None else (*row[:i], replace(row[i], op=turned), *row[i + 1 :])


def half_a_backward(row: Row, i: int, rng: random.Random, program: Program) -> Row | None:
    half = rng.choice((Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT))
    return (*row[:i], replace(row[i], op=half), *row[i + 1 :]) if row[i].op is Op.BACKWARD else None


def whole_beside_halves(row: Row, i: int, rng: random.Random, program: Program) -> Row | None:
    whole = replace(row[i], op=Op.BACKWARD)
    return (*row[:i], whole, *row[i + 1 :]) if row[i].op is Op.BACKWARD_INPUT else None


def weights_before_inputs(row: Row, i: int, rng: random.Random, program: Program) -> Row | None:
    if row[i].op is not Op.BACKWARD_WEIGHT:
        return None
    j = row.index(replace(row[i], op=Op.BACKWARD_INPUT))
    return (*row[:j], row[i], *row[j:i], *row[i + 1 :])


def backward_before_forward(row: Row, i: int, rng: random.Random, program: Program) -> Row | None:
    if row[i].op not in BACKWARD:
        return None
    forward = row.index(replace(row[i], op=Op.FORWARD))
    return (*row[:forward], row[i], *row[forward:i], *row[i + 1 :])


def receive_too_late(row: Row, i: int, rng: random.Random, program: Program) -> Row | None:
    if row[i].op not in RECEIVE or row[i + 1].op in RECEIVE:
        return None
    return (*row[:i], row[i + 1], row[i], *row[i + 2 :])


def send_too_early(row: Row, i: int, rng: random.Random, program: Program) -> Row | None:
    if row[i].op not in SEND or row[i - 1].op in SEND:
        return None
    return (*row[: i - 1], row[i], row[i - 1], *row[i + 1 :])


def micro_batches_in_another_order(row: Row, i: int, rng: random.Random, program: Program) -> Row | None:
    """Two micro-batches change places on this rank alone, so that what it sends or receives comes out of order."""
    alike = [a.microbatch for a in row if (a.stage, a.op, a.peer) == (row[i].stage, row[i].op, row[i].peer)]
    if row[i].op not in MESSAGE or len(alike) < 2:
        return None
    a, b = row[i].microbatch, rng.choice([m for m in alike if m != row[i].microbatch])
    turned = {a: b, b: a}
    return tuple(replace(each, microbatch=turned.get(each.microbatch, each.microbatch)) for each in row)


def update_too_early(row: Row, i: int, rng: random.Random, program: Program) -> Row | None:
    """Before what it counts, or before the last thing that its stage does."""
    if row[i].op is not Op.UPDATE or row[i - 1].stage != row[i].stage:
        return None
    is_last = not any(a.op is Op.UPDATE and a.stage == row[i].stage for a in row[i + 1 :])
    if not is_last and row[i - 1].op not in (*GRADIENT, Op.REDUCE_GRAD):
        return None
    return (*row[: i - 1], row[i], row[i - 1], *row[i + 1 :])


def update_before_the_hand_back(row: Row, i: int, rng: random.Random, program: Program) -> Row | None:
    """The last update of a stage before the last gradient that it sends."""
    if row[i].op is not Op.SEND_BACKWARD or any(a.op is row[i].op and a.stage == row[i].stage for a in row[i + 1 :]):
        return None
    j = max(j for j, a in enumerate(row) if a.op is Op.UPDATE and a.stage == row[i].stage)
    return (*row[:i], row[j], *row[i:j], *row[j + 1 :])


def reduction_too_early(row: Row, i: int, rng: random.Random, program: Program) -> Row | None:
    if row[i].op is not Op.REDUCE_GRAD:
        return None
    j = max(j for j, a in enumerate(row[:i]) if a.op in GRADIENT and a.stage == row[i].stage)
    return (*row[:j], row[i], *row[j:i], *row[i + 1 :])


def another_version(row: Row, i: int, rng: random.Random, program: Program) -> Row | None:
    if row[i].op not in COMPUTE or not program.trains:
        return None
    other = rng.choice([v for v in range(3) if v != row[i].version])
    return (*row[:i], replace(row[i], version=other), *row[i + 1 :])


def a_message_of_another_manner(row: Row, i: int, rng: random.Random, program: Program) -> Row | None:
    turned = replace(row[i], blocking=not row[i].blocking)
    return (*row[:i], turned, *row[i + 1 :]) if row[i].op in MESSAGE else None


MUTATIONS: tuple[Mutation, ...] = (
    drop,
    duplicate,
    another_microbatch,
    another_stage,
    another_peer,
    another_direction,
    half_a_backward,
    whole_beside_halves,
    weights_before_inputs,
    backward_before_forward,
    receive_too_late,
    send_too_early,
    micro_batches_in_another_order,
    update_too_early,
    update_before_the_hand_back,
    reduction_too_early,
    another_version,
    a_message_of_another_manner,
)
