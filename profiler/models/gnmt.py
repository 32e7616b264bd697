"""GNMT (Wu et al. 2016, "Google's neural machine translation system"), trained with teacher forcing.

    encoder   embedding -> bidirectional LSTM -> LSTM -> LSTM + residual -> ...
    decoder   embedding -> LSTM -> attention over the encoder's output -> context
              [h, context] -> LSTM -> [h, context] -> LSTM + residual -> ... -> vocabulary

It has the shape of the implementation that PipeDream profiled: residuals from the third layer on, the context computed
once, from the bottom decoder layer, and joined to the input of every later one, additive attention. Every layer runs
over the whole sequence at once, so the bottom decoder layer sees the previous token but not the previous context.
What it leaves out: padding masks (all samples have the full length), dropout, beam search.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from profiler.models.example import Example, indices, next_tokens, require_dims, token_cross_entropy


class AdditiveAttention(nn.Module):
    """Attention with the score `v . tanh(W q + U k)` (Bahdanau et al. 2015, section A.1.2)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.score = nn.Linear(width, 1, bias=False)

    def forward(self, queries: Tensor, memory: Tensor) -> Tensor:
        """Queries (sample, target time, width) and memory (sample, source time, width) to one context a query."""
        energy = torch.tanh(self.query(queries).unsqueeze(2) + self.key(memory).unsqueeze(1))
        weights: Tensor = self.score(energy).squeeze(3).softmax(dim=2)
        return weights @ memory


class Encoder(nn.Module):
    """Source tokens (sample, time) to the memory (sample, time, width) that the decoder attends to."""

    def __init__(self, vocabulary: int, width: int, num_layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.bidirectional = _lstm(width, width, bidirectional=True)
        self.second = _lstm(2 * width, width)
        self.residual = nn.ModuleList(_lstm(width, width) for _ in range(num_layers - 2))

    def forward(self, tokens: Tensor) -> Tensor:
        """(sample, time) to (sample, time, width)."""
        x: Tensor
        x, _ = self.bidirectional(self.embedding(tokens))
        x, _ = self.second(x)
        for layer in self.residual:
            y, _ = layer(x)
            x = x + y
        return x


class Decoder(nn.Module):
    """Target tokens shifted right, and the memory, to the logits of the next tokens."""

    def __init__(self, vocabulary: int, width: int, num_layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.bottom = _lstm(width, width)
        self.attention = AdditiveAttention(width)
        self.second = _lstm(2 * width, width)
        self.residual = nn.ModuleList(_lstm(2 * width, width) for _ in range(num_layers - 2))
        self.classifier = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor, memory: Tensor) -> Tensor:
        """(sample, target time) and (sample, source time, width) to logits (sample, target time, vocabulary)."""
        x, _ = self.bottom(self.embedding(tokens))
        context = self.attention(x, memory)
        x, _ = self.second(torch.cat((x, context), dim=2))
        for layer in self.residual:
            y, _ = layer(torch.cat((x, context), dim=2))
            x = x + y
        logits: Tensor = self.classifier(x)
        return logits


class GNMT(nn.Module):
    """The encoder and the decoder, `num_layers` LSTM layers each."""

    def __init__(self, *, vocabulary: int, width: int, num_layers: int) -> None:
        super().__init__()
        self.encoder = Encoder(vocabulary, width, num_layers)
        self.decoder = Decoder(vocabulary, width, num_layers)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -0.1, 0.1)

    def forward(self, source: Tensor, target_in: Tensor) -> Tensor:
        """Tokens (sample, source time) and (sample, target time) to logits (sample, target time, vocabulary)."""
        logits: Tensor = self.decoder(target_in, self.encoder(source))
        return logits


def gnmt(
    *,
    input_shape: tuple[int, ...] = (8, 32),
    vocabulary: int = 32320,
    width: int = 1024,
    layers: int = 4,
) -> Example:
    """GNMT with `layers` (at least 2) LSTM layers on each side; 193,765,952 parameters as it stands.

    Source and target are both `input_shape` = (sample, time) long; the targets are the target input shifted by one.
    """
    require_dims("gnmt", input_shape, ("sample", "time"))
    if layers < 2:
        raise ValueError(
            f"gnmt: layers is {layers}, needs at least 2: the bidirectional layer and the one that joins it"
        )
    module = GNMT(vocabulary=vocabulary, width=width, num_layers=layers)
    source = indices(vocabulary, input_shape, seed=0)
    target, following = next_tokens("gnmt", input_shape, vocabulary, seed=1)
    return module, ((source, target), following), token_cross_entropy


def _lstm(in_features: int, width: int, *, bidirectional: bool = False) -> nn.LSTM:
    """One layer over (sample, time, in_features); its output has `width` features a direction."""
    return nn.LSTM(in_features, width, batch_first=True, bidirectional=bidirectional)
