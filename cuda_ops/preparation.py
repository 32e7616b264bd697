"""A batch that is prepared before the network sees it: clouds become sites and maps, seeds become sampled neighbours.

Users' tensors have samples first: those of ``raw_names``, then the targets.  What is made of them are the inputs of a
captured graph, whose sizes vary from batch to batch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar, Self

import torch
from torch import Tensor


class InputPreparation(ABC):
    """How a network's inputs are made of a batch as its users have it.

    Attributes:
        raw_names: of the user's tensors before the targets.
        without_samples: how names of inputs begin whose first dim is not the samples, whatever its extent.
        indices: how names of inputs begin that hold numbers of rows.
        per_site: of each target, whether it has a value a row rather than one a sample.
    """

    raw_names: ClassVar[tuple[str, ...]]
    without_samples: ClassVar[tuple[str, ...]]
    indices: ClassVar[tuple[str, ...]] = ()
    per_site: tuple[bool, ...]

    @property
    @abstractmethod
    def input_names(self) -> tuple[str, ...]:
        """Of the inputs, in order."""

    @property
    def names(self) -> tuple[str, ...]:
        """Of the prepared tensors, in order; targets are ``target_0``, ..."""
        return (*self.input_names, *(f"target_{index}" for index in range(len(self.per_site))))

    @property
    def num_inputs(self) -> int:
        """How many of them are inputs; the others are targets."""
        return len(self.input_names)

    @property
    @abstractmethod
    def varying(self) -> dict[str, list[tuple[str, int]]]:
        """By the name of a size, the (tensor, dim) pairs that have it."""

    @abstractmethod
    def prepared(self, raw: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """All of them, for the samples of ``raw``: the user's tensors."""

    @abstractmethod
    def of_fewer(self, raw: tuple[Tensor, ...], divisor: int) -> tuple[Self, tuple[Tensor, ...]]:
        """This and a user's batch with a part of the rows, at least one where there are some."""

    def cast(self, casts: Mapping[torch.dtype, torch.dtype]) -> Self:
        """With what it adds to the user's tensors cast as they are; nothing is added here."""
        return self


class SeparatePreparation(InputPreparation):
    """Inputs of some samples are made without those of others; rows that samples have in common are each one's own.

    So ranks that share samples exchange nothing, and each prepares what it runs.
    """

    @abstractmethod
    def side_by_side(self, parts: Sequence[Sequence[Tensor]]) -> list[tuple[Tensor, ...]]:
        """The inputs of several parts of a user's batch side by side, then of each alone."""
