"""Classifiers of pictures from timm, for small pictures."""

from __future__ import annotations

from typing import Any

from tests.zoo.packages.examples import CLASSES, SAMPLES, Example, declare_missing, picture_classifier, registering

network, made = registering("timm")

_LARGER = 8
"""Samples of networks whose last batch normalisations have few values a channel."""


def _created(name: str, size: int, samples: int = SAMPLES, **settings: Any) -> Example:
    declare_missing()
    import timm

    return picture_classifier(timm.create_model(name, num_classes=CLASSES, **settings), size, samples)


made("cait", "CaiT (Touvron et al. 2021): attention of the class token alone at the end")(
    _created, "cait_xxs24_224", 64, img_size=64, depth=3
)
made("coat", "CoaT-Lite (Xu et al. 2021): convolutions and attention in one layer")(
    _created, "coat_lite_tiny", 64, img_size=64
)
made("densenet121", "DenseNet-121 (Huang et al. 2017): each layer reads all before it")(
    _created, "densenet121", 64, _LARGER
)
made("efficientnet_b0", "EfficientNet-B0 (Tan and Le 2019)")(_created, "efficientnet_b0", 64, _LARGER)
made("ghostnet", "GhostNet (Han et al. 2020): half of the features are cheap copies")(
    _created, "ghostnet_100", 64, _LARGER
)
made("inception_v3", "Inception v3 (Szegedy et al. 2016): four branches side by side")(
    _created, "inception_v3", 128, _LARGER, aux_logits=False
)
made("mixer", "MLP-Mixer (Tolstikhin et al. 2021)")(_created, "mixer_s32_224", 64, img_size=64)
made("mobilenetv3", "MobileNetV3 (Howard et al. 2019)")(_created, "mobilenetv3_small_100", 64, _LARGER)
made("regnet", "RegNetY (Radosavovic et al. 2020)")(_created, "regnety_002", 64, _LARGER)
made("resnet18", "ResNet-18 (He et al. 2016)")(_created, "resnet18", 64, _LARGER)
made("resnet50", "ResNet-50 (He et al. 2016)")(_created, "resnet50", 64, _LARGER)
made("swin_tiny", "Swin transformer (Liu et al. 2021), in timm's words")(
    _created, "swin_tiny_patch4_window7_224", 56, img_size=56, embed_dim=24, depths=(1, 2, 1, 1)
)
made("vit_tiny", "ViT (Dosovitskiy et al. 2021), in timm's words")(
    _created, "vit_tiny_patch16_224", 64, img_size=64, depth=3
)
made("xception", "Xception (Chollet 2017)")(_created, "xception41", 64)
made("xcit", "XCiT (El-Nouby et al. 2021): attention between features")(
    _created, "xcit_nano_12_p16_224", 64, img_size=64, depth=3
)
made("beit_v2", "BEiT v2 (Peng et al. 2022): relative positions of patches")(
    _created, "beitv2_base_patch16_224", 64, img_size=64, depth=2, embed_dim=48, num_heads=4
)
made("deit3", "DeiT III (Touvron et al. 2022)")(
    _created, "deit3_small_patch16_224", 64, img_size=64, depth=2, embed_dim=48, num_heads=4
)
made("edgenext", "EdgeNeXt (Maaz et al. 2022): attention between features, convolutions of growing size")(
    _created, "edgenext_xx_small", 64
)
made("hrnet", "HRNet (Wang et al. 2020): several resolutions side by side")(_created, "hrnet_w18_small", 32, 4)
made("coatnet", "CoAtNet (Dai et al. 2021): convolutions, then attention")(
    _created, "coatnet_pico_rw_224", 64, img_size=64, depths=(1, 1, 1, 1), embed_dim=(32, 64, 64, 64)
)
made("mobileone", "MobileOne (Vasu et al. 2023): branches that are summed")(_created, "mobileone_s0", 64, _LARGER)
made("repvgg", "RepVGG (Ding et al. 2021)")(_created, "repvgg_a0", 32, _LARGER)
made("resnest", "ResNeSt (Zhang et al. 2022): attention between groups of channels")(
    _created, "resnest14d", 32, _LARGER
)
made("seresnet", "SE-ResNet (Hu et al. 2018): channels weighted by all of space")(_created, "seresnet18", 32, _LARGER)
made("twins", "Twins-SVT (Chu et al. 2021): local and global attention in turn")(
    _created, "twins_svt_small", 64, img_size=64, depths=(1, 1, 1, 1), embed_dims=(16, 32, 48, 64)
)
