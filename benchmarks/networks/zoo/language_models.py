"""Language models of transformers, which predict the next token."""

from __future__ import annotations

from typing import Any

from benchmarks.networks.zoo.examples import GROUPED, Example, decoder

_GPT: dict[str, Any] = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64}
_EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "experts_implementation": "batched_mm",
}


def biogpt() -> Example:
    """BioGPT (Luo et al. 2022)."""
    return decoder("BioGpt", layerdrop=0.0)


def bloom() -> Example:
    """BLOOM (Scao et al. 2022): ALiBi positions."""
    return decoder("Bloom", n_layer=2, n_head=4)


def codegen() -> Example:
    """CodeGen (Nijkamp et al. 2023)."""
    return decoder("CodeGen", n_embd=64, n_layer=2, n_head=4, rotary_dim=8, n_positions=64)


def cohere() -> Example:
    """Command R (Cohere 2024): attention and feed-forward side by side."""
    return decoder("Cohere")


def ctrl() -> Example:
    """CTRL (Keskar et al. 2019)."""
    return decoder("CTRL", "CTRLLMHeadModel", n_embd=64, n_layer=2, n_head=4, dff=128, n_positions=64)


def deepseek_v3() -> Example:
    """DeepSeek-V3 (DeepSeek-AI 2024): latent attention, routed and shared experts."""
    latent = {"q_lora_rank": 32, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
    routed = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "n_shared_experts": 1}
    own = {"moe_intermediate_size": 32, "first_k_dense_replace": 1, "experts_implementation": "batched_mm"}
    return decoder("DeepseekV3", **latent, **routed, **own)


def falcon() -> Example:
    """Falcon (Almazrouei et al. 2023): one key and value for all heads."""
    return decoder("Falcon")


def falcon_mamba() -> Example:
    """Falcon Mamba (Zuo et al. 2024): a state space with normalised parameters."""
    return decoder("FalconMamba", state_size=4)


def gemma() -> Example:
    """Gemma (Gemma team 2024)."""
    return decoder("Gemma", head_dim=16, **GROUPED)


def gemma2() -> Example:
    """Gemma 2 (Gemma team 2024): a sliding window in every other layer, capped logits."""
    return decoder("Gemma2", head_dim=16, sliding_window=8, **GROUPED)


def gemma3() -> Example:
    """Gemma 3 (Gemma team 2025): normalised queries and keys."""
    return decoder("Gemma3Text", "Gemma3ForCausalLM", head_dim=16, sliding_window=8, **GROUPED)


def glm() -> Example:
    """GLM-4 (Zeng et al. 2024): half of each head is rotated."""
    return decoder("Glm", head_dim=16, **GROUPED)


def gpt2() -> Example:
    """GPT-2 (Radford et al. 2019): the head shares the embedding's weights."""
    return decoder("GPT2", "GPT2LMHeadModel", n_embd=64, n_layer=2, n_head=4, n_positions=64)


def gpt_bigcode() -> Example:
    """GPT-BigCode (Ben Allal et al. 2023): one key and value for all heads."""
    return decoder("GPTBigCode", **_GPT)


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


def helium() -> Example:
    """Helium (Kyutai 2025)."""
    return decoder("Helium", head_dim=16, **GROUPED)


def lfm2() -> Example:
    """LFM2 (Liquid AI 2025): short convolutions between attention."""
    return decoder("Lfm2", layer_types=["conv", "full_attention"], **GROUPED)


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


def mpt() -> Example:
    """MPT (MosaicML 2023): ALiBi positions."""
    return decoder("Mpt", d_model=64, n_heads=4, n_layers=2, max_seq_len=64)


def nemotron() -> Example:
    """Nemotron (Parmar et al. 2024): squared ReLU."""
    return decoder("Nemotron", head_dim=16, **GROUPED)


def olmo2() -> Example:
    """OLMo 2 (OLMo team 2024): normalisation behind each block."""
    return decoder("Olmo2", **GROUPED)


def openai_gpt() -> Example:
    """GPT (Radford et al. 2018)."""
    return decoder("OpenAIGPT", "OpenAIGPTLMHeadModel", **_GPT)


def opt() -> Example:
    """OPT (Zhang et al. 2022), with sequences of unequal length."""
    return decoder("OPT", masked=True, ffn_dim=128, word_embed_proj_dim=64)


def persimmon() -> Example:
    """Persimmon (Adept 2023)."""
    return decoder("Persimmon")


def phi() -> Example:
    """Phi-1.5 (Li et al. 2023)."""
    return decoder("Phi")


def phi3() -> Example:
    """Phi-3 (Abdin et al. 2024): queries, keys and values of one matrix."""
    return decoder("Phi3", **GROUPED)


def qwen2() -> Example:
    """Qwen2 (Yang et al. 2024)."""
    return decoder("Qwen2", **GROUPED)


def qwen2_moe() -> Example:
    """Qwen1.5-MoE (Qwen team 2024): routed experts, and one that all tokens go through."""
    return decoder("Qwen2Moe", shared_expert_intermediate_size=32, **_EXPERTS, **GROUPED)


def qwen3() -> Example:
    """Qwen3 (Yang et al. 2025)."""
    return decoder("Qwen3", head_dim=16, **GROUPED)


def recurrent_gemma() -> Example:
    """RecurrentGemma (Botev et al. 2024): linear recurrences, local attention in every third block."""
    return decoder("RecurrentGemma", lru_width=64, attention_window_size=8, num_hidden_layers=3, **GROUPED)


def rwkv() -> Example:
    """RWKV (Peng et al. 2023): a recurrence that writes its output step by step."""
    return decoder("Rwkv", attention_hidden_size=64)


def smollm3() -> Example:
    """SmolLM3 (Hugging Face 2025): every fourth layer without positions."""
    return decoder("SmolLM3", **GROUPED)


def stablelm() -> Example:
    """StableLM (Stability AI 2023)."""
    return decoder("StableLm", **GROUPED)


def starcoder2() -> Example:
    """StarCoder 2 (Lozhkov et al. 2024)."""
    return decoder("Starcoder2", sliding_window=8, **GROUPED)


def xglm() -> Example:
    """XGLM (Lin et al. 2021)."""
    return decoder("XGLM", d_model=64, ffn_dim=128, num_layers=2, attention_heads=4, layerdrop=0.0)
