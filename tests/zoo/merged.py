"""Samples with several rows in one dim: lists of tokens or pixels as targets, inputs that forward reshapes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.autograd import Network
from tests.zoo.entries import WHOLE_BATCH, network
from tests.zoo.sequences import PAD, padded

SAMPLES = 4
TOKENS = 6
WORDS = 9
WIDTH = 8
MERGED = "merges samples with another dim that comes first"


def words(*shape: int, ignored: int = -100) -> Tensor:
    """Targets, of which every third is ignored."""
    targets = torch.randint(1, WORDS, shape)
    return torch.where(torch.rand(shape) < 0.3, ignored, targets)


class Language(nn.Module):
    """A causal transformer, whose logits are one list of tokens."""

    def __init__(self, dropped: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.places = nn.Parameter(torch.randn(TOKENS, WIDTH) * 0.1)
        self.block = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, 0.0, batch_first=True, norm_first=True)
        self.dropout = nn.Dropout(dropped)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        causal = nn.Transformer.generate_square_subsequent_mask(ids.size(1), dtype=self.places.dtype)
        hidden = self.block(self.embedding(ids) + self.places, causal)
        return self.head(self.dropout(hidden.reshape(-1, WIDTH))).view(-1, WORDS)


@network("a language model whose logits and targets are one list of tokens, of which some are ignored")
def language_model() -> Network:
    return Language(), (torch.randint(WORDS, (SAMPLES, TOKENS)), words(SAMPLES * TOKENS)), nn.CrossEntropyLoss()


@network("a language model that drops values of its list of tokens", draws=True)
def dropping_language_model() -> Network:
    targets = torch.randint(WORDS, (SAMPLES * TOKENS,))
    return Language(0.3), (torch.randint(WORDS, (SAMPLES, TOKENS)), targets), nn.CrossEntropyLoss()


@network("an example of one sample, whose targets are a list of tokens")
def one_sentence() -> Network:
    return Language(), (torch.randint(WORDS, (1, TOKENS)), words(TOKENS)), nn.CrossEntropyLoss()


class Unflattened(nn.Module):
    """Takes a list of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.language = Language()

    def forward(self, ids: Tensor) -> Tensor:
        return self.language(ids.view(-1, TOKENS))


@network("a list of tokens that forward reshapes to sentences, and as many targets")
def listed_inputs() -> Network:
    return Unflattened(), (torch.randint(WORDS, (SAMPLES * TOKENS,)), words(SAMPLES * TOKENS)), nn.CrossEntropyLoss()


class Sentences(nn.Module):
    """Takes a list of words' vectors, and says of each sentence what it is about."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, WIDTH)
        self.outer = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(torch.tanh(self.inner(x)).reshape(-1, TOKENS, WIDTH).mean(1))


@network("a list of vectors, several of which make up a sample with one target")
def listed_sentences() -> Network:
    return Sentences(), (torch.randn(SAMPLES * TOKENS, 5), torch.randint(3, (SAMPLES,))), F.cross_entropy


class Tagger(nn.Module):
    """A bidirectional LSTM; the number of its tags is read as a Python number."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 5, padding_idx=PAD)
        self.lstm = nn.LSTM(5, 4, batch_first=True, bidirectional=True)
        self.head = nn.Linear(8, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        tags = self.head(self.lstm(self.embedding(ids))[0])
        return tags.reshape(len(ids) * ids.shape[1], WORDS)


@network("a tagger whose padding is ignored, tags weighted, and the list as long as len(x) says")
def tagger() -> Network:
    ids = padded()
    weights = torch.rand(WORDS) + 0.5
    return (
        Tagger(),
        (ids, ids.roll(1, 1).flatten()),
        lambda out, y: F.cross_entropy(out, y, weights.to(out), ignore_index=PAD),
    )


@network("a mean over what a mask of all tokens leaves, written by hand")
def masked_tokens() -> Network:
    def loss(out: Tensor, y: tuple[Tensor, Tensor]) -> Tensor:
        targets, mask = y
        return (F.cross_entropy(out, targets, reduction="none") * mask).sum() / mask.sum()

    targets = torch.randint(WORDS, (SAMPLES * TOKENS,)), (torch.rand(SAMPLES * TOKENS) < 0.7).float()
    return Language(), (torch.randint(WORDS, (SAMPLES, TOKENS)), targets), loss


class Pixels(nn.Module):
    """A segmentation whose answers are one list of pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Conv2d(3, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.outer = nn.Conv2d(4, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(F.relu(self.norm(self.inner(x)))).permute(0, 2, 3, 1).reshape(-1, 3)


@network("a segmentation whose targets are one list of pixels", mixes=True)
def pixels() -> Network:
    labels = torch.randint(3, (SAMPLES * 6 * 5,))
    return Pixels(), (torch.randn(SAMPLES, 3, 6, 5), labels), F.cross_entropy


class Views(nn.Module):
    """Two views of a sample lie one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.net(x).view(-1, 2, 4).unbind(1)


def _alike(out: tuple[Tensor, Tensor], same: Tensor) -> Tensor:
    return F.cosine_embedding_loss(*out, 2 * same - 1)


@network("two views of each sample in one dim, one after the other, and one label a pair")
def views() -> Network:
    return Views(), (torch.randn(2 * SAMPLES, 6), torch.randint(2, (SAMPLES,))), _alike


@network("two views of each sample in one dim, compared with noise of as many rows")
def views_alone() -> Network:
    inputs = torch.randn(2 * SAMPLES, 6), torch.randn(2 * SAMPLES, 4)
    return Views(), inputs, lambda out, y: F.mse_loss(out[0] * out[1], y.view(-1, 2, 4)[:, 0])


class TimeFirst(nn.Module):
    """Time first, as recurrent networks are by default: the list begins with the first token of each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 5)
        self.lstm = nn.LSTM(5, 4)
        self.head = nn.Linear(4, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        hidden, _ = self.lstm(self.embedding(ids).transpose(0, 1))
        return self.head(hidden).flatten(0, 1)


@network(
    "a list of tokens with time first, of which no sample is one piece",
    refused=dict.fromkeys(WHOLE_BATCH, MERGED),
)
def time_first() -> Network:
    ids = torch.randint(WORDS, (SAMPLES, TOKENS))
    targets = torch.randint(WORDS, (TOKENS * SAMPLES,))
    return TimeFirst(), (ids, targets), nn.CrossEntropyLoss()
