"""Networks with parts that do not train: frozen layers, evaluation modes, unused and tied parameters."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.autograd import Network, classes
from tests.zoo.entries import network


def images(rows: int = 4, size: int = 8, num_classes: int = 3) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, 3, size, size), torch.randint(num_classes, (rows,))


def backbone() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(),
        nn.Conv2d(4, 6, 3, stride=2, padding=1), nn.BatchNorm2d(6), nn.ReLU(),
    )  # fmt: skip


class Classifier(nn.Module):
    def __init__(self, body: nn.Module, width: int = 6) -> None:
        super().__init__()
        self.backbone = body
        self.fc = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.backbone(x)
        return self.fc(x.mean(dim=(2, 3)))


@network("transfer learning: the backbone has requires_grad False, its batch norm still trains", mixes=True)
def frozen_backbone() -> Network:
    net = Classifier(backbone())
    for p in net.backbone.parameters():
        p.requires_grad = False
    return net, images(), nn.CrossEntropyLoss()


@network("fine-tuning with batch norm in eval() and its affine frozen, as detection repositories do")
def frozen_batch_norm() -> Network:
    net = Classifier(backbone())
    for m in net.modules():
        if isinstance(m, nn.BatchNorm2d):
            m.running_mean.normal_()
            m.running_var.uniform_(0.5, 2)
            m.eval()
            m.weight.requires_grad_(False)
            m.bias.requires_grad_(False)
    return net, images(), nn.CrossEntropyLoss()


class FreezeBN(Classifier):
    """train() is overridden so that batch norm stays in eval()."""

    def train(self, mode: bool = True) -> FreezeBN:
        super().train(mode)
        for m in self.backbone.modules():
            if isinstance(m, nn.BatchNorm2d):
                m.eval()
        return self


@network("train() overridden so that batch norm stays frozen")
def train_overridden() -> Network:
    net = FreezeBN(backbone())
    net.backbone[1].running_var.fill_(0.3)
    net.train()
    return net, images(), nn.CrossEntropyLoss()


@network("one of two dropouts is in eval()")
def dropout_in_eval() -> Network:
    net = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.ReLU(), nn.Linear(8, 3))
    net[1].eval()
    return net, classes(), F.cross_entropy


@network("half of the batch norms in eval(), half training", mixes=True)
def mixed_modes() -> Network:
    net = Classifier(backbone())
    net.backbone[1].eval()
    return net, images(), F.cross_entropy


class Lora(nn.Module):
    """Frozen weight plus a trained low-rank one."""

    def __init__(self, fin: int, fout: int, r: int = 2) -> None:
        super().__init__()
        self.base = nn.Linear(fin, fout)
        self.base.requires_grad_(False)
        self.A = nn.Parameter(torch.randn(r, fin) / fin**0.5)
        self.B = nn.Parameter(torch.randn(fout, r) * 0.1)
        self.scaling = 2.0

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + (x @ self.A.t() @ self.B.t()) * self.scaling


@network("LoRA: frozen linear layers with trained low-rank updates")
def lora() -> Network:
    return nn.Sequential(Lora(6, 8), nn.GELU(), Lora(8, 8), nn.GELU(), Lora(8, 3)), classes(), F.cross_entropy


class Unused(nn.Module):
    """The auxiliary head is there but not called, as with GoogLeNet without aux logits."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(6, 8)
        self.aux = nn.Linear(8, 5)
        self.head = nn.Linear(8, 3)
        self.register_parameter("nothing", None)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.trunk(x).relu())


@network("an auxiliary head and a parameter that forward does not use")
def unused_head() -> Network:
    return Unused(), classes(), F.cross_entropy


class TiedLM(nn.Module):
    def __init__(self, vocab: int = 11, width: int = 6) -> None:
        super().__init__()
        self.emb = nn.Embedding(vocab, width)
        self.body = nn.Sequential(nn.Linear(width, width), nn.Tanh())
        self.out = nn.Linear(width, vocab, bias=False)
        self.out.weight = self.emb.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.body(self.emb(ids)))


def token_loss(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits.view(-1, logits.size(-1)), y.view(-1))


@network("a language model whose output layer is its embedding")
def tied_embedding() -> Network:
    return TiedLM(), (torch.randint(11, (4, 5)), torch.randint(11, (4, 5))), token_loss


class TiedAutoencoder(nn.Module):
    """The decoder uses the encoder's weights transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(5, 6) * 0.3)
        self.w2 = nn.Parameter(torch.randn(3, 5) * 0.3)
        self.b = nn.Parameter(torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.sigmoid(F.linear(torch.sigmoid(F.linear(x, self.w1)), self.w2))
        return F.linear(torch.sigmoid(F.linear(h, self.w2.t())), self.w1.t(), self.b)


@network("an autoencoder whose decoder is its encoder transposed")
def tied_autoencoder() -> Network:
    x, _ = classes()
    return TiedAutoencoder(), (x, x.clone()), nn.MSELoss()


class Byol(nn.Module):
    """A deep copy as target network, which has no gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.online = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
        self.target = copy.deepcopy(self.online)
        self.predictor = nn.Linear(4, 4)
        for p in self.target.parameters():
            p.requires_grad_(False)

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            t = self.target(b)
        return self.predictor(self.online(a)), t


def byol_loss(out: tuple[Tensor, Tensor], _: Tensor) -> Tensor:
    return 2 - 2 * F.cosine_similarity(out[0], out[1].detach(), dim=-1).mean()


@network("BYOL: a deep copy as target, no gradients there, targets unused")
def byol() -> Network:
    a, y = classes()
    return Byol(), ((a, a + 0.1), y), byol_loss


class Positional(nn.Module):
    """Sinusoids in a buffer that is not saved, a learned class token, and a ParameterDict."""

    def __init__(self) -> None:
        super().__init__()
        pos = torch.arange(8).unsqueeze(1) / 10000 ** (torch.arange(0, 6, 2) / 6)
        self.register_buffer("pe", torch.stack([pos.sin(), pos.cos()], -1).flatten(1), persistent=False)
        self.cls = nn.Parameter(torch.zeros(1, 1, 6))
        self.scales = nn.ParameterDict({"a": torch.ones(6), "b": nn.Parameter(torch.full((6,), 0.5))})
        self.steps = nn.ParameterList([nn.Parameter(torch.randn(6) * 0.1) for _ in range(2)])
        self.fc = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.cls.expand(x.shape[0], -1, -1), x], dim=1)
        x = x + self.pe[: x.size(1)]
        for step in self.steps:
            x = torch.tanh(x * self.scales["a"] + step)
        return self.fc(x[:, 0] * self.scales["b"])


@network("class token expanded over the batch, sinusoids in a non-persistent buffer, ParameterDict and ParameterList")
def class_token() -> Network:
    return Positional(), (torch.randn(4, 5, 6), torch.randint(3, (4,))), F.cross_entropy
