"""The tables of other people's runs, each with what its source's software does; read off its code, never off a time.

    vTrain             Megatron-LM, which version is not stated: as of 2022.  (With torch's own kernels and nothing
                       overlapped, as its profiler has them, 11 and 16 % are missed.)  The vocabulary is GPT's 51,200
    llm-foundry        PyTorch's FSDP around MPT (Composer's ``mixed_precision``: DEFAULT sums in float32, PURE
                       in bfloat16; 8 bits with delayed scaling); torch's own kernels, FlashAttention
    torchtitan         FSDP2; gradients summed in float32; what compiles shares kernels; exchanges of tensor ranks are
                       waited for, but where they are asynchronous.  Its H100 are those of 96 GB and 500 W
    BigScience         Megatron-DeepSpeed of 2022 over Omni-Path, four cards a host: ZeRO-1, messages that block
    SimuMax            Megatron-LM core, nothing overlaps, on 8 B200
    Megatron-Bridge    Megatron-LM core with ZeRO-1 and sums beside the backward.  Recipes for speed (``perf_recipes``)
                       sum gradients in half precision, scale each tensor by itself, send between chunks beside
                       computing, and exchange in parts between tensor ranks of dense networks.  Its cards do not say
                       what is computed again: of two networks the recipe does (``recipes/qwen/h100``), the others are
                       left out.  Experts are whole (``expert_tensor_parallel_size=1``), and tokens spread evenly by
                       force, but for cards of a ``pretrain``, whose tokens go where the router says
    NeMo               the same of 2024 and 2025, with delayed scaling (``recipes/precision``); nothing is computed
                       again where its configurations for H100 have that division
                       (``performance/recommended_model_configs``), other rows are left out
    Automodel          FSDP2 and expert ranks, by ``examples/llm_benchmark``: DeepEP, a gate that is balanced by force
    Megatron-LM's tests  one host, deterministic kernels; small ones wait for it.  One of another machine takes 13
                       times as long as the same case elsewhere: left out
    DGX Cloud          NeMo around Megatron-LM core, by the file of settings of a release: ZeRO-1, gradients in bfloat16
                       summed beside the backward, sequence parallelism, the rest as in recipes for speed; experts one
                       after another
    InternEvo          Apex's and FlashAttention's kernels, gradients in bfloat16, summed beside the backward
                       (``configs/7B_sft.py``); ZeRO-1 of all replicas, no sequence parallelism
    MLPerf             a row has no precision where its script exports none; those of 405 billion weights are in eight
                       bits, with delayed scaling (``config_common.sh``, ``pretrain.py``), the others are left out, as
                       those whose script has fp4 in its name; the rest is as in recipes for speed

Left out by their own words: networks that are no transformer of ours, adapters, packed samples, sizes or divisions that
are not stated.  Later releases of DGX Cloud, Pax and all but a few of Aceso and Mist do not say what is computed
again; Primus says no batch; fms-fsdp divides weights within a host alone, or does not say how many blocks are computed
again; L4, A10G and MI300X are in no named cluster.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.published import megatron_ci
from benchmarks.published.runs import read
from benchmarks.published.settings import Setting
from halopipe.extras.transformers.evidence import FRAMEWORKS, MEGATRON
from planner.extras.transformers.cluster import GBIT
from planner.extras.transformers.shape import (
    MODERN,
    ExpertExchange,
    Fusion,
    Precision,
    Recompute,
    Scaling,
    Sends,
    Transformer,
    named_transformer,
)
from planner.extras.transformers.software import SOFTWARE

Line = Mapping[str, str]
FSDP = FRAMEWORKS["accelerate"]
TITAN = FRAMEWORKS["torchtitan"]
BRIDGE = FRAMEWORKS["megatron-bridge"]
AUTOMODEL = "Automodel"
GIB = 2**30
_GPUS = {
    "A100": "A100-80GB", "A100-SXM4-80GB": "A100-80GB", "H100": "H100-SXM", "H100-80GB": "H100-SXM",
    "H100-96GB-HBM2e-500W": "H100-96GB", "H100-95GB-HBM2e": "H100-96GB", "NVIDIA H100-SXM5-80GB": "H100-SXM",
    "NVIDIA H200-SXM5-141GB": "H200", "H100-SXM-80GB": "H100-SXM", "A100-SXM4-40GB": "A100-40GB",
}  # fmt: skip
"""What sources call a device, and what the catalogue does; others by their own name, or the one in brackets."""
_NAMED = {
    "Llama-3.1-8B": "llama3-8b", "LLAMA3_8B": "llama3-8b", "llama31_8b": "llama3-8b",
    "Llama-3.1-70B": "llama3-70b", "LLAMA3_70B": "llama3-70b", "llama3-70b": "llama3-70b",
    "Llama-3.1-405B": "llama3.1-405b", "LLAMA3.1_405B": "llama3.1-405b", "llama31_405b": "llama3.1-405b",
    "Qwen3_30B_a3B": "qwen3-30b-a3b", "Qwen3-30B-A3B": "qwen3-30b-a3b", "Qwen3 MoE 30B": "qwen3-30b-a3b",
    "Qwen3_235B_a22B": "qwen3-235b-a22b", "qwen3-30b-a3b": "qwen3-30b-a3b", "qwen3-235b-a22b": "qwen3-235b-a22b",
    "qwen3-8b": "qwen3-8b", "deepseekv2": "deepseek-v2", "deepseekv3": "deepseek-v3", "deepseek-v3": "deepseek-v3",
    "DeepSeek V3 671B": "deepseek-v3",
}  # fmt: skip
RECOMPUTATION = "what is computed again"
DIVISION = "its division"
SIZES = "its sizes"
PRECISION = "its precision"
ADAPTERS = "adapters or packed samples"
OTHER = "no transformer of the model's"
AGAIN = "another part of a run that is here"
VARIANT = "one of its settings"
STEP = "its step"


def settings(folder: Path) -> Iterator[Setting]:
    """What the tables say that are in ``folder``."""
    for name, setting in _TABLES.items():
        before: set[str] = set()
        for line in read(folder / name) if (folder / name).exists() else ():
            yield setting(_alone(line, before))
            before.add(line.get("id", ""))


def _alone(line: Line, before: Collection[str]) -> Line:
    """A line; of those that have each other's values the first says nothing of the others."""
    repeats = "id" not in line or line.get("same_values_as", "") in before
    return line if repeats else {**line, "same_values_as": ""}


def gpt_oss(layers: int, experts: int, seq: int) -> Transformer:
    """GPT-OSS: windows of 128 tokens in every second block, biases."""
    return Transformer(
        f"gpt-oss-{experts}", 2880, 2880, 64, layers, 201088, seq, 8,
        **{**MODERN, "qkv_bias": True, "out_bias": True},
        head_size=64, experts=experts, top_k=4, expert_ffn=2880, router_bias=True, window=128, windowed=layers // 2,
    )  # fmt: skip


def _device(name: str) -> str:
    inside = re.search(r"\((\w+)", name)
    return _GPUS.get(name, inside[1] if inside else name)


def _named(model: str, seq: int) -> Transformer | None:
    """The network of that name, in samples of ``seq`` tokens, without what predicts tokens beyond the next."""
    if model == "GPT OSS 120B":
        return gpt_oss(36, 128, seq)
    if model == "GPT-OSS 20B":
        return gpt_oss(24, 32, seq)
    return replace(named_transformer(_NAMED[model]), seq=seq, mtp=0) if model in _NAMED else None


def _division(line: Line) -> dict[str, Any]:
    """The columns that all tables of ``rows`` have; what is beyond the model under its own name."""
    division: dict[str, Any] = {
        "tensor": int(line["tensor"]),
        "pipeline": int(line["pipeline"]),
        "data": int(line["data"]),
        "micro_batch": int(line["micro_batch"]),
        "interleave": int(line["interleave"] or 1),
        "expert": int(line["expert_parallel"] or 1),
        "zero": int(line["zero"] or 0),
        "sequence_parallel": line["sequence_parallel"] == "true",
        "recompute": Recompute(line["recompute"]),
    }
    return division | _beyond(line["context"], line["dtype"])


def _beyond(context: str, dtype: str) -> dict[str, Any]:
    """Context ranks, and numbers of eight bits or fewer."""
    ranks = {"context": int(context)} if int(context or 1) > 1 else {}
    narrow = {"precision": Precision.FP8} if "fp8" in dtype else {}
    micro = {"scaling": Scaling.MICRO} if dtype in ("mxfp8", "fp8_mx") else {}
    return ranks | narrow | micro | ({"fp4": True} if "fp4" in dtype else {})


def _first(asked: Iterable[tuple[bool, str]]) -> str:
    """The first reason that holds; empty: none does."""
    return next((reason for is_missing, reason in asked if is_missing), "")


def _ranks(line: Line) -> dict[str, Any]:
    """Parts of the way that tables of ``rows2`` have in common columns."""
    tensor = int(line["tensor"])
    pipeline = int(line["pipeline"])
    return {
        "tensor": tensor,
        "pipeline": pipeline,
        "data": int(line["gpus"]) // (tensor * pipeline * int(line["context"] or 1)),
        "micro_batch": int(line["micro_batch"]),
    }


def _unstated(line: Line, *more: tuple[bool, str]) -> str:
    """What a row of ``rows`` does not say."""
    asked = (
        *more,
        (not all(line[name] for name in ("hidden", "ffn", "heads", "layers", "vocab", "seq_len")), SIZES),
        (not all(line[name] for name in ("tensor", "pipeline", "data", "micro_batch")), DIVISION),
        (not line["recompute"], RECOMPUTATION),
    )
    return _first(asked)


def _shape(line: Line, **more: Any) -> Transformer:
    hidden = int(line["hidden"])
    kept = MODERN if line["gated"] == "true" else {}
    return Transformer(
        line["model"], hidden, int(line["ffn"]), int(line["heads"]), int(line["layers"]), int(line["vocab"]),
        int(line["seq_len"]), int(line["kv_heads"]), **{**kept, **more},
    )  # fmt: skip


def _stated(
    line: Line, group: str, framework: str, shape: Callable[[Line], Transformer | None], unstated: str, **more: Any
) -> Setting:
    """A row of ``rows``, whose common columns are alike."""
    setting = Setting(
        group, line["id"], framework, _device(line["gpu"]), int(line["global_batch"] or 0),
        float(line["measured_s"] or 0), unstated=unstated,
    )  # fmt: skip
    return setting if unstated else replace(setting, shape=shape(line), division=_division(line), **more)


def _vtrain(line: Line) -> Setting:
    hidden = int(line["hidden"])
    gpus = int(line["gpus"])
    shape = Transformer("gpt", hidden, 4 * hidden, int(line["heads"]), int(line["layers"]), 51200, int(line["seq_len"]))
    division = {
        "tensor": int(line["tensor_parallel"]),
        "pipeline": int(line["pipeline"]),
        "data": int(line["data_parallel"]),
        "micro_batch": int(line["micro_batch"]),
        "recompute": Recompute.FULL,
    }
    ranks = "-".join(str(division[part]) for part in ("tensor", "pipeline", "data", "micro_batch"))
    return Setting(
        f"vTrain, {'several hosts' if gpus > 8 else 'one host'}",
        f"{shape.parameters / 1e9:.1f}e9 weights of width {hidden}, {gpus} GPUs, {ranks}",
        MEGATRON,
        "A100-80GB",
        int(line["global_batch"]),
        1e-3 * float(line["measured_ms"]),
        shape,
        division,
        cards_bytes_per_s=800 * GBIT,
    )


_SWEPT = 128
_BY_TRITON = ("MPT-13b", "MPT-30b")


def _llm_foundry(line: Line) -> Setting:
    def mpt(line: Line) -> Transformer:
        return _shape(line, fused_attention=True, dropout=False)

    # Its sweep of January 2024 (scripts/train/benchmarking/sweep.py) names what fuses attention on 128 H100 and more.
    is_new = line["gpu"].startswith("H100") and int(line["gpus"]) >= _SWEPT and line["model"] not in _BY_TRITON
    software = {
        **SOFTWARE["pytorch" if is_new else "pytorch-2023"].parts,
        "fp32_gradients": line["mp_mode"] != "PURE",
        "scaling": Scaling.DELAYED,
    }
    return _stated(line, "FSDP, llm-foundry", FSDP, mpt, _unstated(line), software=software)


def _torchtitan(line: Line) -> Setting:
    in_parts = line["async_tp"] == "true"
    by_operator = line["recompute"] == "selective"
    line = {**line, "recompute": Recompute.OPERATORS.value if by_operator else line["recompute"]}
    software = {
        **SOFTWARE["pytorch-compiled" if line["compile"] == "true" else "pytorch"].parts,
        "overlap_tensor": in_parts,
        "overlap_parts": in_parts,
    }
    unstated = _unstated(
        line,
        ("slow by a bug" in line["note"], "slow by a fault that its source names"),
    )
    return _stated(
        line, "torchtitan", TITAN, _shape, unstated,
        software=software, measured_bytes=GIB * float(line["measured_memory_gib"] or 0),
    )  # fmt: skip


def _bigscience(line: Line) -> Setting:
    told = {"sends": Sends.BLOCKING, "fp32_gradients": line["dtype"] == "bf16"}
    software = SOFTWARE["megatron-2021"].parts | told
    return _stated(
        line, "BigScience", "Megatron-DeepSpeed", _shape, _unstated(line),
        software=software, cards_bytes_per_s=4 * 100 * GBIT,
    )  # fmt: skip


def _simumax(line: Line) -> Setting:
    def cut(line: Line) -> Transformer | None:
        layers = int(line["layers"])
        if not line["experts"]:
            return _shape(line)
        named = _named(line["model"], int(line["seq_len"]))
        dense = int(line["dense_layers"] or 0)
        return None if named is None else replace(named, first_dense=dense, layers=layers - dense)

    group = f"SimuMax, {line['gpu']}, {'experts' if line['experts'] else 'dense'}"
    return _stated(
        line, group, MEGATRON, cut, _unstated(line),
        software={"overlap_tensor": False}, measured_bytes=GIB * float(line["measured_memory_gib"] or 0),
    )  # fmt: skip


def _bridge_group(gpu: str, shape: Transformer | None) -> str:
    return f"Megatron-Bridge, {gpu}, {'experts' if shape is None or shape.experts else 'dense'}"


_BRIDGE_SOFTWARE = {"overlap_gradients": True}
_QWEN = {**_BRIDGE_SOFTWARE, "fp32_gradients": False}
_DISPATCHED = {"expert_exchange": ExpertExchange.DISPATCH}
_OF_EXPERTS: Mapping[tuple[str, str], tuple[ExpertExchange, bool]] = {
    ("QWEN3_30B_A3B", "v0.3"): (ExpertExchange.DISPATCH, True),
    ("QWEN3_30B_A3B", "v0.4"): (ExpertExchange.DISPATCH, False),
    ("QWEN3_235B_A22B", "v0.2"): (ExpertExchange.ALL_TO_ALL, True),
    ("QWEN3_235B_A22B", "v0.3"): (ExpertExchange.ALL_TO_ALL, True),
    ("QWEN3_235B_A22B", "v0.4"): (ExpertExchange.ALL_TO_ALL, True),
}
"""How tokens come to experts, and whether beside another micro-batch, by network and release of the recipes for H100:
``moe_flex_dispatcher_backend`` and ``moe_a2a_overlap`` in ``scripts/performance/configs/qwen*`` at its tag, where
``grad_reduce_in_fp32`` is false."""


def _of_recipe(setting: Setting, recipe: str) -> Setting:
    """With what the recipe says of experts."""
    division = dict(setting.division) | _whole(setting.division)
    network, _, release = recipe.rpartition(".")[0].partition("@")
    told = _OF_EXPERTS.get((re.split("_H100|_PRETRAIN", network)[0], release)) if "_H100_" in network else None
    if told is None:
        return replace(setting, division=division)
    exchange, is_beside = told
    division["expert_exchange"] = exchange
    return replace(setting, division=division, software={**setting.software, "overlap_experts": is_beside})


def _for_speed(shape: Transformer | None, division: Mapping[str, Any]) -> dict[str, Any]:
    """What recipes for speed say (``perf_recipes/_common.py``, ``training/comm_overlap.py``)."""
    return {
        **_BRIDGE_SOFTWARE,
        "fp32_gradients": False,
        "overlap_parts": division["tensor"] > 1 and not (shape and shape.experts),
        "sends": Sends.OVERLAPPED if division["interleave"] > 1 else Sends.EXCHANGED,
    }


def _bridge(line: Line) -> Setting:
    def of_name(line: Line) -> Transformer | None:
        return _named(line["model"], int(line["seq_len"]))

    group = _bridge_group(line["gpu"], of_name(line) if line["seq_len"] else None)
    unstated = _unstated(
        line,
        (line["task"] != "pretrain", ADAPTERS),
        (line["recompute"] == "selective", "recomputation by operator"),
    )
    setting = _stated(line, group, BRIDGE, of_name, unstated)
    if unstated:
        return setting
    return _of_recipe(replace(setting, software=_for_speed(setting.shape, setting.division)), line["recipe"])


def _whole(division: Mapping[str, Any]) -> dict[str, Any]:
    """Experts of Megatron-Bridge's recipes beside tensor ranks."""
    return {"whole_experts": division["tensor"] > 1 and division["expert"] > 1}


_CONFIGURED: Mapping[str, tuple[str, ...]] = {
    "Llama-3.1-8B": ("1-1-2-1-1",), "LLAMA3-8B": ("1-1-2-1-1",), "LLAMA3-70B": ("4-4-2-5-1",),
    "Llama-3.1-70B": ("4-4-2-5-1", "4-8-1-5-1"), "Llama-3.1-405B": ("8-8-2-8-1",), "Nemotron-4-15B": ("2-1-1-1-2",),
    "Nemotron-4-340B": ("8-8-1-12-1",), "Nemotron-340B": ("8-8-1-12-1",),
}  # fmt: skip
"""By network, divisions of NeMo's configurations for H100: ranks, stages, context ranks, chunks, samples."""


def _nemo(line: Line) -> Setting:
    def of_columns(line: Line) -> Transformer:
        return _shape(line, **({**MODERN, "gated": False, "layer_norm": True} if "Nemotron" in line["model"] else {}))

    parts = ("tensor", "pipeline", "context", "interleave", "micro_batch")
    ranks = "-".join(line[part] or "1" for part in parts)
    group = f"NeMo, {line['gpu'].partition('-')[0]}, 8 bits"
    told = {**line, "recompute": "none", "zero": "1", "sequence_parallel": str(line["tensor"] != "1").lower()}
    unstated = _unstated(
        told,
        (line.get("task", "pretrain") != "pretrain", ADAPTERS),
        (ranks not in _CONFIGURED.get(line["model"], ()), RECOMPUTATION),
    )
    setting = _stated(told, group, "NeMo", of_columns, unstated)
    if unstated:
        return setting
    software = _for_speed(setting.shape, setting.division)
    return replace(setting, software={**software, "scaling": Scaling.DELAYED})


_RECIPES: Mapping[str, Mapping[str, Any]] = {
    "qwen3-8b": _BRIDGE_SOFTWARE,
    "qwen3-30b-a3b": _QWEN,
}
"""By network, what the recipe for 16 H100 says beside the card; nothing is computed again there, and HybridEP sends
tokens to experts."""
_OVERLAPPED = "expert-parallel overlap"


def _card(line: Line) -> Setting:
    """A card of a run, or a row of a study of one setting (``skill``)."""
    model = _NAMED.get(line["model"], line["model"])
    seq = int(line["seq"] or 0)
    shape = _named(line["model"], seq) if seq else None
    kind = line.get("item", "pretrain")
    variant = line.get("variant", "no overlap")
    step = line.get("step_time_ms", line.get("step_ms", ""))
    asked = (
        (kind.startswith("checkpoint_resume"), AGAIN),
        (kind.startswith(("sft", "peft")) or "SFT" in line["model"], ADAPTERS),
        (not step or not line["global_batch"], STEP),
        (not all(line[name] for name in ("tensor", "pipeline", "micro_batch", "gpus")), DIVISION),
        (shape is None, OTHER),
        (variant not in ("no overlap", _OVERLAPPED), VARIANT),
        (_device(line["gpu"]) == "H100-SXM" and model not in _RECIPES, RECOMPUTATION),
    )
    unstated = _first(asked)
    setting = Setting(
        _bridge_group(line["gpu"].removesuffix("-80GB"), shape),
        f"{line['model']}, {line.get('item', line.get('skill', ''))}" + f", {variant}" * (variant == _OVERLAPPED),
        BRIDGE,
        _device(line["gpu"]),
        int(line["global_batch"] or 0),
        1e-3 * float(step or 0),
        unstated=unstated,
    )
    if unstated:
        return setting
    ranks = _ranks(line)
    division = {
        **ranks,
        "interleave": int(line["virtual"] or 1),
        "expert": int(line["expert"] or 1),
        "zero": 1,
        "sequence_parallel": ranks["tensor"] > 1,
    }
    dispatched = _DISPATCHED if model in _RECIPES and shape is not None and shape.experts else {}
    return replace(
        setting,
        shape=shape,
        division=division | _whole(division) | dispatched | _beyond(line["context"], line["precision"]),
        software=(_RECIPES.get(model) or _for_speed(shape, division)) | {"overlap_experts": variant == _OVERLAPPED},
    )


_CHECKPOINTED = {"Qwen3 MoE 30B": Recompute.FULL, "GPT-OSS 20B": Recompute.NONE}
"""``activation_checkpointing`` of the network's file in ``examples/llm_benchmark``."""

_FLEX = "GPT-OSS 20B"
"""Its ``attn`` there is FlexAttention, of PyTorch."""


def _automodel(line: Line) -> Setting:
    model = line["model"]
    shape = _named(model, int(line["seq"]))
    asked = (
        (line["task"] != "Pre-Training", ADAPTERS),
        ("Nemotron" in model, OTHER),
        (shape is None, SIZES),
        (int(line["context"] or 1) == 1 and model not in _CHECKPOINTED, RECOMPUTATION),
    )
    gpus = int(line["gpus"])
    division = {
        **_ranks(line),
        "interleave": int(line["virtual"] or 1),
        "expert": int(line["expert"] or gpus if shape and shape.experts else 1),
        "zero": 3,
        "recompute": _CHECKPOINTED.get(model, Recompute.NONE),
        **(_DISPATCHED if shape and shape.experts else {}),
    }
    return Setting(
        "Automodel, H100", f"{model}, {gpus} GPUs", AUTOMODEL, "H100-SXM", int(line["global_batch"]),
        float(line["step_s"]), shape, division | _beyond(line["context"], "bf16"),
        software={"kernels": Fusion.KERNELS} if model == _FLEX else {},
        unstated=_first(asked),
    )  # fmt: skip


def _fit(line: Line) -> Setting:
    return Setting("Automodel, does it fit", line["division"], AUTOMODEL, "H100-SXM", 1, 0.0, unstated=SIZES)


def _nous(line: Line) -> Setting:
    """The device is not named; 178 GiB are a B200's.  Nor are its expert ranks."""
    return Setting("torchtitan of Nous", line["scaling"], TITAN, "B200", 1, 0.0, unstated=DIVISION)


def _intern_evo(line: Line) -> Setting:
    """A part of the replicas that state is divided over is none of ours, but where it is all of them."""
    unstated = _unstated(line, (not line["measured_s"], STEP), ("packed samples" in line["note"], ADAPTERS))
    setting = _stated(
        line, "InternEvo", "InternEvo", _shape, unstated,
        software={"fp32_gradients": False, "overlap_gradients": True}, cards_bytes_per_s=4 * 100 * GBIT,
    )  # fmt: skip
    group = line["zero1_group"]
    if unstated or group in ("-1", line["data"]):
        return setting
    return replace(setting, division={**setting.division, "zero1_group": int(group)})


_OF_NEMOTRON = {**MODERN, "gated": False, "layer_norm": True, "relu": True}
_CLOUD_FILES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "GPT3-175B": ("v24.11.1 v25.02 v25.04", {"fused_attention": True}),
    "Grok-1-314B": ("v24.11.1 v25.02 v25.04", {}),
    "Llama-3.1-8B": ("v24.11.1 v25.02", {}),
    "Llama-3.1-70B": ("v24.11.1 v25.02", {}),
    "Llama-3.1-405B": ("v24.11.1 v25.02", {}),
    "Nemotron-4-15B": ("v24.11.1 v25.02", _OF_NEMOTRON),
    "Nemotron-4-340B": ("v24.11.1 v25.02", _OF_NEMOTRON),
}
"""By network, the releases with a file of its settings, and what that says of the network beside its sizes."""


def _cloud(line: Line) -> Setting:
    """By the file of NeMo's settings, which early releases have; what later ones compute again is in NeMo's recipes."""
    model = line["model"]
    releases, network = _CLOUD_FILES.get(model, ("", {}))
    has_file = line["release"] in releases.split()
    recompute = Recompute.SELECTIVE if model == "Nemotron-4-340B" else Recompute.NONE
    of_file = {"recompute": recompute.value, "zero": "1"} if has_file else {}
    stated = {**line, **of_file, "sequence_parallel": str(int(line["tensor"]) > 1).lower()}
    without_chunks = not line["interleave"] and int(line["pipeline"]) > 1

    def of_sizes(line: Line) -> Transformer:
        return _shape(line, experts=int(line["experts"] or 0), top_k=int(line["top_k"] or 0), **network)

    group = f"DGX Cloud, {line['gpu'].removesuffix('-80GB')}, {'experts' if line['experts'] else 'dense'}"
    unstated = _unstated(stated, (without_chunks, DIVISION))
    setting = _stated(stated, group, MEGATRON, of_sizes, unstated)
    if unstated:
        return setting
    return replace(setting, software={**_for_speed(setting.shape, setting.division), "scaling": Scaling.DELAYED})


def _rarely_stated(group: str, framework: str) -> Callable[[Line], Setting]:
    """Tables that hardly ever say all of a run."""

    def setting(line: Line) -> Setting:
        unstated = _unstated(
            line,
            (not line["measured_s"], STEP),
            (line.get("task", "pretrain") != "pretrain", ADAPTERS),
            ("HSDP" in line["note"], "weights that are divided within a host alone"),
        )
        return _stated(line, group, framework, _shape, unstated)

    return setting


_WIDE = 4096
_SPECIAL = ("mla", "frozen", "uneven", "fim", "mtp", "muon", "grpo", "zp_z3", "a2a", "account_for")
"""Words of cases that change what is computed, or when."""


def _golden(line: Line) -> Setting:
    case = line["case"]
    family = case.partition("/")[0]
    hosts = line["nodes"] and line["gpus_per_node"]
    asked = (
        (bool(line["same_values_as"]) or line["golden"].endswith("_2nd"), AGAIN),
        (family not in ("gpt", "moe") or line["swiglu"] == "True", OTHER),
        (any(word in case for word in _SPECIAL), VARIANT),
        (line["golden"] == "golden_values_dev_dgxh100_dgxc", "a machine that contradicts the others"),
        (not hosts or not line["gpu"] or not line["global_batch"] or not line["median_iteration_s"], DIVISION),
        (not line["seq"] or not line["heads"], SIZES),
        (line["expert_tensor"] not in ("", "1", line["tensor"]), "expert ranks with tensor ranks of their own"),
        (line["recompute"] not in ("", "full", "selective"), RECOMPUTATION),
        (bool(line["recompute_modules"]), "recomputation by operator"),
    )
    unstated = _first(asked)
    setting = Setting(
        f"Megatron-LM's tests, {'7e9 weights' if int(line['hidden'] or 0) >= _WIDE else 'small'}",
        f"{case.rpartition('/')[2]}, {line['golden']}",
        MEGATRON,
        _device(line["gpu"]),
        int(line["global_batch"] or 0),
        float(line["median_iteration_s"] or 0),
        unstated=unstated,
    )
    if unstated:
        return setting
    gpus = int(line["nodes"]) * int(line["gpus_per_node"]) // int(line["context"] or 1)
    counted = {**line, "gpus": str(gpus)}
    return replace(
        setting,
        shape=megatron_ci.shape_of(counted),
        division=megatron_ci.division_of(counted) | _beyond(line["context"], line["precision"]),
        software={"overlap_gradients": "overlap-grad-reduce" in line["flags"]},
    )


def _mlperf(line: Line) -> Setting:
    model = line["model"]
    shape = None if "lora" in model else _named(model, int(line["seq"] or 0))
    eight_bits = "405b" in model or line["fp8"] == "True" or line["fp4"] == "True"
    asked = (
        ("lora" in model, ADAPTERS),
        (bool(line["same_values_as"]), AGAIN),
        (not line["config"] or not line["tensor"] or not line["micro_batch"], DIVISION),
        (not eight_bits, PRECISION),
    )
    unstated = _first(asked)
    setting = Setting(
        f"MLPerf, {'Llama 2 70B, LoRA' if shape is None else f'Llama 3.1 {model[8:].upper()}'}",
        line["id"],
        "MLPerf",
        _device(line["gpu"]),
        int(line["global_batch"] or 0),
        float(line["median_step_s"] or 0),
        unstated=unstated,
    )
    if unstated:
        return setting
    ranks = _ranks(line)
    division = {
        **ranks,
        "interleave": int(line["interleave"].removeprefix("null") or 1),
        "zero": 1,
        "sequence_parallel": ranks["tensor"] > 1,
    }
    narrow = "fp4" if "fp4" in line["config"] else "fp8"
    return replace(
        setting,
        shape=shape,
        division=division | _beyond(line["context"], narrow),
        software={**_for_speed(shape, division), "scaling": Scaling.DELAYED},
    )


_TABLES: Mapping[str, Callable[[Line], Setting]] = {
    "vtrain/multi.csv": _vtrain,
    "vtrain/single.csv": _vtrain,
    "rows/llm_foundry.csv": _llm_foundry,
    "rows/torchtitan.csv": _torchtitan,
    "rows/bigscience_a100.csv": _bigscience,
    "rows/simumax_b200.csv": _simumax,
    "rows/megatron_bridge.csv": _bridge,
    "rows/internevo.csv": _intern_evo,
    "rows/nemo_h100.csv": _nemo,
    "rows/dgxc_benchmarking.csv": _cloud,
    "rows/fms_fsdp.csv": _rarely_stated("fms-fsdp", FSDP),
    "rows/jax_toolbox.csv": _rarely_stated("Pax", "Pax"),
    "rows/amd_primus.csv": _rarely_stated("Primus", "Primus"),
    "rows/mist_aceso.csv": _rarely_stated("Aceso", "Aceso"),
    "rows/mist_tuned.csv": _rarely_stated("Mist", "Mist"),
    "rows2/megatron_bridge_cards.csv": _card,
    "rows2/megatron_bridge_skills.csv": _card,
    "rows2/nemo_automodel_h100.csv": _automodel,
    "rows2/automodel_fit_sweep.csv": _fit,
    "rows2/nous_torchtitan_moe.csv": _nous,
    "rows2/megatron_lm_golden.csv": _golden,
    "rows2/mlperf_training.csv": _mlperf,
}
"""By its file in the folder of ``--data``."""
