"""``config.json`` of public models: numbers of weights as they are published, and what is not understood refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from planner.extras.transformers.hf_config import KINDS, MOST_SEQ, described, read_config
from planner.extras.transformers.shape import TRANSFORMERS, Transformer, named_transformer
from planner.ir.errors import CorruptFileError, HalopipeError, UnknownNameError, UnsupportedModelError
from tests.missing_operators import declare_missing


def config(kind: str, layers: int, hidden: int, ffn: int, heads: int, kv_heads: int, **more: Any) -> dict[str, Any]:
    """The fields that all of them have."""
    return {
        "model_type": kind, "num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": ffn,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, **more,
    }  # fmt: skip


ROUTED = {"num_experts_per_tok": 8, "tie_word_embeddings": False}
LATENT = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
QWEN = {"use_sliding_window": False, "tie_word_embeddings": False, "hidden_act": "silu"}
DEEPSEEK = {"moe_layer_freq": 1, "rope_scaling": {"type": "yarn"}, "scoring_func": "softmax", "aux_loss_alpha": 0.001}
PUBLIC: Mapping[str, tuple[dict[str, Any], int]] = {
    "llama2-7b": (
        config("llama", 32, 4096, 11008, 32, 32, vocab_size=32000, max_position_embeddings=4096, pretraining_tp=1),
        6_738_415_616,
    ),
    "llama3-8b": (
        config(
            "llama", 32, 4096, 14336, 32, 8, vocab_size=128256, max_position_embeddings=8192, rope_theta=500000.0,
            attention_bias=False, attention_dropout=0.0, architectures=["LlamaForCausalLM"], torch_dtype="bfloat16",
        ),
        8_030_261_248,
    ),
    "llama3-70b": (
        config("llama", 80, 8192, 28672, 64, 8, vocab_size=128256, max_position_embeddings=8192), 70_553_706_496,
    ),
    "smollm2-135m": (
        config(
            "llama", 30, 576, 1536, 9, 3, vocab_size=49152, max_position_embeddings=8192, is_llama_config=True,
            rope_interleaved=False, rope_theta=100000, tie_word_embeddings=True,
        ),
        134_515_008,
    ),
    "mistral-7b": (
        config("mistral", 32, 4096, 14336, 32, 8, vocab_size=32000, max_position_embeddings=32768, sliding_window=4096),
        7_241_732_096,
    ),
    "mixtral-8x7b": (
        config(
            "mixtral", 32, 4096, 14336, 32, 8, vocab_size=32000, max_position_embeddings=32768, sliding_window=None,
            num_local_experts=8, num_experts_per_tok=2, output_router_logits=False, router_aux_loss_coef=0.02,
        ),
        46_702_792_704,
    ),
    "qwen2.5-7b": (
        config(
            "qwen2", 28, 3584, 18944, 28, 4, vocab_size=152064, max_position_embeddings=131072, max_window_layers=28,
            sliding_window=131072, use_mrope=False, **QWEN,
        ),
        7_615_616_512,
    ),
    "qwen3-8b": (
        config(
            "qwen3", 36, 4096, 12288, 32, 8, vocab_size=151936, max_position_embeddings=40960, head_dim=128,
            max_window_layers=36, sliding_window=None, rope_scaling=None, attention_bias=False, **QWEN,
        ),
        8_190_735_360,
    ),
    "qwen1.5-moe-a2.7b": (
        config(
            "qwen2_moe", 24, 2048, 5632, 16, 16, vocab_size=151936, max_position_embeddings=8192, num_experts=60,
            num_experts_per_tok=4, moe_intermediate_size=1408, shared_expert_intermediate_size=5632,
            decoder_sparse_step=1, norm_topk_prob=False, max_window_layers=21, sliding_window=32768, **QWEN,
        ),
        14_315_784_192,
    ),
    "qwen3-30b-a3b": (
        config(
            "qwen3_moe", 48, 2048, 6144, 32, 4, vocab_size=151936, max_position_embeddings=40960, head_dim=128,
            num_experts=128, moe_intermediate_size=768, decoder_sparse_step=1, mlp_only_layers=[], norm_topk_prob=True,
            max_window_layers=48, use_sliding_window=False, sliding_window=None, **ROUTED,
        ),
        30_532_122_624,
    ),
    "deepseek-v2-lite": (
        config(
            "deepseek_v2", 27, 2048, 10944, 16, 16, vocab_size=102400, max_position_embeddings=163840, **LATENT,
            q_lora_rank=None, n_routed_experts=64, n_shared_experts=2, num_experts_per_tok=6, first_k_dense_replace=1,
            moe_intermediate_size=1408, topk_method="greedy", topk_group=1, n_group=1, **DEEPSEEK,
        ),
        15_706_484_224,
    ),
    "deepseek-v2": (
        config(
            "deepseek_v2", 60, 5120, 12288, 128, 128, vocab_size=102400, max_position_embeddings=163840, **LATENT,
            q_lora_rank=1536, n_routed_experts=160, n_shared_experts=2, num_experts_per_tok=6, first_k_dense_replace=1,
            moe_intermediate_size=1536, topk_method="group_limited_greedy", topk_group=3, n_group=8, **DEEPSEEK,
        ),
        235_741_434_880,
    ),
    "deepseek-v3": (
        config(
            "deepseek_v3", 61, 7168, 18432, 128, 128, vocab_size=129280, max_position_embeddings=163840, **LATENT,
            q_lora_rank=1536, n_routed_experts=256, n_shared_experts=1, first_k_dense_replace=3, topk_method="noaux_tc",
            moe_intermediate_size=2048, num_nextn_predict_layers=1, quantization_config={"quant_method": "fp8"},
            **ROUTED, **DEEPSEEK,
        ),
        671_026_419_200,
    ),
    "gpt-neox-20b": (
        {
            "model_type": "gpt_neox", "num_hidden_layers": 44, "hidden_size": 6144, "intermediate_size": 24576,
            "num_attention_heads": 64, "vocab_size": 50432, "max_position_embeddings": 2048, "rotary_pct": 0.25,
            "hidden_act": "gelu_fast", "hidden_dropout_prob": 0, "use_parallel_residual": True,
        },
        20_554_567_680,
    ),
    "gemma-7b": (
        config(
            "gemma", 28, 3072, 24576, 16, 16, vocab_size=256000, max_position_embeddings=8192, head_dim=256,
            hidden_act="gelu_pytorch_tanh", hidden_activation=None,
        ),
        8_537_680_896,
    ),
    "gemma2-9b": (
        config(
            "gemma2", 42, 3584, 14336, 16, 8, vocab_size=256000, max_position_embeddings=8192, head_dim=256,
            hidden_act="gelu_pytorch_tanh", hidden_activation="gelu_pytorch_tanh", sliding_window=4096,
            sliding_window_size=4096, attn_logit_softcapping=50.0, final_logit_softcapping=30.0,
            query_pre_attn_scalar=256,
        ),
        9_241_705_984,
    ),
    "gemma-3-1b": (
        config(
            "gemma3_text", 26, 1152, 6912, 4, 1, vocab_size=262144, max_position_embeddings=32768, head_dim=256,
            sliding_window=512, sliding_window_pattern=6, rope_local_base_freq=10000,
        ),
        999_885_952,
    ),
}  # fmt: skip
"""The fields that matter of files at huggingface.co, and the numbers of weights that their pages state."""


@pytest.mark.every_case
@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_model_has_as_many_weights_as_its_page_says(name: str) -> None:
    given, count = PUBLIC[name]
    shape = described(given, name).shape
    assert shape.parameters == count
    assert shape.seq == min(given["max_position_embeddings"], MOST_SEQ)


@pytest.mark.parametrize("name", [name for name in PUBLIC if name in TRANSFORMERS])
def test_a_name_is_what_its_file_says(name: str) -> None:
    known = named_transformer(name)
    found = replace(described(PUBLIC[name][0], name).shape, seq=known.seq)
    others = {"attention_dropout": known.attention_dropout, "rotary_base": known.rotary_base, "settings": ()}
    assert replace(found, **others) == known  # dropout is of no account, and these files leave positions out


@pytest.mark.parametrize(
    ("given", "base", "settings"),
    [
        ({}, 1e4, ()),
        ({"rope_theta": 5e5, "rope_scaling": {"factor": 8.0}}, 5e5, ('rope_scaling={"factor": 8.0}',)),
        ({"rope_parameters": {"rope_theta": 1000000}}, 1e6, ('rope_parameters={"rope_theta": 1000000}',)),
        ({"rms_norm_eps": 1e-6, "hidden_act": "silu"}, 1e4, ("rms_norm_eps=1e-06",)),
    ],
    ids=str,
)
def test_what_neither_weights_nor_times_depend_on_is_kept(
    given: dict[str, object], base: float, settings: tuple[str, ...]
) -> None:
    shape = described({"model_type": "llama", **given}, "llama").shape
    assert (shape.rotary_base, shape.settings) == (base, settings)


def test_a_rotary_base_that_is_none_is_refused() -> None:
    with pytest.raises(CorruptFileError, match="rope_theta is 'wide'"):
        described({"model_type": "llama", "rope_theta": "wide"}, "llama")


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        ("mixtral-8x7b", 46.7, 12.9),
        ("mixtral-8x22b", 140.6, 39.2),
        ("deepseek-v2", 235.7, 21.4),
        ("deepseek-v3", 671.0, 37.6),
        ("qwen3-30b-a3b", 30.5, 3.35),
        ("qwen3-235b-a22b", 235.1, 22.2),
    ],
)
def test_of_experts_those_are_active_that_a_token_goes_through(name: str, total: float, active: float) -> None:
    """In thousands of millions, as their papers say; the embedding counts as active."""
    shape = named_transformer(name)
    assert shape.parameters / 1e9 == pytest.approx(total, abs=0.05)
    assert shape.active_parameters / 1e9 == pytest.approx(active, abs=0.05)


SMALL: Mapping[str, dict[str, Any]] = {
    "num_hidden_layers": 3, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "vocab_size": 64,
}  # fmt: skip
WEE: Mapping[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": 2, "attention_bias": True, "mlp_bias": True},
    "mistral": {"num_key_value_heads": 2, "head_dim": 16},
    "mixtral": {"num_key_value_heads": 2, "num_local_experts": 4},
    "qwen2": {"num_key_value_heads": 2, "tie_word_embeddings": True},
    "qwen3": {"num_key_value_heads": 2, "head_dim": 16},
    "qwen2_moe": {
        "num_key_value_heads": 2, "num_experts": 4, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 24,
    },
    "qwen3_moe": {"num_experts": 8, "moe_intermediate_size": 8, "head_dim": 16, "mlp_only_layers": [0]},
    "deepseek_v2": {
        **LATENT, "kv_lora_rank": 12, "q_lora_rank": None, "n_routed_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 8, "first_k_dense_replace": 1,
    },
    "deepseek_v3": {
        "kv_lora_rank": 12, "q_lora_rank": 20, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 10,
        "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "first_k_dense_replace": 2,
        "n_group": 2, "topk_group": 1, "num_key_value_heads": 4, "attention_bias": True,
    },
    "gpt_neox": {},
    "gemma": {"num_key_value_heads": 2, "head_dim": 16},
    "gemma2": {"num_key_value_heads": 2, "head_dim": 16, "attention_bias": True},
    "gemma3_text": {"num_key_value_heads": 2, "head_dim": 16},
}  # fmt: skip


@pytest.mark.exhaustive("importing transformers takes 10 s")
@pytest.mark.parametrize("kind", KINDS)
def test_a_model_of_transformers_on_the_meta_device_has_as_many_weights(kind: str) -> None:
    """Its router's bias is a buffer there, and blocks of MTP are no part of the model."""
    declare_missing()
    transformers = pytest.importorskip("transformers")
    given = {**SMALL, **WEE[kind]}
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(kind, **given))
    count = sum(parameter.numel() for parameter in model.parameters())
    shape = described({"model_type": kind, **given}, kind).shape
    assert shape.parameters - shape.router_bias * shape.layers * shape.experts == count


def test_what_a_file_leaves_out_is_what_its_kind_says_and_is_told() -> None:
    found = described({"model_type": "mistral", "num_hidden_layers": 4}, "mistral")
    assert found.left_out["sliding_window"] == found.shape.window == 4096
    assert found.left_out["hidden_size"] == found.shape.hidden == 4096
    assert "num_hidden_layers" not in found.left_out
    without = described({"model_type": "qwen2"}, "qwen2")
    assert "sliding_window" not in without.left_out
    assert found.shape.windowed == 4


@pytest.mark.parametrize(("kind", "more", "windowed"), [
    ("qwen2", {"use_sliding_window": True, "max_window_layers": 2}, 4),
    ("qwen2", {"use_sliding_window": False, "max_window_layers": 2}, 0),
    ("gemma2", {}, 3),
    ("gemma3_text", {"sliding_window_pattern": 3}, 4),
    ("gemma3_text", {"layer_types": ["full_attention"] * 5 + ["sliding_attention"]}, 1),
    ("mixtral", {}, 0),
])  # fmt: skip
def test_blocks_with_a_window_are_those_of_the_kind(kind: str, more: dict[str, Any], windowed: int) -> None:
    assert described({"model_type": kind, "num_hidden_layers": 6, **more}, kind).shape.windowed == windowed


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        ({"model_type": "mamba2"}, UnknownNameError, "model_type 'mamba2' is not known"),
        (
            {
                "model_type": "gpt2",
                "n_embd": 768,
                "n_head": 12,
                "n_layer": 12,
                "n_positions": 1024,
                "vocab_size": 50257,
            },
            UnknownNameError,
            "hidden=768,ffn=3072,heads=12,layers=12,vocab=50257,seq=1024;",
        ),
        ({"model_type": "lama"}, UnknownNameError, "llama (did you mean that?)"),
        ({"model_type": "gemma3", "text_config": {}}, UnknownNameError, "text_config as a file of its own"),
        ({"model_type": "qwen2", "use_mrope": True}, UnsupportedModelError, "use_mrope = True"),
        ({"model_type": "llama", "depth_gate": 3}, UnsupportedModelError, "nothing is known of depth_gate"),
        ({"model_type": "llama", "hidden_act": "xielu"}, UnsupportedModelError, "hidden_act = 'xielu'"),
        ({"model_type": "llama", "hidden_size": "4096"}, CorruptFileError, "beside the model's weights"),
        ({"model_type": "llama", "num_hidden_layers": True}, CorruptFileError, "num_hidden_layers is True"),
        ({"model_type": "llama", "hidden_size": 4100}, UnsupportedModelError, "is not divided by num_attention_heads"),
        ({"model_type": "llama", "attention_bias": 1}, CorruptFileError, "true or false is meant"),
        ({"model_type": "llama", "architectures": ["LlamaForQuestionAnswering"]}, UnsupportedModelError, "architec"),
        ({"model_type": "gemma", "use_bidirectional_attention": True}, UnsupportedModelError, "bidirectional"),
        ({"model_type": "deepseek_v2", "moe_layer_freq": 2}, UnsupportedModelError, "moe_layer_freq = 2"),
        ({"model_type": "deepseek_v2"}, CorruptFileError, "num_experts_per_tok is None"),
        ({"model_type": "deepseek_v3", "num_key_value_heads": 8}, UnsupportedModelError, "num_key_value_heads = 8"),
        ({"model_type": "deepseek_v3", "topk_method": "greedy"}, UnsupportedModelError, "topk_method"),
        ({"model_type": "qwen3_moe", "decoder_sparse_step": 2}, UnsupportedModelError, "decoder_sparse_step = 2"),
        ({"model_type": "qwen3_moe", "mlp_only_layers": [5]}, UnsupportedModelError, "mlp_only_layers"),
        ({"model_type": "gemma2", "layer_types": ["linear"]}, UnsupportedModelError, "layer_types"),
        ({"model_type": "mixtral", "num_experts_per_tok": 9}, HalopipeError, "experts=8, top_k=9"),
    ],
)
def test_what_is_not_understood_is_refused_by_its_name(
    given: dict[str, Any], error: type[HalopipeError], said: str
) -> None:
    with pytest.raises(error) as caught:
        described(given, "wrong")
    assert said in caught.value.render()


def test_a_file_or_its_folder_is_read_and_what_is_no_configuration_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "Meta-Llama-3-8B" / "config.json"
    file.parent.mkdir()
    file.write_text(json.dumps(PUBLIC["llama3-8b"][0]), "utf-8")
    assert read_config(file) == read_config(file.parent)
    assert read_config(file).shape == replace(named_transformer("llama3-8b"), name="Meta-Llama-3-8B")
    for text in ("[1]", '{"hidden_size": 8}', "{"):
        file.write_text(text, "utf-8")
        with pytest.raises(CorruptFileError, match=r"is no config\.json"):
            read_config(file)


def test_sizes_that_contradict_each_other_are_refused_with_both() -> None:
    mixtral = named_transformer("mixtral-8x7b")
    for wrong, said in (
        ({"kv_heads": 5}, "heads=32, kv_heads=5"),
        ({"top_k": 9}, "experts=8, top_k=9"),
        ({"windowed": 40, "window": 8}, "windowed=40, layers=32"),
        ({"experts": 0}, "experts=0"),
        ({"query_rank": 8}, "query_rank=8, kv_rank=0"),
    ):
        with pytest.raises(HalopipeError) as caught:
            replace(mixtral, **wrong)
        assert said in caught.value.title
    assert {field.name for field in fields(Transformer)} >= {"experts", "top_k", "kv_rank"}


@pytest.mark.parametrize("kind", KINDS)
def test_whatever_a_field_holds_is_read_or_refused(kind: str) -> None:
    """By an error of ours: any other ends the test."""
    strange = [None, -1, 0, 3, 2**40, 1.5, True, "x", [], [5], ["x"], [[]], {}, {"a": 1}]
    names = [*KINDS[kind].defaults, "architectures", "quantization_config", "rope_scaling", "moe_layer_freq"]
    for name in names:
        for value in strange:
            with suppress(HalopipeError):
                described({"model_type": kind, "num_experts_per_tok": 2, name: value}, kind)
