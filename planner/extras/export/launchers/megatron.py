"""Megatron-LM's ``pretrain_gpt.py``, and recipes of Megatron-Bridge, which runs the same core.

Names are those of NVIDIA/Megatron-LM: ``megatron/training/arguments.py`` and, for what that generates from fields,
``megatron/core/transformer/transformer_config.py``, ``megatron/core/model_parallel_config.py`` and
``megatron/training/config/training_config.py``; ranks that share a sample's tokens are between tensor ranks and
replicas, and weights are divided over both, or over as many of them as there are instances of the optimiser
(``megatron/core/parallel_state.py``), which sum gradients once a step; the layout is that of
``megatron/core/transformer/pipeline_parallel_layer_layout.py`` (core 0.17 to 0.20, commit d98e8a64 of August 2026).
Of NVIDIA-NeMo/Megatron-Bridge: ``scripts/training/run_recipe.py``, ``src/megatron/bridge/training/config.py``,
``src/megatron/bridge/recipes/llama/__init__.py`` (0.7, commit 067f987d of August 2026).
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from planner.extras.export.launchers.job import (
    ARGUMENTS,
    BFLOAT16,
    FLOAT16,
    Launcher,
    LauncherFiles,
    TrainingJob,
    script,
    torchrun,
)
from planner.extras.transformers.shape import (
    ContextExchange,
    ExpertExchange,
    Offload,
    ParallelDegrees,
    Precision,
    Recompute,
    Transformer,
)
from planner.extras.transformers.space import LauncherLimits

_CONTEXT = {ContextExchange.RING: "p2p", ContextExchange.ALL_TO_ALL: "a2a"}
_STRATEGIES = {2: "optim_grads", 3: "optim_grads_params"}
"""Of Megatron-FSDP, by ZeRO's level."""

_RECIPES = {
    "llama2-7b": "llama2_7b_pretrain_config",
    "llama3-8b": "llama3_8b_pretrain_config",
    "llama3-70b": "llama3_70b_pretrain_config",
}


def layout_of(job: TrainingJob) -> str:
    """Which layers each chunk has: the embedding (E), blocks (t), those of later tokens (m), head and loss (L).

    ``Et*3|t*5|t*5|t*3L`` is two stages of two chunks each; a chunk follows the one before it on the next stage.
    """
    chunks = [_repeated("t", blocks) for blocks in job.blocks]
    return f"E{'|'.join(chunks)}{_repeated('m', job.shape.mtp)}L"


def _repeated(layer: str, number: int) -> str:
    return f"{layer}*{number}" if number > 1 else layer * number


def _environment(job: TrainingJob) -> list[str]:
    """Exchanges of tensor and context ranks run beside kernels on one queue; those of slices need several."""
    if job.ways.zero > 1:
        return ["unset CUDA_DEVICE_MAX_CONNECTIONS"]
    return ["export CUDA_DEVICE_MAX_CONNECTIONS=1"] if max(job.tensor, job.ways.context) > 1 else []


_SIZES = (
    *("name", "hidden", "ffn", "heads", "layers", "vocab", "seq", "kv_heads", "head_size"),
    *("gated", "rotary", "fused_attention", "dropout", "attention_dropout", "relu", "parameters_tied"),
    *("layer_norm", "qk_norm", "rotary_base", "settings"),
    *("value_size", "query_rank", "kv_rank", "rope_size"),
    *("experts", "top_k", "expert_ffn", "shared_ffn", "shared_gate", "router_bias", "first_dense", "mtp"),
)
"""Of a network; options tell them of any."""


def _sizes(shape: Transformer) -> tuple[str, ...]:
    """Of a network those that its options tell.

    A window is one of all blocks; biases are of all products, of those before attention alone, or of none.
    """
    window = ("window", "windowed") if shape.windowed == shape.layers else ()
    others = shape.ffn_bias
    is_usual = shape.out_bias == others and (shape.qkv_bias or not others)
    biases = ("qkv_bias", "out_bias", "ffn_bias") if is_usual else ()
    return (*_SIZES, *window, *biases)


_SETTINGS = {
    "rms_norm_eps": "--norm-epsilon",
    "layer_norm_eps": "--norm-epsilon",
    "rotary_pct": "--rotary-percent",
    "n_group": "--moe-router-num-groups",
    "topk_group": "--moe-router-group-topk",
    "routed_scaling_factor": "--moe-router-topk-scaling-factor",
}
"""Options by what a ``config.json`` calls it; what is beyond is left to the user."""


def _settings(shape: Transformer) -> Iterator[tuple[str, str]]:
    """Of a network what is in no size."""
    for name, _, value in (each.partition("=") for each in shape.settings):
        if name in _SETTINGS:
            yield _SETTINGS[name], value


def _network(job: TrainingJob) -> Iterator[tuple[str, ...]]:
    """Options of ``pretrain_gpt.py`` that say what is trained."""
    shape = job.shape
    yield "--num-layers", str(shape.layers + shape.first_dense)
    yield "--hidden-size", str(shape.hidden)
    yield "--ffn-hidden-size", str(shape.ffn)
    yield from _attention(shape)
    yield "--seq-length", str(shape.seq)
    yield "--max-position-embeddings", str(shape.seq)
    if shape.rotary:
        yield "--position-embedding-type", "rope", "--rotary-base", f"{shape.rotary_base:.0f}"
    yield "--normalization", "LayerNorm" if shape.layer_norm else "RMSNorm"
    if not shape.ffn_bias:
        yield ("--disable-bias-linear", *(["--add-qkv-bias"] if shape.qkv_bias else []))
    if shape.gated:
        yield ("--swiglu",)
    if not shape.dropout:
        yield "--hidden-dropout", "0"
    if not shape.drops_scores:
        yield "--attention-dropout", "0"
    if not shape.parameters_tied:
        yield ("--untie-embeddings-and-output-weights",)
    if shape.vocab % (128 * job.tensor):
        yield "--make-vocab-size-divisible-by", "1"
    if shape.experts:
        yield from _experts(job)
    if shape.mtp:
        yield "--mtp-num-layers", str(shape.mtp)
    yield from _settings(shape)


def _attention(shape: Transformer) -> Iterator[tuple[str, ...]]:
    yield "--num-attention-heads", str(shape.heads)
    if shape.kv_rank:
        rotated = shape.rope_size
        yield "--multi-latent-attention", "--kv-lora-rank", str(shape.kv_rank)
        if shape.query_rank:
            yield "--q-lora-rank", str(shape.query_rank)
        yield "--qk-head-dim", str(shape.head_size - rotated), "--qk-pos-emb-head-dim", str(rotated)
        yield "--v-head-dim", str(shape.value_size), "--rope-type", "rope"
    else:
        yield "--kv-channels", str(shape.head_size)
        if shape.kv_heads != shape.heads:
            yield "--group-query-attention", "--num-query-groups", str(shape.kv_heads)
    if shape.qk_norm or shape.kv_rank:
        yield ("--qk-layernorm",)
    if shape.windowed:
        yield "--window-size", f"{shape.window - 1},0"
    yield "--attention-backend", "auto" if shape.fused_attention else "unfused"


def _experts(job: TrainingJob) -> Iterator[tuple[str, ...]]:
    shape = job.shape
    dense = shape.first_dense
    yield "--num-experts", str(shape.experts), "--moe-router-topk", str(shape.top_k)
    yield "--moe-ffn-hidden-size", str(shape.expert_ffn)
    if job.ways.expert_exchange is ExpertExchange.DISPATCH:
        yield "--moe-token-dispatcher-type", "flex", "--moe-flex-dispatcher-backend", "deepep"
        yield "--moe-router-dtype", "fp32"
    else:
        yield "--moe-token-dispatcher-type", "alltoall"
    if job.dtype == BFLOAT16:
        yield ("--moe-grouped-gemm",)
    if shape.shared_ffn:
        yield "--moe-shared-expert-intermediate-size", str(shape.shared_ffn)
    if shape.shared_gate:
        yield ("--moe-shared-expert-gate",)
    if shape.router_bias:
        yield "--moe-router-enable-expert-bias", "--moe-router-score-function", "sigmoid"
    if dense:
        yield "--moe-layer-freq", f"([0]*{dense}+[1]*{shape.layers})"


def _division(job: TrainingJob) -> Iterator[tuple[str, ...]]:
    """Options that say how its step is divided, and in which precision."""
    ways = job.ways
    yield "--tensor-model-parallel-size", str(job.tensor)
    if ways.context > 1:
        yield "--context-parallel-size", str(ways.context), "--cp-comm-type", _CONTEXT[ways.context_exchange]
    if ways.expert > 1:
        yield "--expert-model-parallel-size", str(ways.expert)
    if ways.whole_experts:
        yield "--expert-tensor-parallel-size", "1"
    if job.tensor > 1 and ways.sequence_parallel:
        yield ("--sequence-parallel",)
    yield "--pipeline-model-parallel-size", str(ways.pipeline)
    if ways.pipeline > 1:
        yield "--pipeline-model-parallel-layout", layout_of(job)
    yield "--micro-batch-size", str(ways.micro_batch)
    yield "--global-batch-size", str(job.global_batch)
    yield from _recomputation(ways)
    yield from _precision(job)
    if ways.zero == 1 or ways.offload is Offload.OPTIMIZER:
        yield ("--use-distributed-optimizer",)
    if ways.offload is Offload.OPTIMIZER:
        yield "--optimizer-cpu-offload", "--optimizer-offload-fraction", "1.0"
        yield "--use-precision-aware-optimizer", "--overlap-cpu-optimizer-d2h-h2d"
    if ways.offload is Offload.ACTIVATIONS:
        yield "--cpu-offloading-num-layers", str(sum(job.blocks) - 1)
    if ways.shard_groups > 1:
        yield "--num-distributed-optimizer-instances", str(ways.shard_groups)
    if ways.zero > 1:
        yield "--use-megatron-fsdp", "--data-parallel-sharding-strategy", _STRATEGIES[ways.zero]
        yield "--ckpt-format", "fsdp_dtensor"
        yield "--overlap-grad-reduce", "--overlap-param-gather"
    elif ways.overlap_gradients:
        yield ("--overlap-grad-reduce",)


def _recomputation(ways: ParallelDegrees) -> Iterator[tuple[str, ...]]:
    if ways.recompute is Recompute.SELECTIVE:
        yield "--recompute-granularity", "selective", "--recompute-modules", *ways.recompute_modules
    elif ways.recompute is Recompute.FULL:
        yield "--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"


def _precision(job: TrainingJob) -> Iterator[tuple[str, ...]]:
    """Of products, then of sums of gradients, which Megatron-FSDP is told by an option of its own."""
    if job.ways.precision is Precision.FP8:
        yield "--transformer-impl", "transformer_engine", "--fp8-format", "hybrid", "--fp8-recipe", "tensorwise"
    if job.dtype == BFLOAT16:
        yield ("--bf16",)
    elif job.dtype == FLOAT16:
        yield ("--fp16",)
    else:
        return
    if job.ways.fp32_gradients:
        yield ("--accumulate-allreduce-grads-in-fp32",)
        if job.ways.zero > 1:
            yield "--megatron-fsdp-main-grads-dtype", "fp32"
    elif job.dtype == BFLOAT16:
        yield ("--grad-reduce-in-bf16",)


def _megatron(job: TrainingJob, file: str) -> LauncherFiles:
    del file
    missing = [f"the vocabulary of {job.shape.vocab}: it is the tokeniser's, --tokenizer-type among the arguments"]
    if job.shape.relu:
        missing.append("ReLU: activation_func of the TransformerConfig, in the model's code")
    missing += [each for each in job.untold if each.partition("=")[0] not in _SETTINGS]
    about = "Megatron-LM, core 0.17 to 0.20, in its folder; arguments: what is yours (data, tokeniser, optimiser)"
    command = [torchrun(job), ("pretrain_gpt.py",), *_network(job), *_division(job), (ARGUMENTS,)]
    return LauncherFiles(script(job, about, command, _environment(job)), missing=tuple(missing))


def _fields(job: TrainingJob) -> Iterator[tuple[str, object]]:
    """Of a recipe: fields of its ``ConfigContainer``."""
    ways = job.ways
    sliced = ways.zero > 1
    yield "dataset.seq_length", job.shape.seq
    yield "train.micro_batch_size", ways.micro_batch
    yield "train.global_batch_size", job.global_batch
    yield "model.tensor_model_parallel_size", job.tensor
    yield "model.sequence_parallel", job.tensor > 1 and ways.sequence_parallel
    yield "model.context_parallel_size", ways.context
    yield "model.cp_comm_type", _CONTEXT[ways.context_exchange] if ways.context > 1 else None
    yield "model.expert_model_parallel_size", ways.expert
    if job.shape.experts:
        is_flex = ways.expert_exchange is ExpertExchange.DISPATCH
        yield "model.expert_tensor_parallel_size", 1 if ways.whole_experts else job.tensor
        yield "model.moe_token_dispatcher_type", "flex" if is_flex else "alltoall"
        yield "model.moe_flex_dispatcher_backend", "deepep" if is_flex else None
    yield "model.pipeline_model_parallel_size", ways.pipeline
    yield "model.virtual_pipeline_model_parallel_size", ways.interleave if ways.interleave > 1 else None
    yield "model.pipeline_model_parallel_layout", f'"{layout_of(job)}"' if ways.pipeline > 1 else None
    yield "model.recompute_granularity", None if ways.recompute is Recompute.NONE else ways.recompute.value
    yield "model.recompute_method", "uniform" if ways.recompute is Recompute.FULL else None
    yield "model.recompute_num_layers", 1 if ways.recompute is Recompute.FULL else None
    modules = f"[{','.join(ways.recompute_modules)}]"
    yield "model.recompute_modules", modules if ways.recompute is Recompute.SELECTIVE else None
    yield "mixed_precision", "bf16_mixed" if job.dtype == BFLOAT16 else "fp16_mixed"
    yield "ddp.grad_reduce_in_fp32", True
    yield "ddp.use_distributed_optimizer", ways.zero > 0
    yield "optimizer.use_distributed_optimizer", ways.zero > 0
    yield "ddp.num_distributed_optimizer_instances", ways.shard_groups if ways.zero else 1
    yield "ddp.use_megatron_fsdp", sliced
    yield "ddp.data_parallel_sharding_strategy", _STRATEGIES.get(ways.zero, "no_shard")
    yield "ddp.overlap_grad_reduce", sliced or ways.overlap_gradients
    yield "ddp.overlap_param_gather", sliced
    yield "checkpoint.ckpt_format", "fsdp_dtensor" if sliced else "torch_dist"


def _bridge(job: TrainingJob, file: str) -> LauncherFiles:
    del file
    recipe = next((recipe for name, recipe in _RECIPES.items() if job.is_of(name)), "")
    missing = job.untold if recipe else [f"the sizes of {job.shape.name}: RECIPE=... names a recipe of it"]
    if job.ways.zero > 1:
        missing.append("slices of gradients in float32: ddp.megatron_fsdp_main_grads_dtype in the recipe's code")
    about = "Megatron-Bridge 0.7, in its folder; arguments: what is yours (--dataset, tokenizer.*, optimizer.*)"
    command = [
        torchrun(job),
        ("scripts/training/run_recipe.py", "--recipe", recipe or '"$RECIPE"', "--mode", "pretrain"),
        *((f"{name}={value if isinstance(value, str) else json.dumps(value)}",) for name, value in _fields(job)),
        (ARGUMENTS,),
    ]
    return LauncherFiles(script(job, about, command, _environment(job)), missing=tuple(missing))


MEGATRON = Launcher(
    LauncherLimits(
        "megatron",
        schedules=("1f1b",),
        one_degree=True,
        offload=(Offload.NONE, Offload.OPTIMIZER, Offload.ACTIVATIONS),
        shards_offload=False,
        offload_zero=(1,),
        offload_alone=True,
        further=("expert", "whole_experts", "expert_exchange", "precision", "recompute_modules"),
    ),
    _megatron,
    network=_sizes,
)
BRIDGE = Launcher(
    LauncherLimits(
        "megatron-bridge",
        schedules=("1f1b",),
        one_degree=True,
        fp32_gradients=(True,),
        offload=(Offload.NONE,),
        further=("expert", "whole_experts", "expert_exchange", "recompute_modules"),
    ),
    _bridge,
    dtypes=(BFLOAT16, FLOAT16),
)
