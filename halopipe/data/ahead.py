"""The batch after the one that is trained on: told to whoever prepares it, while this one is computed.

Sites, maps and sampled neighbours of the next step are prepared during this one where the plan says so
(:mod:`runtime.sparse.preparing`), if somebody knows the next batch.  ``halopipe run`` reads its own data, and takes a
batch more than it uses (:class:`AheadSource`).  A script's loop gives one batch at a time; the iterator of its batches,
passed through ``run.ahead``, knows the next one:

    for batch in run.ahead(loader):     the loader is asked for batch 1 before batch 0 comes out,
        run.step(batch)                 and the step on batch 0 tells the ranks batch 1 as well
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from halopipe.data.batch_sources import BatchSource
from halopipe.data.factories import BatchItem, Pair
from halopipe.data.sources import bound, tensors_of
from runtime.pipeline.microbatches import Batch, InputSpecs

_log = logging.getLogger(__name__)

_END: Any = object()
"""Behind the last batch; a script's batch may be anything."""

UNTOLD = (
    "the plan prepares the next step's sites and neighbours during this one, but nobody tells the next batch: each "
    "step prepares its own, and takes longer than predicted. Say `for batch in run.ahead(batches)`"
)


class AheadSource:
    """A source whose next batch is taken, and told to whoever prepares it, before the one before is used.

    Its position is that after the batch last given, so that a run that goes on reads the next one again.

    Args:
        expect: is told the batch after the one that is given.
    """

    def __init__(self, source: BatchSource, expect: Callable[[Batch], None]) -> None:
        self._source = source
        self._expect = expect
        self.position = source.position
        self.agreement = source.agreement
        self._next: tuple[Batch | None, Any] | None = None

    def take(self) -> Batch | None:
        batch, self.position = self._next or self._read_next()
        if batch is not None:
            self._next = self._read_next()
        return batch

    def _read_next(self) -> tuple[Batch | None, Any]:
        batch = self._source.take()
        if batch is not None:
            self._expect(batch)
        return batch, self._source.position


@dataclass(slots=True)
class Upcoming:
    """What a script's loop knows of its next batch.

    Attributes:
        is_wanted: whether the plan prepares it during this step; else there is nothing to tell.
        warns: whether a loop that tells nothing is told so; one rank does, for all.
    """

    is_wanted: bool
    warns: bool = True
    _next: Any = _END
    _is_told: bool = False
    _num_taken: int = 0

    def ahead(self, batches: Iterable[Any]) -> Iterator[Any]:
        """``batches``, each given when the one after it is known."""
        if not self.is_wanted:
            yield from batches
            return
        self._is_told = True
        rest = iter(batches)
        current = next(rest, _END)
        while current is not _END:
            self._next = following = next(rest, _END)
            yield current
            current = following

    def take(self) -> tuple[Any, ...]:
        """The batch of the step after this one, once; () where nobody knows it, which is said at the second step."""
        following = self._next
        self._next = _END
        self._num_taken += 1
        if self.is_wanted and self.warns and not self._is_told and self._num_taken == 2:
            _log.warning("%s", UNTOLD)
        return () if following is _END else (following,)


@dataclass(slots=True)
class Announced:
    """A copy of the batch that was told ahead, and what the engine was told: whose preparation counts if it comes.

    It is recognised by all its numbers.  A script may change a batch before it trains on it, or train on another one;
    what was prepared is then left unused.
    """

    _tensors: Sequence[Sequence[Tensor]] = ()
    _batch: Batch | None = None

    def announce(self, item: BatchItem, inputs: InputSpecs, planned: Sequence[int]) -> Batch:
        """``item`` as the engine takes it; raises as :func:`halopipe.data.sources.bound`."""
        copied = [_copied(pair) for pair in item] if isinstance(item, list) else _copied(item)
        self._tensors = tensors_of(copied)
        self._batch = bound(copied, inputs, planned, is_prepared=True)
        return self._batch

    def recognised(self, item: BatchItem) -> Batch | None:
        """What was announced, if ``item`` is the same; it is forgotten in either case."""
        tensors = self._tensors
        batch = self._batch
        self._tensors = ()
        self._batch = None
        return batch if batch is not None and _same(tensors, tensors_of(item)) else None


def _copied(pair: Pair) -> Pair:
    inputs, targets = ([tensor.clone() for tensor in tensors] for tensors in pair)
    return tuple(inputs), tuple(targets)


def _same(one: Sequence[Sequence[Tensor]], other: Sequence[Sequence[Tensor]]) -> bool:
    return [len(each) for each in one] == [len(each) for each in other] and all(
        (a.dtype, a.device) == (b.dtype, b.device) and torch.equal(a, b)
        for these, those in zip(one, other, strict=True)
        for a, b in zip(these, those, strict=True)
    )
