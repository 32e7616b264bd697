"""What people do with metrics in their scripts: a habit a row (:mod:`benchmarks.robustness.habits`).

Each trains a small network for two steps under several plans, and evaluates a metric of its own on two batches, beside
a loop on one device that calls the metric as it calls its loss function.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import halopipe as hp
from benchmarks.robustness.habits import Habit, Notes
from planner.ir.plan import Plan
from planner.ir.profile import ModelSource
from profiler.models.example import normal
from profiler.source.source import load_model
from tests.captures import capture
from tests.halopipe.plans import plan_of
from tests.runtime.divided import divided

SAMPLES = 6
NUM_CLASSES = 3
WIDTH = 5

LossFunction = Callable[[Any, Any], Tensor]
Batch = tuple[Any, Any]


def habits() -> list[Habit]:
    """All of them."""
    return [*(_habit(name, plan) for name in NETWORKS for plan in PLANS), _divided(), *_named(), *_refused()]


def mse_and_l1(output: Tensor, target: Tensor) -> Tensor:
    """Two terms of one pair."""
    return functional.mse_loss(output, target) + 0.1 * functional.l1_loss(output, target)


def by_hand(output: Tensor, target: Tensor) -> Tensor:
    """No loss function of torch."""
    return ((output - target) ** 2).mean()


def of_probabilities(output: Tensor, target: Tensor) -> Tensor:
    """What torch compares is not what the module gives."""
    return functional.nll_loss(output.log_softmax(1), target)


def of_heads(output: Mapping[str, Tensor], targets: Sequence[Tensor]) -> Tensor:
    """Two heads, each with its target."""
    sizes, classes = targets
    return functional.mse_loss(output["size"], sizes) + 0.5 * functional.cross_entropy(output["classes"], classes)


class Heads(nn.Module):
    """A network that says two things, in two stages' work."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh())
        self.size = nn.Linear(8, 1)
        self.classes = nn.Linear(8, NUM_CLASSES)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        found = self.body(x)
        return {"size": self.size(found).squeeze(1), "classes": self.classes(found)}


class WithFeatures(nn.Module):
    """A network that gives its features as well, of which no loss is made."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh())
        self.head = nn.Linear(8, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        found = self.body(x)
        return self.head(found), found.exp()


class WithOwnLoss(nn.Module):
    """A network that makes its loss itself, of two terms."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh())
        self.head = nn.Linear(8, WIDTH)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        found = self.head(self.body(x))
        return {"loss": mse_and_l1(found, labels), "logits": found}


class MAE:
    """The mean absolute error over all elements, and the mean over batches of each batch's own."""

    def __init__(self) -> None:
        self.errors = list[Tensor]()
        self.of_batches = list[Tensor]()

    def update(self, prediction: Tensor, target: Tensor) -> None:
        """Of a batch."""
        error = (prediction - target).abs()
        self.errors.append(error.flatten())
        self.of_batches.append(error.mean())

    def compute(self) -> dict[str, Tensor]:
        """Both."""
        return {"all": torch.cat(self.errors).mean(), "batches": torch.stack(self.of_batches).mean()}


class Sharpness:
    """The largest number that a network gives for the right class, and the mean over all classes."""

    def __init__(self) -> None:
        self.right = list[Tensor]()
        self.seen = list[Tensor]()

    def update(self, prediction: Tensor, target: Tensor) -> None:
        """Of a batch."""
        self.right.append(prediction.gather(1, target[:, None]).flatten())
        self.seen.append(prediction.flatten())

    def compute(self) -> dict[str, Tensor]:
        """Both."""
        return {"right": torch.cat(self.right).max(), "mean": torch.cat(self.seen).mean()}


class OfHeads:
    """As the loss of heads is called."""

    def __init__(self) -> None:
        self.size = MAE()
        self.classes = Sharpness()

    def update(self, output: Mapping[str, Tensor], targets: Sequence[Tensor]) -> None:
        """Of a batch."""
        sizes, classes = targets
        self.size.update(output["size"], sizes)
        self.classes.update(output["classes"], classes)

    def compute(self) -> dict[str, Tensor]:
        """All."""
        return {**self.size.compute(), **self.classes.compute()}


def regressor() -> tuple[Any, ...]:
    """A network whose loss has two terms."""
    return _perceptron(WIDTH), batch(0), mse_and_l1


def regressor_by_hand() -> tuple[Any, ...]:
    """The same with a loss of plain arithmetic."""
    return _perceptron(WIDTH), batch(0), by_hand


def classifier() -> tuple[Any, ...]:
    """A network whose loss is of probabilities."""
    return _perceptron(NUM_CLASSES), batch(0, "classes"), of_probabilities


def heads() -> tuple[Any, ...]:
    """A network with two heads."""
    return _filled(Heads()), batch(0, "heads"), of_heads


def with_features() -> tuple[Any, ...]:
    """A network that gives its features as well."""
    return _filled(WithFeatures()), batch(0), lambda output, target: mse_and_l1(output[0], target)


def with_own_loss() -> tuple[Any, ...]:
    """A network that makes its loss itself."""
    return _filled(WithOwnLoss()), {"x": batch(0)[0], "labels": batch(0)[1]}


def picture() -> tuple[Any, ...]:
    """A network over space whose loss has two terms."""
    layers = nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 2, 3, padding=1)
    return _filled(nn.Sequential(*layers)), batch(0, "pictures"), mse_and_l1


def batch(number: int, kind: str = "", samples: int = SAMPLES) -> Batch:
    """Inputs and targets."""
    if kind == "pictures":
        return normal((samples, 2, 8, 6), number), normal((samples, 2, 8, 6), number + 50)
    inputs = normal((samples, WIDTH), number)
    numbers = normal((samples, WIDTH), number + 50)
    classes = numbers.argmax(1) % NUM_CLASSES
    targets = {"": numbers, "classes": classes, "heads": (numbers[:, 0], classes)}
    return inputs, targets[kind]


@dataclass(frozen=True, slots=True)
class Network:
    """A factory of this module, and the metric that goes with it."""

    factory: str
    metric: Callable[[], Any]
    kind: str = ""

    @property
    def source(self) -> ModelSource:
        """In float64."""
        return ModelSource(f"benchmarks.robustness.metrics:{self.factory}", dtype="float64")


def held_out(network: Network) -> list[Batch]:
    """Two batches, of which one is smaller."""
    return [_double(batch(7, network.kind)), _double(batch(8, network.kind, SAMPLES - 1))]


NETWORKS = {
    "a loss of two terms": Network("regressor", MAE),
    "a loss by hand": Network("regressor_by_hand", MAE),
    "a loss of probabilities": Network("classifier", Sharpness, "classes"),
    "a loss of two heads": Network("heads", OfHeads, "heads"),
}

PLANS: Mapping[str, Callable[[ModelSource], Plan]] = {
    "a pipeline, unequal micro-batches": lambda source: plan_of(source, [0.5], (4, 2)),
    "unequal shares of the samples": lambda source: plan_of(source, [], (4, 2), ranks=[(0, 1)], shares=[(1, 2)]),
}


def _filled(module: nn.Module) -> nn.Module:
    with torch.no_grad():
        for number, parameter in enumerate(module.parameters()):
            parameter.copy_(0.4 * normal(tuple(parameter.shape), 100 + number))
    return module


def _perceptron(num_outputs: int) -> nn.Module:
    return _filled(nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, num_outputs)))


def _habit(name: str, plan: str) -> Habit:
    network = NETWORKS[name]
    return _compared(f"{name}, {plan}", network, lambda: PLANS[plan](network.source))


def _divided() -> Habit:
    network = Network("picture", MAE, "pictures")

    def cut_along_height() -> Plan:
        plan = plan_of(network.source, [], (SAMPLES,))
        graph = capture(load_model(network.source)).graph
        return replace(plan, decision=divided(graph, {"height": (0, 3, 8)}, (4, 2)))

    return _compared("a loss of two terms, cut along height", network, cut_along_height)


def _compared(name: str, network: Network, make_plan: Callable[[], Plan]) -> Habit:
    """Two steps, then the metric on a batch and on a smaller one."""

    def plain(notes: Notes) -> None:
        loaded = load_model(network.source)
        module = loaded.module
        loss_fn = loaded.loss_fn.function
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for number in range(2):
            optimizer.zero_grad()
            inputs, targets = _double(batch(number, network.kind))
            loss = loss_fn(module(inputs), targets)
            loss.backward()
            optimizer.step()
            notes.numbers.append(loss.item())
        metric = network.metric()
        with torch.no_grad():
            for inputs, targets in held_out(network):
                metric.update(module.eval()(inputs), targets)
        notes.numbers += [float(value) for value in metric.compute().values()]

    def ours(notes: Notes) -> None:
        with hp.parallelize(load_model(network.source).module, plan=make_plan(), optimizer="SGD:lr=0.1") as run:
            notes.numbers += [run.step(_double(batch(number, network.kind))) for number in range(2)]
            notes.numbers += run.evaluate(*held_out(network), metric=network.metric).metrics.values()

    return Habit(name, plain, ours)


def _double(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_double, value))
    return value.double() if value.is_floating_point() else value


def _named() -> list[Habit]:
    """What metrics are given where the script names it."""
    return [
        _by_name("features beside the output, which is named", Network("with_features", MAE), ("0", "targets")),
        _by_name(
            "a module that makes its loss itself, names given", Network("with_own_loss", MAE), ("logits", "labels")
        ),
    ]


def _by_name(name: str, network: Network, outputs: tuple[str, ...]) -> Habit:
    def plain(notes: Notes) -> None:
        module = load_model(network.source).module
        metric = MAE()
        inputs, targets = _double(batch(7))
        found = module(inputs)[0] if outputs[0] == "0" else module(inputs, targets)[outputs[0]]
        metric.update(found.detach(), targets)
        notes.numbers += [float(value) for value in metric.compute().values()]

    def ours(notes: Notes) -> None:
        given = _double(batch(7))
        own = given if outputs[0] == "0" else dict(zip(("x", "labels"), given, strict=True))
        with _run(network) as run:
            notes.numbers += run.evaluate(own, metric=MAE, outputs=outputs).metrics.values()

    return Habit(name, plain, ours)


def _run(network: Network) -> Any:
    plan = plan_of(network.source, [0.5], (4, 2))
    return hp.parallelize(load_model(network.source).module, plan=plan, optimizer="SGD:lr=0.1")


def _refused() -> list[Habit]:
    """What is not to be had is said before anything is done."""
    return [
        _asked("features beside the output", Network("with_features", MAE), "the loss is not made of all tensors"),
        _asked("a module that makes its loss itself", Network("with_own_loss", MAE), "makes its loss itself"),
    ]


def _asked(name: str, network: Network, says: str) -> Habit:
    def ours(_: Notes) -> None:
        given = _double(batch(7))
        own = given if network.factory == "with_features" else dict(zip(("x", "labels"), given, strict=True))
        with _run(network) as run:
            run.evaluate(own, metric=MAE)

    return Habit(name, lambda _: None, ours, says)
