"""Networks of transformers that look at pictures and films: classes, places, boxes; and those that read as well."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.zoo.packages.examples import (
    BRANCHES,
    CLASSES,
    NOT_APART,
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
    registering,
    token_loss,
    tokens,
)

network, made = registering("transformers")

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
_DETECTION: dict[str, Any] = {
    "d_model": 32,
    "num_queries": 6,
    **{f"{side}_layers": 2 for side in ("encoder", "decoder")},
    **{f"{side}_attention_heads": 4 for side in ("encoder", "decoder")},
    **{f"{side}_ffn_dim": 64 for side in ("encoder", "decoder")},
}


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


def _films(model: torch.nn.Module) -> Example:
    example = normal(SAMPLES, 4, 3, 32, 32), labels()
    return Named(model, ("pixel_values",), "logits"), example, functional.cross_entropy


def _backbone() -> Any:
    import transformers

    return transformers.ResNetConfig(
        embedding_size=16, layer_type="basic", out_features=["stage4"], num_labels=CLASSES, **_LEVELS
    )


def _detector(architecture: str, size: int = 64, **settings: Any) -> Example:
    model = configured(architecture, f"{architecture}ForObjectDetection", **settings)
    boxes = torch.rand(SAMPLES, 6, 4, generator=torch.Generator().manual_seed(1))
    return Named(model, ("pixel_values",), "pred_boxes"), (normal(SAMPLES, 3, size, size), boxes), functional.l1_loss


def _classifier(architecture: str, size: int = 32, samples: int = SAMPLES, **settings: Any) -> Example:
    model = configured(architecture, f"{architecture}ForImageClassification", num_labels=CLASSES, **settings)
    return picture_classifier(Named(model, ("pixel_values",), "logits"), size, samples)


made("beit", "BEiT (Bao et al. 2022)")(_classifier, "Beit", **_PATCHES)
made("convnext", "ConvNeXt (Liu et al. 2022)")(_classifier, "ConvNext", **_LEVELS)
made("convnextv2", "ConvNeXt V2 (Woo et al. 2023)")(_classifier, "ConvNextV2", **_LEVELS)
made("deit", "DeiT (Touvron et al. 2021)")(_classifier, "DeiT", **_PATCHES)
made("dinov2", "DINOv2 (Oquab et al. 2024)")(_classifier, "Dinov2", **_PATCHES)
made("poolformer", "PoolFormer (Yu et al. 2022): pooling in place of attention")(_classifier, "PoolFormer", **_LEVELS)


@network("SegFormer (Xie et al. 2021): a class for every place")
def segformer() -> Example:
    sizes: dict[str, Any] = {**_LEVELS, "depths": [1, 1, 1, 1], "decoder_hidden_size": 32, "num_labels": CLASSES}
    model = configured("Segformer", "SegformerForSemanticSegmentation", **sizes)
    targets = labels(CLASSES, SAMPLES, 16, 16)
    return Named(model, ("pixel_values",), "logits"), (normal(SAMPLES, 3, 64, 64), targets), functional.cross_entropy


made("swin", "Swin transformer (Liu et al. 2021): shifted windows")(_classifier, "Swin", **_WINDOWS)
made("vit", "ViT (Dosovitskiy et al. 2021)")(_classifier, "ViT", **_PATCHES)
made("bit", "BiT (Kolesnikov et al. 2020): convolutions whose weights are standardised")(
    _classifier, "Bit", embedding_size=16, num_groups=8, **_LEVELS
)
made("cvt", "CvT (Wu et al. 2021): convolutions make queries, keys and values")(
    _classifier, "Cvt", 64, embed_dim=[16, 32, 48], num_heads=[1, 2, 4], depth=[1, 2, 3]
)
made("data2vec_vision", "data2vec for pictures (Baevski et al. 2022)")(_classifier, "Data2VecVision", **_PATCHES)


@network("DPT (Ranftl et al. 2021): depth of every place")
def dpt() -> Example:
    levels = {"backbone_out_indices": [0, 1, 2, 3], "neck_hidden_sizes": [8, 16, 24, 32], "fusion_hidden_size": 16}
    settings = {**_PATCHES, "num_hidden_layers": 4, **levels, "is_hybrid": False}
    model = configured("DPT", "DPTForDepthEstimation", **settings)
    example = normal(SAMPLES, 3, 32, 32), normal(SAMPLES, 64, 64, seed=1)
    return Named(model, ("pixel_values",), "predicted_depth"), example, functional.l1_loss


made("efficientnet", "EfficientNet (Tan and Le 2019), in transformers' words")(
    _classifier, "EfficientNet", 32, image_size=32, width_coefficient=0.25, depth_coefficient=0.3, hidden_dim=320
)
made("focalnet", "FocalNet (Yang et al. 2022): context gathered from far and near")(
    _classifier, "FocalNet", image_size=32, embed_dim=16, depths=[1, 1, 1, 1]
)


@network("GLPN (Kim et al. 2022): depth of every place")
def glpn() -> Example:
    sizes = {**_LEVELS, "num_attention_heads": [1, 2, 4, 4], "decoder_hidden_size": 16}
    model = configured("GLPN", "GLPNForDepthEstimation", **sizes)
    example = normal(SAMPLES, 3, 64, 64), normal(SAMPLES, 64, 64, seed=1)
    return Named(model, ("pixel_values",), "predicted_depth"), example, functional.l1_loss


@network("Hiera (Ryali et al. 2023): attention within units that are pooled")
def hiera() -> Example:
    sizes = {"embed_dim": 16, "image_size": [64, 64], "depths": [1, 1, 1, 1], "num_heads": [1, 2, 4, 8]}
    return _classifier("Hiera", 64, masked_unit_attention=[True, True, False, False], **sizes)


@network("LeViT (Graham et al. 2021): attention that halves resolution")
def levit() -> Example:
    sizes = {"hidden_sizes": [32, 48, 64], "num_attention_heads": [2, 3, 4], "depths": [1, 1, 1], "key_dim": [8, 8, 8]}
    return _classifier("Levit", 64, 8, image_size=64, **sizes)


@network("MobileViT (Mehta and Rastegari 2022): attention between the same places of patches")
def mobilevit() -> Example:
    sizes: dict[str, Any] = {"hidden_sizes": [24, 32, 40], "neck_hidden_sizes": [8, 8, 16, 24, 32, 40, 64]}
    return _classifier("MobileViT", 64, 8, image_size=64, num_attention_heads=2, **sizes)


@network("PVT (Wang et al. 2021): keys and values of lower resolution")
def pvt() -> Example:
    heads = {"num_attention_heads": [1, 2, 4, 4], "sequence_reduction_ratios": [8, 4, 2, 1]}
    return _classifier("Pvt", 64, image_size=64, **_LEVELS, **heads)


made("swiftformer", "SwiftFormer (Shaker et al. 2023): additive attention")(
    _classifier,
    "SwiftFormer",
    64,
    8,
    image_size=64,
    depths=[1, 1, 1, 1],
    embed_dims=[16, 24, 32, 48],
    drop_path_rate=0.0,
)


@network("Swin2SR (Conde et al. 2022): a picture of twice the size")
def swin2sr() -> Example:
    sizes = {"image_size": 16, "embed_dim": 24, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4}
    model = configured("Swin2SR", "Swin2SRForImageSuperResolution", upscale=2, **sizes)
    example = normal(SAMPLES, 3, 16, 16), normal(SAMPLES, 3, 32, 32, seed=1)
    return Named(model, ("pixel_values",), "reconstruction"), example, functional.l1_loss


made("swinv2", "Swin transformer V2 (Liu et al. 2022): cosine attention")(
    _classifier, "Swinv2", image_size=32, patch_size=2, embed_dim=32, depths=[2, 2], num_heads=[2, 4], window_size=4
)
made("vit_msn", "ViT-MSN (Assran et al. 2022)")(_classifier, "ViTMSN", **_PATCHES)


@network("The side of SAM (Kirillov et al. 2023) that looks: windows, relative positions")
def sam_vision() -> Example:
    sizes = {"hidden_size": 32, "output_channels": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "mlp_dim": 64}
    places = {"image_size": 64, "patch_size": 8, "window_size": 4, "global_attn_indexes": [1]}
    named = Named(configured("SamVision", "SamVisionModel", **sizes, **places), ("pixel_values",), "last_hidden_state")
    return named, (normal(SAMPLES, 3, 64, 64), normal(SAMPLES, 16, 8, 8, seed=1)), functional.mse_loss


@network("TimeSformer (Bertasius et al. 2021): attention over time, then over space", refused=NOT_APART)
def timesformer() -> Example:
    model = configured("Timesformer", "TimesformerForVideoClassification", num_frames=4, num_labels=CLASSES, **_PATCHES)
    return _films(model)


@network("VideoMAE (Tong et al. 2022): tubes of pictures")
def videomae() -> Example:
    sizes = {"num_frames": 4, "tubelet_size": 2, "num_labels": CLASSES}
    model = configured("VideoMAE", "VideoMAEForVideoClassification", **_PATCHES, **sizes)
    return _films(model)


@network("ViViT (Arnab et al. 2021): films")
def vivit() -> Example:
    model = configured(
        "Vivit", "VivitForVideoClassification", num_frames=4, tubelet_size=[2, 8, 8], num_labels=CLASSES, **_PATCHES
    )
    return _films(model)


@network("Conditional DETR (Meng et al. 2021): queries that say where")
def conditional_detr() -> Example:
    return _detector("ConditionalDetr", backbone_config=_backbone(), use_timm_backbone=False, **_DETECTION)


@network("DETR (Carion et al. 2020): a set of boxes")
def detr() -> Example:
    return _detector("Detr", backbone_config=_backbone(), use_timm_backbone=False, **_DETECTION)


@network("YOLOS (Fang et al. 2021): boxes from a plain transformer")
def yolos() -> Example:
    settings = {**_PATCHES, "image_size": [32, 32], "num_detection_tokens": 6}
    return _detector("Yolos", size=32, **settings)


@network("The side of CLIP (Radford et al. 2021) that looks at pictures")
def clip_vision() -> Example:
    model = configured("CLIPVision", "CLIPVisionModelWithProjection", projection_dim=32, **_PATCHES)
    return Named(model, ("pixel_values",), "image_embeds"), _embeddings(normal(SAMPLES, 3, 32, 32)), functional.mse_loss


@network("The side of CLIP that reads")
def clip_text() -> Example:
    model = configured("CLIPText", "CLIPTextModelWithProjection", **_reading())
    named = Named(model, ("input_ids", "attention_mask"), "text_embeds")
    return named, _embeddings(_captions(), lengths_mask() | 1), functional.mse_loss


@network("Both sides of CLIP: how well a picture fits its own caption, and only that one")
def clip() -> Example:
    settings = {"text_config": _reading(), "vision_config": _PATCHES, "projection_dim": 32}
    both = _Pairs(configured("CLIP", "CLIPModel", **settings))
    return both, ((_captions(), normal(SAMPLES, 3, 32, 32)), normal(SAMPLES, seed=1)), functional.mse_loss


@network("CLIP as it is trained: each picture against the captions of the whole batch", refused=NOT_APART)
def clip_contrast() -> Example:
    settings = {"text_config": _reading(), "vision_config": _PATCHES, "projection_dim": 32}
    named = Named(configured("CLIP", "CLIPModel", **settings), ("input_ids", "pixel_values"), "logits_per_image")
    return named, ((_captions(), normal(SAMPLES, 3, 32, 32)), labels()), _contrast


@network("SigLIP (Zhai et al. 2023), the side that looks: attention pools the patches")
def siglip_vision() -> Example:
    model = configured("SiglipVision", "SiglipVisionModel", **_PATCHES)
    named = Named(model, ("pixel_values",), "pooler_output")
    return named, (normal(SAMPLES, 3, 32, 32), normal(SAMPLES, 64, seed=1)), functional.mse_loss


@network("BLIP (Li et al. 2022): a picture's caption, word by word")
def blip_text_vision() -> Example:
    text = {**SMALL, "vocab_size": VOCABULARY, "max_position_embeddings": 32, "encoder_hidden_size": 64}
    settings = {"text_config": {**text, "bos_token_id": 1, "sep_token_id": 2}, "vision_config": _PATCHES}
    model = configured("Blip", "BlipForConditionalGeneration", projection_dim=32, **settings)
    inputs = normal(SAMPLES, 3, 32, 32), tokens(SAMPLES, TIME)
    named = Named(model, ("pixel_values", "input_ids"), "logits")
    return named, (inputs, tokens(SAMPLES, TIME, seed=1)), token_loss


@network("ViLT (Kim et al. 2021): words and patches in one transformer", refused=BRANCHES)
def vilt() -> Example:
    settings = {**_PATCHES, "vocab_size": VOCABULARY, "max_position_embeddings": 32, "num_labels": CLASSES}
    named = Named(configured("Vilt", "ViltForQuestionAnswering", **settings), ("input_ids", "pixel_values"), "logits")
    return named, ((tokens(SAMPLES, TIME), normal(SAMPLES, 3, 32, 32)), labels()), functional.cross_entropy
