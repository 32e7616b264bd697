"""Small networks with what runtimes get wrong or refuse, plans that are hard to run, and what one device computes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional

from planner.ir.plan import Decision
from planner.ir.profile import ModelSource
from planner.ir.schedule import Action, Op, Pipeline, Schedule
from profiler.models.example import Example, indices, normal
from profiler.source.source import load_model
from runtime.numerics.single_device import LossOfStep, serial_step
from runtime.stage.random.streams import CounterRng
from tests.captures import capture
from tests.runtime.engines import Network, Tensors, drawing_loss
from tests.runtime.plans import Trained, batch_of, decide, folded, sgd, split_backward

WIDTH = 6
CODES = 5


class Normalised(nn.Module):
    """Batch normalisation and a skip over all of it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, CODES)
        self.norm1 = nn.BatchNorm1d(WIDTH)
        self.norm2 = nn.BatchNorm1d(WIDTH, affine=False)
        self.middle = nn.Linear(WIDTH, WIDTH)
        self.late = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        start = self.first(x)
        y = self.middle(self.norm1(start).relu())
        return self.last(self.late(self.norm2(y).tanh()).tanh() + start)


class Mixed(nn.Module):
    """Tuples and integers that later layers read: halves, sorted values with their order, codes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 8)
        self.second = nn.Linear(4, 4)
        self.third = nn.Linear(4, 4)
        self.table = nn.Embedding(4, 4)
        self.last = nn.Linear(4, CODES)

    def forward(self, x: Tensor) -> Tensor:
        left, right = self.first(x).chunk(2, 1)
        codes = left.detach().argmax(1)
        values, order = right.sort(1)
        y = self.second(left.tanh()).gather(1, order) + values
        return self.last(self.third(y.tanh()) + self.table(codes))


class Dropping(nn.Module):
    """Dropout beside batch normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 8)
        self.last = nn.Linear(8, CODES)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.4)
        self.middle = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.drop(self.norm(self.first(x)).relu())
        return self.last(self.drop(self.middle(y).tanh()))


MODULES = {"normalised": Normalised, "mixed": Mixed, "dropping": Dropping}


def made(*, input_shape: tuple[int, ...] = (4, WIDTH), name: str = "normalised") -> Example:
    target = indices(CODES, input_shape[:1], 1)
    return MODULES[name](), (normal(input_shape, 0), target), functional.cross_entropy


PLANS: dict[str, dict[str, object]] = {
    "ten rows in uneven micro-batches": {"cuts": [0.5], "micro_batches": (4, 3, 3)},
    "a later micro-batch larger than the first": {"cuts": [0.3, 0.6], "micro_batches": (2, 5, 3)},
    "a skip over several stages": {"cuts": [0.25, 0.5, 0.75], "micro_batches": (4, 3, 3)},
    "replicas of unequal share": {"cuts": [], "micro_batches": (4, 6), "ranks": [(0, 1)], "shares": [(3, 1)]},
    "two ranks with shares 2 to 1 feed one": {
        "cuts": [0.5],
        "micro_batches": (4, 3, 3),
        "ranks": [(0, 1), (2,)],
        "shares": [(2, 1), (1,)],
    },
    "one rank feeds two with shares 2 to 1": {
        "cuts": [0.5],
        "micro_batches": (4, 3, 3),
        "ranks": [(0,), (1, 2)],
        "shares": [(1,), (2, 1)],
    },
    "one feeds two, they feed one": {
        "cuts": [0.3, 0.7],
        "micro_batches": (4, 3, 3),
        "ranks": [(0,), (1, 2), (3,)],
        "shares": [(1,), (1, 2), (1,)],
        "schedule": split_backward,
    },
    "two stages on one rank that are not neighbours": {
        "cuts": [0.3, 0.6],
        "micro_batches": (4, 3, 3),
        "ranks": [(0,), (1,), (0,)],
        "schedule": folded,
    },
    "micro-batches in another order": {"cuts": [0.5], "micro_batches": (4, 3, 3), "schedule": "turned"},
}
TURNED = (2, 0, 1)
TURNED_BACK = (1, 2, 0)


@cache
def network(name: str) -> Network:
    torch.manual_seed(0)
    model = load_model(ModelSource(f"{__name__}:made", {"name": f'"{name}"'}, (4, WIDTH), "float64"))
    return model, capture(model)


def decision_of(name: str, **plan: object) -> Decision:
    order = turned if plan.get("schedule") == "turned" else plan.get("schedule", "1f1b")
    return decide(network(name)[1].graph, **{**plan, "schedule": order})


def turned(pipeline: Pipeline) -> Schedule:
    """Micro-batches forward in one order that is not theirs, and backward in another."""
    return Schedule(
        tuple(
            (*(Action(s, Op.FORWARD, m) for m in TURNED), *(Action(s, Op.BACKWARD, m) for m in TURNED_BACK))
            for s in range(pipeline.stages.num_stages)
        )
    )


def recomputing(decision: Decision) -> Decision:
    return replace(decision, stages=tuple(replace(stage, recompute=True) for stage in decision.stages))


def trained_alone(
    given: Network,
    batches: Sequence[tuple[Tensors, Tensors]],
    micro_batches: Sequence[tuple[int, ...]],
    loss_with: Callable[[Network, CounterRng], LossOfStep] | None = None,
    seed: int = 0,
) -> Trained:
    """One device, each batch in micro-batches of its own."""
    model, captured = copy.deepcopy(given)
    draw = CounterRng(seed)
    loss_of = model.loss if loss_with is None else loss_with((model, captured), draw)
    optimizer = sgd(model.module.parameters())
    losses = []
    for step, (batch, rows) in enumerate(zip(batches, micro_batches, strict=True)):
        draw.step = step
        losses.append(serial_step(loss_of, optimizer, *batch, rows, draw))
    gradients = {name: p.grad for name, p in model.module.named_parameters()}
    return Trained(losses, gradients, model.module.state_dict())


@cache
def expected(name: str, micro_batches: tuple[int, ...], order: tuple[int, ...] = (0, 1, 2)) -> Trained:
    given = network(name)
    batches = [in_order(batch_of(given[0], sum(micro_batches), step), micro_batches, order) for step in range(2)]
    return trained_alone(given, batches, [tuple(micro_batches[m] for m in order[: len(micro_batches)])] * 2)


def in_order(batch: tuple[Tensors, Tensors], micro_batches: tuple[int, ...], order: Sequence[int]) -> object:
    """The batch with its micro-batches in ``order``, which running statistics depend on."""
    parts = [[tensor.split(micro_batches) for tensor in tensors] for tensors in batch]
    present = [m for m in order if m < len(micro_batches)]
    return tuple(tuple(torch.cat([part[m] for m in present]) for part in tensors) for tensors in parts)


def order_of(plan: str) -> tuple[int, ...]:
    return TURNED if PLANS[plan].get("schedule") == "turned" else (0, 1, 2)


def dropping(given: Network, draw: CounterRng) -> LossOfStep:
    return drawing_loss(given[1], draw)
