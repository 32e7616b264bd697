"""Streams: answers are those of the user's module on one device, batch after batch, state of stages included."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from planner.ir.box import hull
from planner.ir.errors import NotFiniteError, UnsupportedModelError, UsageError
from planner.ir.plan import Decision
from planner.ir.profile import ModelSource
from profiler.models.example import Example, normal
from profiler.source.source import load_model
from runtime.engine import Engine
from runtime.extras.streams.stream import DEPTH, LEAD, Answered
from runtime.numerics.finite import OnNan
from runtime.pipeline.routing import Piece, assemble
from runtime.transport import InProcessTransport, MessageKey
from runtime.transport.frame import tag
from tests.captures import capture
from tests.runtime import test_local_losses
from tests.runtime.engines import Network, on_engines
from tests.runtime.plans import batch_of, decide

WIDTH = 5
CLASSES = 3
TOLERANCE = {"rtol": 1e-10, "atol": 1e-12}


class Recurrent(nn.Module):
    """A state that goes from batch to batch, the mean over samples, and a count of batches."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.inward = nn.Linear(WIDTH, WIDTH)
        self.again = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, CLASSES))
        self.state: Tensor
        self.count: Tensor
        self.register_buffer("state", torch.zeros(1, WIDTH))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        state = torch.tanh(self.inward(self.first(x)) + self.again(self.state.clone()))
        self.state.copy_(state.detach().mean(0, keepdim=True))
        scores = self.head(state)
        self.count.add_(1.0)
        return {"scores": scores + self.count, "state": state}


def loss_of(output: dict[str, Tensor], targets: Tensor) -> Tensor:
    return nn.functional.mse_loss(output["scores"], targets) + 0.1 * output["state"].square().mean()


def recurrent(*, input_shape: tuple[int, ...] = (4, WIDTH)) -> Example:
    torch.manual_seed(0)
    return Recurrent(), (normal(input_shape, 0), normal((input_shape[0], CLASSES), 1)), loss_of


class Plain(nn.Sequential):
    """Layers that treat samples apart, but for the norm."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 3, 3, padding=1), nn.Flatten(1)
        )


def plain(*, input_shape: tuple[int, ...] = (4, 2, 4, 4)) -> Example:
    torch.manual_seed(0)
    made = nn.functional.mse_loss
    return Plain(), (normal(input_shape, 0), normal((input_shape[0], 48), 1)), made


class Summing(nn.Module):
    """Puts out its state itself, which the next batch writes."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, CLASSES))
        self.total: Tensor
        self.register_buffer("total", torch.zeros(1, WIDTH))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        self.total.add_(x.sum(0, keepdim=True))
        return {"scores": self.head(x), "state": self.total}


def summing(*, input_shape: tuple[int, ...] = (4, WIDTH)) -> Example:
    torch.manual_seed(0)
    return Summing(), (normal(input_shape, 0), normal((input_shape[0], CLASSES), 1)), loss_of


@cache
def network(name: str = "plain", rows: int = 4) -> Network:
    shape = (rows, 2, 4, 4) if name == "plain" else (rows, WIDTH)
    model = load_model(ModelSource(f"{__name__}:{name}", {}, shape, "float64"))
    return model, capture(model)


def streamed(
    own: Network,
    decision: Decision,
    batches: Sequence[tuple[Tensor, ...]],
    *,
    probes: int = 0,
    on_nan: OnNan = OnNan.IGNORE,
    **setting: bool,
) -> tuple[list[list[Tensor]], dict[str, Tensor], list[float]]:
    """The tensors of the module's output for each batch, then the state, and the losses of learning."""

    def work(engine: Engine) -> tuple[list[Answered], dict[str, Tensor]]:
        stream = engine.stream(**setting)
        left = list(batches)
        found: list[Answered] = []
        for _ in range(probes):
            stream.offer(stream.batch(batches[0]), probes=True)
            stream.run()
        while left or stream.num_offered:
            while left and stream.has_room:
                stream.offer(stream.batch(left.pop(0)))
            found.append(stream.run())
        stream.settle()
        return found, engine.state_dict()

    ranks = on_engines(own, decision, work, answers=True, on_nan=on_nan)
    state = {name: tensor for _, of_rank in ranks for name, tensor in of_rank.items()}
    answers = []
    for number in range(len(batches)):
        of_batch = [found[number] for found, _ in ranks]
        answers.append([_whole(of_batch, value) for value in own[1].outputs.values()])
    rows = [sum(each.rows) for each in ranks[0][0]]
    losses = [sum(found[n].losses for found, _ in ranks) / rows[n] for n in range(len(batches))]
    return answers, state, losses


def _whole(found: Sequence[Answered], value: str) -> Tensor:
    """Of the parts that ranks have of each micro-batch."""
    micro_batches = []
    for m in range(len(found[0].rows)):
        pieces: list[Piece] = [each.outputs[m][value] for each in found if value in each.outputs.get(m, {})]
        if pieces:
            box = pieces[0][0]
            for part, _ in pieces:
                box = hull(box, part)
            micro_batches.append(assemble(pieces, box, pieces[0][1].dtype))
    return torch.cat(micro_batches)


def on_one_device(
    own: Network, batches: Sequence[tuple[Tensor, ...]], rows: int, *, training: bool
) -> tuple[list[list[Tensor]], dict[str, Tensor]]:
    """The module itself, on the parts of each batch that micro-batches of ``rows`` are."""
    module = copy.deepcopy(own[0].module).train(training)
    answers = []
    with torch.no_grad():
        for x, *_ in batches:
            outputs = [module(part) for part in x.split(rows)]
            parts = [list(each.values()) if isinstance(each, dict) else [each] for each in outputs]
            answers.append([torch.cat(tensors) for tensors in zip(*parts, strict=True)])
    return answers, module.state_dict()


def assert_same(found: list[list[Tensor]], expected: list[list[Tensor]]) -> None:
    assert len(found) == len(expected)
    for some, others in zip(found, expected, strict=True):
        for one, other in zip(some, others, strict=True):
            torch.testing.assert_close(one, other, **TOLERANCE)


def batches_of(own: Network, sizes: Sequence[int]) -> list[tuple[Tensor, ...]]:
    return [
        tuple(tensor for part in batch_of(own[0], rows, number) for tensor in part) for number, rows in enumerate(sizes)
    ]


PLANS: dict[str, dict[str, Any]] = {
    "state of stages, one row": {"name": "recurrent", "cuts": ["inward", "head.0"], "sizes": [1] * 5},
    "state of stages": {"name": "recurrent", "cuts": ["inward", "head.0"], "sizes": [3] * 5},
    "batches that probe leave no trace": {
        "name": "recurrent",
        "cuts": ["inward", "head.0"],
        "sizes": [2] * 3,
        "probes": 2,
    },
    "an answer that is a state": {"name": "summing", "cuts": ["head.2"], "sizes": [3] * 4},
    **{
        f"norms, unequal shares, last batches in fewer micro-batches, {schedule}": {
            "name": "plain",
            "cuts": [0.6],
            "sizes": [6, 6, 4, 3, 6, 2],
            "micro_batches": (3, 3),
            "replicas": ([(0, 1), (2,)], [(2, 1), (1,)]),
            "schedule": schedule,
        }
        for schedule in ("forward", "1f1b", "gpipe")
    },
}


@pytest.mark.cases(14)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("training", [True, False])
def test_answers_and_state_are_those_of_the_module_in_its_mode_from_batch_to_batch(plan: str, training: bool) -> None:
    asked = PLANS[plan]
    own = network(asked["name"])
    sizes = asked["sizes"]
    micro_batches = asked.get("micro_batches", (sizes[0],))
    replicas = asked.get("replicas", ())
    schedule = asked.get("schedule", "forward")
    decision = decide(own[1].graph, asked["cuts"], micro_batches, *replicas, schedule=schedule)
    batches = batches_of(own, sizes)
    found, state, _ = streamed(own, decision, batches, training=training, probes=asked.get("probes", 0))
    expected, own_state = on_one_device(own, batches, micro_batches[0], training=training)
    assert_same(found, expected)
    for name, tensor in state.items():
        torch.testing.assert_close(tensor, own_state[name], **TOLERANCE)


def test_a_stage_works_on_a_batch_while_the_next_is_behind() -> None:
    """Rank 1 touches its first batch only when rank 0 is done with it: a step's barrier would never let it."""
    own = network()
    is_done = threading.Event()
    decision = decide(own[1].graph, [0.6], (4,), schedule="forward")
    (batch,) = batches_of(own, [4])

    def work(engine: Engine) -> int:
        stream = engine.stream()
        if not engine.state_dict().keys() & {"0.weight"}:
            assert is_done.wait(20)
        stream.offer(stream.batch(batch))
        assert stream.has_room is (DEPTH > 1)
        number = stream.run().number
        is_done.set()
        stream.settle()
        return number

    assert on_engines(own, decision, work, answers=True) == [0, 0]


def test_a_rank_waits_for_its_readers_before_a_transport_takes_messages_of_two_batches_for_the_same() -> None:
    own = network()
    decision = decide(own[1].graph, [0.6], (4,), schedule="forward")
    (batch,) = batches_of(own, [4])
    waits = [0, 0]

    class Waiting(InProcessTransport):
        def flush(self) -> None:
            waits[self.rank] += 1
            super().flush()

    def work(engine: Engine) -> list[int]:
        stream = engine.stream()
        rank = 1 - ("0.weight" in engine.state_dict())
        seen = []
        for _ in range(6):
            stream.offer(stream.batch(batch))
            stream.run()
            seen.append(waits[rank])
        stream.settle()
        return seen

    waited = [number // LEAD for number in range(1, 7)]
    assert on_engines(own, decision, work, transport=Waiting, answers=True) == [waited, waited]
    assert len({tag(MessageKey(step, "F", 0, 1, 0)) for step in range(DEPTH + LEAD)}) == DEPTH + LEAD


@pytest.mark.parametrize("ranks", [((0,), (1,)), ((0, 1), (2,)), ((0,), (1,), (2,), (3,))])
def test_each_stage_learns_from_its_own_loss_as_one_device_does_batch_after_batch(
    ranks: tuple[tuple[int, ...], ...],
) -> None:
    own = test_local_losses.network()
    decision = test_local_losses.decision_of(len(ranks), "1f1b", (3, 3), ranks)
    batches = batches_of(own, [6, 6, 5, 6, 3, 6])
    found, state, losses = streamed(own, decision, batches, learns=True)
    twin = copy.deepcopy(own[0].module)
    of_block = [
        torch.optim.SGD([*block.parameters(), *head.parameters()], lr=0.01, momentum=0.9)
        for block, head in zip(twin.blocks, twin.heads, strict=True)
    ]
    for number, (x, targets) in enumerate(batches):
        total = 0.0
        for n, (block, head) in enumerate(zip(twin.blocks, twin.heads, strict=True)):  # each by what it alone knows
            x = block(x.detach())
            made = head(x)
            torch.testing.assert_close(found[number][n], made, **TOLERANCE)
            loss = nn.functional.mse_loss(made, targets)
            of_block[n].zero_grad()
            loss.backward()
            of_block[n].step()
            total += loss.item()
        assert losses[number] == pytest.approx(total, rel=1e-10)
    for name, tensor in twin.state_dict().items():
        torch.testing.assert_close(state[name], tensor, **TOLERANCE)


def test_a_plan_whose_gradients_cross_between_stages_does_not_learn_over_a_stream() -> None:
    own = network()
    decision = decide(own[1].graph, [0.6], (4,))
    with pytest.raises(UsageError, match="cannot learn over a stream") as told:
        on_engines(own, decision, lambda engine: engine.stream(learns=True), answers=True)
    assert "gradients cross between stages: 0 to 1" in told.value.details
    decision = decide(own[1].graph, [0.6], (4,), schedule="forward")
    with pytest.raises(UsageError, match="cannot learn over a stream"):
        on_engines(own, decision, lambda engine: engine.stream(learns=True), answers=True)


def test_what_is_no_number_is_not_learnt() -> None:
    own = test_local_losses.network()
    decision = test_local_losses.decision_of(2, "1f1b", (6,))
    x, targets = batches_of(own, [6])[0]
    with pytest.raises(NotFiniteError, match=r"stage [01] cannot learn from batch 0"):
        streamed(own, decision, [(x * float("nan"), targets)], learns=True, on_nan=OnNan.STOP)


class Untold(Plain):
    """Has more in its output than its loss depends on."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x), x.sum((1, 2, 3))


def untold(*, input_shape: tuple[int, ...] = (4, 2, 4, 4)) -> tuple[nn.Module, object, Callable[..., Tensor]]:
    _, example, _ = plain(input_shape=input_shape)
    return Untold(), example, lambda output, targets: nn.functional.mse_loss(output[0], targets)


def test_an_output_that_the_graph_does_not_make_is_refused() -> None:
    model = load_model(ModelSource(f"{__name__}:untold", {}, (4, 2, 4, 4), "float64"))
    own = model, capture(model)
    assert list(own[1].outputs.values())[1] == ""
    decision = decide(own[1].graph, [0.6], (4,), schedule="forward")
    with pytest.raises(UnsupportedModelError, match="output cannot be had") as told:
        on_engines(own, decision, lambda engine: engine.stream(), answers=True)
    assert "of its 2 tensors, is not made on the way to the loss" in told.value.details[0]
