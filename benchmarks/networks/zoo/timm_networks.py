"""Classifiers of pictures from timm, for small pictures."""

from __future__ import annotations

from typing import Any

from benchmarks.networks.zoo.examples import CLASSES, SAMPLES, Example, picture_classifier
from benchmarks.networks.zoo.torchvision_operators import declare_missing

_LARGER = 8
"""Samples of networks whose last batch normalisations have few values a channel."""


def cait() -> Example:
    """CaiT (Touvron et al. 2021): attention of the class token alone at the end."""
    return _created("cait_xxs24_224", 64, img_size=64, depth=3)


def coat() -> Example:
    """CoaT-Lite (Xu et al. 2021): convolutions and attention in one layer."""
    return _created("coat_lite_tiny", 64, img_size=64)


def densenet121() -> Example:
    """DenseNet-121 (Huang et al. 2017): each layer reads all before it."""
    return _created("densenet121", 64, _LARGER)


def efficientnet_b0() -> Example:
    """EfficientNet-B0 (Tan and Le 2019)."""
    return _created("efficientnet_b0", 64, _LARGER)


def ghostnet() -> Example:
    """GhostNet (Han et al. 2020): half of the features are cheap copies."""
    return _created("ghostnet_100", 64, _LARGER)


def inception_v3() -> Example:
    """Inception v3 (Szegedy et al. 2016): four branches side by side."""
    return _created("inception_v3", 96, aux_logits=False)


def mixer() -> Example:
    """MLP-Mixer (Tolstikhin et al. 2021)."""
    return _created("mixer_s32_224", 64, img_size=64)


def mobilenetv3() -> Example:
    """MobileNetV3 (Howard et al. 2019)."""
    return _created("mobilenetv3_small_100", 64, _LARGER)


def regnet() -> Example:
    """RegNetY (Radosavovic et al. 2020)."""
    return _created("regnety_002", 64, _LARGER)


def resnet18() -> Example:
    """ResNet-18 (He et al. 2016)."""
    return _created("resnet18", 64, _LARGER)


def resnet50() -> Example:
    """ResNet-50 (He et al. 2016)."""
    return _created("resnet50", 64, _LARGER)


def swin_tiny() -> Example:
    """Swin transformer (Liu et al. 2021), in timm's words."""
    return _created("swin_tiny_patch4_window7_224", 56, img_size=56, embed_dim=24, depths=(1, 2, 1, 1))


def vit_tiny() -> Example:
    """ViT (Dosovitskiy et al. 2021), in timm's words."""
    return _created("vit_tiny_patch16_224", 64, img_size=64, depth=3)


def xception() -> Example:
    """Xception (Chollet 2017)."""
    return _created("xception41", 64)


def xcit() -> Example:
    """XCiT (El-Nouby et al. 2021): attention between features."""
    return _created("xcit_nano_12_p16_224", 64, img_size=64, depth=3)


def _created(name: str, size: int, samples: int = SAMPLES, **settings: Any) -> Example:
    declare_missing()
    import timm

    return picture_classifier(timm.create_model(name, num_classes=CLASSES, **settings), size, samples)
