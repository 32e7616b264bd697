"""Classifiers of pictures from timm, for small pictures."""

from __future__ import annotations

from typing import Any

from benchmarks.networks.zoo.examples import CLASSES, SAMPLES, Example, declare_missing, picture_classifier

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
    return _created("inception_v3", 128, _LARGER, aux_logits=False)


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


def beit_v2() -> Example:
    """BEiT v2 (Peng et al. 2022): relative positions of patches."""
    return _created("beitv2_base_patch16_224", 64, img_size=64, depth=2, embed_dim=48, num_heads=4)


def deit3() -> Example:
    """DeiT III (Touvron et al. 2022)."""
    return _created("deit3_small_patch16_224", 64, img_size=64, depth=2, embed_dim=48, num_heads=4)


def edgenext() -> Example:
    """EdgeNeXt (Maaz et al. 2022): attention between features, convolutions of growing size."""
    return _created("edgenext_xx_small", 64)


def hrnet() -> Example:
    """HRNet (Wang et al. 2020): several resolutions side by side."""
    return _created("hrnet_w18_small", 32, 4)


def coatnet() -> Example:
    """CoAtNet (Dai et al. 2021): convolutions, then attention."""
    return _created("coatnet_pico_rw_224", 64, img_size=64, depths=(1, 1, 1, 1), embed_dim=(32, 64, 64, 64))


def mobileone() -> Example:
    """MobileOne (Vasu et al. 2023): branches that are summed."""
    return _created("mobileone_s0", 64, _LARGER)


def repvgg() -> Example:
    """RepVGG (Ding et al. 2021)."""
    return _created("repvgg_a0", 32, _LARGER)


def resnest() -> Example:
    """ResNeSt (Zhang et al. 2022): attention between groups of channels."""
    return _created("resnest14d", 32, _LARGER)


def seresnet() -> Example:
    """SE-ResNet (Hu et al. 2018): channels weighted by all of space."""
    return _created("seresnet18", 32, _LARGER)


def twins() -> Example:
    """Twins-SVT (Chu et al. 2021): local and global attention in turn."""
    return _created("twins_svt_small", 64, img_size=64, depths=(1, 1, 1, 1), embed_dims=(16, 32, 48, 64))


def _created(name: str, size: int, samples: int = SAMPLES, **settings: Any) -> Example:
    declare_missing()
    import timm

    return picture_classifier(timm.create_model(name, num_classes=CLASSES, **settings), size, samples)
