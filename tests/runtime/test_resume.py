"""Training goes on from a checkpoint as if it had not stopped, under the same plan and under another."""

from __future__ import annotations

import copy
import functools
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from planner.ir.errors import UsageError
from planner.ir.plan import Decision
from runtime.captured import CapturedModule
from runtime.checkpoint import Checkpoint, save
from runtime.engine import Engine
from runtime.optim.ties import groups_of
from runtime.transport import Hub, InProcessTransport
from tests.captures import capture
from tests.runtime.plans import batch_of, decide, engine_of, model_of

MODEL = model_of("gpt:gpt", (4, 6), vocabulary=17, width=8, layers=2, heads=2)
SHARDED: dict[str, dict[str, Any]] = {
    "replicas": {},
    "sharded": {"sharded": True},
    "gradients": {"sharded": True, "zero": 2},
    "parameters": {"sharded": True, "zero": 3},
}
PLANS = ("pipeline", *SHARDED, "one")


@functools.cache
def captured() -> CapturedModule:
    return capture(MODEL)


def plan_of(name: str) -> Decision:
    graph = captured().graph
    if name not in SHARDED:
        return decide(graph, [0.4] if name == "pipeline" else [], (2, 2))
    decision = decide(graph, [0.6], (2, 2), [(0, 1), (2,)], [(2, 1), (1,)])
    first, last = decision.stages
    return replace(decision, stages=(replace(first, **SHARDED[name]), last))


def adam(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)


def train(
    decision: Decision,
    steps: range,
    folder: Path | None = None,
    save_at: int = -1,
    resume: bool = False,
    **options: int,
) -> list[float]:
    """The losses of ``steps``; a checkpoint is written after step ``save_at``."""
    hub = Hub(decision.num_ranks, groups_of(decision, captured().graph), rendezvous=True)
    copies = [copy.deepcopy((MODEL, captured())) for _ in range(decision.num_ranks)]
    losses: dict[int, float] = {}
    errors: list[BaseException] = []

    def work(rank: int) -> None:
        transport = InProcessTransport(hub, rank)
        try:
            engine = engine_of(decision, *copies[rank], transport, optimizer=adam, scheduler=schedule, **options)
            run(engine, transport, rank)
        except BaseException as error:  # noqa: BLE001  # raised below, in the test's own thread
            errors.append(error)
        finally:
            transport.close()

    def run(engine: Engine, transport: InProcessTransport, rank: int) -> None:
        if resume:
            assert folder is not None
            engine.load_state(Checkpoint.open(folder))
            assert engine.num_steps == steps.start
        for step in steps:
            result = engine.step(*batch_of(MODEL, 4, step))
            if result.loss is not None:
                losses[step] = result.loss
            if step == save_at:
                assert folder is not None
                save(folder, step + 1, engine.state(), rank, decision.num_ranks, lambda: transport.barrier(), {})

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(decision.num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [losses[step] for step in steps]


@pytest.mark.parametrize("later", PLANS)
@pytest.mark.parametrize("earlier", PLANS)
def test_what_was_saved_under_one_plan_goes_on_under_another(earlier: str, later: str, tmp_path: Path) -> None:
    before = train(plan_of(earlier), range(3), tmp_path, save_at=2)
    after = train(plan_of(later), range(3, 6), tmp_path, resume=True)
    whole = train(plan_of("one"), range(6))
    assert before + after == pytest.approx(whole, rel=1e-11)
    if earlier == later:
        assert before + after == train(plan_of(earlier), range(6))


def test_between_updates_nothing_can_be_saved(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="gradients wait for the update"):
        train(plan_of("one"), range(1), tmp_path, save_at=0, accumulate=2)
