"""Recurrent networks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from tests.zoo.autograd import Network
from tests.zoo.entries import network
from tests.zoo.frozen import token_loss


def sequences(rows: int = 4, length: int = 5) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, length, 6), torch.randint(3, (rows,))


class LastState(nn.Module):
    def __init__(self, rnn: nn.RNNBase, width: int) -> None:
        super().__init__()
        self.rnn = rnn
        self.fc = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        out, _ = self.rnn(x)
        return self.fc(out[:, -1, :])


@network("LSTM, the last output")
def lstm() -> Network:
    return LastState(nn.LSTM(6, 5, num_layers=2, batch_first=True), 5), sequences(), F.cross_entropy


@network("bidirectional GRU")
def bidirectional_gru() -> Network:
    return LastState(nn.GRU(6, 4, batch_first=True, bidirectional=True), 8), sequences(), F.cross_entropy


@network("LSTM with dropout between its layers", draws=True)
def lstm_dropout() -> Network:
    return LastState(nn.LSTM(6, 5, num_layers=3, batch_first=True, dropout=0.3), 5), sequences(), F.cross_entropy


class TimeFirst(nn.Module):
    """Time before samples inside, with a state of zeros of the batch's size (PyTorch's tutorial)."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(9, 5)
        self.lstm = nn.LSTM(5, 6, 1)
        self.out = nn.Linear(6, 9)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.emb(ids).permute(1, 0, 2)
        h0 = torch.zeros(1, ids.size(0), 6, dtype=x.dtype, device=x.device)
        c0 = torch.zeros(1, ids.size(0), 6, dtype=x.dtype, device=x.device)
        out, _ = self.lstm(x, (h0, c0))
        return self.out(out).permute(1, 0, 2).contiguous()


@network("time before samples inside, states of zeros by the batch's size")
def time_first() -> Network:
    return TimeFirst(), (torch.randint(9, (4, 5)), torch.randint(9, (4, 5))), token_loss


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 5, batch_first=True)
        self.fc = nn.Linear(5, 3)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        out, (h, _) = self.lstm(packed)
        padded, _ = pad_packed_sequence(out, batch_first=True)
        return self.fc(h[-1]) + padded.mean() * 0


@network("a packed sequence, padded to the longest of the batch", refused="total_length")
def packed() -> Network:
    x, y = sequences()
    return Packed(), ((x, torch.tensor([5, 2, 3, 5])), y), F.cross_entropy


class Stateful(nn.Module):
    """The state is carried from batch to batch, as language models do; detached."""

    state: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(6, 5)
        self.fc = nn.Linear(5, 3)
        self.state = torch.zeros(1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.state.detach() if self.state.shape == (x.size(0), 5) else x.new_zeros(x.size(0), 5)
        for t in range(x.size(1)):
            h = self.cell(x[:, t], h)
        self.state = h
        return self.fc(h)


@network("a hidden state kept as an attribute from batch to batch", mixes=True, refused="state|attribute|called again")
def stateful() -> Network:
    return Stateful(), sequences(), F.cross_entropy


class CellLoop(nn.Module):
    """LSTMCells unrolled with scheduled inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.cell1 = nn.LSTMCell(6, 5)
        self.cell2 = nn.LSTMCell(5, 4)
        self.fc = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        n = x.size(0)
        h1 = c1 = torch.zeros(n, 5, dtype=x.dtype)
        h2 = c2 = torch.zeros(n, 4, dtype=x.dtype)
        for step in x.chunk(x.size(1), dim=1):
            h1, c1 = self.cell1(step.squeeze(1), (h1, c1))
            h2, c2 = self.cell2(h1, (h2, c2))
        return self.fc(h2)


@network("LSTM cells unrolled by chunk")
def lstm_cells() -> Network:
    return CellLoop(), sequences(), F.cross_entropy


class Seq2Seq(nn.Module):
    """An encoder, Bahdanau's attention, a decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.src = nn.Embedding(9, 5)
        self.tgt = nn.Embedding(7, 5)
        self.encoder = nn.GRU(5, 4, batch_first=True)
        self.w1 = nn.Linear(4, 4)
        self.w2 = nn.Linear(4, 4)
        self.v = nn.Linear(4, 1)
        self.cell = nn.GRUCell(9, 4)
        self.out = nn.Linear(4, 7)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory, h = self.encoder(self.src(source))
        h = h[0]
        logits = []
        for t in range(target.size(1)):
            scores = self.v(torch.tanh(self.w1(memory) + self.w2(h).unsqueeze(1)))
            context = (scores.softmax(1) * memory).sum(1)
            h = self.cell(torch.cat([self.tgt(target[:, t]), context], 1), h)
            logits.append(self.out(h))
        return torch.stack(logits, dim=1)


@network("sequence to sequence with attention, step by step")
def seq2seq() -> Network:
    data = (torch.randint(9, (4, 4)), torch.randint(7, (4, 3))), torch.randint(7, (4, 3))
    return Seq2Seq(), data, token_loss
