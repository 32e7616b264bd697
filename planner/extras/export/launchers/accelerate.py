"""accelerate: a configuration of FSDP2 (or of replicas alone), and a script that launches its user's program with it.

Keys are those of huggingface/accelerate: ``src/accelerate/commands/config/config_args.py``,
``src/accelerate/commands/launch.py``, ``FullyShardedDataParallelPlugin`` of ``src/accelerate/utils/dataclasses.py`` and
``src/accelerate/parallelism_config.py`` (1.15, commit 16cb6eb8 of July 2026).  It has tensor ranks, and ranks
that share a sample's tokens, beside slices alone; weights are divided over the latter and the replicas
(``docs/source/concept_guides/context_parallelism.md``).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
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
)
from planner.extras.transformers.shape import ContextExchange, Offload, Recompute
from planner.extras.transformers.space import LauncherLimits

_WORDS = {BFLOAT16: "bf16", FLOAT16: "fp16", FLOAT32: "no"}


def _settings(job: TrainingJob) -> dict[str, Any]:
    ways = job.ways
    settings: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "FSDP" if ways.zero else "MULTI_GPU" if ways.data > 1 else "NO",
        "mixed_precision": _WORDS[job.dtype],
        "num_machines": job.num_hosts,
        "num_processes": ways.devices,
        "rdzv_backend": "static",
    }
    if ways.zero:
        settings["fsdp_config"] = {
            "fsdp_version": 2,
            "fsdp_reshard_after_forward": ways.zero == 3,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_activation_checkpointing": ways.recompute is Recompute.FULL,
            "fsdp_offload_params": ways.offload is Offload.PARAMETERS,
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        }
    if max(job.tensor, ways.context, ways.shard_groups if ways.zero else 1) > 1:
        groups = ways.shard_groups
        settings["parallelism_config"] = {
            "parallelism_config_dp_replicate_size": groups,
            "parallelism_config_dp_shard_size": ways.data // groups,
            "parallelism_config_tp_size": job.tensor,
            "parallelism_config_cp_size": ways.context,
            **({"parallelism_config_cp_comm_strategy": "alltoall"} if ways.context > 1 else {}),
        }
    return settings


def _yaml(settings: Mapping[str, Any], indent: str = "") -> str:
    return "".join(
        f"{indent}{name}:\n{_yaml(value, indent + '  ')}"
        if isinstance(value, dict)
        else f"{indent}{name}: {json.dumps(value)}\n"
        for name, value in settings.items()
    )


def _missing(job: TrainingJob) -> list[str]:
    missing = [
        f"the sizes of {job.shape.name}: the network is the program's",
        f"{job.ways.micro_batch} samples a rank: batch_size of the program's DataLoader",
    ]
    if job.ways.fp32_gradients and job.ways.zero and job.dtype != FLOAT32:
        missing.append(
            "gradients summed in float32: FullyShardedDataParallelPlugin(mixed_precision_policy="
            "MixedPrecisionPolicy(reduce_dtype=torch.float32, ...)), in the program"
        )
    if job.tensor > 1:
        missing.append("the vocabulary in parts: the model's tp_plan says what tensor ranks divide")
    if job.ways.context > 1:
        missing.append(
            f"samples in {job.ways.context} parts: accelerator.maybe_context_parallel(buffers=..., "
            "buffer_seq_dims=...) around each pass, and causal attention of torch (sdpa) without a mask, in the program"
        )
    if job.ways.recompute is Recompute.FULL and not job.ways.zero:
        missing.append(CHECKPOINTING)
    return missing


def _accelerate(job: TrainingJob, file: str) -> LauncherFiles:
    several = job.num_hosts > 1
    machine = ("--machine_rank", '"$NODE_RANK"', "--main_process_ip", '"$MASTER_ADDR"')
    command = [
        ("accelerate", "launch", "--config_file", file),
        *([(*machine, "--main_process_port", '"${MASTER_PORT:-29500}"')] if several else []),
        ('"${PROGRAM:-train.py}"', ARGUMENTS),
    ]
    about = "accelerate 1.15, which calls torchrun; arguments: what the program takes; PROGRAM, if it is not train.py"
    environment = [f"export ACCELERATE_GRADIENT_ACCUMULATION_STEPS={job.micro_batches}"]
    return LauncherFiles(_yaml(_settings(job)), script(job, about, command, environment), tuple(_missing(job)))


ACCELERATE = Launcher(
    LauncherLimits(
        "accelerate",
        stages=False,
        zero=(0, 2, 3),
        slices_beside=True,
        sequence_parallel=(False,),
        recompute=(Recompute.NONE, Recompute.FULL),
        context=(ContextExchange.RING,),
        slices_context=True,
        offload=(Offload.NONE, Offload.PARAMETERS),
        shards=(2, 3),
        sums_once=False,
    ),
    _accelerate,
    unlike_hosts=False,
)
