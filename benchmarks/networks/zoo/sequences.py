"""Networks of transformers with an encoder and a decoder, and networks of sound and of time series."""

from __future__ import annotations

from typing import Any

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
    token_loss,
    tokens,
)

_ANSWER = 10
"""Tokens that the decoder sees."""

_TWO_SIDES: dict[str, Any] = {
    "d_model": 64,
    **{f"{side}_layers": 2 for side in ("encoder", "decoder")},
    **{f"{side}_attention_heads": 4 for side in ("encoder", "decoder")},
    **{f"{side}_ffn_dim": 128 for side in ("encoder", "decoder")},
}
_WAVES: dict[str, Any] = {
    "conv_dim": (32, 32, 32),
    "conv_stride": (5, 2, 2),
    "conv_kernel": (10, 3, 3),
    "num_feat_extract_layers": 3,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
    "classifier_proj_size": 32,
    "num_labels": CLASSES,
    # masks and skipped layers are drawn by numpy, outside of the graph
    "mask_time_prob": 0.0,
    "layerdrop": 0.0,
}


def bart() -> Example:
    """BART (Lewis et al. 2020)."""
    return _translation("Bart", "BartForConditionalGeneration", max_position_embeddings=64, **_TWO_SIDES)


def t5() -> Example:
    """T5 (Raffel et al. 2020): the position bias of the first layer is read by all."""
    sizes = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4}
    return _translation("T5", "T5ForConditionalGeneration", **sizes)


def whisper() -> Example:
    """Whisper (Radford et al. 2023): spectrograms to tokens."""
    sizes = {"num_mel_bins": 16, "max_source_positions": 20, "max_target_positions": 32, "decoder_start_token_id": 1}
    settings = {**_TWO_SIDES, **SPECIAL, **sizes, "vocab_size": VOCABULARY}
    model = configured("Whisper", "WhisperForConditionalGeneration", **settings)
    named = Named(model, ("input_features", "decoder_input_ids"), "logits", use_cache=False)
    inputs = (normal(SAMPLES, 16, 40), tokens(SAMPLES, _ANSWER, seed=2))
    return named, (inputs, labels(VOCABULARY, SAMPLES, _ANSWER)), token_loss


def wav2vec2() -> Example:
    """wav2vec 2.0 (Baevski et al. 2020): a convolution whose weight is normalised."""
    return _waves("Wav2Vec2")


def ast() -> Example:
    """Audio spectrogram transformer (Gong et al. 2021)."""
    sizes = {"patch_size": 8, "frequency_stride": 8, "time_stride": 8, "max_length": 32, "num_mel_bins": 16}
    model = configured("AST", "ASTForAudioClassification", num_labels=CLASSES, **sizes, **SMALL)
    return Named(model, ("input_values",), "logits"), (normal(SAMPLES, 32, 16), labels()), functional.cross_entropy


def patchtst() -> Example:
    """PatchTST (Nie et al. 2023): patches of several time series."""
    sizes = {"num_input_channels": 3, "context_length": 32, "patch_length": 8, "patch_stride": 8, "d_model": 32}
    more = {"num_attention_heads": 4, "ffn_dim": 64, "num_hidden_layers": 2, "num_targets": CLASSES}
    model = configured("PatchTST", "PatchTSTForClassification", **sizes, **more)
    named = Named(model, ("past_values",), "prediction_logits")
    return named, (normal(SAMPLES, 32, 3), labels()), functional.cross_entropy


def _translation(architecture: str, name: str, **settings: Any) -> Example:
    special = {"pad_token_id": 0, "decoder_start_token_id": 0, "eos_token_id": 1}
    model = configured(architecture, name, vocab_size=VOCABULARY, **special, **settings)
    named = Named(model, ("input_ids", "attention_mask", "decoder_input_ids"), "logits", use_cache=False)
    inputs = (tokens(SAMPLES, TIME), lengths_mask(), tokens(SAMPLES, _ANSWER, seed=2))
    return named, (inputs, labels(VOCABULARY, SAMPLES, _ANSWER)), token_loss


def _waves(architecture: str) -> Example:
    model = configured(architecture, f"{architecture}ForSequenceClassification", **_WAVES, **SMALL)
    return Named(model, ("input_values",), "logits"), (normal(SAMPLES, 800), labels()), functional.cross_entropy
