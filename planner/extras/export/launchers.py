"""Ways of a transformer's step as options of Megatron-LM and torchtitan, or DeepSpeed's settings.

Each target says of a way what it is told, and what it cannot be told: which is then left to it, or to the model's code.
The names are those of Megatron core 0.16, torchtitan 0.3 and DeepSpeed 0.19.  A test has the last two's own parsers
read them where these are installed; Megatron-LM's parser (``megatron.training``) is in no package, its core has none.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from planner.extras.transformers.shape import ParallelDegrees, Recompute, Transformer


@dataclass(frozen=True, slots=True)
class LauncherOptions:
    """What a launcher is given.

    Attributes:
        text: command-line options, one a line; or a file's content.
        missing: what of the way the target cannot be told.
    """

    text: str
    missing: tuple[str, ...]


def megatron(shape: Transformer, ways: ParallelDegrees, global_batch: int) -> LauncherOptions:
    """Options of Megatron-LM's ``pretrain_gpt.py``."""
    arguments = [
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
    arguments += [flag for flag, wanted in flags.items() if wanted]
    missing = _of_stages(ways)
    blocks = ways.chunks(shape.layers)
    if ways.interleave > 1:
        arguments.append(f"--num-layers-per-virtual-pipeline-stage {shape.layers // len(blocks)}")
    elif len(set(blocks)) > 1:
        arguments += [
            f"--decoder-first-pipeline-num-layers {blocks[0]}",
            f"--decoder-last-pipeline-num-layers {blocks[-1]}",
        ]
        if len(set(blocks[1:-1])) > 1:
            missing.append(f"stages of {', '.join(map(str, blocks))} blocks: only the first and the last may differ")
    if ways.zero > 1:
        missing.append(f"ZeRO-{ways.zero}: its distributed optimiser is ZeRO-1")
    if ways.schedule == "gpipe":
        missing.append("GPipe: its schedule is 1F1B")
    return LauncherOptions("\n".join(arguments) + "\n", tuple(missing))


def torchtitan(shape: Transformer, ways: ParallelDegrees, global_batch: int) -> LauncherOptions:
    """Options of torchtitan's command line, beside those that name a model and its configuration."""
    sharded = ways.zero >= 2
    local = ways.micro_batch * (ways.micro_batches(global_batch) if ways.pipeline > 1 else 1)
    arguments = [
        f"--training.local_batch_size {local}",
        f"--training.global_batch_size {global_batch}",
        f"--training.seq_len {shape.seq}",
        f"--parallelism.data_parallel_replicate_degree {1 if sharded else ways.data}",
        f"--parallelism.data_parallel_shard_degree {ways.data if sharded else 1}",
        f"--parallelism.fsdp_reshard_after_forward {'never' if ways.zero == 2 else 'default'}",
        f"--parallelism.tensor_parallel_degree {ways.tensor}",
        f"--parallelism.pipeline_parallel_degree {ways.pipeline}",
        f"--parallelism.pipeline_parallel_schedule {_torch_schedule(ways)}",
        f"--parallelism.pipeline_parallel_microbatch_size {ways.micro_batch}",
    ]
    if ways.tensor > 1 and not ways.sequence_parallel:
        arguments.append("--parallelism.no-enable_sequence_parallel")
    missing = [f"sizes of {shape.name}: they are a flavour of a model there", *_of_stages(ways)]
    if ways.zero == 1:
        missing.append("ZeRO-1: replicas there divide nothing, or gradients too")
    if ways.recompute is Recompute.SELECTIVE:
        missing.append("selective recomputation: there it chooses operators, and not the core of attention alone")
    elif ways.recompute is Recompute.FULL:
        missing.append("full recomputation: FullAC as activation_checkpoint of the model's configuration function")
    if len(set(ways.chunks(shape.layers))) > 1:
        missing.append("stages of unlike numbers of blocks: it divides them itself")
    return LauncherOptions("\n".join(arguments) + "\n", tuple(missing))


def _of_stages(ways: ParallelDegrees) -> list[str]:
    """What stages have of their own: each launcher has one kind of rank."""
    missing = []
    if len(set(ways.degrees)) > 1:
        missing.append(f"tensor degrees {', '.join(map(str, ways.degrees))} of stages: it has one for all")
    if len(set(ways.pools)) > 1:
        missing.append(f"stages on {', '.join(ways.pools)}: which host has which stage is for you to arrange")
    return missing


def _torch_schedule(ways: ParallelDegrees) -> str:
    if ways.schedule == "gpipe":
        return "GPipe"
    return "Interleaved1F1B" if ways.interleave > 1 else "1F1B"


def deepspeed(shape: Transformer, ways: ParallelDegrees, global_batch: int) -> LauncherOptions:
    """DeepSpeed's configuration."""
    settings: dict[str, object] = {
        "train_batch_size": global_batch,
        "train_micro_batch_size_per_gpu": ways.micro_batch,
        "gradient_accumulation_steps": ways.micro_batches(global_batch),
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": ways.zero, "overlap_comm": ways.overlap_gradients or ways.zero > 1},
        "communication_data_type": "fp32" if ways.fp32_gradients else "bf16",
    }
    missing = _of_stages(ways)
    if ways.pipeline > 1:
        missing.append(f"{ways.pipeline} stages: PipelineModule(num_stages={ways.pipeline}) in the model's code")
    if ways.interleave > 1:
        missing.append(f"{ways.interleave} chunks a stage: its pipeline has one")
    if ways.tensor > 1:
        missing.append(f"tensor degree {ways.tensor}: the model's code (Megatron-DeepSpeed) divides it")
    if ways.recompute is not Recompute.NONE:
        missing.append(f"recomputation ({ways.recompute.value}): deepspeed.checkpointing in the model's code")
    return LauncherOptions(json.dumps(settings, indent=1) + "\n", tuple(missing))


LAUNCHERS: Mapping[str, Callable[[Transformer, ParallelDegrees, int], LauncherOptions]] = {
    "megatron": megatron,
    "torchtitan": torchtitan,
    "deepspeed": deepspeed,
}
