"""How a stage is run (:class:`RunConfig`, :class:`Mode`), and on what part of a micro-batch (:class:`MicrobatchShard`).

In evaluation :func:`in_evaluation` replaces operators one by one (:mod:`cuda_ops.dense.evaluation`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import fx

from cuda_ops.dense.evaluation import draws_in_any_mode, evaluated
from planner.ir.errors import UnsupportedModelError
from planner.ir.schedule import Action, Op
from planner.layers.division import Division

if TYPE_CHECKING:
    from runtime.sparse.batch import AnyShare


@dataclass(frozen=True, slots=True)
class RunConfig:
    """How a stage is run in a program.

    Attributes:
        trains: whether there is a backward; if not, forward keeps nothing.
        recompute: drop what forward made but the outputs, and make it again in backward.
        split: micro-batches whose backward comes in two halves.
        version_uses: how many micro-batches of a step run on each version of the weights; empty if on one alone.
        autocast: the dtype of what torch's autocast runs in lower precision; None: no autocast.
    """

    trains: bool = True
    recompute: bool = False
    split: frozenset[int] = frozenset()
    version_uses: Mapping[int, int] = field(default_factory=dict)
    autocast: torch.dtype | None = None

    @classmethod
    def of(cls, actions: Iterable[Action], recompute: bool, autocast: torch.dtype | None) -> RunConfig:
        """What ``actions``, those of one stage on one rank, ask for."""
        split = set()
        uses = Counter[int]()
        trains = updates_within = False
        for action in actions:
            if action.op is Op.BACKWARD_INPUT and action.microbatch is not None:
                split.add(action.microbatch)
            elif action.op is Op.FORWARD:
                uses[action.version] += 1
            updates_within |= action.op is Op.UPDATE and action.microbatch is not None
            trains |= action.op in (Op.BACKWARD, Op.BACKWARD_INPUT)
        is_versioned = trains and (updates_within or any(uses))
        return cls(trains, recompute and trains, frozenset(split), uses if is_versioned else {}, autocast)


@dataclass(frozen=True, slots=True)
class Mode:
    """Which function of a stage is meant.

    Attributes:
        training: normalisation by the statistics of the micro-batch, and dropout; else for evaluation.
        is_empty: for a rank without rows.
    """

    training: bool = True
    is_empty: bool = False


@dataclass(frozen=True, slots=True)
class MicrobatchShard:
    """A rank's part of a micro-batch.

    Attributes:
        num_samples: its rows; there may be none.
        start: where they begin in the micro-batch.
        total: rows of the micro-batch.
        sizes: what varies between micro-batches beside the number of rows, in the order of the stage's ``sizes``.
        sites: of a stage whose ranks share out the sites of clouds, for this micro-batch; samples are then those that
            the rank goes on with after a reduction over sites.
        division: of a stage whose layers are divided along any dims, for this micro-batch, of which ``num_samples`` are
            then all rows; None where the stage's ranks just share out samples.
        whole: the micro-batch, where it is cut along an axis with an order; ``microbatch`` then numbers all parts of a
            step.
        loss_weight: its rows over all rows whose gradients make up the same update.
    """

    microbatch: int
    num_samples: int
    start: int
    total: int
    sizes: tuple[int, ...] = ()
    division: Division | None = None
    sites: AnyShare | None = None
    whole: int | None = None
    loss_weight: float = 0.0

    @property
    def of(self) -> int:
        """The micro-batch that this is a part of."""
        return self.microbatch if self.whole is None else self.whole


class MicrobatchContext(Protocol):
    """Something that must know what is run next."""

    def at(self, microbatch_shard: MicrobatchShard) -> None:
        """A micro-batch, or a part of one."""


def in_evaluation(node: fx.Node) -> Callable[..., Any] | None:
    """The rule that puts operators in evaluation mode.

    Raises:
        UnsupportedModelError: an operator draws random numbers, and nothing tells whether it would in evaluation mode.
    """
    if draws_in_any_mode(node):
        raise UnsupportedModelError(
            f"node {node.name} draws random numbers ({node.target}), perhaps only in training",
            ["the captured graph does not tell what it does in evaluation mode"],
            ["draw with nn.Dropout, or evaluate the module itself, on one device"],
        )
    return evaluated(node)


def cannot_evaluate(reason: str) -> UnsupportedModelError:
    """The error of a model whose graph is another in evaluation mode, as its capture found."""
    return UnsupportedModelError(
        "the model cannot be evaluated under a plan",
        [reason],
        [
            "evaluate the module itself, on one device",
            "leave what depends on self.training to nn modules, such as nn.Dropout",
        ],
    )
