"""The batches that a run trains on, in order.

``--data`` names a factory, ``pkg.mod:factory`` or ``path/file.py:factory``, called with (global_batch, input_shape,
seed).  It gives one of

    an iterator     of batches (inputs, targets) of up to ``global_batch`` samples, until it ends
    a DataLoader    or another iterable of batches, passed over again and again
    a Dataset       of samples (inputs, targets), shuffled each epoch; the last batch of an epoch may be smaller

with ``inputs`` and ``targets`` a tensor or a tuple of tensors, samples first; floats are cast to the model's dtype.  A
batch may also be a list of micro-batches, each an (inputs, targets) tuple of its own size and shape.

Of a sparse network the inputs are coordinates int32 (samples, points, 3), features (samples, points, channels) and
counts (samples,), the points of each cloud that are there; targets are one a sample, or (samples, points).  Every rank
makes the maps that its stages read of whole clouds, and so reads all of them, whoever ``--data-from`` names.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from halopipe.data.sources import Data, Item, Position, open_data
from planner.ir.errors import UsageError
from profiler.source.model import LoadedModel
from runtime.pipeline.microbatches import Batch, InputSpecs, MicroBatches, WholeBatch


def batches(data: str, model: LoadedModel, global_batch: int, seed: int) -> Iterator[Item]:
    """What every step trains on, from the first on.

    Raises:
        ModelNotFoundError, FactoryError: the factory is not there, or fails.
    """
    for _, item in read(open_data(data, model, global_batch, seed), Position()):
        yield item


def read(data: Data, start: Position, epochs: int = 0) -> Iterator[tuple[int, Item]]:
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


def take(stream: Iterator[Item], step: int) -> Item:
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
    return UsageError(
        f"the data ended after {step} batches", ["one is needed for every step"], [f"--steps {max(step, 1)}"]
    )


def bound(item: Item, inputs: InputSpecs, planned: Sequence[int]) -> Batch:
    """What the engine takes.

    Raises:
        UsageError: it is not what the model takes, or more than planned.
    """
    if isinstance(item, list):
        return MicroBatches(inputs, [(*given, *targets) for given, targets in item], len(planned))
    return WholeBatch(inputs, (*item[0], *item[1]), tuple(planned))


def tensors_of(item: Item) -> list[tuple[Tensor, ...]]:
    """Of each input and target its tensors, one a micro-batch."""
    pairs = item if isinstance(item, list) else [item]
    return list(zip(*((*given, *targets) for given, targets in pairs), strict=True))
