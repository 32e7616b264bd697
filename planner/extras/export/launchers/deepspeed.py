"""DeepSpeed: its configuration, and a script that starts a training program of its user's with it.

Keys are those of deepspeedai/DeepSpeed: ``deepspeed/runtime/config.py``, ``deepspeed/runtime/zero/config.py``,
``deepspeed/runtime/tensor_parallel/config.py`` and ``docs/_pages/config-json.md`` (0.19.6, commit edaa7221 of August
2026).  Of the samples two of three numbers are told, since it counts tensor ranks among the replicas of the third.  Its
stages are a ``PipelineModule``, which is a network written anew: no configuration makes them.  Without ZeRO it sums
gradients in half precision; one replica's optimiser state is the same at level 1.  Ranks that share a sample's tokens
exchange heads for tokens (``deepspeed/runtime/sequence_parallel/ulysses_sp.py``), which the program asks for; they
slice with the replicas.  Groups that have the same slices are those of MiCS (``deepspeed/runtime/zero/mics.py``), which
sum gradients once a step.
"""

from __future__ import annotations

import json
from typing import Any

from planner.extras.export.launchers.job import (
    ARGUMENTS,
    BFLOAT16,
    CHECKPOINTING,
    FLOAT16,
    FLOAT32,
    Launcher,
    LauncherFiles,
    TrainingJob,
    script,
    torchrun,
)
from planner.extras.transformers.shape import ContextExchange, Offload, Recompute
from planner.extras.transformers.space import LauncherLimits

_WORDS = {BFLOAT16: "bf16", FLOAT16: "fp16", FLOAT32: "fp32"}


def _settings(job: TrainingJob) -> dict[str, Any]:
    ways = job.ways
    half = _WORDS[job.dtype]
    summed = "fp32" if ways.fp32_gradients else half
    host = {"device": "cpu", "pin_memory": True}
    further: dict[str, Any] = {"offload_optimizer": host} if ways.offload is not Offload.NONE else {}
    if ways.offload is Offload.PARAMETERS:
        further["offload_param"] = host
    if ways.shard_groups > 1:
        further["mics_shard_size"] = ways.shards
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": ways.micro_batch,
        "gradient_accumulation_steps": job.micro_batches,
        "zero_optimization": {
            "stage": ways.zero if ways.copies > 1 else max(1, ways.zero),
            "overlap_comm": ways.overlap_gradients or ways.zero > 1,
            **further,
        },
        "communication_data_type": summed,
        "data_types": {"grad_accum_dtype": summed},
    }
    if job.dtype != FLOAT32:
        settings[half] = {"enabled": True}
    if ways.context > 1:
        settings["sequence_parallel_size"] = ways.context
    if job.tensor > 1:
        settings["tensor_parallel"] = {"autotp_size": job.tensor}
    return settings


def _missing(job: TrainingJob) -> list[str]:
    missing = [f"the sizes of {job.shape.name}: the network is the program's"]
    if job.tensor > 1:
        missing.append("the vocabulary in parts: AutoTP keeps the embedding whole on each rank, and gathers logits")
    if job.ways.context > 1:
        missing.append(
            f"UlyssesSPAttentionHF.register_with_transformers(sequence_parallel_size={job.ways.context}, ...), whose "
            "result is mpu= of deepspeed.initialize, and UlyssesSPDataLoaderAdapter, in the program"
        )
    if job.ways.shard_groups > 1:
        missing.append("the network is made within deepspeed.zero.MiCS_Init(config_dict_or_path=...), in the program")
    if job.ways.recompute is Recompute.FULL:
        missing.append(CHECKPOINTING)
    elif job.ways.recompute is Recompute.SELECTIVE:
        missing.append("selective recomputation: deepspeed.checkpointing around attention's core, in the model's code")
    return missing


def _deepspeed(job: TrainingJob, file: str) -> LauncherFiles:
    about = "arguments: what is yours (data, and what else the program takes); PROGRAM, if it is not train.py"
    command = [
        torchrun(job),
        ('"${PROGRAM:-train.py}"', "--deepspeed", "--deepspeed_config", file),
        (ARGUMENTS,),
    ]
    text = json.dumps(_settings(job), indent=1) + "\n"
    return LauncherFiles(text, script(job, f"DeepSpeed 0.19; {about}", command), tuple(_missing(job)))


DEEPSPEED = Launcher(
    LauncherLimits(
        "deepspeed",
        stages=False,
        zero=(1, 2, 3),
        sequence_parallel=(False,),
        context=(ContextExchange.ALL_TO_ALL,),
        context_beside_tensor=False,
        offload=(Offload.NONE, Offload.OPTIMIZER, Offload.PARAMETERS),
        shards=(3,),
        shards_offload=False,
    ),
    _deepspeed,
)
