"""The comparison with torch is a fair one: same work, same order, and an ideal that is what it says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.devices.ranks import on_ranks
from benchmarks.executor import upkeep
from benchmarks.executor.__main__ import OURS, REAL, TORCH, durations, ideal_s, peak_bytes, race, work_rows
from benchmarks.executor.sides import NUM_RANKS, Case
from benchmarks.turns import require_equal
from planner.ir.program import Program
from planner.ir.schedule import Op
from planner.ir.timeline import Span
from planner.layers.boundary import Boundaries
from planner.passes import validate
from profiler import load_model
from profiler.capture.graph import capture
from runtime.checkpoint import complete_steps
from runtime.transport import Transport

SMALL = {case.schedule: replace(case, width=8, rows=2, num_microbatches=4, num_layers=16) for case in REAL}


def program_of(case: Case) -> Program:
    graph = capture(load_model(case.source)).graph
    decision = case.decision(graph)
    return Boundaries.of_decision(graph, decision).program(decision)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("1f1b", 5 * 3.0),
        ("gpipe", 5 * 3.0),
        ("1f1b-so", 5 * 3.0),
        ("interleaved", 4.5 * 3.0),
        ("zb-h1", 4 * 3.0 + 1.0),
        ("zb-v", None),
    ],
)
def test_every_case_is_a_legal_program_of_equal_stages_whose_ideal_is_the_closed_form(
    name: str, expected: float | None
) -> None:
    """With F = I = W = 1 a rank and micro-batch, and messages for free."""
    case = SMALL[name]
    program = program_of(case)
    validate(program)
    assert len(program.ranks) == 2 * case.stages_per_rank
    layers = [case.stage_of(layer) for layer in ("0", "15", "16", "31", "loss")]
    assert layers == ([0, 0, 1, 1, 1] if len(program.ranks) == 2 else [0, 1, 2, 3, 3])
    each = 1.0 / case.stages_per_rank
    costs = {Op.FORWARD: each, Op.BACKWARD: 2 * each, Op.BACKWARD_INPUT: each, Op.BACKWARD_WEIGHT: each}
    seconds = {(stage, op): cost for stage in range(len(case.ranks)) for op, cost in costs.items()}
    found_s = ideal_s(program, (2,) * 4, seconds)
    assert found_s == pytest.approx(expected) if expected is not None else found_s >= 4 * 3.0


def test_messages_are_no_cost_of_an_action() -> None:
    spans = [Span(0, "0F0", 0.0, 1.0), Span(0, "0SEND_F0>1", 1.0, 5.0), Span(0, "0B0", 5.0, 7.0)]
    assert dict(durations(spans)) == {(0, Op.FORWARD): 1.0, (0, Op.BACKWARD): 2.0}


def test_sides_that_compute_something_else_are_not_compared() -> None:
    one = {"y": torch.ones(3) * torch.arange(3)}
    require_equal({"linear": one, "blocking": {"y": one["y"] + 1e-5}})
    for other, fault in (({"y": one["y"] + 0.1}, "linear and blocking disagree on y"), ({}, "linear has y, blocking ")):
        with pytest.raises(RuntimeError, match=fault):
            require_equal({"linear": one, "blocking": other})


@pytest.mark.exhaustive("ranks that import torch afresh, for halopipe and for torch")
def test_both_sides_run_a_case() -> None:
    cases = [SMALL["1f1b-so"], SMALL["zb-v"]]

    def work(transport: Transport) -> list[object]:
        return [race(case, transport, steps=1) for case in cases]

    for case, *found in zip(cases, *on_ranks(NUM_RANKS, work), strict=True):
        assert {side for each in found for side in each.seconds} >= {OURS, TORCH}
        assert all(row.value > 0 for row in work_rows(case, found))
        assert {stage for each in found for stage, _ in each.action_s[OURS]} == set(range(len(case.ranks)))


@pytest.mark.exhaustive("ranks that import torch afresh, for halopipe and for torch")
def test_memory_counts_parameters_gradients_and_momentum_at_least() -> None:
    case = replace(SMALL["1f1b"], width=64)
    parameters = 8 * (64 * 64 + 64) * 4
    for side in (OURS, TORCH):
        for found in on_ranks(NUM_RANKS, lambda transport, side=side: peak_bytes(side, case, transport)):
            assert 3 * parameters < found < 4 * parameters


def test_what_saves_and_looking_for_nan_cost_is_told_of_engines_that_do_so(tmp_path: Path) -> None:
    def upkeep_of(transport: Transport) -> tuple[upkeep.Rounds, dict[str, float]]:
        case = SMALL["1f1b"]
        return upkeep.saving(case, transport, tmp_path, rounds=2), upkeep.looking(case, transport, steps=1)

    found = on_ranks(NUM_RANKS, upkeep_of)
    saved = [rounds for rounds, _ in found]
    assert [(len(each.without_s), len(each.with_s), each.counted.number) for each in saved] == [(2, 2, 3)] * 2
    assert complete_steps(tmp_path) == (upkeep.WARM_UP + 6 * upkeep.STEPS_A_ROUND,)
    costly = [replace(each, with_s=tuple(s + 100.0 for s in each.without_s)) for each in saved]
    rows = {row.name: row for row in [*upkeep.save_rows(costly), *upkeep.nan_rows([seconds for _, seconds in found])]}
    assert not rows["saves: share of the time at that interval"].holds
    assert rows["on-nan, step: stop / ignore"].value > 0
