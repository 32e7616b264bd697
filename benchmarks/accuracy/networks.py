"""Networks that nothing here was made for: transformers, pictures, and two that a user might write."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.missing_operators import declare_missing
from tests.zoo.packages.examples import configured

Loss = Callable[[Tensor, Tensor], Tensor]
Example = tuple[nn.Module, tuple[Tensor, Tensor], Loss]

SAMPLES = 16
WORDS = 64
VOCABULARY = 2000
CLASSES = 20
_SIZES = {"hidden_size": 256, "num_hidden_layers": 6, "num_attention_heads": 4}


class Logits(nn.Module):
    """A network of Hugging Face's, of whose outputs the logits count."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, inputs: Tensor) -> Tensor:
        found: Tensor = self.network(inputs).logits
        return found


def bert() -> Example:
    """Masked words."""
    return _of_text("Bert", "BertForMaskedLM", intermediate_size=1024, max_position_embeddings=WORDS, **_SIZES)


def gpt2() -> Example:
    """The next word; the embedding is the head's too."""
    return _of_text("GPT2", "GPT2LMHeadModel", n_positions=WORDS, use_cache=False, **_SIZES)


def vit() -> Example:
    """Pictures as words."""
    sizes = {"image_size": 64, "patch_size": 8, "num_labels": CLASSES, "intermediate_size": 1024}
    return Logits(configured("ViT", "ViTForImageClassification", **_SIZES, **sizes)), *_pictures(64)


def regnet() -> Example:
    """A RegNetX of 200 MFLOP, of timm."""
    declare_missing()
    import timm

    return timm.create_model("regnetx_002", num_classes=CLASSES), *_pictures(96)


def se_resnet() -> Example:
    """A residual network whose blocks weigh their channels."""
    widths = (32, 64, 128, 256)
    body = [nn.Conv2d(3, 32, 3, padding=1), *(_Weighing(a, b) for a, b in pairwise((32, *widths)))]
    network = nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], CLASSES))
    return network, *_pictures(64)


def unet() -> Example:
    """A class for each pixel."""
    (pictures, _), loss_fn = _pictures(64)
    targets = torch.randint(CLASSES, (SAMPLES, 64, 64), generator=torch.Generator().manual_seed(2))
    return _UNet((16, 32, 64, 128)), (pictures, targets), loss_fn


class _Weighing(nn.Module):
    """Squeeze and excitation (Hu, Shen and Sun 2018) behind two convolutions, halved, beside a shortcut."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, 2, 1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.shortcut = nn.Conv2d(inputs, outputs, 1, 2)
        self.squeeze = nn.Linear(outputs, outputs // 8)
        self.excite = nn.Linear(outputs // 8, outputs)

    def forward(self, x: Tensor) -> Tensor:
        found = self.body(x)
        weights = self.excite(self.squeeze(found.mean((2, 3))).relu()).sigmoid()
        shown: Tensor = (found * weights[:, :, None, None] + self.shortcut(x)).relu()
        return shown


def _twice(inputs: int, outputs: int) -> nn.Sequential:
    layers = [(inputs, outputs), (outputs, outputs)]
    return nn.Sequential(
        *(
            layer
            for a, b in layers
            for layer in (nn.Conv2d(a, b, 3, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU())
        )
    )


class _UNet(nn.Module):
    """Ronneberger, Fischer and Brox 2015, with padding."""

    def __init__(self, widths: tuple[int, ...]) -> None:
        super().__init__()
        self.down = nn.ModuleList(_twice(a, b) for a, b in pairwise((3, *widths)))
        self.grow = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, 2) for a, b in pairwise(widths))
        self.up = nn.ModuleList(_twice(2 * a, a) for a in widths[:-1])
        self.head = nn.Conv2d(widths[0], CLASSES, 1)

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for number, level in enumerate(self.down):
            x = level(functional.max_pool2d(x, 2) if number else x)
            kept.append(x)
        for number in reversed(range(len(self.up))):
            x = self.up[number](torch.cat([kept[number], self.grow[number](x)], 1))
        found: Tensor = self.head(x)
        return found


def _of_text(architecture: str, model: str, **settings: Any) -> Example:
    generator = torch.Generator().manual_seed(1)
    words, targets = (torch.randint(VOCABULARY, (SAMPLES, WORDS), generator=generator) for _ in range(2))
    network = configured(architecture, model, vocab_size=VOCABULARY, **settings)
    return Logits(network), (words, targets), _of_words


def _of_words(logits: Tensor, words: Tensor) -> Tensor:
    return functional.cross_entropy(logits.transpose(1, 2), words)


def _pictures(size: int) -> tuple[tuple[Tensor, Tensor], Loss]:
    generator = torch.Generator().manual_seed(1)
    pictures = torch.randn(SAMPLES, 3, size, size, generator=generator)
    return (pictures, torch.randint(CLASSES, (SAMPLES,), generator=generator)), functional.cross_entropy
