"""Ways of a transformer's step as options of Megatron-LM, or settings of torchtitan and DeepSpeed.

Each target says of a way what it is told, and what it cannot be told: which is then left to it, or to the model's code.
The names are those of 2025 (Megatron core 0.12 and later, torchtitan's job files, DeepSpeed's JSON).  No target has
parsed them here: the parsers of Megatron-LM and torchtitan are in no package that installs on a CPU.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from planner.transformers.shape import Recompute, Transformer, Ways


@dataclass(frozen=True, slots=True)
class Options:
    """What a launcher is given.

    Attributes:
        text: command-line options, one a line; or a file's content.
        missing: what of the way the target cannot be told.
    """

    text: str
    missing: tuple[str, ...]


def megatron(shape: Transformer, ways: Ways, global_batch: int) -> Options:
    """Options of Megatron-LM's ``pretrain_gpt.py``."""
    told = [
        f"--tensor-model-parallel-size {ways.tensor}",
        f"--pipeline-model-parallel-size {ways.pipeline}",
        f"--micro-batch-size {ways.micro_batch}",
        f"--global-batch-size {global_batch}",
        f"--num-layers {shape.layers}",
        f"--hidden-size {shape.hidden}",
        f"--ffn-hidden-size {shape.ffn}",
        f"--num-attention-heads {shape.heads}",
        f"--kv-channels {shape.head_size}",
        f"--seq-length {shape.seq}",
        f"--max-position-embeddings {shape.seq}",
    ]
    flags = {
        "--sequence-parallel": ways.sequence_parallel,
        "--use-distributed-optimizer": ways.zero == 1,
        "--overlap-grad-reduce": ways.overlap_gradients,
        "--accumulate-allreduce-grads-in-fp32": ways.fp32_gradients,
        f"--group-query-attention --num-query-groups {shape.kv_heads}": shape.kv_heads != shape.heads,
        "--swiglu": shape.gated,
        "--position-embedding-type rope": shape.rotary,
        "--use-flash-attn": shape.fused_attention,
        "--attention-dropout 0 --hidden-dropout 0": not shape.dropout,
        "--untie-embeddings-and-output-weights": not shape.parameters_tied,
        "--recompute-granularity selective": ways.recompute is Recompute.SELECTIVE,
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1": (
            ways.recompute is Recompute.FULL
        ),
    }
    told += [flag for flag, wanted in flags.items() if wanted]
    missing = []
    blocks = ways.chunks(shape.layers)
    if ways.interleave > 1:
        told.append(f"--num-layers-per-virtual-pipeline-stage {shape.layers // len(blocks)}")
    elif len(set(blocks)) > 1:
        told += [
            f"--decoder-first-pipeline-num-layers {blocks[0]}",
            f"--decoder-last-pipeline-num-layers {blocks[-1]}",
        ]
        if len(set(blocks[1:-1])) > 1:
            missing.append(f"stages of {', '.join(map(str, blocks))} blocks: only the first and the last may differ")
    if ways.zero > 1:
        missing.append(f"ZeRO-{ways.zero}: its distributed optimiser is ZeRO-1")
    if ways.schedule == "gpipe":
        missing.append("GPipe: its schedule is 1F1B")
    return Options("\n".join(told) + "\n", tuple(missing))


def torchtitan(shape: Transformer, ways: Ways, global_batch: int) -> Options:
    """Sections of a torchtitan job's TOML."""
    sharded = ways.zero >= 2
    settings: dict[str, dict[str, object]] = {
        "training": {
            "local_batch_size": ways.micro_batch * ways.micro_batches(global_batch),
            "global_batch_size": global_batch,
            "seq_len": shape.seq,
        },
        "parallelism": {
            "data_parallel_replicate_degree": 1 if sharded else ways.data,
            "data_parallel_shard_degree": ways.data if sharded else 1,
            "fsdp_reshard_after_forward": "never" if ways.zero == 2 else "default",
            "tensor_parallel_degree": ways.tensor,
            "pipeline_parallel_degree": ways.pipeline,
            "pipeline_parallel_schedule": _torch_schedule(ways),
            "pipeline_parallel_microbatch_size": ways.micro_batch,
        },
        "activation_checkpoint": {"mode": ways.recompute.value},
    }
    if ways.pipeline == 1:
        settings["training"]["local_batch_size"] = ways.micro_batch
    missing = [f"sizes of {shape.name}: they are a flavour of a model there"]
    if ways.zero == 1:
        missing.append("ZeRO-1: replicas there divide nothing, or gradients too")
    if ways.tensor > 1 and not ways.sequence_parallel:
        missing.append("tensor parallelism without sequence parallelism: it has them together")
    if ways.recompute is Recompute.SELECTIVE:
        missing.append("selective recomputation: there it chooses operators, and not the core of attention alone")
    if len(set(ways.chunks(shape.layers))) > 1:
        missing.append("stages of unlike numbers of blocks: it divides them itself")
    return Options(_toml(settings), tuple(missing))


def _torch_schedule(ways: Ways) -> str:
    if ways.schedule == "gpipe":
        return "GPipe"
    return "Interleaved1F1B" if ways.interleave > 1 else "1F1B"


def deepspeed(shape: Transformer, ways: Ways, global_batch: int) -> Options:
    """DeepSpeed's configuration."""
    settings: dict[str, object] = {
        "train_batch_size": global_batch,
        "train_micro_batch_size_per_gpu": ways.micro_batch,
        "gradient_accumulation_steps": ways.micro_batches(global_batch),
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": ways.zero, "overlap_comm": ways.overlap_gradients or ways.zero > 1},
        "communication_data_type": "fp32" if ways.fp32_gradients else "bf16",
    }
    missing = []
    if ways.pipeline > 1:
        missing.append(f"{ways.pipeline} stages: PipelineModule(num_stages={ways.pipeline}) in the model's code")
    if ways.interleave > 1:
        missing.append(f"{ways.interleave} chunks a stage: its pipeline has one")
    if ways.tensor > 1:
        missing.append(f"tensor degree {ways.tensor}: the model's code (Megatron-DeepSpeed) divides it")
    if ways.recompute is not Recompute.NONE:
        missing.append(f"recomputation ({ways.recompute.value}): deepspeed.checkpointing in the model's code")
    return Options(json.dumps(settings, indent=1) + "\n", tuple(missing))


LAUNCHERS: Mapping[str, Callable[[Transformer, Ways, int], Options]] = {
    "megatron": megatron,
    "torchtitan": torchtitan,
    "deepspeed": deepspeed,
}


def _toml(settings: Mapping[str, Mapping[str, object]]) -> str:
    def lines() -> Iterator[str]:
        for section, values in settings.items():
            yield f"[{section}]"
            yield from (f"{name} = {json.dumps(value)}" for name, value in values.items())
            yield ""

    return "\n".join(lines())
