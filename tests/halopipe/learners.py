"""Small models that learn, with parameters that follow from nothing but their shapes, and data for them."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from functools import cache
from itertools import count

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, TensorDataset

from planner.ir.plan import Plan
from planner.ir.profile import ModelSource
from tests.halopipe.plans import plan_of

NUM_SAMPLES = 19
NUM_CLASSES = 3
WIDTH = 5


def classifier(
    *, input_shape: tuple[int, ...] = (4, WIDTH), dropout: float = 0.2
) -> tuple[nn.Module, tuple[Tensor, Tensor], object]:
    """Two layers, dropout between."""
    module = nn.Sequential(nn.Linear(WIDTH, 7), nn.Tanh(), nn.Dropout(dropout), nn.Linear(7, NUM_CLASSES))
    _fill(module)
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(input_shape, generator=generator)
    targets = torch.randint(NUM_CLASSES, input_shape[:1], generator=generator)
    return module, (inputs, targets), functional.cross_entropy


class Keyed(nn.Module):
    """Takes a mapping with the labels inside, and gives one with its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = classifier(dropout=0.0)[0]

    def forward(self, inputs: list[Tensor | None], labels: Tensor) -> dict[str, Tensor]:
        logits = self.layers(inputs[0])
        return {"loss": functional.cross_entropy(logits, labels), "logits": logits}


def keyed() -> tuple[nn.Module, dict[str, object]]:
    """The classifier, as models of people are called."""
    _, (inputs, targets), _ = classifier(dropout=0.0)
    return Keyed(), {"inputs": [inputs, None], "labels": targets}


class Heads(nn.Module):
    """Two answers and what they are made of, by name; the loss is made of all but one.

    Of inputs in sixteenths every sum is exact: no part of a batch rounds otherwise, whatever a processor adds first.
    """

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, 7), nn.Hardtanh())
        self.classes = nn.Linear(7, NUM_CLASSES)
        self.size = nn.Linear(7, 1)

    def forward(self, x: Tensor) -> dict[str, object]:
        found = self.body(x)
        size = self.size(found).squeeze(1)
        return {"classes": self.classes(found), "more": [size, found], "idle": found.exp()}


def heads() -> tuple[object, ...]:
    """A classifier that also tells sizes."""
    module = Heads()
    _, example, _ = classifier()
    _fill(module)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(16).round_().div_(16)
    return module, example, _of_heads


def _of_heads(output: dict[str, Tensor], targets: Tensor) -> dict[str, Tensor]:
    size, found = output["more"]
    sizes = functional.mse_loss(size, targets.to(size.dtype))
    return {
        "classes": functional.cross_entropy(output["classes"], targets),
        "sizes": sizes + 0.1 * found.square().mean(),
    }


class Confusion:
    """A metric: how often the right class was found, and a number that depends on the order of the samples."""

    def __init__(self) -> None:
        self.counts = torch.zeros(NUM_CLASSES, NUM_CLASSES)
        self.seen = list[Tensor]()

    def update(self, prediction: Tensor, target: Tensor) -> None:
        self.seen.append(prediction.double().flatten())
        for guess, right in zip(prediction.argmax(1).flatten(), target.flatten(), strict=True):
            self.counts[right, guess] += 1

    def compute(self) -> dict[str, Tensor]:
        seen = torch.cat(self.seen)
        recall = (self.counts.diag() / self.counts.sum(1).clamp(min=1)).mean()
        return {"recall": recall, "order": torch.arange(len(seen), dtype=torch.float64) @ seen}


def tagger() -> tuple[object, ...]:
    """A class for each place of sequences whose length varies from batch to batch."""
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, NUM_CLASSES))
    _fill(module)
    generator = torch.Generator().manual_seed(1)
    tensors = torch.randn(4, 6, WIDTH, generator=generator), torch.randint(3, (4, 6), generator=generator)
    return module, tensors, _tag_loss, {"time": [("inputs", 1), ("targets", 1)]}


def _tag_loss(output: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(output.flatten(0, 1), targets.flatten())


def sequences(global_batch: int, input_shape: tuple[int, ...], seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of sequences of 3, 4, 5, 3, ... places."""
    generator = torch.Generator().manual_seed(seed)
    for step in count():
        inputs = torch.randn(global_batch, 3 + step % 3, WIDTH, generator=generator)
        yield inputs, inputs[:, :, :NUM_CLASSES].argmax(-1)


class Sequences(Dataset[tuple[Tensor, Tensor]]):
    """Sequences that are shorter than those of the example."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(index))
        return inputs, inputs[:, :NUM_CLASSES].argmax(-1)


def some_sequences(global_batch: int, input_shape: tuple[int, ...], seed: int) -> Sequences:
    """Shorter than the example's."""
    return Sequences()


@cache
def samples() -> tuple[Tensor, Tensor]:
    """Inputs and classes of all samples."""
    inputs = torch.randn(NUM_SAMPLES, WIDTH, generator=torch.Generator().manual_seed(5))
    return inputs, inputs[:, :NUM_CLASSES].argmax(1)


def dataset(global_batch: int, input_shape: tuple[int, ...], seed: int) -> TensorDataset:
    """19 samples."""
    return TensorDataset(*samples())


class Noisy(Dataset[tuple[Tensor, int]]):
    """The same samples, with noise from torch's own generator."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        inputs, targets = samples()
        return inputs[index] + 0.1 * torch.randn(WIDTH), int(targets[index])


def noisy(global_batch: int, input_shape: tuple[int, ...], seed: int) -> Noisy:
    """Samples with noise."""
    return Noisy()


def loader(global_batch: int, input_shape: tuple[int, ...], seed: int) -> DataLoader[tuple[Tensor, int]]:
    """A shuffling DataLoader of samples with noise."""
    return DataLoader(Noisy(), batch_size=global_batch, shuffle=True)


def stream(global_batch: int, input_shape: tuple[int, ...], seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches without end."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        inputs = torch.randn(global_batch, *input_shape[1:], generator=generator)
        yield inputs, inputs[:, :NUM_CLASSES].argmax(1)


def deadly(global_batch: int, input_shape: tuple[int, ...], seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The same batches; the process that is the first to come to the fifth is killed, and leaves a file ``died``."""
    for step, batch in enumerate(stream(global_batch, input_shape, seed)):
        if step == 4:
            with contextlib.suppress(FileExistsError):
                os.close(os.open("died", os.O_CREAT | os.O_EXCL))
                os.kill(os.getpid(), signal.SIGKILL)
        yield batch


def pieces(global_batch: int, input_shape: tuple[int, ...], seed: int) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Micro-batches one by one, the second smaller."""
    for inputs, targets in stream(global_batch, input_shape, seed):
        yield [(inputs[:3], targets[:3]), (inputs[3:4], targets[3:4])]


def plan(cuts: list[float] | None = None, micro_batches: tuple[int, ...] = (3, 3), **options: object) -> Plan:
    """A plan of the classifier in float64, of two stages unless said otherwise."""
    source = ModelSource(f"{__name__}:classifier", {}, (4, WIDTH), "float64")
    return plan_of(source, [0.5] if cuts is None else cuts, micro_batches, **options)


def replicas() -> Plan:
    """Four ranks: two share each stage."""
    return plan(ranks=[(0, 1), (2, 3)], shares=[(1, 1), (1, 2)])


def plan_of_taggers() -> Plan:
    """A plan of the tagger in float64."""
    return plan_of(ModelSource(f"{__name__}:tagger", {}, (), "float64"), [0.5], (2, 2))


def _fill(module: nn.Module) -> None:
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 2)
