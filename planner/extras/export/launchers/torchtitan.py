"""torchtitan: a script with its options.

Names are those of pytorch/torchtitan: ``torchtitan/config/configs.py`` and
``torchtitan/distributed/activation_checkpoint.py`` of August 2026 (commit b5bcd76c, tokens in place of samples), and
``torchtitan/config/job_config.py`` of v0.2.2 (February 2026).  What they do is in ``torchtitan/distributed/fsdp.py``
and ``pipeline_parallel.py``, and in ``torchtitan/models/llama3/parallelize.py``: replicas divide nothing, or
gradients and optimiser (ZeRO-2: weights stay gathered between the passes), or weights too; sums are in float32.
Groups of replicas that have the same slices sum those of every micro-batch. Ranks that share a sample's tokens always
slice what they have alike, with the replicas (``resolve_fsdp_mesh``); keys and values are gathered before attention
(``torchtitan/models/common/decoder_sharding.py``). In v0.2.2 they pass from rank to rank; weights are cast to
bfloat16 where they are sliced, or replicas are of one rank each, alone, and tensor ranks always divide tokens too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate, pairwise

from planner.extras.export.launchers.job import (
    ARGUMENTS,
    BFLOAT16,
    FLOAT32,
    Launcher,
    LauncherFiles,
    TrainingJob,
    script,
    torchrun,
)
from planner.extras.transformers.shape import ContextExchange, Offload, Precision, Recompute
from planner.extras.transformers.space import LauncherLimits

_FLAVOURS = {"llama3-8b": "8B", "llama3-70b": "70B"}
_CHECKPOINTING = {Recompute.NONE: "none", Recompute.OPERATORS: "selective", Recompute.FULL: "full"}
_RESHARD = {2: "never", 3: "always"}
"""After a block's forward, by ZeRO's level."""
_LIMITS = LauncherLimits(
    "torchtitan",
    zero=(0, 2, 3),
    one_degree=True,
    recompute=(Recompute.NONE, Recompute.OPERATORS, Recompute.FULL),
    fp32_gradients=(True,),
    context=(ContextExchange.ALL_GATHER,),
    slices_context=True,
    offload=(Offload.NONE, Offload.PARAMETERS),
    shards=(2, 3),
    sums_once=False,
    further=("precision",),
)
_ABOUT = "arguments: what is yours (data, optimiser)"


def _parallelism(job: TrainingJob, head: str) -> Iterator[tuple[str, ...]]:
    """Of all versions; ``head`` is the module that makes logits."""
    ways = job.ways
    sliced = ways.zero >= 2
    groups = ways.shard_groups if sliced else ways.data
    yield "--parallelism.data_parallel_replicate_degree", str(groups)
    yield "--parallelism.data_parallel_shard_degree", str(ways.data // groups)
    if sliced:
        yield "--parallelism.fsdp_reshard_after_forward", _RESHARD[ways.zero]
    yield "--parallelism.tensor_parallel_degree", str(job.tensor)
    if job.tensor > 1 and not ways.sequence_parallel:
        yield ("--parallelism.no-enable_sequence_parallel",)
    if ways.context > 1:
        yield "--parallelism.context_parallel_degree", str(ways.context)
    yield "--parallelism.pipeline_parallel_degree", str(ways.pipeline)
    if ways.pipeline > 1:
        yield "--parallelism.module_fqns_per_model_part", *modules_of(job, head)
        yield "--parallelism.pipeline_parallel_schedule", _schedule(job)


def modules_of(job: TrainingJob, head: str) -> list[str]:
    """The modules of each chunk, with commas between them."""
    layers = [[f"layers.{layer}" for layer in range(*ends)] for ends in pairwise(accumulate(job.blocks, initial=0))]
    layers[0].insert(0, "tok_embeddings")
    layers[-1] += ["norm", head]
    return [",".join(modules) for modules in layers]


def _schedule(job: TrainingJob) -> str:
    """The name that torch has (``torch/distributed/pipelining/schedules.py``)."""
    if job.ways.interleave > 1:
        return "Interleaved1F1B"
    return "GPipe" if job.ways.schedule == "gpipe" else "1F1B"


def _missing(job: TrainingJob, where: str) -> tuple[str, ...]:
    return tuple(job.untold) if _flavour(job) else (f"the sizes of {job.shape.name}: {where}",)


def _flavour(job: TrainingJob) -> str:
    return next((flavour for name, flavour in _FLAVOURS.items() if job.is_of(name)), "")


def _newest(job: TrainingJob, file: str) -> LauncherFiles:
    """In tokens; what is recomputed is a subcommand, which comes last."""
    del file
    ways = job.ways
    seq = job.shape.seq
    flavour = _flavour(job)
    config = ("llama3", f"llama3_{flavour.lower()}") if flavour else ('"$MODULE"', '"$CONFIG"')
    command = [
        torchrun(job),
        ("-m", "torchtitan.train", "--module", config[0], "--config", config[1]),
        ("--training.num_tokens_per_microbatch_per_dp_rank", str(ways.micro_batch * seq)),
        ("--training.num_tokens_per_train_step", str(job.global_batch * seq)),
        ("--training.max_context_length", str(seq)),
        *_precision(job),
        *_parallelism(job, "lm_head"),
        *(_microbatches(job) if ways.pipeline > 1 else ()),
        (ARGUMENTS,),
        (f"activation-checkpoint:{_CHECKPOINTING[ways.recompute]}",),
    ]
    about = f"torchtitan of August 2026 (commit b5bcd76c), in its folder; {_ABOUT}"
    missing = _missing(job, "MODULE=... and CONFIG=... name a configuration of it")
    if ways.precision is Precision.FP8:
        converter = "Float8LinearConverter.Config(filter_fqns=['lm_head'], model_compile_enabled=True)"
        missing = (*missing, f"8 bits: {converter} among converters= of model_registry, in the configuration's code")
    return LauncherFiles(script(job, about, command), missing=missing)


def _microbatches(job: TrainingJob) -> Iterator[tuple[str, ...]]:
    """Of a pipeline; CUDA graphs, on by default, are refused beside one."""
    yield "--parallelism.num_pp_microbatches", str(job.micro_batches)
    yield ("--training.disable_cuda_graphs",)


def _precision(job: TrainingJob) -> Iterator[tuple[str, ...]]:
    yield "--training.mixed_precision_param", job.dtype
    yield "--training.mixed_precision_reduce", FLOAT32
    if job.ways.offload is Offload.PARAMETERS:
        yield ("--training.enable_cpu_offload",)
    if job.ways.precision is Precision.FP8:
        yield ("--compile.enable",)


def _of_v0_2(job: TrainingJob, file: str) -> LauncherFiles:
    """In samples."""
    del file
    ways = job.ways
    flavour = _flavour(job)
    local = ways.micro_batch * (job.micro_batches if ways.pipeline > 1 else 1)
    command = [
        torchrun(job),
        ("-m", "torchtitan.train", "--model.name", "llama3", "--model.flavor", flavour or '"$FLAVOR"'),
        ("--training.local_batch_size", str(local)),
        ("--training.global_batch_size", str(job.global_batch)),
        ("--training.seq_len", str(job.shape.seq)),
        *_precision(job),
        *_parallelism(job, "output"),
        *([("--parallelism.context_parallel_rotate_method", "alltoall")] if ways.context > 1 else []),
        *(_float8() if ways.precision is Precision.FP8 else []),
        ("--parallelism.pipeline_parallel_microbatch_size", str(ways.micro_batch)),
        ("--activation_checkpoint.mode", _CHECKPOINTING[ways.recompute]),
        *([("--activation_checkpoint.selective_ac_option", "op")] if ways.recompute is Recompute.OPERATORS else []),
        (ARGUMENTS,),
    ]
    missing = _missing(job, "FLAVOR=... names one of its configurations")
    return LauncherFiles(script(job, f"torchtitan v0.2.2, in its folder; {_ABOUT}", command), missing=missing)


def _float8() -> Iterator[tuple[str, str]]:
    """The converter of v0.2.2; it leaves the head in half precision."""
    yield "--model.converters", "quantize.linear.float8"
    yield "--quantize.linear.float8.recipe_name", "rowwise"
    yield "--quantize.linear.float8.filter_fqns", "output"


NEWEST = Launcher(_LIMITS, _newest, dtypes=(BFLOAT16, FLOAT32))
V0_2 = replace(
    NEWEST,
    limits=replace(_LIMITS, slices_beside=True, sequence_parallel=(True,), context=(ContextExchange.RING,)),
    write=_of_v0_2,
)
