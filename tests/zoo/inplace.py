"""Networks that write in place: activations, parts of tensors, and buffers updated in forward."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.autograd import Network, classes
from tests.zoo.entries import DATA, PIPELINE, SPLIT, WHOLE_BATCH, network
from tests.zoo.frozen import images


class Block(nn.Module):
    def __init__(self, cin: int, cout: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(cin, cout, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(cout)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(cout, cout, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(cout)
        self.down = nn.Conv2d(cin, cout, 1, stride, bias=False) if stride > 1 or cin != cout else None

    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.down is None else self.down(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += identity
        return self.relu(out)


@network("residual blocks: out += identity, ReLU in place", mixes=True)
def residual_in_place() -> Network:
    net = nn.Sequential(Block(3, 4), Block(4, 6, 2), nn.AdaptiveAvgPool2d((1, 1)), nn.Flatten(1), nn.Linear(6, 3))
    return net, images(), nn.CrossEntropyLoss()


class Assigns(nn.Module):
    """Shifts channels in time by assignment to slices (TSM)."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(6, 8)
        self.out = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.inp(x)
        shifted = torch.zeros_like(h)
        shifted[:, :-1, :2] = h[:, 1:, :2]
        shifted[:, 1:, 2:4] = h[:, :-1, 2:4]
        shifted[:, :, 4:] = h[:, :, 4:]
        return self.out(F.relu_(shifted)).mean(1)


@network("a temporal shift by assignments to slices of zeros")
def temporal_shift() -> Network:
    return Assigns(), (torch.randn(4, 5, 6), torch.randint(3, (4,))), F.cross_entropy


class MaskedFill(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(6, 1)
        self.value = nn.Linear(6, 6)
        self.out = nn.Linear(6, 3)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        s = self.score(x).squeeze(-1)
        s.masked_fill_(mask == 0, float("-inf"))
        return self.out((s.softmax(1).unsqueeze(-1) * self.value(x)).sum(1))


@network("attention pooling with masked_fill_ to minus infinity")
def masked_fill_in_place() -> Network:
    mask = (torch.arange(5) < torch.tensor([[5], [2], [1], [4]])).long()
    return MaskedFill(), ((torch.randn(4, 5, 6), mask), torch.randint(3, (4,))), F.cross_entropy


class Decoder(nn.Module):
    """Outputs are filled step by step, as in image captioning."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(6, 5)
        self.fc = nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = x.new_zeros(x.size(0), 5)
        outputs = torch.zeros(x.size(0), x.size(1), 4, dtype=x.dtype, device=x.device)
        for t in range(x.size(1)):
            h = self.cell(x[:, t], h)
            outputs[:, t] = self.fc(h)
        return outputs


@network("a decoder that fills its outputs step by step")
def outputs_filled_in_steps() -> Network:
    return Decoder(), (torch.randn(4, 3, 6), torch.randn(4, 3, 4)), F.mse_loss


class EmaNorm(nn.Module):
    """A running mean kept by hand: normalises by what was seen so far."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))
        self.a = nn.Linear(6, 8)
        self.b = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        if self.training:
            self.mean.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)
        return self.b(h - self.mean)


@network(
    "a running mean updated in forward from the rows seen",
    mixes=True,
    refused={**WHOLE_BATCH, DATA: "writes the buffer mean"},
)
def ema_buffer() -> Network:
    return EmaNorm(), classes(), F.cross_entropy


class Counter(nn.Module):
    """A warm-up by a counter in a buffer."""

    steps: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.fc = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        return self.fc(x) * torch.clamp(self.steps / 10, max=1.0)


_COUNTED = "buffer steps"


@network("a counter in a buffer that scales the output", mixes=True, refused={PIPELINE: _COUNTED, SPLIT: _COUNTED})
def step_counter() -> Network:
    return Counter(), classes(), F.cross_entropy


class Moco(nn.Module):
    """A queue of keys that forward pushes the batch into."""

    queue: Tensor
    pointer: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.enc = nn.Linear(6, 4)
        self.register_buffer("queue", F.normalize(torch.randn(12, 4), dim=1))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))

    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        zq = F.normalize(self.enc(q), dim=1)
        with torch.no_grad():
            zk = F.normalize(self.enc(k), dim=1)
        logits = torch.cat([(zq * zk).sum(1, keepdim=True), zq @ self.queue.clone().t()], 1)
        with torch.no_grad():
            place = (self.pointer + torch.arange(zk.size(0))) % 12
            self.queue.index_copy_(0, place, zk)
            self.pointer.add_(zk.size(0)).remainder_(12)
        return logits


_QUEUE = "buffer (queue|pointer)"


@network("a momentum queue written in forward", mixes=True, refused={DATA: _QUEUE, PIPELINE: _QUEUE, SPLIT: _QUEUE})
def momentum_queue() -> Network:
    x = torch.randn(4, 6)
    return Moco(), ((x, x + 0.1), torch.zeros(4, dtype=torch.long)), F.cross_entropy


class BufferAssigned(nn.Module):
    """The buffer is not updated in place, its name gets a new tensor."""

    norm: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("norm", torch.ones(8))
        self.a = nn.Linear(6, 8)
        self.b = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        self.norm = 0.9 * self.norm + 0.1 * h.detach().abs().mean(0)
        return self.b(h / self.norm)


@network("a buffer that forward assigns anew", mixes=True, refused="all samples of a step|writes the buffer")
def buffer_assigned() -> Network:
    return BufferAssigned(), classes(), F.cross_entropy


class WrittenByBoth(nn.Module):
    """Both halves count into one buffer."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
            self.seen += 1
        return self.head(x)


_ONE_STAGE = "buffer seen"


@network("a buffer that layers of both stages write", refused={PIPELINE: _ONE_STAGE, SPLIT: _ONE_STAGE}, mixes=True)
def written_by_both_stages() -> Network:
    return WrittenByBoth(), classes(), F.cross_entropy


class InputInPlace(nn.Module):
    """Forward changes its own input."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x.sub_(0.5).div_(0.25)
        x[:, 0] = 0
        return self.fc(x)


@network("forward normalises its own input in place", refused="in place|input")
def input_in_place() -> Network:
    return InputInPlace(), classes(), F.cross_entropy


@network("views: in-place on a slice is seen through the whole")
def in_place_through_a_view() -> Network:
    class Views(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(6, 8)
            self.b = nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x)
            h[:, 4:].mul_(torch.sigmoid(h[:, :4]))
            h.view(-1, 2, 4)[:, 0] += 1
            return self.b(h)

    return Views(), classes(), F.cross_entropy
