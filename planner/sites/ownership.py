"""Ownership: the rank of every block, and so of every site at every stride."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.ir.errors import CorruptFileError
from planner.sites.keys import AnyInts, Ints, block_keys, samples_of

Ranks = NDArray[np.int32]
_VERSION = 1


@dataclass(frozen=True, slots=True, eq=False)
class Ownership:
    """Which of ``num_ranks`` ranks owns which block.

    Attributes:
        keys: [B], the blocks, ascending.
        ranks: [B], their owners.
    """

    num_ranks: int
    keys: Ints
    ranks: Ranks

    def owner(self, samples: AnyInts, coordinates: AnyInts, stride: int | Sequence[int] = 1) -> Ranks:
        """The rank [N] that owns each site: ``samples`` [N], ``coordinates`` [N, 3] in units of ``stride``.

        A site that exists nowhere has an owner too, so that whoever looks for it knows whom to ask.

        Raises:
            UsageError: see :func:`planner.sites.keys.block_keys`.
        """
        return self.owner_of_blocks(block_keys(samples, coordinates, stride))

    def owner_of_blocks(self, keys: Ints) -> Ranks:
        """The owner [N] of blocks: of one that is not listed, that of its sample's nearest listed one below, or above.

        Of a sample without blocks it is any rank, the same whoever asks; without any block, rank 0.
        """
        if not len(self.keys):
            return np.zeros(len(keys), np.int32)
        below = np.searchsorted(self.keys, keys, side="right") - 1
        above = np.minimum(below + 1, len(self.keys) - 1)
        foreign = (below < 0) | (samples_of(self.keys[below]) != samples_of(keys))
        owners: Ranks = self.ranks[np.where(foreign, above, below)]
        return owners

    def words(self) -> Ints:
        """Everything in one array of integers, to be sent or stored."""
        head = np.array([_VERSION, self.num_ranks, len(self.keys)], np.int64)
        return np.concatenate([head, self.keys, self.ranks.astype(np.int64)])


def from_words(words: Ints) -> Ownership:
    """The ownership that :meth:`Ownership.words` wrote.

    Raises:
        CorruptFileError: the words are not one.
    """
    faults = _faults(words)
    if faults:
        raise CorruptFileError("not an ownership of blocks", faults)
    num_ranks, count = int(words[1]), int(words[2])
    return ownership_of(num_ranks, words[3 : 3 + count], words[3 + count :])


def ownership_of(num_ranks: int, keys: Ints, ranks: AnyInts) -> Ownership:
    """The ownership that gives block ``keys[i]`` (distinct, in any order) to ``ranks[i]``; its arrays are its own."""
    order = np.argsort(keys)
    owned = Ownership(num_ranks, keys[order], np.asarray(ranks)[order].astype(np.int32))
    for array in (owned.keys, owned.ranks):
        array.setflags(write=False)
    return owned


def _faults(words: Ints) -> list[str]:
    if words.ndim != 1 or len(words) < 3 or words[0] != _VERSION:
        return [f"an array of shape {list(words.shape)} that starts with {words.ravel()[:1].tolist()}, not {_VERSION}"]
    num_ranks, count = int(words[1]), int(words[2])
    if len(words) != 3 + 2 * count:
        return [f"{len(words)} words for {count} blocks, which take {3 + 2 * count}"]
    keys, ranks = words[3 : 3 + count], words[3 + count :]
    faults = [] if np.all(np.diff(keys) > 0) else ["its blocks are not ascending"]
    if count and not 0 <= ranks.min() <= ranks.max() < num_ranks:
        faults.append(f"ranks {ranks.min()} to {ranks.max()} of {num_ranks}")
    return faults
