"""Ranks of a plan in a script of one's own, as threads, and the loop on one device that they are held against."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from halopipe.training.optimizer_spec import make_optimizer_of, make_scheduler_of, parse_optimizer, parse_scheduler
from halopipe.training.rank import JobMember
from halopipe.training.session import Execution
from halopipe.training.single_device import parameters_of
from planner.ir.plan import Plan
from planner.ir.profile import ModelSource
from profiler.source.source import load_model
from runtime.engine import Engine
from runtime.monitor.waits import RankHeartbeat
from runtime.optim.followed import Followed
from runtime.optim.schedules import schedules_of
from runtime.optim.ties import groups_of
from runtime.rank import RankContext
from runtime.transport import InProcessTransport
from tests.captures import capture
from tests.halopipe import learners
from tests.halopipe.plans import plan_of
from tests.runtime.plans import folded
from tests.runtime.ranks import on_ranks


@functools.cache
def lone() -> Plan:
    """A plan of one rank."""
    return learners.plan([])


Make = Callable[[nn.Module], tuple[torch.optim.Optimizer, LRScheduler | None]]


def together(
    plan: Plan, do: Callable[[Execution], object], seed: int = 0, make: Make | None = None, **options: object
) -> list[object]:
    """What ``do`` gives on each rank; ``make`` makes the optimiser and schedule objects of a user's script."""
    torch.set_num_threads(1)
    model = load_model(plan.inputs.model)
    original = model, capture(model)
    copies = [copy.deepcopy(original) for _ in range(plan.decision.num_ranks)]
    store = dist.HashStore()
    made = {
        "scheduler": make_scheduler_of(parse_scheduler("StepLR:step_size=1,gamma=0.5")),
        "seed": seed,
        "deadline_s": 20.0,
        **options,
    }

    def run(end: InProcessTransport) -> object:
        twin, captured = copies[end.rank]
        rank_heartbeat = RankHeartbeat(store, plan.decision, end.rank, 20.0, 20.0)
        own = dict(made)
        optimizer = make_optimizer_of(parse_optimizer(own.pop("text", "SGD:lr=0.5")))
        if make is not None:
            made_by_user, schedule = make(twin.module)
            own["scheduler"] = None  # that of an optimiser object is its own
            optimizer = Followed(made_by_user, None if schedule is None else schedules_of(schedule))
            optimizer.recognise(parameters_of(twin, captured))
        context = RankContext(plan.decision, optimizer, model=captured, module=twin.module, transport=end, **own)
        context.activity = rank_heartbeat.activity
        member = JobMember(plan, context)
        member.model = twin
        member.engine = Engine(context)
        member._stack.callback(end.close)
        with rank_heartbeat, Execution(member) as execution:
            return do(execution)

    return on_ranks(plan.decision.num_ranks, run, groups_of(plan.decision, original[1].graph))


def batch(rows: int, step: int) -> tuple[Tensor, Tensor]:
    inputs, targets = learners.samples()
    return inputs[step : step + rows].double(), targets[step : step + rows]


def steps(first: int, last: int) -> Callable[[Execution], list[float]]:
    return lambda execution: [execution.step(batch(6, step)) for step in range(first, last)]


def loss_of(found: list[object]) -> list[float]:
    assert all(losses == found[0] for losses in found)  # every rank is told
    return found[0]


def no_number(rows: int, step: int) -> tuple[Tensor, Tensor]:
    inputs, targets = batch(rows, step)
    return inputs.index_fill(0, torch.tensor([0]), math.nan), targets


def adamw(module: nn.Module) -> tuple[torch.optim.Optimizer, LRScheduler]:
    """No decay for biases, another rate for the last layer; a warm-up of one's own."""
    named = dict(module.named_parameters())
    biases = [parameter for name, parameter in named.items() if name.endswith("bias")]
    groups = [{"params": biases, "weight_decay": 0.0}, {"params": [named["0.weight"]]}]
    groups.append({"params": [named["3.weight"]], "lr": 0.03, "betas": (0.5, 0.9)})
    optimizer = torch.optim.AdamW(groups, lr=0.1, weight_decay=0.3)
    return optimizer, lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))


def stepped(module: nn.Module) -> tuple[torch.optim.Optimizer, None]:
    """An optimiser that has something to keep already."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.2, momentum=0.9, nesterov=True)
    nn.functional.cross_entropy(module(batch(6, 9)[0]), batch(6, 9)[1]).backward()
    optimizer.step()
    optimizer.zero_grad()
    return optimizer, None


def one_device(
    make: Make, num_steps: int, rows: int = 6, first: int = 0, module: nn.Module | None = None
) -> tuple[list[float], dict[str, Tensor]]:
    """A training loop as people write it."""
    module = load_model(CALM).module if module is None else module
    optimizer, schedule = make(module)
    losses = []
    for step in range(first, first + num_steps):
        inputs, targets = batch(rows, step)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(module(inputs), targets)
        loss.backward()
        optimizer.step()
        if schedule is not None:
            schedule.step()
        losses.append(loss.item())
    return losses, module.state_dict()


CALM = ModelSource("tests.halopipe.learners:classifier", {"dropout": "0.0"}, (4, learners.WIDTH), "float64")


def divided(zero: int = 1) -> Plan:
    """A stage of two ranks, which divide its optimiser and what else ``zero`` says, and one of one rank."""
    found = plan_of(CALM, [0.5], (3, 3), ranks=[(0, 1), (2,)], shares=[(1, 2), (3,)])
    stages = tuple(
        replace(stage, sharded=len(stage.ranks) > 1, zero=zero if len(stage.ranks) > 1 else 1)
        for stage in found.decision.stages
    )
    return replace(found, decision=replace(found.decision, stages=stages))


CALM_PLANS = {
    "two stages": lambda: plan_of(CALM, [0.5], (3, 3)),
    "a divided optimiser": divided,
    "divided gradients": lambda: divided(2),
    "divided parameters": lambda: divided(3),
    "two stages on a rank": lambda: plan_of(CALM, [0.3, 0.6], (3, 3), ranks=[(0,), (1,), (0,)], schedule=folded),
}


def require_close(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert list(found) == list(expected)
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-10, atol=1e-12)
