"""Language models of transformers that predict the next token."""

from __future__ import annotations

from typing import Any

from benchmarks.networks.zoo.examples import (
    SAMPLES,
    SMALL,
    SPECIAL,
    TIME,
    VOCABULARY,
    Example,
    Named,
    configured,
    lengths_mask,
    token_loss,
    tokens,
)

_GROUPED = {"num_key_value_heads": 2}


def bloom() -> Example:
    """BLOOM (Scao et al. 2022): ALiBi positions."""
    return _decoder("Bloom", n_layer=2, n_head=4)


def codegen() -> Example:
    """CodeGen (Nijkamp et al. 2023)."""
    return _decoder("CodeGen", n_embd=64, n_layer=2, n_head=4, rotary_dim=8, n_positions=64)


def cohere() -> Example:
    """Command R (Cohere 2024): attention and feed-forward side by side."""
    return _decoder("Cohere")


def falcon() -> Example:
    """Falcon (Almazrouei et al. 2023): one key and value for all heads."""
    return _decoder("Falcon")


def gemma() -> Example:
    """Gemma (Gemma team 2024)."""
    return _decoder("Gemma", head_dim=16, **_GROUPED)


def gemma2() -> Example:
    """Gemma 2 (Gemma team 2024): a sliding window in every other layer, capped logits."""
    return _decoder("Gemma2", head_dim=16, sliding_window=8, **_GROUPED)


def gpt2() -> Example:
    """GPT-2 (Radford et al. 2019): the head shares the embedding's weights."""
    return _decoder("GPT2", "GPT2LMHeadModel", n_embd=64, n_layer=2, n_head=4, n_positions=64)


def gpt_neo() -> Example:
    """GPT-Neo (Black et al. 2021): global and local attention in turn."""
    kinds = [[["global", "local"], 1]]
    return _decoder("GPTNeo", attention_types=kinds, num_layers=2, num_heads=4, window_size=8)


def gpt_neox() -> Example:
    """GPT-NeoX (Black et al. 2022)."""
    return _decoder("GPTNeoX")


def gptj() -> Example:
    """GPT-J (Wang and Komatsuzaki 2021)."""
    return _decoder("GPTJ", n_embd=64, n_layer=2, n_head=4, rotary_dim=8, n_positions=64)


def granite() -> Example:
    """Granite (IBM 2024)."""
    return _decoder("Granite")


def llama() -> Example:
    """Llama (Touvron et al. 2023), with sequences of unequal length."""
    return _decoder("Llama", masked=True, **_GROUPED)


def mamba() -> Example:
    """Mamba (Gu and Dao 2024): a selective state space, step by step."""
    return _decoder("Mamba", state_size=8)


def mamba2() -> Example:
    """Mamba-2 (Dao and Gu 2024): state spaces in chunks."""
    return _decoder("Mamba2", state_size=8, num_heads=8, head_dim=16, n_groups=2, chunk_size=8)


def mistral() -> Example:
    """Mistral (Jiang et al. 2023): a sliding window."""
    return _decoder("Mistral", sliding_window=8, **_GROUPED)


def mixtral() -> Example:
    """Mixtral (Jiang et al. 2024): two of four experts for each token."""
    return _decoder("Mixtral", num_local_experts=4, experts_implementation="batched_mm", **_GROUPED)


def opt() -> Example:
    """OPT (Zhang et al. 2022), with sequences of unequal length."""
    return _decoder("OPT", masked=True, ffn_dim=128, word_embed_proj_dim=64)


def phi() -> Example:
    """Phi-1.5 (Li et al. 2023)."""
    return _decoder("Phi")


def qwen2() -> Example:
    """Qwen2 (Yang et al. 2024)."""
    return _decoder("Qwen2", **_GROUPED)


def rwkv() -> Example:
    """RWKV (Peng et al. 2023): a recurrence that writes its output step by step."""
    return _decoder("Rwkv", attention_hidden_size=64)


def _decoder(architecture: str, name: str = "", masked: bool = False, **settings: Any) -> Example:
    sizes = {**SMALL, **SPECIAL, "vocab_size": VOCABULARY, "max_position_embeddings": 64, **settings}
    model = configured(architecture, name or f"{architecture}ForCausalLM", **sizes)
    text = tokens(SAMPLES, TIME + 1)
    inputs = (text[:, :-1].contiguous(), *([lengths_mask()] if masked else []))
    named = Named(model, ("input_ids", "attention_mask")[: len(inputs)], "logits", use_cache=False)
    return named, (inputs, text[:, 1:].contiguous()), token_loss
