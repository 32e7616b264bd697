"""Exported options, read by the launchers' own parsers where these are installed."""

from __future__ import annotations

import dataclasses
import json
from types import SimpleNamespace

import pytest

from planner.extras.export.launchers import LAUNCHERS, deepspeed, megatron, torchtitan
from planner.extras.transformers.shape import ParallelDegrees, Recompute, named_transformer

LLAMA = named_transformer("llama2-7b")
WAYS = [
    ParallelDegrees(tensor=4, pipeline=2, data=2, micro_batch=2, sequence_parallel=True, interleave=2),
    ParallelDegrees(tensor=2, data=8, micro_batch=1, zero=1, recompute=Recompute.FULL),
    ParallelDegrees(data=4, micro_batch=2, zero=3),
    ParallelDegrees(pipeline=4, micro_batch=1, schedule="gpipe"),
    ParallelDegrees(4, 2, 2, tensors=(2, 4), pools=("A100-40GB", "V100-16GB")),
]


@pytest.mark.parametrize("ways", WAYS, ids=str)
def test_torchtitan_reads_what_it_is_told(ways: ParallelDegrees) -> None:
    reason = "torchtitan is not installed (it parses options without a GPU: pip install torchtitan tyro)"
    configs = pytest.importorskip("torchtitan.config.configs", reason=reason)
    tyro = pytest.importorskip("tyro", reason=reason)
    fields = [("training", configs.TrainingConfig), ("parallelism", configs.ParallelismConfig)]
    job = dataclasses.make_dataclass(
        "Job", [(name, kind, dataclasses.field(default_factory=kind)) for name, kind in fields]
    )
    found = tyro.cli(job, args=torchtitan(LLAMA, ways, 32).text.split())
    told = found.parallelism
    assert (told.tensor_parallel_degree, told.pipeline_parallel_degree) == (ways.tensor, ways.pipeline)
    assert told.data_parallel_replicate_degree * told.data_parallel_shard_degree == ways.data
    assert told.enable_sequence_parallel == (ways.sequence_parallel or ways.tensor == 1)
    assert found.training.global_batch_size == 32
    assert found.training.local_batch_size % told.pipeline_parallel_microbatch_size == 0


@pytest.mark.parametrize("ways", WAYS, ids=str)
def test_deepspeed_reads_what_it_is_told(ways: ParallelDegrees, monkeypatch: pytest.MonkeyPatch) -> None:
    reason = "deepspeed is not installed (it parses settings without a GPU: DS_BUILD_OPS=0 pip install deepspeed)"
    config = pytest.importorskip("deepspeed.runtime.config", reason=reason)
    monkeypatch.setattr(config.dist, "get_rank", lambda: 0)
    ranks = SimpleNamespace(get_data_parallel_world_size=lambda: ways.data)
    found = config.DeepSpeedConfig(json.loads(deepspeed(LLAMA, ways, 32).text), mpu=ranks)
    assert found.train_batch_size == 32
    assert found.train_micro_batch_size_per_gpu == ways.micro_batch
    assert found.gradient_accumulation_steps == ways.micro_batches(32)
    assert int(found.zero_config.stage) == ways.zero


@pytest.mark.parametrize("ways", WAYS, ids=str)
def test_megatron_reads_what_it_is_told(ways: ParallelDegrees) -> None:
    reason = "megatron.training, which has pretrain_gpt.py's parser, is in no package of PyPI (megatron-core has none)"
    arguments = pytest.importorskip("megatron.training.arguments", reason=reason)
    parser = arguments.add_megatron_arguments(__import__("argparse").ArgumentParser())
    found = parser.parse_args(megatron(LLAMA, ways, 32).text.split())
    assert (found.tensor_model_parallel_size, found.pipeline_model_parallel_size) == (ways.tensor, ways.pipeline)


@pytest.mark.parametrize("ways", WAYS, ids=str)
@pytest.mark.parametrize("name", LAUNCHERS)
def test_what_a_target_is_not_told_is_said(name: str, ways: ParallelDegrees) -> None:
    missing = " ".join(LAUNCHERS[name](LLAMA, ways, 32).missing)
    expected = {
        "megatron": {"ZeRO-3": ways.zero == 3, "GPipe": ways.schedule == "gpipe"},
        "torchtitan": {"ZeRO-1": ways.zero == 1, "FullAC": ways.recompute is Recompute.FULL},
        "deepspeed": {"stages": ways.pipeline > 1, "tensor degree": ways.tensor > 1, "chunks": ways.interleave > 1},
    }
    expected[name] |= {"degrees 2, 4 of stages": bool(ways.tensors), "on A100-40GB, V100-16GB": bool(ways.pools)}
    assert {word: word in missing for word in expected[name]} == expected[name]
