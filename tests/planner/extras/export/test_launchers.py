"""What launchers are given, read by their own parsers where these are installed, and what they cannot be told."""

from __future__ import annotations

import argparse
import dataclasses
import json
import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from planner.extras.export.launchers import (
    LAUNCHERS,
    Launcher,
    LauncherFiles,
    TrainingJob,
    launcher_of,
    require_network,
    written,
)
from planner.extras.export.launchers.job import HostGroup, dtype_of, hosts_of
from planner.extras.export.launchers.megatron import layout_of
from planner.extras.export.launchers.network import sizes_beyond
from planner.extras.export.launchers.torchtitan import modules_of
from planner.extras.kernels.links import AlphaBeta
from planner.extras.transformers.cluster import named_cluster
from planner.extras.transformers.pools import GpuPool, Pools
from planner.extras.transformers.shape import (
    ContextExchange,
    ExpertExchange,
    Module,
    Offload,
    ParallelDegrees,
    Precision,
    Recompute,
    Transformer,
    named_transformer,
)
from planner.ir.errors import UnknownNameError, UsageError

LLAMA = named_transformer("llama3-8b")
GPT = named_transformer("gpt3-xl")
A100, T4 = map(named_cluster, ("a100-dgx", "g4dn.12xlarge"))
INTERLEAVED = ParallelDegrees(tensor=4, pipeline=2, data=2, micro_batch=2, sequence_parallel=True, interleave=2)
SLICED = ParallelDegrees(data=4, micro_batch=2, zero=3, recompute=Recompute.FULL)
REPLICAS = ParallelDegrees(data=8, micro_batch=1)
UNEQUAL = ParallelDegrees(pipeline=3, micro_batch=2, blocks=(9, 12, 11))
WAYS = [
    INTERLEAVED,
    SLICED,
    REPLICAS,
    UNEQUAL,
    ParallelDegrees(tensor=2, data=8, micro_batch=1, zero=1, recompute=Recompute.FULL),
    ParallelDegrees(tensor=2, data=4, micro_batch=2, zero=2),
    ParallelDegrees(tensor=2, pipeline=2, data=2, micro_batch=1, sequence_parallel=True, zero=3),
    ParallelDegrees(pipeline=4, micro_batch=1, schedule="gpipe"),
    ParallelDegrees(micro_batch=4, recompute=Recompute.SELECTIVE),
    ParallelDegrees(4, 2, 2, tensors=(2, 4), pools=("A100-40GB", "V100-16GB")),
    ParallelDegrees(tensor=2, pipeline=2, data=2, micro_batch=1, zero=1, context=2),
    ParallelDegrees(data=2, micro_batch=1, zero=3, context=4),
    ParallelDegrees(micro_batch=2, zero=2, context=4, context_exchange=ContextExchange.ALL_TO_ALL),
    ParallelDegrees(2, 1, 2, 2, zero=3, context=2, context_exchange=ContextExchange.ALL_TO_ALL),
    ParallelDegrees(data=2, micro_batch=2, zero=2, context=2, context_exchange=ContextExchange.ALL_GATHER),
    ParallelDegrees(micro_batch=4, recompute=Recompute.SELECTIVE, recompute_modules=(Module.CORE_ATTN, Module.MLP)),
    ParallelDegrees(micro_batch=4, recompute=Recompute.OPERATORS),
    ParallelDegrees(data=8, micro_batch=1, zero=3, shards=4),
    ParallelDegrees(data=8, micro_batch=1, zero=2, shards=4, sums_once=False),
    ParallelDegrees(data=4, micro_batch=2, zero=3, offload=Offload.PARAMETERS),
]
EXCHANGES = {
    "torchtitan": (ContextExchange.ALL_GATHER,),
    "torchtitan 0.2": (ContextExchange.RING,),
    "deepspeed": (ContextExchange.ALL_TO_ALL,),
    "accelerate": (ContextExchange.RING,),
}
"""How ranks may share the tokens of a sample; of the others by ring and by all-to-all."""
EVERY = [(name, version) for name, versions in LAUNCHERS.items() for version in versions]


def job_of(ways: ParallelDegrees, shape: Transformer = LLAMA, dtype: str = "bfloat16") -> TrainingJob:
    return TrainingJob(shape, ways, 48, dtype, hosts_of(A100, replace(ways, pools=())))


def files_of(ways: ParallelDegrees, name: str, version: str = "", **of_job: Any) -> LauncherFiles:
    return written(launcher_of(name, version), job_of(ways, **of_job), f"{name}.json")


def ways_for(name: str, version: str = "") -> pytest.MarkDecorator:
    """A case a way that the launcher can be told."""
    launcher = launcher_of(name, version)
    told = [ways for ways in WAYS if not any(launcher.refusals(job_of(ways)))]
    return pytest.mark.parametrize("ways", told, ids=str)


def words(script: str, program: str) -> list[str]:
    """What a script gives the program, without what its caller adds."""
    command = script.partition("set -eu\n")[2].replace("\\\n", " ").splitlines()[-1]
    told = shlex.split(command)
    return [word for word in told[told.index(program) + 1 :] if word != "$@"]


SIZES = (
    *("num-layers", "hidden-size", "ffn-hidden-size", "num-attention-heads", "kv-channels", "num-query-groups"),
    *("seq-length", "max-position-embeddings", "rotary-base", "make-vocab-size-divisible-by"),
    *("tensor-model-parallel-size", "pipeline-model-parallel-size", "micro-batch-size", "global-batch-size"),
    *("recompute-num-layers", "context-parallel-size", "num-distributed-optimizer-instances"),
)
FLAGS = (
    *("group-query-attention", "swiglu", "disable-bias-linear", "untie-embeddings-and-output-weights"),
    *("sequence-parallel", "bf16", "fp16", "accumulate-allreduce-grads-in-fp32", "grad-reduce-in-bf16"),
    *("use-distributed-optimizer", "use-megatron-fsdp", "overlap-grad-reduce", "overlap-param-gather"),
)


def megatron_parser() -> argparse.ArgumentParser:
    """Of the options that are written: their names and values as in Megatron-LM's parser (core 0.20)."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name in SIZES:
        parser.add_argument(f"--{name}", type=int)
    for name in FLAGS:
        parser.add_argument(f"--{name}", action="store_true")
    for name in ("hidden-dropout", "attention-dropout"):
        parser.add_argument(f"--{name}", type=float, default=0.1)
    choices = {
        "position-embedding-type": ["learned_absolute", "rope", "yarn", "mrope", "relative", "none"],
        "normalization": ["LayerNorm", "RMSNorm"],
        "attention-backend": ["flash", "fused", "unfused", "local", "auto"],
        "recompute-granularity": ["full", "selective"],
        "recompute-method": ["uniform", "block"],
        "data-parallel-sharding-strategy": ["no_shard", "optim", "optim_grads", "optim_grads_params"],
        "ckpt-format": ["torch", "torch_dist", "torch_dcp", "fsdp_dtensor"],
        "megatron-fsdp-main-grads-dtype": ["fp32", "bf16", "fp16", "auto"],
    }
    for name, values in choices.items():
        parser.add_argument(f"--{name}", choices=values)
    parser.add_argument("--recompute-modules", nargs="+")
    parser.add_argument("--cp-comm-type", nargs="+", choices=["p2p", "a2a", "allgather", "a2a+p2p"], default=["p2p"])
    parser.add_argument("--pipeline-model-parallel-layout")
    return parser


def layers_of(layout: str) -> list[str]:
    """The layers of each chunk of a layout, a letter a layer: ``t*3`` is ``ttt``."""
    chunks = []
    for chunk in layout.replace(",", "").split("|"):
        letters = ""
        count = chunk.split("*")
        for number, part in enumerate(count):
            digits = part[: len(part) - len(part.lstrip("0123456789"))] if number else ""
            letters += letters[-1] * (int(digits) - 1) if digits else ""
            letters += part[len(digits) :]
        chunks.append(letters)
    return chunks


@ways_for("megatron")
@pytest.mark.parametrize("shape", [LLAMA, GPT], ids=lambda shape: shape.name)
def test_megatron_is_told_the_network_and_all_of_its_division(shape: Transformer, ways: ParallelDegrees) -> None:
    if ways.context > 1:
        shape = replace(shape, fused_attention=True)
    if ways.blocks:
        ways = replace(ways, blocks=(5, 12, shape.layers - 17))
    told = files_of(ways, "megatron", shape=shape)
    found = megatron_parser().parse_args(words(told.text, "pretrain_gpt.py"))
    assert (found.tensor_model_parallel_size, found.pipeline_model_parallel_size) == (ways.tensor, ways.pipeline)
    assert (found.num_layers, found.hidden_size, found.kv_channels) == (shape.layers, shape.hidden, shape.head_size)
    assert (found.micro_batch_size, found.global_batch_size) == (ways.micro_batch, 48)
    is_llama = shape.name == LLAMA.name
    assert (found.normalization == "RMSNorm", found.disable_bias_linear, found.swiglu) == (is_llama,) * 3
    assert found.rotary_base == (500_000 if is_llama else None)
    assert found.attention_backend == ("auto" if shape.fused_attention else "unfused")
    assert (found.context_parallel_size or 1) == ways.context
    assert found.cp_comm_type == ["a2a" if ways.context_exchange is ContextExchange.ALL_TO_ALL else "p2p"]
    assert found.bf16
    assert found.accumulate_allreduce_grads_in_fp32
    assert found.use_distributed_optimizer == (ways.zero == 1)
    sliced = {2: "optim_grads", 3: "optim_grads_params"}.get(ways.zero)
    assert (found.use_megatron_fsdp, found.data_parallel_sharding_strategy) == (sliced is not None, sliced)
    assert found.recompute_granularity == (None if ways.recompute is Recompute.NONE else ways.recompute.value)
    by_module = ways.recompute is Recompute.SELECTIVE
    assert found.recompute_modules == ([module.value for module in ways.recompute_modules] if by_module else None)
    assert (found.num_distributed_optimizer_instances or 1) == (ways.shard_groups if ways.shards else 1)
    is_on_one_queue = max(ways.tensor, ways.context) > 1 and ways.zero < 2
    assert ("export CUDA_DEVICE_MAX_CONNECTIONS=1" in told.text) == is_on_one_queue
    if ways.pipeline > 1:
        chunks = layers_of(found.pipeline_model_parallel_layout)
        assert [chunk.count("t") for chunk in chunks] == list(ways.chunks(shape.layers))
        assert (chunks[0][0], chunks[-1][-1]) == ("E", "L")


@ways_for("megatron")
def test_megatrons_own_parser_reads_it(ways: ParallelDegrees) -> None:
    reason = "megatron.training, which has pretrain_gpt.py's parser, is in no package of PyPI (megatron-core has none)"
    arguments = pytest.importorskip("megatron.training.arguments", reason=reason)
    layouts = pytest.importorskip("megatron.core.transformer.pipeline_parallel_layer_layout", reason=reason)
    parser = arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    found = parser.parse_args(words(files_of(ways, "megatron").text, "pretrain_gpt.py"))
    assert (found.tensor_model_parallel_size, found.pipeline_model_parallel_size) == (ways.tensor, ways.pipeline)
    if ways.pipeline > 1:
        layout = layouts.PipelineParallelLayerLayout(found.pipeline_model_parallel_layout, ways.pipeline)
        layout.validate_layer_layout(LLAMA.layers, None)


def test_a_layout_names_the_layers_of_each_chunk() -> None:
    assert layout_of(job_of(UNEQUAL)) == "Et*9|t*12|t*11L"
    assert layers_of(layout_of(job_of(INTERLEAVED))) == ["E" + 8 * "t", 8 * "t", 8 * "t", 8 * "t" + "L"]
    assert modules_of(job_of(replace(UNEQUAL, blocks=(1, 30, 1))), "lm_head")[::2] == [
        "tok_embeddings,layers.0",
        "layers.31,norm,lm_head",
    ]


@ways_for("megatron-bridge")
def test_a_recipe_is_told_by_fields_that_hydra_reads(ways: ParallelDegrees) -> None:
    told = words(files_of(ways, "megatron-bridge").text, "scripts/training/run_recipe.py")
    assert told[:4] == ["--recipe", "llama3_8b_pretrain_config", "--mode", "pretrain"]
    fields = dict(word.split("=", 1) for word in told[4:])
    assert fields["model.tensor_model_parallel_size"] == str(ways.tensor)
    assert fields["model.context_parallel_size"] == str(ways.context)
    kinds = {ContextExchange.RING: "p2p", ContextExchange.ALL_TO_ALL: "a2a"}
    assert fields["model.cp_comm_type"] == (kinds[ways.context_exchange] if ways.context > 1 else "null")
    assert fields["ddp.num_distributed_optimizer_instances"] == str(ways.shard_groups)
    modules = f"[{','.join(ways.recompute_modules)}]" if ways.recompute is Recompute.SELECTIVE else "null"
    assert fields["model.recompute_modules"] == modules
    assert fields["ddp.use_megatron_fsdp"] == ("true" if ways.zero > 1 else "false")
    parser = pytest.importorskip("hydra.core.override_parser.overrides_parser").OverridesParser.create()
    read = {each.key_or_group: each.value() for each in parser.parse_overrides(told[4:])}
    assert read["dataset.seq_length"] == LLAMA.seq
    layout = str(read["model.pipeline_model_parallel_layout"] or "").strip('"')
    assert layout == (layout_of(job_of(ways)) if ways.pipeline > 1 else "")


@ways_for("torchtitan")
def test_torchtitan_reads_tokens_and_chunks(ways: ParallelDegrees) -> None:
    reason = "torchtitan of August 2026 is not installed (it parses options without a GPU: pip install torchtitan tyro)"
    configs = pytest.importorskip("torchtitan.config.configs", reason=reason)
    tyro = pytest.importorskip("tyro", reason=reason)
    if "max_context_length" not in {field.name for field in dataclasses.fields(configs.TrainingConfig)}:
        pytest.skip(reason)
    activations = pytest.importorskip("torchtitan.distributed.activation_checkpoint", reason=reason)
    sections = {
        "training": configs.TrainingConfig,
        "parallelism": configs.ParallelismConfig,
        "activation_checkpoint": activations.ActivationCheckpointingConfig,
    }
    told = words(files_of(ways, "torchtitan").text, "torchtitan.train")
    assert told[:4] == ["--module", "llama3", "--config", "llama3_8b"]
    found = tyro.cli(job_class(sections), args=told[4:], registry=registry_of(tyro))
    assert found.training.num_tokens_per_microbatch_per_dp_rank == ways.micro_batch * LLAMA.seq
    assert found.training.num_tokens_per_train_step == 48 * LLAMA.seq
    kind = type(found.activation_checkpoint).__qualname__.partition(".")[0]
    kinds = {Recompute.FULL: "FullAC", Recompute.OPERATORS: "SelectiveAC"}
    assert kind == kinds.get(ways.recompute, "NoneType")
    assert found.training.enable_cpu_offload == (ways.offload is Offload.PARAMETERS)
    require_parallelism(found.parallelism, ways, "lm_head")
    if ways.pipeline > 1:
        assert found.parallelism.num_pp_microbatches == ways.micro_batches(48)
        assert found.training.disable_cuda_graphs


@ways_for("torchtitan", "0.2")
def test_older_torchtitan_reads_samples(ways: ParallelDegrees) -> None:
    reason = "torchtitan 0.2 is not installed (it parses options without a GPU: pip install torchtitan==0.2.2 tyro)"
    configs = pytest.importorskip("torchtitan.config.job_config", reason=reason)
    tyro = pytest.importorskip("tyro", reason=reason)
    told = words(files_of(ways, "torchtitan", "0.2").text, "torchtitan.train")
    found = tyro.cli(configs.JobConfig, args=told, registry=registry_of(tyro))
    assert (found.training.global_batch_size, found.training.seq_len) == (48, LLAMA.seq)
    assert found.training.local_batch_size % found.parallelism.pipeline_parallel_microbatch_size == 0
    mode = "selective" if ways.recompute is Recompute.OPERATORS else ways.recompute.value
    assert (found.activation_checkpoint.mode, found.activation_checkpoint.selective_ac_option) == (mode, "op")
    assert found.training.enable_cpu_offload == (ways.offload is Offload.PARAMETERS)
    require_parallelism(found.parallelism, ways, "output")


def job_class(sections: Mapping[str, Any]) -> type[Any]:
    return dataclasses.make_dataclass(
        "Job",
        [
            (name, kind, dataclasses.field(default_factory=kind if isinstance(kind, type) else lambda: None))
            for name, kind in sections.items()
        ],
    )


def registry_of(tyro: Any) -> Any:
    """As torchtitan's manager has it: a list of names is one word, with commas."""
    registry = tyro.constructors.ConstructorRegistry()

    @registry.primitive_rule  # type: ignore[untyped-decorator]  # of a package that need not be installed
    def names(info: Any) -> Any:
        if info.type != list[str]:
            return None
        return tyro.constructors.PrimitiveConstructorSpec(
            nargs=1,
            metavar="A,B",
            instance_from_str=lambda given: given[0].split(","),
            is_instance=lambda value: isinstance(value, list),
            str_from_instance=lambda value: [",".join(value)],
        )

    return registry


def require_parallelism(told: Any, ways: ParallelDegrees, head: str) -> None:
    assert (told.tensor_parallel_degree, told.pipeline_parallel_degree) == (ways.tensor, ways.pipeline)
    assert told.context_parallel_degree == ways.context
    assert told.data_parallel_replicate_degree * told.data_parallel_shard_degree == ways.data
    assert (told.data_parallel_shard_degree > 1) == (ways.zero >= 2 and ways.data > 1)
    assert not ways.shards or told.data_parallel_shard_degree == ways.shards
    if head == "lm_head":  # of the older one tensor ranks always divide tokens too
        assert told.enable_sequence_parallel == (ways.sequence_parallel or ways.tensor == 1)
    if ways.pipeline > 1:
        parts = [",".join(modules) for modules in told.module_fqns_per_model_part]
        assert parts == modules_of(job_of(ways), head)
        assert told.pipeline_parallel_schedule == (
            "GPipe" if ways.schedule == "gpipe" else "Interleaved1F1B" if ways.interleave > 1 else "1F1B"
        )


@ways_for("deepspeed")
def test_deepspeed_reads_what_it_is_told(ways: ParallelDegrees, monkeypatch: pytest.MonkeyPatch) -> None:
    told = files_of(ways, "deepspeed")
    settings = json.loads(told.text)
    assert settings["gradient_accumulation_steps"] * settings["train_micro_batch_size_per_gpu"] * ways.data == 48
    assert settings.get("tensor_parallel", {"autotp_size": 1})["autotp_size"] == ways.tensor
    assert settings.get("sequence_parallel_size", 1) == ways.context
    sliced = settings["zero_optimization"]
    assert sliced.get("mics_shard_size", 0) == ways.shards
    assert any("MiCS_Init" in text for text in told.missing) == (ways.shards > 0)
    assert ("offload_param" in sliced) == ("offload_optimizer" in sliced) == (ways.offload is Offload.PARAMETERS)
    assert any("UlyssesSPAttentionHF" in text for text in told.missing) == (ways.context > 1)
    assert words(told.script, "${PROGRAM:-train.py}") == ["--deepspeed", "--deepspeed_config", "deepspeed.json"]
    reason = "deepspeed is not installed (it parses settings without a GPU: DS_BUILD_OPS=0 pip install deepspeed)"
    config = pytest.importorskip("deepspeed.runtime.config", reason=reason)
    monkeypatch.setattr(config.dist, "get_rank", lambda: 0)
    ranks = SimpleNamespace(get_data_parallel_world_size=lambda: ways.data)
    found = config.DeepSpeedConfig(settings, mpu=ranks)
    assert (found.train_batch_size, found.gradient_accumulation_steps) == (48, ways.micro_batches(48))
    assert int(found.zero_config.stage) == (ways.zero if ways.copies > 1 else 1)
    assert found.grad_accum_dtype == "fp32"


@ways_for("accelerate")
def test_accelerate_reads_what_it_is_told(ways: ParallelDegrees, tmp_path: Path) -> None:
    told = files_of(ways, "accelerate")
    assert f"ACCELERATE_GRADIENT_ACCUMULATION_STEPS={ways.micro_batches(48)}\n" in told.script
    assert words(told.script, "launch")[:2] == ["--config_file", "accelerate.json"]
    if ways.zero:
        assert f"fsdp_offload_params: {json.dumps(ways.offload is Offload.PARAMETERS)}\n" in told.text
    if ways.shards:
        assert f"dp_replicate_size: {ways.shard_groups}\n" in told.text
        assert f"dp_shard_size: {ways.shards}\n" in told.text
    config = pytest.importorskip("accelerate.commands.config.config_args", reason="accelerate is not installed")
    (tmp_path / "accelerate.yaml").write_text(told.text, "utf-8")
    found = config.load_config_from_file(str(tmp_path / "accelerate.yaml"))
    assert (found.num_processes, found.mixed_precision) == (ways.devices, "bf16")
    assert found.fsdp_config.get("fsdp_reshard_after_forward") == {0: None, 2: False, 3: True}[ways.zero]
    sizes = found.parallelism_config
    assert sizes.pop("parallelism_config_cp_comm_strategy", None) == ("alltoall" if ways.context > 1 else None)
    assert any("maybe_context_parallel" in text for text in told.missing) == (ways.context > 1)
    degrees = pytest.importorskip("accelerate.parallelism_config").ParallelismConfig(
        **{name.removeprefix("parallelism_config_"): size for name, size in sizes.items()}
    )
    assert degrees.total_size == (ways.devices if sizes else 1)


@pytest.mark.parametrize(("name", "version"), EVERY)
@pytest.mark.parametrize("ways", WAYS, ids=str)
def test_a_way_is_told_whole_or_refused(name: str, version: str, ways: ParallelDegrees) -> None:
    launcher = launcher_of(name, version)
    job = job_of(ways)
    said = " ".join(launcher.refusals(job))
    no_stages = name in ("deepspeed", "accelerate")
    whole = {"torchtitan 0.2": ways.zero < 2, "accelerate": ways.zero < 2}
    slices = name in ("torchtitan", "accelerate") and ways.context > 1 and ways.zero < 2
    exchange = ways.context_exchange
    known = EXCHANGES.get(f"{name} {version}", EXCHANGES.get(name, (ContextExchange.RING, ContextExchange.ALL_TO_ALL)))
    expected = {
        f"{ways.pipeline} stages: it has one": no_stages and ways.pipeline > 1,
        "schedule gpipe": name.startswith("megatron") and ways.schedule == "gpipe",
        "ZeRO-0": name == "deepspeed" and ways.zero == 0 and ways.data > 1,
        "ZeRO-1": name in ("torchtitan", "accelerate") and ways.zero == 1,
        "tensor degrees 2, 4 of stages": not no_stages and bool(ways.tensors),
        "recomputation selective": name in ("torchtitan", "accelerate") and ways.recompute is Recompute.SELECTIVE,
        "recomputation operators": not name.startswith("torchtitan") and ways.recompute is Recompute.OPERATORS,
        "recompute modules core_attn,mlp": not name.startswith("megatron") and len(ways.recompute_modules) > 1,
        "ZeRO-2 within groups of 4": name == "deepspeed" and ways.shards > 0 and ways.zero == 2,
        "groups that sum their gradients": ways.shards > 0 and ways.sums_once == (name in ("torchtitan", "accelerate")),
        "parameters in the host's memory": name.startswith("megatron") and ways.offload is Offload.PARAMETERS,
        "with sequence": no_stages and ways.sequence_parallel,
        "without sequence": version == "0.2" and ways.tensor > 1 and not ways.sequence_parallel,
        "whole weights": slices
        or (whole.get(f"{name} {version}", whole.get(name, False)) and ways.devices > ways.copies),
        f"{ways.context} ranks that share the tokens of a sample by {exchange.value}: it has": ways.context > 1
        and exchange not in known,
        "ranks that share the tokens of a sample beside 2 tensor ranks": name == "deepspeed"
        and ways.context > 1
        and ways.tensor > 1,
    }
    assert {text: text in said for text in expected} == expected
    if said:
        with pytest.raises(UsageError, match=f"{name} cannot be told") as told:
            written(launcher, job, "x.json")
        assert list(told.value.details) == list(launcher.refusals(job))
        assert f"--for {name}" in told.value.remedies[0]
        others = [remedy.split()[1].rstrip(",") for remedy in told.value.remedies[1:]]
        assert others == [other for other in LAUNCHERS if not any(launcher_of(other).refusals(job))]
    else:
        assert written(launcher, job, "x.json").text


@pytest.mark.parametrize(("name", "version"), EVERY)
def test_sums_in_half_precision_and_other_dtypes_are_told_or_refused(name: str, version: str) -> None:
    launcher = launcher_of(name, version)
    half = ParallelDegrees(data=4, micro_batch=2, zero=2, fp32_gradients=False)
    told = {
        "deepspeed": '"communication_data_type": "bf16"',
        "accelerate": "fsdp_version: 2",
        "megatron": "--grad-reduce-in-bf16",
    }
    assert any(launcher.refusals(job_of(half))) == (name not in told)
    if name in told:
        assert told[name] in written(launcher, job_of(half), "x").text
    for dtype, refused in {"float16": {"torchtitan"}, "float32": {"megatron-bridge"}}.items():
        said = list(launcher.refusals(job_of(SLICED, dtype=dtype)))
        assert bool(said) == (name in refused)


@pytest.mark.parametrize(("name", "version"), EVERY)
def test_products_in_8_bits_are_told_or_refused(name: str, version: str) -> None:
    launcher = launcher_of(name, version)
    job = job_of(ParallelDegrees(data=4, micro_batch=2, zero=3, precision=Precision.FP8))
    told = {
        "megatron 0.20": "--fp8-format hybrid --fp8-recipe tensorwise",
        "torchtitan 2026-08": "--compile.enable",
        "torchtitan 0.2": "--model.converters quantize.linear.float8",
    }
    said = told.get(f"{name} {version}")
    assert ("precision fp8" in launcher.refusals(job)) == (said is None)
    if said is not None:
        files = written(launcher, job, "x")
        assert said in files.text
        assert any("Float8LinearConverter" in text for text in files.missing) == (version == "2026-08")


@pytest.mark.parametrize(("name", "version"), EVERY)
def test_how_experts_are_spread_and_reached_is_told_or_refused(name: str, version: str) -> None:
    launcher = launcher_of(name, version)
    shape = named_transformer("mixtral-8x7b")
    cut = ParallelDegrees(2, data=4, micro_batch=2, zero=1, sequence_parallel=True, expert=4)
    whole = replace(cut, expert=8, whole_experts=True, expert_exchange=ExpertExchange.DISPATCH)
    beside = replace(cut, overlap_experts=True)
    refusals = list(launcher.refusals(job_of(whole, shape)))
    is_megatron = name.startswith("megatron")
    assert ({"whole experts True", "expert exchange dispatch"} <= set(refusals)) != is_megatron
    assert "overlap experts True" in launcher.refusals(job_of(beside, shape))
    if not is_megatron:
        return
    said, usual = (written(launcher, job_of(ways, shape), "x").text for ways in (whole, cut))
    if name == "megatron":
        assert "--expert-model-parallel-size 8" in said
        assert "--expert-tensor-parallel-size 1" in said
        assert "--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend deepep" in said
        assert "--moe-token-dispatcher-type alltoall" in usual
        assert "--expert-tensor-parallel-size" not in usual
    else:
        for text in ("expert_tensor_parallel_size=1", "moe_token_dispatcher_type=flex"):
            assert f"model.{text}" in said
        for text in ("expert_tensor_parallel_size=2", "moe_token_dispatcher_type=alltoall"):
            assert f"model.{text}" in usual


@pytest.mark.parametrize(("name", "version"), EVERY)
def test_what_is_in_the_hosts_memory_is_told_or_refused(name: str, version: str) -> None:
    launcher = launcher_of(name, version)
    state = ParallelDegrees(data=4, micro_batch=2, zero=1, offload=Offload.OPTIMIZER)
    kept = ParallelDegrees(data=4, micro_batch=2, zero=3, offload=Offload.ACTIVATIONS)
    told = {
        ("megatron", state): "--optimizer-cpu-offload --optimizer-offload-fraction 1.0",
        ("megatron", kept): "--cpu-offloading-num-layers 31",
        ("deepspeed", state): '"device": "cpu"',
    }
    for ways in (state, kept):
        said = told.get((name, ways))
        refusals = " ".join(launcher.refusals(job_of(ways)))
        assert (f"{ways.offload.value} in the host's memory" in refusals) == (said is None)
        if said is not None:
            assert said in written(launcher, job_of(ways), "x").text
    if name == "megatron":
        for ways, why in (
            (replace(state, zero=3), "the optimiser in the host's memory beside ZeRO-3"),
            (replace(kept, pipeline=2, zero=1), "activations in the host's memory beside 2 stages"),
        ):
            assert why in list(launcher.refusals(job_of(ways)))


def test_what_is_left_to_the_users_code_is_said() -> None:
    opt = named_transformer("opt-350m")
    assert "ReLU" in " ".join(files_of(REPLICAS, "megatron", shape=opt).missing)
    for name, text in {
        "deepspeed": "gradient_checkpointing_enable",
        "accelerate": "reduce_dtype=torch.float32",
        "torchtitan": "the sizes of gpt3-xl",
        "megatron-bridge": "the sizes of gpt3-xl",
    }.items():
        assert text in " ".join(files_of(SLICED, name, shape=GPT).missing)
    assert files_of(SLICED, "torchtitan").missing == ()
    scaled = replace(named_transformer("llama3-8b"), settings=("rope_scaling=8",))
    for name in ("megatron", "megatron-bridge", "torchtitan"):  # which tell sizes, or name a recipe of these
        missing = " ".join(files_of(SLICED, name, shape=scaled).missing)
        assert "rope_scaling=8" in missing
        assert "the sizes of" not in missing
    grouped = ("rms_norm_eps=1e-06", "n_group=8", "topk_group=4", "routed_scaling_factor=2.5", "norm_topk_prob=true")
    told = files_of(SLICED, "megatron", shape=replace(named_transformer("llama3-8b"), settings=grouped))
    options = told.text.split()
    for name, value in {
        "--norm-epsilon": "1e-06",
        "--moe-router-num-groups": "8",
        "--moe-router-group-topk": "4",
        "--moe-router-topk-scaling-factor": "2.5",
    }.items():
        assert options[options.index(name) + 1] == value
    assert "norm_topk_prob" in " ".join(told.missing)
    assert "rms_norm_eps" not in " ".join(told.missing)


def test_a_size_that_no_option_says_is_refused() -> None:
    assert sizes_beyond(LLAMA, ("name",))
    narrow: Launcher = replace(launcher_of("megatron"), network=lambda shape: ("name", shape.name))
    refused = f"a network of vocab={LLAMA.vocab}: no option says it"
    assert refused in list(narrow.refusals(job_of(REPLICAS)))
    with pytest.raises(UsageError, match="megatron cannot be told llama3-8b") as told:
        require_network(narrow, LLAMA)
    assert refused in told.value.details
    require_network(launcher_of("megatron"), LLAMA)


def test_hosts_are_told_in_the_order_of_ranks() -> None:
    for ways, hosts in {
        ParallelDegrees(tensor=4, data=6): (HostGroup("A100-80GB", 3, 8),),
        ParallelDegrees(tensor=4, data=5): (HostGroup("A100-80GB", 2, 8), HostGroup("A100-80GB", 1, 4)),
        ParallelDegrees(tensor=2): (HostGroup("A100-80GB", 1, 2),),
    }.items():
        assert hosts_of(A100, ways) == hosts
    wire = AlphaBeta(1e-5, 1e9)
    pools = Pools(
        "two",
        (GpuPool(A100, 8), GpuPool(T4, 8)),
        {("a100-dgx", "g4dn.12xlarge"): wire, ("g4dn.12xlarge", "a100-dgx"): wire},
    )
    through = ParallelDegrees(
        4, 3, 2, tensors=(4, 2, 2), pools=("a100-dgx", "g4dn.12xlarge", "g4dn.12xlarge"), blocks=(4, 2, 2)
    )
    assert hosts_of(pools, through) == (HostGroup("A100-80GB", 1, 8), HostGroup("T4", 2, 4))
    assert dtype_of(pools, through) == "float16"
    assert dtype_of(A100, ParallelDegrees()) == "bfloat16"
    assert dtype_of(replace(A100, dtype="float32"), ParallelDegrees()) == "float32"


def test_a_launch_line_has_hosts_their_gpus_and_where_they_meet() -> None:
    several = files_of(ParallelDegrees(tensor=4, data=6, zero=1), "megatron").text
    assert "torchrun --nnodes 3 --nproc-per-node 8 --node-rank" in several
    assert "NODE_RANK (0 to 2, in that order)" in several
    unlike = files_of(ParallelDegrees(tensor=4, data=3, zero=1), "megatron").text
    assert "GPUS=(8 4)\n" in unlike
    assert '--nproc-per-node "${GPUS[$NODE_RANK]}"' in unlike
    assert "torchrun --standalone --nproc-per-node 8 " in files_of(REPLICAS, "megatron").text
    unlike_job = job_of(ParallelDegrees(tensor=4, data=3, zero=3))
    assert "hosts of 8, 4 GPUs: it has as many on each" in list(launcher_of("accelerate").refusals(unlike_job))


def test_a_script_ends_no_comment_by_a_name() -> None:
    named = replace(LLAMA, name="llama\nrm -rf x")
    lines = files_of(REPLICAS, "megatron", shape=named).text.splitlines()
    assert not any(line.startswith("rm") for line in lines)


def test_hosts_of_another_way_are_refused() -> None:
    wrong = replace(job_of(REPLICAS), hosts=(HostGroup("A100-80GB", 1, 4),))
    with pytest.raises(UsageError, match="takes 8 GPUs") as told:
        written(launcher_of("megatron"), wrong, "x.sh")
    assert told.value.details == ("its hosts have 4",)
    with pytest.raises(UsageError, match="nothing is known of the hosts"):
        written(launcher_of("megatron"), replace(wrong, hosts=()), "x.sh")
    for made in (lambda: HostGroup("A100-80GB", 0, 4), lambda: replace(wrong, dtype="int8")):
        with pytest.raises(UsageError):
            made()


@pytest.mark.parametrize(("name", "version", "said"), [("megatrn", "", "megatron"), ("torchtitan", "0.1", "0.2")])
def test_an_unknown_launcher_or_version_names_the_known(name: str, version: str, said: str) -> None:
    with pytest.raises(UnknownNameError) as told:
        launcher_of(name, version)
    assert said in " ".join([*told.value.details, *told.value.remedies])
