"""Recurrent layers over packed sequences as one operator."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from cuda_ops.dense.packed import PackedSequenceError, packed_as_padded

LENGTHS = torch.tensor([2, 5, 1, 4])
X = torch.randn(4, 5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    def __init__(self, layer: nn.RNNBase, value: float = 0.0, total: bool = True) -> None:
        super().__init__()
        self.layer, self.value, self.total = layer.double(), value, total

    def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, ...]:
        time = int(self.layer.batch_first)
        packed, ends = self.layer(pack_padded_sequence(x, lengths, self.layer.batch_first, enforce_sorted=False))
        total = x.size(time) if self.total else None
        padded, _ = pad_packed_sequence(packed, self.layer.batch_first, self.value, total_length=total)
        return (padded, *ends) if isinstance(ends, tuple) else (padded, ends)


def exported(module: nn.Module, *inputs: Tensor) -> nn.Module:
    with packed_as_padded():
        return torch.export.export(module, inputs, strict=False).module()


@pytest.mark.parametrize(
    "layer",
    [
        nn.LSTM(3, 4, batch_first=True),
        nn.LSTM(3, 4, num_layers=2, bidirectional=True, proj_size=2),
        nn.GRU(3, 4, num_layers=2, bias=False, bidirectional=True, batch_first=True),
        nn.RNN(3, 4, nonlinearity="relu"),
    ],
    ids=["lstm", "projected", "gru", "rnn"],
)
def test_results_and_gradients_are_those_of_the_packed_layer(layer: nn.RNNBase) -> None:
    module = Net(layer, value=-1.0)
    x = X if layer.batch_first else X.transpose(0, 1).contiguous()
    graph = exported(module, x, LENGTHS)
    other = torch.tensor([5, 3, 3, 2])
    for lengths in (LENGTHS, other):
        found = []
        for each in (module, graph):
            each.zero_grad()
            results = each(x, lengths)
            sum((value * value.sin()).sum() for value in results).backward()
            found.append([*results, *(p.grad for _, p in sorted(each.named_parameters()))])
        for expected, value in zip(*found, strict=True):
            torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-12)


def test_a_rank_without_samples_takes_part() -> None:
    weights = [p.detach().requires_grad_(True) for p in nn.GRU(3, 4).double().parameters()]
    options = ("gru", [4], 1, True, True, False, True)
    padded, end = torch.ops.halopipe.packed_recurrence(X[:0], LENGTHS[:0], [], weights, *options)
    assert (padded.shape, end.shape) == ((0, 5, 4), (1, 0, 4))
    padded.sum().backward()
    assert all(not weight.grad.any() for weight in weights)


@pytest.mark.parametrize(
    ("module", "lengths", "words"),
    [
        (Net(nn.GRU(3, 4, batch_first=True), total=False), LENGTHS, r"total_length=x\.size\(1\)"),
        (Net(nn.GRU(3, 4, num_layers=2, dropout=0.5, batch_first=True)), LENGTHS, "drops values between its layers"),
    ],
    ids=["length", "dropout"],
)
def test_what_is_not_captured_is_refused(module: nn.Module, lengths: Tensor, words: str) -> None:
    with pytest.raises(PackedSequenceError, match=words):
        exported(module, X, lengths)


def test_lengths_in_a_list_and_looks_inside_are_refused() -> None:
    class Looks(nn.Module):
        def __init__(self, lengths: object, name: str) -> None:
            super().__init__()
            self.lengths, self.name = lengths, name

        def forward(self, x: Tensor) -> Tensor:
            return getattr(pack_padded_sequence(x, self.lengths, True, False), self.name)

    with pytest.raises(PackedSequenceError, match="lengths as a list"):
        exported(Looks([5, 4, 3, 2], "data"), X)
    with pytest.raises(PackedSequenceError, match=r"reads \.data of a packed sequence"):
        exported(Looks(LENGTHS, "data"), X)


def test_torch_packs_as_ever_within_and_behind() -> None:
    with packed_as_padded():
        inside = pack_padded_sequence(X, LENGTHS, True, False)
    assert torch.equal(inside.data, pack_padded_sequence(X, LENGTHS, True, False).data)
    assert inside.batch_sizes.tolist() == [4, 3, 2, 2, 1]
    padded, lengths = pad_packed_sequence(inside, batch_first=True)
    assert torch.equal(lengths, LENGTHS)
    assert torch.equal(padded[1], X[1])
