"""The feeds of one rank, of the data that a run names."""

from __future__ import annotations

from halopipe.datasets import Data, Position, Samples, open_data
from halopipe.feeding import Consumer, Feed, OwnFeed, SentFeed
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

    def training(self, start: Position) -> Feed:
        """Batches to train on from ``start`` on, epoch after epoch."""
        return self._feed(self._training, start, 0)

    def evaluation(self) -> Feed:
        """Batches to evaluate on, one epoch."""
        return self._feed(self._evaluation, Position(), 1)

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

    def _feed(self, data: Data | None, start: Position, epochs: int) -> Feed:
        if self._way == SHARE and isinstance(data, Samples):
            return SharedFeed(self._consumer, data, start, epochs)
        own = OwnFeed(self._consumer, data, start, epochs) if data is not None else None
        return SentFeed(self._consumer, own, start) if own is None or self._way == FIRST else own
