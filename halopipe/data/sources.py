"""What a data factory gave, epoch after epoch: an iterator, an iterable such as a DataLoader, or a Dataset.

A factory (:mod:`halopipe.data.factories`) gives one of

    an iterator     of batches of up to ``global_batch`` samples, until it ends
    a DataLoader    or another iterable of batches, passed over again and again
    a Dataset       of samples, of torch or of ``datasets``, shuffled each epoch; the last batch may be smaller

What is drawn from the global generators of torch, numpy and ``random`` (the order of samples, augmentations) follows
from the seed, the epoch and the place in it alone: every rank, every plan and a run that goes on later gets the same
batches.  Workers of a DataLoader are seeded by torch, from a number drawn here, anew each epoch.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from cuda_ops._torch import forget_iterator
from cuda_ops.device.seeding import seed_generators, seeded
from halopipe.data.factories import BatchItem, BatchPytree, Pair, call_of
from planner.ir.errors import DifferentDataError, FactoryError, UsageError
from profiler.source.model import LoadedModel, fed_example
from profiler.source.source import find_factory
from runtime.pipeline.microbatches import Batch, InputSpecs, MicroBatches, WholeBatch
from runtime.pipeline.routing import dtype_of


@dataclass(frozen=True, slots=True)
class Position:
    """A place in the data: ``batches`` and ``samples`` of ``epoch`` lie before it."""

    epoch: int = 0
    batches: int = 0
    samples: int = 0

    def after(self, epoch: int, samples: int) -> Position:
        """The place after a batch of ``epoch``."""
        before = self if epoch == self.epoch else Position(epoch)
        return Position(epoch, before.batches + 1, before.samples + samples)


class Data(Protocol):
    """Batches in epochs.

    Attributes:
        repeats: whether there are further epochs.
        origin: what data it is and how it was asked for, in words.
    """

    repeats: bool
    origin: str

    def epoch(self, start: Position) -> Iterator[BatchItem]:
        """The batches of an epoch from ``start`` on."""
        ...


@dataclass(slots=True)
class ExampleData:
    """The model's own example, repeated to the global batch, again and again."""

    pair: Pair
    repeats: bool = False
    origin: str = "the model's own example, again and again"

    def epoch(self, start: Position) -> Iterator[BatchItem]:
        while True:
            yield self.pair


def _drawn(iterator: Iterator[Any], seed: int, start: Position) -> Iterator[Any]:
    """The batches of an epoch from ``start`` on; what each draws depends on its number and the epoch alone."""
    for number in count():
        with drawing(seed, start.epoch, number):
            item = next(iterator, _END)
        if item is _END:
            return
        if number >= start.batches:
            yield item


class StreamData:
    """An iterator: one epoch; asked again, the factory is called again."""

    repeats = False

    def __init__(self, first: Iterator[Any], make: Callable[[], Iterator[Any]], seed: int, form: BatchPytree) -> None:
        self._first: Iterator[Any] | None = first
        self._make = make
        self._seed = seed
        self._form = form
        self.origin = f"{form.call} gave an iterator of batches"

    def epoch(self, start: Position) -> Iterator[BatchItem]:
        with self._form.told():
            iterator = self._make() if self._first is None else self._first
            self._first = None
            yield from map(self._form.item, _drawn(iterator, self._seed, start))


class LoaderData:
    """An iterable of batches, such as a DataLoader: one pass is an epoch.

    Generators and samplers (``set_epoch``) of a DataLoader are set anew for each epoch, and its workers start anew.
    """

    repeats = True

    def __init__(self, loader: Iterable[Any], seed: int, form: BatchPytree, global_batch: int) -> None:
        self._loader = loader
        self._seed = seed
        self._form = form
        self.origin = f"{form.call} gave batches in epochs ({type(loader).__name__})"
        self.length = self._samples(global_batch)

    def epoch(self, start: Position) -> Iterator[BatchItem]:
        with self._form.told():
            self._begin(start.epoch)
            with drawing(self._seed, start.epoch):
                iterator = iter(self._loader)
            yield from map(self._form.item, _drawn(iterator, self._seed, start))

    def _samples(self, global_batch: int) -> int:
        loader = self._loader
        if not isinstance(loader, DataLoader) or loader.drop_last or loader.batch_size != global_batch:
            return 0
        try:
            return len(loader.sampler)  # type: ignore[arg-type]  # not every sampler has a length
        except (TypeError, NotImplementedError):
            return 0

    def _begin(self, epoch: int) -> None:
        loader: Any = self._loader
        batches = getattr(loader, "batch_sampler", None)
        owners: tuple[Any, ...] = loader, getattr(loader, "sampler", None), batches, getattr(batches, "sampler", None)
        for owner in {id(each): each for each in (*owners, getattr(loader, "dataset", None))}.values():
            if callable(getattr(owner, "set_epoch", None)):
                owner.set_epoch(epoch)
        if getattr(loader, "persistent_workers", False):
            forget_iterator(loader)  # else they would go on drawing where the epoch before left them
        for owner in owners:
            generator = getattr(owner, "generator", None)
            if isinstance(generator, torch.Generator):
                generator.manual_seed(mixed(self._seed, epoch))


class Samples:
    """A map-style Dataset, whose samples are (inputs, targets), put together by ``default_collate``.

    The last batch of an epoch may be smaller.

    Args:
        shuffled: whether each epoch has an order of its own.
    """

    repeats = True

    def __init__(self, dataset: Any, global_batch: int, seed: int, form: BatchPytree, *, shuffled: bool) -> None:
        self._dataset = dataset
        self._global_batch = global_batch
        self._seed = seed
        self._form = form
        self._shuffled = shuffled
        with form.told():
            self.length = len(dataset)
        self.origin = f"{form.call} gave a Dataset of {self.length} samples ({type(dataset).__name__})"
        if not self.length:
            raise FactoryError(f"{form.name} gave a Dataset without samples", [f"it is a {type(dataset).__name__}"])

    def epoch(self, start: Position) -> Iterator[BatchItem]:
        for indices in self.indices(start):
            yield self.collated(start.epoch, indices)

    def indices(self, start: Position) -> Iterator[Sequence[int]]:
        """The samples of each batch from ``start`` on."""
        order: Sequence[int] = range(self.length)
        if self._shuffled:
            generator = torch.Generator().manual_seed(mixed(self._seed, start.epoch))
            order = torch.randperm(self.length, generator=generator).tolist()
        for first in range(start.samples, self.length, self._global_batch):
            yield order[first : first + self._global_batch]

    def collated(self, epoch: int, indices: Sequence[int]) -> Pair:
        """These samples as one batch; what a sample draws depends on its number and the epoch alone."""
        with self._form.told(), drawing(self._seed, epoch):
            samples = []
            for index in indices:
                seed_generators(mixed(self._seed, epoch, index))
                samples.append(self._dataset[index])
            return self._form.pair(default_collate(samples))

    def require_repeatable(self, start: Position) -> None:
        """Reads the first sample from ``start`` on twice.

        Raises:
            DifferentDataError: it is another one the second time.
        """
        index = next(iter(self.indices(start)), [0])[0]
        first, second = (_flat(self.collated(start.epoch, [index])) for _ in range(2))
        if [digest(tensor) for tensor in first] != [digest(tensor) for tensor in second]:
            raise DifferentDataError(
                f"sample {index} of {self._form.name} is another one when it is read again",
                ["what a rank reads, or reads again after a checkpoint, would not be what another one read"],
                [
                    "draw from torch, numpy or random themselves, which are seeded for each sample and epoch",
                    "make a generator of the sample's number in __getitem__, not one for all in __init__",
                ],
            )


def samples_of_epoch(data: Data | None) -> int:
    """Samples of an epoch, of a Dataset or a DataLoader that keeps its last batch; 0: unknown."""
    return data.length if isinstance(data, (Samples, LoaderData)) else 0


def digest(tensor: Tensor) -> int:
    """32 bits that follow from the dtype, shape and bytes of a tensor."""
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    bytes_: Any = flat.numpy()  # numpy types its buffer from Python 3.12 on
    return zlib.crc32(bytes_, zlib.crc32(f"{tensor.dtype}{tuple(tensor.shape)}".encode()))


def _flat(pair: Pair) -> tuple[Tensor, ...]:
    return *pair[0], *pair[1]


def open_data(name: str, model: LoadedModel, global_batch: int, seed: int, *, shuffled: bool = True) -> Data:
    """What the factory ``name`` gives for ``model``; the model's example if ``name`` is empty.

    Args:
        shuffled: whether a Dataset is shuffled anew each epoch.

    Raises:
        ModelNotFoundError, FactoryError: the factory is not there, or fails, or gives something else.
    """
    if not name:
        return ExampleData(_repeated(model, global_batch))
    with seeded(seed):
        factory = find_factory(name)
        shape = _input_shape(model)
    call = call_of(name, factory, {"global_batch": global_batch, "input_shape": shape, "seed": seed})
    form = BatchPytree(name, model.casts, model.batch, call.text)

    def make() -> Any:
        with form.told(), seeded(seed):
            return call.make()

    source = make()
    if isinstance(source, IterableDataset):
        return LoaderData(DataLoader(source, batch_size=global_batch), seed, form, global_batch)
    if isinstance(source, Dataset) or _is_map_style(source):
        return Samples(source, global_batch, seed, form, shuffled=shuffled)
    if not hasattr(source, "__iter__") and not hasattr(source, "__getitem__"):
        description = "None" if source is None else f"a {type(source).__name__}"
        raise FactoryError(
            f"{name} gave {description}, which is no data",
            [f"called as {call.text}"],
            ["return a Dataset, a DataLoader, a list of batches or an iterator of them"],
        )
    with form.told(), seeded(seed):
        iterator = iter(source) if not isinstance(source, DataLoader) else None
    if iterator is not None and iterator is source:
        return StreamData(iterator, make, seed, form)
    return LoaderData(source, seed, form, global_batch)


def mixed(*numbers: int) -> int:
    """A seed that follows from the numbers."""
    text = "/".join(map(str, numbers)).encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "big") >> 1


@contextmanager
def drawing(*numbers: int) -> Iterator[None]:
    """What torch, numpy and ``random`` draw inside follows from the numbers, and leaves no trace."""
    with seeded(mixed(*numbers)):
        yield


def _is_map_style(source: Any) -> bool:
    """Whether it is read by numbers of samples, as those of ``datasets`` are; a list is one of batches."""
    return hasattr(source, "__getitems__") and hasattr(source, "__len__")


_END = object()
"""Of an iterator; an iterator may give None, which is no batch."""


def _input_shape(model: LoadedModel) -> tuple[int, ...]:
    """Of the first input as it is wanted; of clouds (samples, points, channels) of the features, of graphs (seeds,)."""
    if model.clouds is None:
        return model.shape_of(model.names[0], tuple(model.inputs[0].shape))
    named = model.clouds.named
    return tuple(named.get("features", next(iter(named.values()))).shape)


def _repeated(model: LoadedModel, global_batch: int) -> Pair:
    tensors = fed_example(model, global_batch)
    if model.sizes:
        tensors = tuple(_of_size(model, name, each) for name, each in zip(model.names, tensors, strict=False))
    num_inputs = len(model.fed[0])
    return tensors[:num_inputs], tensors[num_inputs:]


def _of_size(model: LoadedModel, name: str, tensor: Tensor) -> Tensor:
    """The tensor repeated along the dims that are wanted larger."""
    for dim, extent in enumerate(model.shape_of(name, tuple(tensor.shape))):
        if tensor.shape[dim] != extent:
            tensor = tensor.index_select(dim, torch.arange(extent) % tensor.shape[dim])
    return tensor


def batches(data: str, model: LoadedModel, global_batch: int, seed: int) -> Iterator[BatchItem]:
    """What every step trains on, from the first on.

    Raises:
        ModelNotFoundError, FactoryError: the factory is not there, or fails.
    """
    for _, item in read(open_data(data, model, global_batch, seed), Position()):
        yield item


def read(data: Data, start: Position, epochs: int = 0) -> Iterator[tuple[int, BatchItem]]:
    """The epoch of each batch and the batch, from ``start`` on; ``epochs`` of them in all, 0: as many as there are."""
    at = start
    while True:
        is_empty = True
        for item in data.epoch(at):
            is_empty = False
            yield at.epoch, item
        if not data.repeats or (is_empty and not at.batches) or (epochs and at.epoch + 1 >= epochs):
            return
        at = Position(at.epoch + 1)


def take(stream: Iterator[BatchItem], step: int) -> BatchItem:
    """The next batch.

    Raises:
        UsageError: there is none.
    """
    batch = next(stream, None)
    if batch is None:
        raise ended(step)
    return batch


def ended(step: int) -> UsageError:
    """The error of data that ends before the run."""
    if step == 0:
        return UsageError("the data are empty", ["they ended before the first batch"], ["data of one batch at least"])
    return UsageError(
        f"the data ended after {step} batches",
        ["one is needed for every step"],
        [f"--steps {step}"],
    )


def bound(item: BatchItem, inputs: InputSpecs, planned: Sequence[int], *, is_prepared: bool = False) -> Batch:
    """What the engine takes.

    Args:
        is_prepared: the graph's inputs are made of it (clouds, seeds), in their own dtypes.

    Raises:
        UsageError: it is not what the model takes, of another dtype, or more than planned.
    """
    if not is_prepared:
        for pair in item if isinstance(item, list) else [item]:
            _require_dtypes(pair, inputs)
    if isinstance(item, list):
        return MicroBatches(inputs, [(*model_inputs, *targets) for model_inputs, targets in item], len(planned))
    return WholeBatch(inputs, (*item[0], *item[1]), tuple(planned))


def _require_dtypes(pair: Pair, inputs: InputSpecs) -> None:
    """Tensors have the dtypes of the example; targets may be other floats, which a loss promotes as torch does."""
    num_inputs = len(pair[0])
    for number, (tensor, (name, spec)) in enumerate(zip((*pair[0], *pair[1]), inputs.specs.items(), strict=False)):
        wanted = dtype_of(spec)
        is_near = number >= num_inputs and tensor.is_floating_point() and wanted.is_floating_point
        if tensor.dtype != wanted and not is_near:
            raise UsageError(
                f"{name} is of {tensor.dtype}, the model was captured with {wanted}",
                ["what it would compute is not known, or an operator would refuse it in the middle of a step"],
                [f"{name}.to({wanted})", "profile and plan again with an example of that dtype"],
            )


def tensors_of(item: BatchItem) -> list[tuple[Tensor, ...]]:
    """Of each input and target its tensors, one a micro-batch."""
    pairs = item if isinstance(item, list) else [item]
    return list(zip(*((*model_inputs, *targets) for model_inputs, targets in pairs), strict=True))
