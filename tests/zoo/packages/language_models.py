"""Language models of transformers, which predict the next token."""

from __future__ import annotations

from typing import Any

from tests.zoo.packages.examples import GROUPED, Example, decoder, registering

network, made = registering("transformers")

_GPT: dict[str, Any] = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64}
_EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "experts_implementation": "batched_mm",
}


made("biogpt", "BioGPT (Luo et al. 2022)")(decoder, "BioGpt", layerdrop=0.0)
made("bloom", "BLOOM (Scao et al. 2022): ALiBi positions")(decoder, "Bloom", n_layer=2, n_head=4)
made("codegen", "CodeGen (Nijkamp et al. 2023)")(
    decoder, "CodeGen", n_embd=64, n_layer=2, n_head=4, rotary_dim=8, n_positions=64
)
made("cohere", "Command R (Cohere 2024): attention and feed-forward side by side")(decoder, "Cohere")
made("ctrl", "CTRL (Keskar et al. 2019)")(
    decoder, "CTRL", "CTRLLMHeadModel", n_embd=64, n_layer=2, n_head=4, dff=128, n_positions=64
)


@network("DeepSeek-V3 (DeepSeek-AI 2024): latent attention, routed and shared experts")
def deepseek_v3() -> Example:
    latent = {"q_lora_rank": 32, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
    routed = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "n_shared_experts": 1}
    own = {"moe_intermediate_size": 32, "first_k_dense_replace": 1, "experts_implementation": "batched_mm"}
    return decoder("DeepseekV3", **latent, **routed, **own)


made("falcon", "Falcon (Almazrouei et al. 2023): one key and value for all heads")(decoder, "Falcon")
made("falcon_mamba", "Falcon Mamba (Zuo et al. 2024): a state space with normalised parameters")(
    decoder, "FalconMamba", state_size=4
)
made("gemma", "Gemma (Gemma team 2024)")(decoder, "Gemma", head_dim=16, **GROUPED)
made("gemma2", "Gemma 2 (Gemma team 2024): a sliding window in every other layer, capped logits")(
    decoder, "Gemma2", head_dim=16, sliding_window=8, **GROUPED
)
made("gemma3", "Gemma 3 (Gemma team 2025): normalised queries and keys")(
    decoder, "Gemma3Text", "Gemma3ForCausalLM", head_dim=16, sliding_window=8, **GROUPED
)
made("glm", "GLM-4 (Zeng et al. 2024): half of each head is rotated")(decoder, "Glm", head_dim=16, **GROUPED)
made("gpt2", "GPT-2 (Radford et al. 2019): the head shares the embedding's weights")(
    decoder, "GPT2", "GPT2LMHeadModel", n_embd=64, n_layer=2, n_head=4, n_positions=64
)
made("gpt_bigcode", "GPT-BigCode (Ben Allal et al. 2023): one key and value for all heads")(
    decoder, "GPTBigCode", **_GPT
)


@network("GPT-Neo (Black et al. 2021): global and local attention in turn")
def gpt_neo() -> Example:
    kinds = [[["global", "local"], 1]]
    return decoder("GPTNeo", attention_types=kinds, num_layers=2, num_heads=4, window_size=8)


made("gpt_neox", "GPT-NeoX (Black et al. 2022)")(decoder, "GPTNeoX")
made("gptj", "GPT-J (Wang and Komatsuzaki 2021)")(
    decoder, "GPTJ", n_embd=64, n_layer=2, n_head=4, rotary_dim=8, n_positions=64
)
made("granite", "Granite (IBM 2024)")(decoder, "Granite")
made("helium", "Helium (Kyutai 2025)")(decoder, "Helium", head_dim=16, **GROUPED)
made("lfm2", "LFM2 (Liquid AI 2025): short convolutions between attention")(
    decoder, "Lfm2", layer_types=["conv", "full_attention"], **GROUPED
)
made("llama", "Llama (Touvron et al. 2023), with sequences of unequal length")(decoder, "Llama", masked=True, **GROUPED)
made("mamba", "Mamba (Gu and Dao 2024): a selective state space, step by step")(decoder, "Mamba", state_size=8)
made("mamba2", "Mamba-2 (Dao and Gu 2024): state spaces in chunks")(
    decoder, "Mamba2", state_size=8, num_heads=8, head_dim=16, n_groups=2, chunk_size=8
)
made("mistral", "Mistral (Jiang et al. 2023): a sliding window")(decoder, "Mistral", sliding_window=8, **GROUPED)
made("mixtral", "Mixtral (Jiang et al. 2024): two of four experts for each token")(
    decoder, "Mixtral", num_local_experts=4, experts_implementation="batched_mm", **GROUPED
)
made("mpt", "MPT (MosaicML 2023): ALiBi positions")(decoder, "Mpt", d_model=64, n_heads=4, n_layers=2, max_seq_len=64)
made("nemotron", "Nemotron (Parmar et al. 2024): squared ReLU")(decoder, "Nemotron", head_dim=16, **GROUPED)
made("olmo2", "OLMo 2 (OLMo team 2024): normalisation behind each block")(decoder, "Olmo2", **GROUPED)
made("openai_gpt", "GPT (Radford et al. 2018)")(decoder, "OpenAIGPT", "OpenAIGPTLMHeadModel", **_GPT)
made("opt", "OPT (Zhang et al. 2022), with sequences of unequal length")(
    decoder, "OPT", masked=True, ffn_dim=128, word_embed_proj_dim=64
)
made("persimmon", "Persimmon (Adept 2023)")(decoder, "Persimmon")
made("phi", "Phi-1.5 (Li et al. 2023)")(decoder, "Phi")
made("phi3", "Phi-3 (Abdin et al. 2024): queries, keys and values of one matrix")(decoder, "Phi3", **GROUPED)
made("qwen2", "Qwen2 (Yang et al. 2024)")(decoder, "Qwen2", **GROUPED)
made("qwen2_moe", "Qwen1.5-MoE (Qwen team 2024): routed experts, and one that all tokens go through")(
    decoder, "Qwen2Moe", shared_expert_intermediate_size=32, **_EXPERTS, **GROUPED
)
made("qwen3", "Qwen3 (Yang et al. 2025)")(decoder, "Qwen3", head_dim=16, **GROUPED)
made("recurrent_gemma", "RecurrentGemma (Botev et al. 2024): linear recurrences, local attention in every third block")(
    decoder, "RecurrentGemma", lru_width=64, attention_window_size=8, num_hidden_layers=3, **GROUPED
)
made("rwkv", "RWKV (Peng et al. 2023): a recurrence that writes its output step by step")(
    decoder, "Rwkv", attention_hidden_size=64
)
made("smollm3", "SmolLM3 (Hugging Face 2025): every fourth layer without positions")(decoder, "SmolLM3", **GROUPED)
made("stablelm", "StableLM (Stability AI 2023)")(decoder, "StableLm", **GROUPED)
made("starcoder2", "StarCoder 2 (Lozhkov et al. 2024)")(decoder, "Starcoder2", sliding_window=8, **GROUPED)
made("xglm", "XGLM (Lin et al. 2021)")(
    decoder, "XGLM", d_model=64, ffn_dim=128, num_layers=2, attention_heads=4, layerdrop=0.0
)
