"""Language models of transformers that predict the next token.

Text encoders of transformers, as classifiers of sequences of unequal length.

Networks of transformers with an encoder and a decoder, and networks of sound and of time series.
"""

from __future__ import annotations

from typing import Any

from torch.nn import functional

from benchmarks.networks.zoo.examples import (
    ANSWER,
    CLASSES,
    GROUPED,
    SAMPLES,
    SMALL,
    SPECIAL,
    TWO_SIDES,
    VOCABULARY,
    Example,
    Named,
    classifier,
    configured,
    decoder,
    encoder,
    labels,
    normal,
    token_loss,
    tokens,
    translation,
    waves,
)


def albert() -> Example:
    """ALBERT (Lan et al. 2020): all layers share their weights."""
    return encoder("Albert", embedding_size=32)


def bert() -> Example:
    """BERT (Devlin et al. 2019)."""
    return encoder("Bert")


def convbert() -> Example:
    """ConvBERT (Jiang et al. 2020): convolutions whose kernels are computed."""
    return encoder("ConvBert", embedding_size=64)


def deberta_v2() -> Example:
    """DeBERTa-v2 (He et al. 2021): attention by content and by relative position."""
    return encoder("DebertaV2", relative_attention=True, pos_att_type=["c2p", "p2c"], position_buckets=8)


def distilbert() -> Example:
    """DistilBERT (Sanh et al. 2019)."""
    return encoder("DistilBert", dim=64, n_layers=2, n_heads=4, hidden_dim=128)


def electra() -> Example:
    """ELECTRA (Clark et al. 2020)."""
    return encoder("Electra", embedding_size=32)


def fnet() -> Example:
    """FNet (Lee-Thorp et al. 2022): Fourier transforms in place of attention."""
    return encoder("FNet", masked=False, use_tpu_fourier_optimizations=False)


def funnel() -> Example:
    """Funnel-Transformer (Dai et al. 2020): sequences are pooled between blocks."""
    sizes: dict[str, Any] = {"block_sizes": [1, 1], "d_model": 64, "n_head": 4, "d_head": 16, "d_inner": 128}
    return classifier("Funnel", True, sizes)


def layoutlm() -> Example:
    """LayoutLM (Xu et al. 2020)."""
    return encoder("LayoutLM")


def modernbert() -> Example:
    """ModernBERT (Warner et al. 2024): rotary positions, a local layer and a global one."""
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
    return encoder("ModernBert", global_attn_every_n_layers=2, local_attention=8, **special)


def mpnet() -> Example:
    """MPNet (Song et al. 2020)."""
    return encoder("MPNet")


def roberta() -> Example:
    """RoBERTa (Liu et al. 2019)."""
    return encoder("Roberta")


def squeezebert() -> Example:
    """SqueezeBERT (Iandola et al. 2020): grouped convolutions."""
    return encoder("SqueezeBert", embedding_size=64)


def xlnet() -> Example:
    """XLNet (Yang et al. 2019)."""
    return classifier("XLNet", True, {"d_model": 64, "n_layer": 2, "n_head": 4, "d_inner": 128})


def bloom() -> Example:
    """BLOOM (Scao et al. 2022): ALiBi positions."""
    return decoder("Bloom", n_layer=2, n_head=4)


def codegen() -> Example:
    """CodeGen (Nijkamp et al. 2023)."""
    return decoder("CodeGen", n_embd=64, n_layer=2, n_head=4, rotary_dim=8, n_positions=64)


def cohere() -> Example:
    """Command R (Cohere 2024): attention and feed-forward side by side."""
    return decoder("Cohere")


def falcon() -> Example:
    """Falcon (Almazrouei et al. 2023): one key and value for all heads."""
    return decoder("Falcon")


def gemma() -> Example:
    """Gemma (Gemma team 2024)."""
    return decoder("Gemma", head_dim=16, **GROUPED)


def gemma2() -> Example:
    """Gemma 2 (Gemma team 2024): a sliding window in every other layer, capped logits."""
    return decoder("Gemma2", head_dim=16, sliding_window=8, **GROUPED)


def gpt2() -> Example:
    """GPT-2 (Radford et al. 2019): the head shares the embedding's weights."""
    return decoder("GPT2", "GPT2LMHeadModel", n_embd=64, n_layer=2, n_head=4, n_positions=64)


def gpt_neo() -> Example:
    """GPT-Neo (Black et al. 2021): global and local attention in turn."""
    kinds = [[["global", "local"], 1]]
    return decoder("GPTNeo", attention_types=kinds, num_layers=2, num_heads=4, window_size=8)


def gpt_neox() -> Example:
    """GPT-NeoX (Black et al. 2022)."""
    return decoder("GPTNeoX")


def gptj() -> Example:
    """GPT-J (Wang and Komatsuzaki 2021)."""
    return decoder("GPTJ", n_embd=64, n_layer=2, n_head=4, rotary_dim=8, n_positions=64)


def granite() -> Example:
    """Granite (IBM 2024)."""
    return decoder("Granite")


def llama() -> Example:
    """Llama (Touvron et al. 2023), with sequences of unequal length."""
    return decoder("Llama", masked=True, **GROUPED)


def mamba() -> Example:
    """Mamba (Gu and Dao 2024): a selective state space, step by step."""
    return decoder("Mamba", state_size=8)


def mamba2() -> Example:
    """Mamba-2 (Dao and Gu 2024): state spaces in chunks."""
    return decoder("Mamba2", state_size=8, num_heads=8, head_dim=16, n_groups=2, chunk_size=8)


def mistral() -> Example:
    """Mistral (Jiang et al. 2023): a sliding window."""
    return decoder("Mistral", sliding_window=8, **GROUPED)


def mixtral() -> Example:
    """Mixtral (Jiang et al. 2024): two of four experts for each token."""
    return decoder("Mixtral", num_local_experts=4, experts_implementation="batched_mm", **GROUPED)


def opt() -> Example:
    """OPT (Zhang et al. 2022), with sequences of unequal length."""
    return decoder("OPT", masked=True, ffn_dim=128, word_embed_proj_dim=64)


def phi() -> Example:
    """Phi-1.5 (Li et al. 2023)."""
    return decoder("Phi")


def qwen2() -> Example:
    """Qwen2 (Yang et al. 2024)."""
    return decoder("Qwen2", **GROUPED)


def rwkv() -> Example:
    """RWKV (Peng et al. 2023): a recurrence that writes its output step by step."""
    return decoder("Rwkv", attention_hidden_size=64)


def bart() -> Example:
    """BART (Lewis et al. 2020)."""
    return translation("Bart", "BartForConditionalGeneration", max_position_embeddings=64, **TWO_SIDES)


def t5() -> Example:
    """T5 (Raffel et al. 2020): the position bias of the first layer is read by all."""
    sizes = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4}
    return translation("T5", "T5ForConditionalGeneration", **sizes)


def whisper() -> Example:
    """Whisper (Radford et al. 2023): spectrograms to tokens."""
    sizes = {"num_mel_bins": 16, "max_source_positions": 20, "max_target_positions": 32, "decoder_start_token_id": 1}
    settings = {**TWO_SIDES, **SPECIAL, **sizes, "vocab_size": VOCABULARY}
    model = configured("Whisper", "WhisperForConditionalGeneration", **settings)
    named = Named(model, ("input_features", "decoder_input_ids"), "logits", use_cache=False)
    inputs = (normal(SAMPLES, 16, 40), tokens(SAMPLES, ANSWER, seed=2))
    return named, (inputs, labels(VOCABULARY, SAMPLES, ANSWER)), token_loss


def wav2vec2() -> Example:
    """wav2vec 2.0 (Baevski et al. 2020): a convolution whose weight is normalised."""
    return waves("Wav2Vec2")


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
