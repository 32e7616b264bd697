"""The feeds of one rank, of the data that a run names."""

from __future__ import annotations

from halopipe.datasets import Data, Position, Samples, open_data
from halopipe.feeding import Consumer, Feed, OwnFeed, SentFeed, agreement_of
from halopipe.runs import EACH, FIRST, SHARE, RunOptions
from halopipe.sharing import SharedFeed
from planner.ir.errors import UsageError
from profiler.source import LoadedModel


class Supply:
    """Opens the data once, on the ranks that read it.

    Args:
        seed: of the order of samples, and of what the data draws.

    Raises:
        ModelNotFoundError, FactoryError: a factory is not there, or fails.
        UsageError: the ranks are to share something else than a Dataset.
    """

    def __init__(self, consumer: Consumer, options: RunOptions, model: LoadedModel, seed: int) -> None:
        self._consumer, self._way = consumer, options.data_from
        self._reads = options.data_from != FIRST or consumer.transport.rank == 0
        self._training = self._opened(options.data, model, seed, shuffled=True)
        self._evaluation = self._opened(options.eval_data, model, seed, shuffled=False) if options.eval_data else None

    def training(self, start: Position, step: int = 0) -> Feed:
        """Batches to train on from ``start`` on, epoch after epoch, the first for ``step``.

        Raises:
            DifferentDataError: they cannot be read again as they were.
        """
        if start != Position() and isinstance(self._training, Samples):
            self._training.require_repeatable(start)
        return self._feed(self._training, start, 0, step)

    def evaluation(self) -> Feed:
        """Batches to evaluate on, one epoch."""
        return self._feed(self._evaluation, Position(), 1, 0)

    def _opened(self, name: str, model: LoadedModel, seed: int, *, shuffled: bool) -> Data | None:
        if not self._reads:
            return None
        data = open_data(name, model, self._consumer.decision.global_batch, seed, shuffled=shuffled)
        if self._way == SHARE and not isinstance(data, Samples):
            raise UsageError(
                f"ranks cannot share what {name} gives",
                ["it is no map-style torch.utils.data.Dataset, whose samples can be read one by one"],
                [f"--data-from {EACH}", f"--data-from {FIRST}"],
            )
        return data

    def _feed(self, data: Data | None, start: Position, epochs: int, step: int) -> Feed:
        consumer = self._consumer
        if self._way == SHARE and isinstance(data, Samples):
            slots = consumer.decision.global_batch
            return SharedFeed(
                consumer, data, start, epochs, agreement_of(consumer, step, slots=slots, always=epochs > 0)
            )
        if data is None or self._way == FIRST:
            own = OwnFeed(consumer, data, start, epochs) if data is not None else None
            return SentFeed(consumer, own, start)
        return OwnFeed(consumer, data, start, epochs, agreement_of(consumer, step, always=epochs > 0))
