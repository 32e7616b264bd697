"""More networks of transformers that look at pictures and films: classes, places, boxes, questions."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from benchmarks.networks.zoo.examples import (
    CLASSES,
    SAMPLES,
    SMALL,
    TIME,
    VOCABULARY,
    Example,
    Named,
    configured,
    labels,
    normal,
    picture_classifier,
    token_loss,
    tokens,
)

_PATCHES: dict[str, Any] = {"image_size": 32, "patch_size": 8, **SMALL}
_LEVELS: dict[str, Any] = {"hidden_sizes": [16, 32, 48, 64], "depths": [1, 1, 2, 1]}
_DETECTION: dict[str, Any] = {
    "d_model": 32,
    "num_queries": 6,
    **{f"{side}_layers": 2 for side in ("encoder", "decoder")},
    **{f"{side}_attention_heads": 4 for side in ("encoder", "decoder")},
    **{f"{side}_ffn_dim": 64 for side in ("encoder", "decoder")},
}


def bit() -> Example:
    """BiT (Kolesnikov et al. 2020): convolutions whose weights are standardised."""
    return _classifier("Bit", embedding_size=16, num_groups=8, **_LEVELS)


def cvt() -> Example:
    """CvT (Wu et al. 2021): convolutions make queries, keys and values."""
    sizes = {"embed_dim": [16, 32, 48], "num_heads": [1, 2, 4], "depth": [1, 2, 3]}
    return _classifier("Cvt", 64, **sizes)


def data2vec_vision() -> Example:
    """data2vec for pictures (Baevski et al. 2022)."""
    return _classifier("Data2VecVision", **_PATCHES)


def dpt() -> Example:
    """DPT (Ranftl et al. 2021): depth of every place."""
    levels = {"backbone_out_indices": [0, 1, 2, 3], "neck_hidden_sizes": [8, 16, 24, 32], "fusion_hidden_size": 16}
    settings = {**_PATCHES, "num_hidden_layers": 4, **levels, "is_hybrid": False}
    model = configured("DPT", "DPTForDepthEstimation", **settings)
    example = normal(SAMPLES, 3, 32, 32), normal(SAMPLES, 64, 64, seed=1)
    return Named(model, ("pixel_values",), "predicted_depth"), example, functional.l1_loss


def efficientnet() -> Example:
    """EfficientNet (Tan and Le 2019), in transformers' words."""
    return _classifier("EfficientNet", 32, image_size=32, width_coefficient=0.25, depth_coefficient=0.3, hidden_dim=320)


def focalnet() -> Example:
    """FocalNet (Yang et al. 2022): context gathered from far and near."""
    return _classifier("FocalNet", image_size=32, embed_dim=16, depths=[1, 1, 1, 1])


def glpn() -> Example:
    """GLPN (Kim et al. 2022): depth of every place."""
    sizes = {**_LEVELS, "num_attention_heads": [1, 2, 4, 4], "decoder_hidden_size": 16}
    model = configured("GLPN", "GLPNForDepthEstimation", **sizes)
    example = normal(SAMPLES, 3, 64, 64), normal(SAMPLES, 64, 64, seed=1)
    return Named(model, ("pixel_values",), "predicted_depth"), example, functional.l1_loss


def hiera() -> Example:
    """Hiera (Ryali et al. 2023): attention within units that are pooled."""
    sizes = {"embed_dim": 16, "image_size": [64, 64], "depths": [1, 1, 1, 1], "num_heads": [1, 2, 4, 8]}
    return _classifier("Hiera", 64, masked_unit_attention=[True, True, False, False], **sizes)


def levit() -> Example:
    """LeViT (Graham et al. 2021): attention that halves resolution."""
    sizes = {"hidden_sizes": [32, 48, 64], "num_attention_heads": [2, 3, 4], "depths": [1, 1, 1], "key_dim": [8, 8, 8]}
    return _classifier("Levit", 64, 8, image_size=64, **sizes)


def mobilevit() -> Example:
    """MobileViT (Mehta and Rastegari 2022): attention between the same places of patches."""
    sizes: dict[str, Any] = {"hidden_sizes": [24, 32, 40], "neck_hidden_sizes": [8, 8, 16, 24, 32, 40, 64]}
    return _classifier("MobileViT", 64, 8, image_size=64, num_attention_heads=2, **sizes)


def pvt() -> Example:
    """PVT (Wang et al. 2021): keys and values of lower resolution."""
    heads = {"num_attention_heads": [1, 2, 4, 4], "sequence_reduction_ratios": [8, 4, 2, 1]}
    return _classifier("Pvt", 64, image_size=64, **_LEVELS, **heads)


def siglip_vision() -> Example:
    """SigLIP (Zhai et al. 2023), the side that looks: attention pools the patches."""
    model = configured("SiglipVision", "SiglipVisionModel", **_PATCHES)
    named = Named(model, ("pixel_values",), "pooler_output")
    return named, (normal(SAMPLES, 3, 32, 32), normal(SAMPLES, 64, seed=1)), functional.mse_loss


def swiftformer() -> Example:
    """SwiftFormer (Shaker et al. 2023): additive attention."""
    sizes = {"depths": [1, 1, 1, 1], "embed_dims": [16, 24, 32, 48], "drop_path_rate": 0.0}
    return _classifier("SwiftFormer", 64, 8, image_size=64, **sizes)


def swin2sr() -> Example:
    """Swin2SR (Conde et al. 2022): a picture of twice the size."""
    sizes = {"image_size": 16, "embed_dim": 24, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4}
    model = configured("Swin2SR", "Swin2SRForImageSuperResolution", upscale=2, **sizes)
    example = normal(SAMPLES, 3, 16, 16), normal(SAMPLES, 3, 32, 32, seed=1)
    return Named(model, ("pixel_values",), "reconstruction"), example, functional.l1_loss


def swinv2() -> Example:
    """Swin transformer V2 (Liu et al. 2022): cosine attention."""
    sizes = {"embed_dim": 32, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4}
    return _classifier("Swinv2", image_size=32, patch_size=2, **sizes)


def timesformer() -> Example:
    """TimeSformer (Bertasius et al. 2021): attention over time, then over space."""
    model = configured("Timesformer", "TimesformerForVideoClassification", num_frames=4, num_labels=CLASSES, **_PATCHES)
    return (
        Named(model, ("pixel_values",), "logits"),
        (normal(SAMPLES, 4, 3, 32, 32), labels()),
        functional.cross_entropy,
    )


def videomae() -> Example:
    """VideoMAE (Tong et al. 2022): tubes of pictures."""
    sizes = {"num_frames": 4, "tubelet_size": 2, "num_labels": CLASSES}
    model = configured("VideoMAE", "VideoMAEForVideoClassification", **_PATCHES, **sizes)
    return (
        Named(model, ("pixel_values",), "logits"),
        (normal(SAMPLES, 4, 3, 32, 32), labels()),
        functional.cross_entropy,
    )


def vit_msn() -> Example:
    """ViT-MSN (Assran et al. 2022)."""
    return _classifier("ViTMSN", **_PATCHES)


def vivit() -> Example:
    """ViViT (Arnab et al. 2021): films."""
    model = configured(
        "Vivit", "VivitForVideoClassification", num_frames=4, tubelet_size=[2, 8, 8], num_labels=CLASSES, **_PATCHES
    )
    return (
        Named(model, ("pixel_values",), "logits"),
        (normal(SAMPLES, 4, 3, 32, 32), labels()),
        functional.cross_entropy,
    )


def conditional_detr() -> Example:
    """Conditional DETR (Meng et al. 2021): queries that say where."""
    return _detector("ConditionalDetr", backbone_config=_backbone(), use_timm_backbone=False, **_DETECTION)


def detr() -> Example:
    """DETR (Carion et al. 2020): a set of boxes."""
    return _detector("Detr", backbone_config=_backbone(), use_timm_backbone=False, **_DETECTION)


def yolos() -> Example:
    """YOLOS (Fang et al. 2021): boxes from a plain transformer."""
    settings = {**_PATCHES, "image_size": [32, 32], "num_detection_tokens": 6}
    return _detector("Yolos", size=32, **settings)


def sam_vision() -> Example:
    """The side of SAM (Kirillov et al. 2023) that looks: windows, relative positions."""
    sizes = {"hidden_size": 32, "output_channels": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "mlp_dim": 64}
    places = {"image_size": 64, "patch_size": 8, "window_size": 4, "global_attn_indexes": [1]}
    named = Named(configured("SamVision", "SamVisionModel", **sizes, **places), ("pixel_values",), "last_hidden_state")
    return named, (normal(SAMPLES, 3, 64, 64), normal(SAMPLES, 16, 8, 8, seed=1)), functional.mse_loss


def blip_text_vision() -> Example:
    """BLIP (Li et al. 2022): a picture's caption, word by word."""
    text = {**SMALL, "vocab_size": VOCABULARY, "max_position_embeddings": 32, "encoder_hidden_size": 64}
    settings = {"text_config": {**text, "bos_token_id": 1, "sep_token_id": 2}, "vision_config": _PATCHES}
    model = configured("Blip", "BlipForConditionalGeneration", projection_dim=32, **settings)
    inputs = normal(SAMPLES, 3, 32, 32), tokens(SAMPLES, TIME)
    named = Named(model, ("pixel_values", "input_ids"), "logits")
    return named, (inputs, tokens(SAMPLES, TIME, seed=1)), token_loss


def vilt() -> Example:
    """ViLT (Kim et al. 2021): words and patches in one transformer."""
    settings = {**_PATCHES, "vocab_size": VOCABULARY, "max_position_embeddings": 32, "num_labels": CLASSES}
    named = Named(configured("Vilt", "ViltForQuestionAnswering", **settings), ("input_ids", "pixel_values"), "logits")
    return named, ((tokens(SAMPLES, TIME), normal(SAMPLES, 3, 32, 32)), labels()), functional.cross_entropy


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
