"""Numbers of classes and of rows that there are not are told before a step, with the sample that has them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from planner.ir.errors import UsageError
from profiler.capture.graph import capture
from profiler.source.losses import TrainedLoss
from profiler.source.model import LoadedModel
from runtime.captured import CapturedModule
from runtime.engine import Engine
from runtime.rank import RankContext
from runtime.stage.index_ranges import IndexRange, index_ranges
from runtime.transport import Hub, InProcessTransport
from tests.runtime.plans import decide, sgd

ROWS = 4
WORDS = 7
CLASSES = 3


class Words(nn.Module):
    """A class for each word, from a table."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, 6)
        self.head = nn.Linear(6, CLASSES)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.table(words)).flatten(0, 1)


def of_each_word(scores: Tensor, kinds: Tensor) -> Tensor:
    return F.cross_entropy(scores, kinds.reshape(-1))


def of_the_next_word(scores: Tensor, kinds: Tensor) -> Tensor:
    scores = scores.view(kinds.shape[0], -1, CLASSES)[:, :-1]
    return F.cross_entropy(scores.flatten(0, 1), kinds[:, 1:].flatten())


def of_one_less(scores: Tensor, kinds: Tensor) -> Tensor:
    return F.cross_entropy(scores, kinds.reshape(-1) - 1)


def captured(loss: Callable[[Tensor, Tensor], Tensor]) -> tuple[CapturedModule, LoadedModel]:
    words = torch.randint(WORDS, (ROWS, 5))
    kinds = torch.randint(1, CLASSES, (ROWS, 5))
    model = LoadedModel(Words(), (words,), (kinds,), TrainedLoss(loss, unpacked=True))
    return capture(model), model


def test_ranges_are_found_through_views_and_slices_but_not_through_arithmetic() -> None:
    table = IndexRange("table", WORDS)
    found = index_ranges(captured(of_each_word)[0])
    assert found == {"inputs": (table,), "targets": (IndexRange("loss", CLASSES, -100),)}
    found = index_ranges(captured(of_the_next_word)[0])
    assert found == {"inputs": (table,), "targets": (IndexRange("loss", CLASSES, -100, ((1, 1, 2**63 - 1),)),)}
    assert index_ranges(captured(of_one_less)[0]) == {"inputs": (table,)}


class Marked(Words):
    """Whether there is a word, from a table of two rows."""

    def __init__(self) -> None:
        super().__init__()
        self.marks = nn.Embedding(2, 6)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.table(words) + self.marks(words.bool().long())).flatten(0, 1)


def test_what_is_told_from_nothing_may_be_any_number() -> None:
    words = torch.randint(WORDS, (ROWS, 5))
    kinds = torch.randint(1, CLASSES, (ROWS, 5))
    model = capture(LoadedModel(Marked(), (words,), (kinds,), TrainedLoss(of_each_word, unpacked=True)))
    assert index_ranges(model)["inputs"] == (IndexRange("table", WORDS),)


def test_a_number_beyond_them_names_the_sample_the_layer_and_the_range() -> None:
    targets = torch.tensor([[0, 1], [2, -100], [-100, 3]])
    pattern = r"targets holds 3, and layer loss has 3 classes: 0 \.\.\. 2[\s\S]*sample 2, at 1[\s\S]*-100 is ignored"
    with pytest.raises(UsageError, match=pattern):
        IndexRange("loss", 3, -100).require("targets", targets)
    with pytest.raises(
        UsageError, match=r"words holds -100, and layer table has a table of 4 rows[\s\S]*num_embeddings"
    ):
        IndexRange("table", 4).require("words", targets)
    IndexRange("loss", 3, -100, ((1, 0, 1),)).require("targets", targets)  # behind the slice anything may be
    IndexRange("loss", 3, -100).require("targets", targets[:0])


def test_a_step_on_such_a_batch_is_refused_and_the_next_one_runs() -> None:
    model, loaded = captured(of_each_word)
    decision = decide(model.graph, [], (2, 2))
    end = InProcessTransport(Hub(1, [(0,)]), 0)
    engine = Engine(RankContext(decision, sgd, deadline_s=20.0, model=model, module=loaded.module, transport=end))
    words = loaded.inputs[0]
    kinds = loaded.targets[0].clone()
    kinds[3, 2] = CLASSES
    with pytest.raises(UsageError, match=r"targets holds 3[\s\S]*sample 3, at 2"):
        engine.step((words,), (kinds,))
    with pytest.raises(UsageError, match=r"inputs holds 7, and layer table has a table of 7 rows: 0 \.\.\. 6"):
        engine.step((words.clamp(min=WORDS),), loaded.targets)
    assert engine.step((words,), loaded.targets).loss is not None
    end.close()
