"""A transformer as the ``config.json`` of a Hugging Face model states it: right, or refused by the field.

    kind        a ``model_type``: the fields that its configuration class reads, with what they are where a file leaves
                them out (transformers 5.23), and a function from fields to sizes of a :class:`Transformer`
    of no price fields that change neither the weights nor what a step takes: token ids, scales, rotary bases
    neutral     fields that would change both, with the values that do not
    the rest    is not understood, and refused by name; a field that is null says nothing

The sequence is ``max_position_embeddings``, :data:`MOST_SEQ` at most: trained on as many tokens few networks are.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from planner.extras.transformers.shape import MODERN, Transformer
from planner.ir.errors import CorruptFileError, UnknownNameError, UnsupportedModelError, nearest
from planner.ir.files import parse_json, read_text

MOST_SEQ = 8192
_MOST_BYTES = 2**20
_MOST_SIZE = 2**24
_SHOWN = 8
_ITS_FILE = "the config.json that lies beside the model's weights"

ShapeSizes = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Described:
    """A transformer, and what is to be said of how its file was read.

    Attributes:
        left_out: fields that the file leaves out, with what they are then.
        notes: what of the file is not priced.
        longest: tokens that a sample may have, where the transformer has fewer; else 0.
    """

    shape: Transformer
    left_out: Mapping[str, Any]
    notes: tuple[str, ...]
    longest: int = 0


def read_config(path: Path) -> Described:
    """The network of a ``config.json``, or of the folder that has one.

    Raises:
        MissingFileError, CorruptFileError: it is not there, or no configuration.
        UnknownNameError: its ``model_type`` is not known.
        UnsupportedModelError: a field of it is not understood.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        config = parse_json(read_text(file, _MOST_BYTES))
    except ValueError as error:
        raise CorruptFileError(f"{file} is no config.json", [f"it is not JSON: {error}"], [_ITS_FILE]) from None
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise CorruptFileError(
            f"{file} is no config.json of a Hugging Face model",
            ["it has no model_type"],
            [_ITS_FILE],
        )
    name = file.stem if file.stem != "config" else file.resolve().parent.name
    return described(config, name or "transformer", str(file))


def described(config: Mapping[str, Any], name: str, place: str = "config.json") -> Described:
    """The network of a configuration's fields.

    Args:
        name: what the transformer is called.
        place: where the fields are from, for errors.

    Raises:
        UnknownNameError, UnsupportedModelError, CorruptFileError: as :func:`read_config`.
    """
    kind = KINDS.get(config["model_type"])
    if kind is None:
        inner = ["its text_config as a file of its own"] if "text_config" in config else []
        raise UnknownNameError(
            f"{place}: model_type {config['model_type']!r} is not known",
            [f"known: {', '.join(KINDS)}"],
            [*inner, *nearest(config["model_type"], KINDS), _as_sizes(config)],
        )
    fields = _Fields(place, config, kind.defaults)
    _require_neutral(fields)
    sizes = {**kind.sizes(fields), "rotary_base": _rotary_base(fields), "settings": _settings(config)}
    _require_known(fields)
    longest = sizes["seq"]
    sizes["seq"] = min(longest, MOST_SEQ)
    shape = Transformer(name=name, **{**MODERN, **sizes})
    return Described(shape, fields.left_out, tuple(fields.notes), longest if longest > MOST_SEQ else 0)


_SIZE_FIELDS = {
    "hidden": "hidden_size n_embd d_model",
    "ffn": "intermediate_size n_inner ffn_dim",
    "heads": "num_attention_heads n_head n_heads",
    "layers": "num_hidden_layers n_layer n_layers",
    "vocab": "vocab_size",
    "seq": "max_position_embeddings n_positions max_seq_len",
    "kv_heads": "num_key_value_heads",
    "head_size": "head_dim",
}
"""What models call their sizes."""


def _as_sizes(config: Mapping[str, Any]) -> str:
    """The remedy of who knows what the model computes: the sizes that the file has, to be typed."""
    values = {size: next(filter(None, map(config.get, names.split())), None) for size, names in _SIZE_FIELDS.items()}
    if values["ffn"] is None and isinstance(values["hidden"], int):
        values["ffn"] = 4 * values["hidden"]
    values["seq"] = min(values["seq"] or MOST_SEQ, MOST_SEQ) if values["hidden"] else None
    sizes = ",".join(f"{size}={value}" for size, value in values.items() if isinstance(value, int))
    return f"sizes in place of the file, such as {sizes or 'hidden=4096,ffn=14336,heads=32,...'}; gated=1,rotary=1,..."


@dataclass
class _Fields:
    """The fields of a file, by a kind's defaults.

    Attributes:
        seen: those that were read.
        left_out: those that were read, and are not in the file.
    """

    place: str
    given: Mapping[str, Any]
    defaults: Mapping[str, Any]
    seen: set[str] = field(default_factory=set)
    left_out: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def value(self, name: str) -> Any:
        """As it is given, or the kind's default."""
        self.seen.add(name)
        if name in self.given:
            return self.given[name]
        if self.defaults[name] is not None:
            self.left_out[name] = self.defaults[name]
        return self.defaults[name]

    def size(self, name: str, least: int = 1) -> int:
        """A whole number."""
        value = self.value(name)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= _MOST_SIZE:
            raise CorruptFileError(
                f"{self.place}: {name} is {value!r}",
                [f"a whole number from {least} to {_MOST_SIZE} is meant"],
                [_ITS_FILE],
            )
        return value

    def optional(self, name: str) -> int | None:
        """A whole number, or None: it is null, or this kind has no such field."""
        if name not in self.defaults or (name in self.given and self.given[name] is None):
            self.seen.update({name} & self.defaults.keys())
            return None
        return self.size(name, 0) if name in self.given or self.defaults[name] is not None else None

    def flag(self, name: str) -> bool:
        """Whether; null is no."""
        value = self.value(name)
        if value is not None and not isinstance(value, bool):
            raise CorruptFileError(f"{self.place}: {name} is {value!r}", ["true or false is meant"], [_ITS_FILE])
        return bool(value)

    def number(self, name: str) -> float:
        """A number of at least 0; null is 0."""
        value = self.value(name)
        if isinstance(value, bool) or not isinstance(value, int | float | None) or (value or 0) < 0:
            about = ["a number of at least 0 is meant"]
            raise CorruptFileError(f"{self.place}: {name} is {value!r}", about, [_ITS_FILE])
        return float(value or 0)

    def refused(self, name: str, why: str, *remedies: str) -> UnsupportedModelError:
        """The error that says what of a field is not understood."""
        return UnsupportedModelError(
            f"{self.place}: {name} = {self.given.get(name, self.defaults.get(name))!r} is not understood",
            [why, f"model_type {self.given['model_type']}"],
            remedies,
        )


def _rotary_base(fields: _Fields) -> float:
    """Of the angles, wherever the file has it (``rope_parameters`` of transformers 5)."""
    config = fields.given
    inner = config.get("rope_parameters")
    within = inner.get("rope_theta") if isinstance(inner, dict) else None
    usual = _ROTARY_BASES.get(config["model_type"], 10_000.0)
    base = config.get("rope_theta") or config.get("rotary_emb_base") or within or usual
    if isinstance(base, bool) or not isinstance(base, int | float) or base <= 0:
        raise CorruptFileError(f"{fields.place}: rope_theta is {base!r}", ["a number above 0 is meant"], [_ITS_FILE])
    return float(base)


_ROTARY_BASES = {"mixtral": 1_000_000.0}
"""Of a ``model_type``, where a file says nothing; of others 10,000."""


def _settings(config: Mapping[str, Any]) -> tuple[str, ...]:
    """What a file says of what is computed that is in no size."""
    values = [(name, config.get(name)) for name in _SETTINGS.split()]
    return tuple(f"{name}={json.dumps(value)}" for name, value in values if value not in (None, "silu"))


_SETTINGS = """
attn_logit_softcapping final_logit_softcapping hidden_act hidden_activation layer_norm_eps n_group norm_topk_prob
partial_rotary_factor query_pre_attn_scalar rms_norm_eps rope_interleave rope_local_base_freq rope_parameters
rope_scaling rotary_pct routed_scaling_factor scoring_func topk_group
"""


def _require_neutral(fields: _Fields) -> None:
    """Raises :class:`UnsupportedModelError` for another value of a field than one that changes nothing."""
    config = fields.given
    for name, neutral in _NEUTRAL.items():
        if name in config and config[name] not in neutral:
            raise fields.refused(name, f"understood: {', '.join(map(repr, neutral))}")
    heads = config.get("architectures") or []
    if not isinstance(heads, list) or not all(str(head).endswith(_HEADS) for head in heads):
        raise fields.refused("architectures", f"understood: models that end in {', '.join(_HEADS)}")


def _require_known(fields: _Fields) -> None:
    """Raises :class:`UnsupportedModelError` for a field that may change what is computed, and is not understood."""
    config = fields.given
    understood = {"model_type", "architectures", *fields.seen, *_NEUTRAL, *_NOTED, *_PRICELESS.split()}
    unknown = [name for name, value in config.items() if name not in understood and value is not None]
    if unknown:
        more = f" and {len(unknown) - _SHOWN} more" if len(unknown) > _SHOWN else ""
        raise UnsupportedModelError(
            f"{fields.place}: nothing is known of {', '.join(unknown[:_SHOWN])}{more}",
            [f"model_type {config['model_type']}; a field may change the weights, or what is computed"],
            ["a copy without the field, if it changes neither", _as_sizes(config)],
        )
    for name, note in _NOTED.items():
        if config.get(name):
            fields.notes.append(f"{name}: {note}")


_HEADS = ("ForCausalLM", "LMHeadModel")
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "add_cross_attention": (False,),
    "attention_probs_dropout_prob": (0,),
    "chunk_size_feed_forward": (0,),
    "cross_attention_hidden_size": (None,),
    "hidden_dropout_prob": (0,),
    "is_encoder_decoder": (False,),
    "moe_layer_freq": (1,),
    "pruned_heads": ({}, None),
    "tie_encoder_decoder": (False,),
    "use_bidirectional_attention": (None, False),
    "use_mrope": (False,),
}
"""Fields that would change what is computed, and the values that do not."""
_NOTED: Mapping[str, str] = {
    "quantization_config": "how the file of weights is stored; trained in half precision here",
    "attn_logit_softcapping": "its tanh is inside the kernel of attention, and not priced",
    "final_logit_softcapping": "its tanh is not priced",
}
_PRICELESS = """
_attn_implementation _attn_implementation_autoset _name_or_path _sliding_window_pattern attn_implementation auto_map
aux_loss_alpha bos_token_id cache_implementation classifier_dropout dtype eos_token_id ep_size finetuning_task
hidden_act hidden_activation id2label initializer_range is_decoder is_llama_config label2id layer_norm_eps
max_window_layers n_group name_or_path norm_topk_prob output_attentions output_hidden_states output_router_logits
pad_token_id
partial_rotary_factor prefix pretraining_tp problem_type qk_head_dim query_pre_attn_scalar return_dict rms_norm_eps
rope_interleave rope_interleaved rope_local_base_freq rope_parameters rope_scaling rope_theta rotary_emb_base rotary_pct
routed_scaling_factor router_aux_loss_coef router_jitter_noise scoring_func sep_token_id seq_aux sliding_window_pattern
sliding_window_size task_specific_params tokenizer_class topk_group torch_dtype torchscript transformers.js_config
transformers_version unk_token_id use_cache
"""
"""Fields that change neither the weights nor what a step takes; those that a kind reads for another end too."""
_ATTENTIONS = ("full_attention", "sliding_attention")
_ACTIVATIONS = ("silu", "gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "relu")


def _decoder(f: _Fields) -> ShapeSizes:
    """What all kinds have."""
    hidden = f.size("hidden_size")
    heads = f.size("num_attention_heads")
    head_size = f.optional("head_dim")
    if not head_size and hidden % heads:
        raise f.refused("hidden_size", f"{hidden} is not divided by num_attention_heads {heads}", "head_dim")
    activation = "hidden_act" if "hidden_act" in f.defaults else "hidden_activation"
    if f.value(activation) not in _ACTIVATIONS:
        raise f.refused(activation, f"understood: {', '.join(_ACTIVATIONS)}")
    drops = f.number("attention_dropout") > 0
    if drops:
        f.notes.append("attention_dropout: inside the kernel of attention, and not priced")
    return {
        "hidden": hidden,
        "ffn": f.size("intermediate_size"),
        "heads": heads,
        "kv_heads": f.optional("num_key_value_heads") or heads,
        "head_size": head_size or hidden // heads,
        "layers": f.size("num_hidden_layers"),
        "vocab": f.size("vocab_size"),
        "seq": f.size("max_position_embeddings"),
        "parameters_tied": f.flag("tie_word_embeddings"),
        "relu": f.value(activation) == "relu",
        "attention_dropout": drops,
    }


def _windows(f: _Fields, layers: int, has_window: Callable[[int], bool]) -> ShapeSizes:
    """Of blocks by number, unless ``layer_types`` says which have a window."""
    types = f.value("layer_types") if "layer_types" in f.defaults else None
    if types is None:
        windowed = sum(map(has_window, range(layers)))
    elif not isinstance(types, list) or len(types) != layers or any(each not in _ATTENTIONS for each in types):
        raise f.refused("layer_types", f"understood: {layers} of {' and '.join(_ATTENTIONS)}")
    else:
        windowed = types.count("sliding_attention")
    f.seen.add("sliding_window")
    window = f.optional("sliding_window") if windowed else 0
    if windowed and not window and types is not None:
        raise f.refused("sliding_window", f"{windowed} blocks have a window")
    return {"window": window, "windowed": windowed} if window else {}


def _llama(f: _Fields) -> ShapeSizes:
    bias = f.flag("attention_bias")
    return {**_decoder(f), "qkv_bias": bias, "out_bias": bias, "ffn_bias": f.flag("mlp_bias")}


def _mistral(f: _Fields) -> ShapeSizes:
    sizes = _decoder(f)
    return {**sizes, **_windows(f, sizes["layers"], lambda _: True)}


def _qwen2(f: _Fields) -> ShapeSizes:
    sizes = _decoder(f)
    first = f.size("max_window_layers", 0)
    on = f.flag("use_sliding_window")
    return {**sizes, "qkv_bias": True, **_windows(f, sizes["layers"], lambda block: on and block >= first)}


def _qwen3(f: _Fields) -> ShapeSizes:
    bias = f.flag("attention_bias")
    return {**_qwen2(f), "qkv_bias": bias, "out_bias": bias, "qk_norm": True}


def _mixtral(f: _Fields) -> ShapeSizes:
    experts = {"experts": f.size("num_local_experts"), "top_k": f.size("num_experts_per_tok")}
    return {**_mistral(f), **experts}


def _qwen2_moe(f: _Fields) -> ShapeSizes:
    sizes = _decoder(f)
    first = f.size("max_window_layers", 0)
    on = f.flag("use_sliding_window")
    near = _windows(f, sizes["layers"], lambda block: on and block % 2 == 0 and block < first)
    shared = {"shared_ffn": f.size("shared_expert_intermediate_size", 0), "shared_gate": True}
    return _with_experts(f, {**sizes, **near, "qkv_bias": f.flag("qkv_bias")}, shared)


def _qwen3_moe(f: _Fields) -> ShapeSizes:
    sizes = _decoder(f)
    on = f.flag("use_sliding_window")
    bias = f.flag("attention_bias")
    near = _windows(f, sizes["layers"], lambda _: on)
    return _with_experts(f, {**sizes, **near, "qkv_bias": bias, "out_bias": bias, "qk_norm": True}, {})


def _with_experts(f: _Fields, sizes: ShapeSizes, shared: ShapeSizes) -> ShapeSizes:
    """Of Qwen: experts in all blocks but those of ``mlp_only_layers``, and but for every ``decoder_sparse_step``-th."""
    layers = sizes["layers"]
    step = f.size("decoder_sparse_step")
    alone = f.value("mlp_only_layers") or []
    if not isinstance(alone, list):
        raise f.refused("mlp_only_layers", "a list of blocks is understood")
    dense = [block for block in range(layers) if block in alone or (block + 1) % step]
    if dense != list(range(len(dense))):
        name = "decoder_sparse_step" if step > 1 else "mlp_only_layers"
        raise f.refused(name, f"dense blocks {dense[:_SHOWN]} are not the first ones", "blocks that are alike")
    experts = {
        "experts": f.size("num_experts"),
        "top_k": f.size("num_experts_per_tok"),
        "expert_ffn": f.size("moe_intermediate_size"),
        **shared,
    }
    return _behind_dense(sizes, len(dense), experts)


def _behind_dense(sizes: ShapeSizes, dense: int, experts: ShapeSizes) -> ShapeSizes:
    """Experts in all blocks but the first ones."""
    if dense >= sizes["layers"]:
        return sizes
    return {**sizes, **experts, "layers": sizes["layers"] - dense, "first_dense": dense}


def _deepseek_v2(f: _Fields) -> ShapeSizes:
    sizes = _decoder(f)
    bias = f.flag("attention_bias")
    sizes |= {"qkv_bias": bias, "out_bias": bias, "ffn_bias": "mlp_bias" in f.defaults and f.flag("mlp_bias")}
    rotated = f.size("qk_rope_head_dim")
    latent = {
        "query_rank": f.optional("q_lora_rank") or 0,
        "kv_rank": f.size("kv_lora_rank"),
        "rope_size": rotated,
        "head_size": f.size("qk_nope_head_dim") + rotated,
        "value_size": f.size("v_head_dim"),
        "kv_heads": sizes["heads"],  # each head has keys and values of its own
    }
    if sizes["kv_heads"] != sizes["heads"]:
        raise f.refused("num_key_value_heads", f"latent attention has {sizes['heads']} heads of keys")
    experts = f.optional("n_routed_experts") or 0
    method = f.value("topk_method")
    if method not in _TOP_K[f.given["model_type"]]:
        raise f.refused("topk_method", f"understood: {', '.join(map(str, _TOP_K[f.given['model_type']]))}")
    if not experts:
        return {**sizes, **latent}
    width = f.size("moe_intermediate_size")
    shared = f.optional("n_shared_experts") or 0
    routed = {
        "experts": experts,
        "top_k": f.size("num_experts_per_tok"),
        "expert_ffn": width,
        "shared_ffn": shared * width,
    }
    return _behind_dense({**sizes, **latent}, f.optional("first_k_dense_replace") or 0, routed)


_TOP_K = {"deepseek_v2": ("greedy", "group_limited_greedy", None), "deepseek_v3": ("noaux_tc",)}
"""How experts are chosen; DeepSeek-V3's by a bias of each expert's own."""


def _deepseek_v3(f: _Fields) -> ShapeSizes:
    sizes = _deepseek_v2(f)
    name = "num_nextn_predict_layers" if "num_nextn_predict_layers" in f.given else "num_mtp_layers"
    return {**sizes, "router_bias": "experts" in sizes, "mtp": f.optional(name) or 0}


def _gpt_neox(f: _Fields) -> ShapeSizes:
    sizes = _decoder(f)
    bias = f.flag("attention_bias")
    if f.flag("use_parallel_residual"):
        f.notes.append("use_parallel_residual: its two halves are priced one after the other")
    dropout = f.number("hidden_dropout") > 0
    return {
        **sizes, "gated": False, "layer_norm": True, "qkv_bias": bias, "out_bias": bias, "ffn_bias": True,
        "dropout": dropout,
    }  # fmt: skip


def _gemma(f: _Fields) -> ShapeSizes:
    bias = f.flag("attention_bias")
    return {**_decoder(f), "qkv_bias": bias, "out_bias": bias}


def _gemma2(f: _Fields) -> ShapeSizes:
    sizes = _gemma(f)
    return {**sizes, **_windows(f, sizes["layers"], lambda block: block % 2 == 0), "norms": 4}


def _gemma3(f: _Fields) -> ShapeSizes:
    sizes = _gemma(f)
    every = 1 if f.given.get("layer_types") else f.size("sliding_window_pattern")
    near = _windows(f, sizes["layers"], lambda block: (block + 1) % every != 0)
    return {**sizes, **near, "norms": 4, "qk_norm": True}


@dataclass(frozen=True, slots=True)
class _Kind:
    """A ``model_type``: the fields that it reads, with their defaults, and its sizes by them."""

    sizes: Callable[[_Fields], ShapeSizes]
    defaults: Mapping[str, Any]


def _defaults(layers: int, hidden: int, ffn: int, heads: int, kv_heads: int | None, **more: Any) -> Mapping[str, Any]:
    """What a configuration class of transformers says where a file says nothing."""
    common = {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": None,
        "tie_word_embeddings": False,
        "attention_dropout": 0.0,
    }
    activation = {} if "hidden_activation" in more else {"hidden_act": "silu"}
    return {**common, **activation, **more}


_QWEN = {"vocab_size": 151936, "max_position_embeddings": 32768, "use_sliding_window": False, "sliding_window": 4096}
_QWEN_EXPERTS = {"decoder_sparse_step": 1, "mlp_only_layers": None}
_LATENT = {"kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
_GEMMA = {"tie_word_embeddings": True, "attention_bias": False, "head_dim": 256}
_NEAR = {"sliding_window": 4096, "layer_types": None, "hidden_activation": "gelu_pytorch_tanh"}

KINDS: Mapping[str, _Kind] = {
    "llama": _Kind(
        _llama,
        _defaults(
            32, 4096, 11008, 32, None, vocab_size=32000, max_position_embeddings=2048, attention_bias=False,
            mlp_bias=False,
        ),
    ),
    "mistral": _Kind(
        _mistral,
        _defaults(32, 4096, 14336, 32, 8, vocab_size=32000, max_position_embeddings=131072, sliding_window=4096),
    ),
    "mixtral": _Kind(
        _mixtral,
        _defaults(
            32, 4096, 14336, 32, 8, vocab_size=32000, max_position_embeddings=131072, sliding_window=None,
            num_local_experts=8, num_experts_per_tok=2,
        ),
    ),
    "qwen2": _Kind(_qwen2, _defaults(32, 4096, 22016, 32, 32, **_QWEN, max_window_layers=28, layer_types=None)),
    "qwen3": _Kind(
        _qwen3,
        _defaults(
            32, 4096, 22016, 32, 32, **_QWEN, max_window_layers=28, layer_types=None, head_dim=128,
            attention_bias=False,
        ),
    ),
    "qwen2_moe": _Kind(
        _qwen2_moe,
        _defaults(
            24, 2048, 5632, 16, 16, **_QWEN, **_QWEN_EXPERTS, max_window_layers=28, layer_types=None, qkv_bias=True,
            num_experts=60, num_experts_per_tok=4, moe_intermediate_size=1408, shared_expert_intermediate_size=5632,
        ),
    ),
    "qwen3_moe": _Kind(
        _qwen3_moe,
        _defaults(
            24, 2048, 6144, 32, 4, **_QWEN, **_QWEN_EXPERTS, max_window_layers=None, attention_bias=False,
            num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768,
        ),
    ),
    "deepseek_v2": _Kind(
        _deepseek_v2,
        _defaults(
            32, 4096, 11008, 32, None, vocab_size=102400, max_position_embeddings=2048, attention_bias=False,
            mlp_bias=False, **_LATENT, n_routed_experts=64, n_shared_experts=2, num_experts_per_tok=None,
            moe_intermediate_size=1407, first_k_dense_replace=0, topk_method="greedy",
        ),
    ),
    "deepseek_v3": _Kind(
        _deepseek_v3,
        _defaults(
            61, 7168, 18432, 128, 128, vocab_size=129280, max_position_embeddings=4096, attention_bias=False,
            **_LATENT, n_routed_experts=256, n_shared_experts=1, num_experts_per_tok=8, moe_intermediate_size=2048,
            first_k_dense_replace=3, topk_method="noaux_tc", num_mtp_layers=1,
            num_nextn_predict_layers=1,
        ),
    ),
    "gpt_neox": _Kind(
        _gpt_neox,
        _defaults(
            44, 6144, 24576, 64, None, vocab_size=50432, max_position_embeddings=2048, hidden_act="gelu",
            hidden_dropout=0.0, attention_bias=True, use_parallel_residual=True,
        ),
    ),
    "gemma": _Kind(
        _gemma,
        _defaults(
            28, 3072, 24576, 16, 16, vocab_size=256000, max_position_embeddings=8192, hidden_act="gelu_pytorch_tanh",
            **_GEMMA,
        ),
    ),
    "gemma2": _Kind(
        _gemma2, _defaults(26, 2304, 9216, 8, 4, vocab_size=256000, max_position_embeddings=8192, **_GEMMA, **_NEAR)
    ),
    "gemma3_text": _Kind(
        _gemma3,
        _defaults(
            26, 2304, 9216, 8, 4, vocab_size=262208, max_position_embeddings=131072, **_GEMMA, **_NEAR,
            sliding_window_pattern=6,
        ),
    ),
}  # fmt: skip
"""By ``model_type``."""
