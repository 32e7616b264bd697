"""Networks of torchvision: classes of pictures and films, a class for every place, boxes, optical flow."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from tests.zoo.packages.examples import (
    CLASSES,
    NOT_APART,
    SAMPLES,
    Example,
    declare_missing,
    labels,
    normal,
    picture_classifier,
    registering,
)

network, made = registering("torchvision")

_LARGER = 8
"""Samples of networks whose last batch normalisations have few values a channel."""
_CHANNELS = 32


class _Pyramid(nn.Module):
    def __init__(self, head: nn.Module) -> None:
        from torchvision.models.detection.backbone_utils import BackboneWithFPN
        from torchvision.models.resnet import BasicBlock, ResNet

        super().__init__()
        trunk = ResNet(BasicBlock, [1, 1, 1, 1], norm_layer=nn.BatchNorm2d)
        levels = {"layer2": "0", "layer3": "1", "layer4": "2"}
        self.backbone = BackboneWithFPN(trunk, levels, [128, 256, 512], _CHANNELS)
        self.head = head

    def forward(self, pictures: Tensor) -> Tensor:
        """(sample, place, class)."""
        found: Tensor = self.head(list(self.backbone(pictures).values()))["cls_logits"]
        return found


class _Flow(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        """(sample, 2, height, width)."""
        found: Tensor = self.model(first, second, num_flow_updates=2)[-1]
        return found


def _pictures() -> tuple[Tensor, Tensor]:
    return normal(SAMPLES, 3, 64, 64), labels()


def _scores(logits: Tensor, targets: Tensor) -> Tensor:
    wanted = functional.one_hot(targets, CLASSES).to(logits.dtype)
    return functional.binary_cross_entropy_with_logits(logits.amax(1), wanted)


def _places(found: dict[str, Tensor], targets: Tensor) -> Tensor:
    return functional.cross_entropy(found["out"], targets)


def _places_with_side(found: dict[str, Tensor], targets: Tensor) -> Tensor:
    return _places(found, targets) + 0.5 * functional.cross_entropy(found["aux"], targets)


def _with_sides(found: Any, targets: Tensor) -> Tensor:
    sides = functional.cross_entropy(found.aux_logits1, targets) + functional.cross_entropy(found.aux_logits2, targets)
    return functional.cross_entropy(found.logits, targets) + 0.3 * sides


def _segmentation(network: str, module: str, head: str) -> Example:
    declare_missing()
    from torchvision.models import segmentation
    from torchvision.models._utils import IntermediateLayerGetter
    from torchvision.models.resnet import BasicBlock, ResNet

    here = getattr(segmentation, module)
    trunk = IntermediateLayerGetter(ResNet(BasicBlock, [1, 1, 1, 1]), {"layer4": "out", "layer3": "aux"})
    made = getattr(here, network)(trunk, getattr(here, head)(512, CLASSES), segmentation.fcn.FCNHead(256, CLASSES))
    return made, (normal(4, 3, 32, 32), labels(CLASSES, 4, 32, 32)), _places_with_side


def _film(block: str, convolution: str, stem: str) -> Example:
    declare_missing()
    from torchvision.models.video import resnet

    parts = getattr(resnet, block), [getattr(resnet, convolution)] * 4, [1, 1, 1, 1], getattr(resnet, stem)
    network = resnet.VideoResNet(*parts, num_classes=CLASSES)
    return network, (normal(SAMPLES, 3, 4, 16, 16), labels()), functional.cross_entropy


def _model(name: str, **settings: Any) -> nn.Module:
    declare_missing()
    from torchvision import models

    network: nn.Module = models.get_model(name, weights=None, num_classes=CLASSES, **settings)
    return network


def _classifier(name: str, size: int, samples: int = SAMPLES, **settings: Any) -> Example:
    return picture_classifier(_model(name, **settings), size, samples)


@network("ConvNeXt (Liu et al. 2022), in torchvision's words")
def convnext_tiny() -> Example:
    from torchvision.models.convnext import CNBlockConfig, ConvNeXt

    blocks = [CNBlockConfig(16, 32, 1), CNBlockConfig(32, 48, 1), CNBlockConfig(48, None, 1)]
    return picture_classifier(ConvNeXt(blocks, 0.1, num_classes=CLASSES), 32)


@network("EfficientNetV2 (Tan and Le 2021)")
def efficientnet_v2() -> Example:
    from torchvision.models.efficientnet import EfficientNet, FusedMBConvConfig, MBConvConfig

    settings = [
        FusedMBConvConfig(1, 3, 1, 16, 16, 1),
        FusedMBConvConfig(4, 3, 2, 16, 24, 2),
        MBConvConfig(4, 3, 2, 24, 32, 2),
        MBConvConfig(6, 3, 2, 32, 48, 1),
    ]
    network = EfficientNet(settings, 0.2, num_classes=CLASSES, last_channel=64)
    return picture_classifier(network, 32, _LARGER)


@network("GoogLeNet (Szegedy et al. 2015), with its two losses at the side")
def googlenet() -> Example:
    network = _model("googlenet", aux_logits=True, init_weights=False, transform_input=True)
    return network, (normal(_LARGER, 3, 64, 64), labels(CLASSES, _LARGER)), _with_sides


@network("MaxViT (Tu et al. 2022): attention within blocks, then over a grid")
def maxvit() -> Example:
    from torchvision.models.maxvit import MaxVit

    sizes: dict[str, Any] = {"input_size": (32, 32), "stem_channels": 16, "partition_size": 2, "num_classes": CLASSES}
    depths = {"block_channels": [16, 32], "block_layers": [1, 1], "head_dim": 8, "stochastic_depth_prob": 0.1}
    return picture_classifier(MaxVit(**sizes, **depths), 32, _LARGER)


made("mnasnet", "MNASNet (Tan et al. 2019)")(_classifier, "mnasnet0_5", 32, _LARGER)
made("mobilenet_v2", "MobileNetV2 (Sandler et al. 2018)")(_classifier, "mobilenet_v2", 32, _LARGER, width_mult=0.25)


@network("ResNeXt (Xie et al. 2017): grouped convolutions")
def resnext() -> Example:
    from torchvision.models.resnet import Bottleneck, ResNet

    network = ResNet(Bottleneck, [1, 1, 1, 1], CLASSES, groups=4, width_per_group=8)
    return picture_classifier(network, 32, _LARGER)


made("shufflenet_v2", "ShuffleNetV2 (Ma et al. 2018): channels are shuffled")(
    _classifier, "shufflenet_v2_x0_5", 32, _LARGER
)
made("squeezenet", "SqueezeNet (Iandola et al. 2016)")(_classifier, "squeezenet1_1", 64)


@network("Swin transformer V2 (Liu et al. 2022), in torchvision's words")
def swin_v2() -> Example:
    from torchvision.models.swin_transformer import PatchMergingV2, SwinTransformer, SwinTransformerBlockV2

    sizes: dict[str, Any] = {"patch_size": [2, 2], "embed_dim": 24, "depths": [2, 2], "num_heads": [2, 4]}
    parts = {"block": SwinTransformerBlockV2, "downsample_layer": PatchMergingV2}
    return picture_classifier(SwinTransformer(**sizes, window_size=[4, 4], num_classes=CLASSES, **parts), 32)


@network("ViT (Dosovitskiy et al. 2021), in torchvision's words: nn.MultiheadAttention")
def vit_b() -> Example:
    from torchvision.models.vision_transformer import VisionTransformer

    return picture_classifier(VisionTransformer(32, 8, 2, 4, 64, 128, num_classes=CLASSES), 32)


made("deeplabv3", "DeepLabv3 (Chen et al. 2017) with its loss at the side: a class for every place")(
    _segmentation, "DeepLabV3", "deeplabv3", "DeepLabHead"
)
made("fcn", "FCN (Long et al. 2015) with its loss at the side")(_segmentation, "FCN", "fcn", "FCNHead")


@network("LR-ASPP (Howard et al. 2019) on MobileNetV3")
def lraspp() -> Example:
    from torchvision.models import segmentation

    declare_missing()
    network = segmentation.lraspp_mobilenet_v3_large(weights=None, weights_backbone=None, num_classes=CLASSES)
    return network, (normal(4, 3, 32, 32), labels(CLASSES, 4, 32, 32)), _places


made("r3d_18", "R3D-18 (Tran et al. 2018): films in three dimensions")(_film, "BasicBlock", "Conv3DSimple", "BasicStem")
made("r2plus1d_18", "R(2+1)D-18 (Tran et al. 2018): space, then time")(
    _film, "BasicBlock", "Conv2Plus1D", "R2Plus1dStem"
)


@network("S3D (Xie et al. 2018): separable convolutions of films")
def s3d() -> Example:
    from torchvision.models import video

    network = video.s3d(num_classes=CLASSES)
    network.avgpool = nn.AdaptiveAvgPool3d(1)  # its own is for films of 224 x 224
    return network, (normal(2, 3, 16, 32, 32), labels(CLASSES, 2)), functional.cross_entropy


@network("MViT (Fan et al. 2021): attention whose queries, keys and values are pooled")
def mvit() -> Example:
    from torchvision.models.video.mvit import MSBlockConfig, MViT

    first = {"kernel_q": [3, 3, 3], "kernel_kv": [3, 3, 3], "stride_q": [1, 1, 1], "stride_kv": [1, 2, 2]}
    blocks = [
        MSBlockConfig(num_heads=1, input_channels=16, output_channels=32, **first),
        MSBlockConfig(num_heads=2, input_channels=32, output_channels=32, **{**first, "stride_q": [1, 2, 2]}),
    ]
    network = MViT((16, 16), 4, blocks, False, False, False, False, num_classes=CLASSES)
    return network, (normal(SAMPLES, 3, 4, 16, 16), labels()), functional.cross_entropy


@network("A feature pyramid (Lin et al. 2017) on a ResNet, with the head of FCOS (Tian et al. 2019)")
def fcos_backbone() -> Example:
    from torchvision.models.detection.fcos import FCOSHead

    return _Pyramid(FCOSHead(_CHANNELS, 1, CLASSES, 1)), _pictures(), _scores


@network("The same with a head of RetinaNet (Lin et al. 2017)")
def retinanet_backbone() -> Example:
    from torchvision.models.detection.retinanet import RetinaNetHead

    return _Pyramid(RetinaNetHead(_CHANNELS, 1, CLASSES)), _pictures(), _scores


@network("RAFT (Teed and Deng 2020): optical flow, refined again and again", refused=NOT_APART)
def raft() -> Example:
    from torchvision.models import optical_flow

    network = _Flow(optical_flow.raft_small(weights=None))
    inputs = normal(2, 3, 128, 128), normal(2, 3, 128, 128, seed=1)
    return network, (inputs, normal(2, 2, 128, 128, seed=2)), functional.l1_loss
