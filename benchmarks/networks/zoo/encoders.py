"""Text encoders of transformers, as classifiers of sequences of unequal length."""

from __future__ import annotations

from typing import Any

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
    lengths_mask,
    tokens,
)


def albert() -> Example:
    """ALBERT (Lan et al. 2020): all layers share their weights."""
    return _encoder("Albert", embedding_size=32)


def bert() -> Example:
    """BERT (Devlin et al. 2019)."""
    return _encoder("Bert")


def convbert() -> Example:
    """ConvBERT (Jiang et al. 2020): convolutions whose kernels are computed."""
    return _encoder("ConvBert", embedding_size=64)


def deberta_v2() -> Example:
    """DeBERTa-v2 (He et al. 2021): attention by content and by relative position."""
    return _encoder("DebertaV2", relative_attention=True, pos_att_type=["c2p", "p2c"], position_buckets=8)


def distilbert() -> Example:
    """DistilBERT (Sanh et al. 2019)."""
    return _encoder("DistilBert", dim=64, n_layers=2, n_heads=4, hidden_dim=128)


def electra() -> Example:
    """ELECTRA (Clark et al. 2020)."""
    return _encoder("Electra", embedding_size=32)


def fnet() -> Example:
    """FNet (Lee-Thorp et al. 2022): Fourier transforms in place of attention."""
    return _encoder("FNet", masked=False, use_tpu_fourier_optimizations=False)


def funnel() -> Example:
    """Funnel-Transformer (Dai et al. 2020): sequences are pooled between blocks."""
    sizes: dict[str, Any] = {"block_sizes": [1, 1], "d_model": 64, "n_head": 4, "d_head": 16, "d_inner": 128}
    return _classifier("Funnel", True, sizes)


def layoutlm() -> Example:
    """LayoutLM (Xu et al. 2020)."""
    return _encoder("LayoutLM")


def modernbert() -> Example:
    """ModernBERT (Warner et al. 2024): rotary positions, a local layer and a global one."""
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
    return _encoder("ModernBert", global_attn_every_n_layers=2, local_attention=8, **special)


def mpnet() -> Example:
    """MPNet (Song et al. 2020)."""
    return _encoder("MPNet")


def roberta() -> Example:
    """RoBERTa (Liu et al. 2019)."""
    return _encoder("Roberta")


def squeezebert() -> Example:
    """SqueezeBERT (Iandola et al. 2020): grouped convolutions."""
    return _encoder("SqueezeBert", embedding_size=64)


def xlnet() -> Example:
    """XLNet (Yang et al. 2019)."""
    return _classifier("XLNet", True, {"d_model": 64, "n_layer": 2, "n_head": 4, "d_inner": 128})


def _encoder(architecture: str, masked: bool = True, **settings: Any) -> Example:
    return _classifier(architecture, masked, {**SMALL, "max_position_embeddings": 64, **settings})


def _classifier(architecture: str, masked: bool, settings: dict[str, Any]) -> Example:
    name = f"{architecture}ForSequenceClassification"
    model = configured(architecture, name, **{"vocab_size": VOCABULARY, "num_labels": CLASSES, **settings})
    inputs = (tokens(SAMPLES, TIME), *([lengths_mask()] if masked else []))
    named = Named(model, ("input_ids", "attention_mask")[: len(inputs)], "logits")
    return named, (inputs, labels()), functional.cross_entropy
