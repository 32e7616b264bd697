"""Networks of transformers that look at pictures, and CLIP, which reads as well."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.networks.zoo.examples import (
    CLASSES,
    SAMPLES,
    SMALL,
    SPECIAL,
    TIME,
    VOCABULARY,
    Example,
    Named,
    configured,
    labels,
    lengths_mask,
    normal,
    picture_classifier,
    tokens,
)

_PATCHES: dict[str, Any] = {"image_size": 32, "patch_size": 8, **SMALL}
_WINDOWS: dict[str, Any] = {
    "image_size": 32,
    "patch_size": 2,
    "embed_dim": 32,
    "depths": [2, 2],
    "num_heads": [2, 4],
    "window_size": 4,
}
_LEVELS: dict[str, Any] = {"hidden_sizes": [16, 32, 48, 64], "depths": [1, 1, 2, 1]}


def beit() -> Example:
    """BEiT (Bao et al. 2022)."""
    return _classifier("Beit", **_PATCHES)


def convnext() -> Example:
    """ConvNeXt (Liu et al. 2022)."""
    return _classifier("ConvNext", **_LEVELS)


def convnextv2() -> Example:
    """ConvNeXt V2 (Woo et al. 2023)."""
    return _classifier("ConvNextV2", **_LEVELS)


def deit() -> Example:
    """DeiT (Touvron et al. 2021)."""
    return _classifier("DeiT", **_PATCHES)


def dinov2() -> Example:
    """DINOv2 (Oquab et al. 2024)."""
    return _classifier("Dinov2", **_PATCHES)


def poolformer() -> Example:
    """PoolFormer (Yu et al. 2022): pooling in place of attention."""
    return _classifier("PoolFormer", **_LEVELS)


def segformer() -> Example:
    """SegFormer (Xie et al. 2021): a class for every place."""
    sizes: dict[str, Any] = {**_LEVELS, "depths": [1, 1, 1, 1], "decoder_hidden_size": 32, "num_labels": CLASSES}
    model = configured("Segformer", "SegformerForSemanticSegmentation", **sizes)
    targets = labels(CLASSES, SAMPLES, 16, 16)
    return Named(model, ("pixel_values",), "logits"), (normal(SAMPLES, 3, 64, 64), targets), functional.cross_entropy


def swin() -> Example:
    """Swin transformer (Liu et al. 2021): shifted windows."""
    return _classifier("Swin", **_WINDOWS)


def vit() -> Example:
    """ViT (Dosovitskiy et al. 2021)."""
    return _classifier("ViT", **_PATCHES)


def clip_vision() -> Example:
    """The side of CLIP (Radford et al. 2021) that looks at pictures."""
    model = configured("CLIPVision", "CLIPVisionModelWithProjection", projection_dim=32, **_PATCHES)
    return Named(model, ("pixel_values",), "image_embeds"), _embeddings(normal(SAMPLES, 3, 32, 32)), functional.mse_loss


def clip_text() -> Example:
    """The side of CLIP that reads."""
    model = configured("CLIPText", "CLIPTextModelWithProjection", **_reading())
    named = Named(model, ("input_ids", "attention_mask"), "text_embeds")
    return named, _embeddings(_captions(), lengths_mask() | 1), functional.mse_loss


def clip() -> Example:
    """Both sides of CLIP: how well a picture fits its own caption, and only that one."""
    settings = {"text_config": _reading(), "vision_config": _PATCHES, "projection_dim": 32}
    both = _Pairs(configured("CLIP", "CLIPModel", **settings))
    return both, ((_captions(), normal(SAMPLES, 3, 32, 32)), normal(SAMPLES, seed=1)), functional.mse_loss


def clip_contrast() -> Example:
    """CLIP as it is trained: each picture against the captions of the whole batch."""
    settings = {"text_config": _reading(), "vision_config": _PATCHES, "projection_dim": 32}
    named = Named(configured("CLIP", "CLIPModel", **settings), ("input_ids", "pixel_values"), "logits_per_image")
    return named, ((_captions(), normal(SAMPLES, 3, 32, 32)), labels()), _contrast


class _Pairs(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, captions: Tensor, pictures: Tensor) -> Tensor:
        """(sample,): similarity of each picture and its caption."""
        found = self.model(input_ids=captions, pixel_values=pictures)
        similar: Tensor = (found.image_embeds * found.text_embeds).sum(-1)
        return similar


def _contrast(logits: Tensor, targets: Tensor) -> Tensor:
    """Each picture's caption is the one of its own number; ``targets`` say nothing."""
    return functional.cross_entropy(logits, torch.arange(logits.shape[0]))


def _reading() -> dict[str, Any]:
    return {**SMALL, **SPECIAL, "vocab_size": VOCABULARY, "projection_dim": 32, "max_position_embeddings": 32}


def _captions() -> Tensor:
    found = tokens(SAMPLES, TIME)
    found[:, -1] = SPECIAL["eos_token_id"]
    return found


def _embeddings(*inputs: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
    return inputs, normal(SAMPLES, 32, seed=1)


def _classifier(architecture: str, size: int = 32, **settings: Any) -> Example:
    model = configured(architecture, f"{architecture}ForImageClassification", num_labels=CLASSES, **settings)
    return picture_classifier(Named(model, ("pixel_values",), "logits"), size)
