"""Ways to divide a transformer: searched, told, exported, planned, and what ranks hold by them when they run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import nn

from cuda_ops.memory import available
from halopipe.extras.kernels.modelled import modelled
from halopipe.extras.transformers.networks import network_of
from halopipe.extras.transformers.ways import LAUNCHES, plan_by
from halopipe.launch.run import run_plan
from halopipe.planning.options import ProfileOptions
from halopipe.run_spec.options import RunOptions
from planner.ir.codec import load
from planner.ir.plan import Plan
from planner.ir.profile import ModelSource, Profile
from tests.halopipe.commands import call, good, require_said

LAYERS = Path(__file__).parents[3] / "data" / "profiles" / "sailor" / "layers.csv"
SIZES = "hidden=512,ffn=2048,heads=8,layers=8,vocab=1024,seq=512"


def test_the_best_way_its_rivals_and_what_binds_are_told_and_written(tmp_path: Path) -> None:
    path = tmp_path / "ways.json"
    asked = ("gpt3-175b", "--on", "a100-dgx", "--gpus", "64", "--global-batch", "64")
    told = good("ways", *asked, "--price-per-hour", "2", "-o", str(path))
    for text in ("of other divisions", "bound by", "no way is better", "dollars a step", "GiB", "fitted"):
        assert text in told.output
    written = json.loads(path.read_text("utf-8"))
    best = written["best"]
    assert best["low_s"] < best["step_s"] < best["high_s"]
    assert best["dollars_per_step"] == pytest.approx(2 * 64 * best["step_s"] / 3600)
    assert sum(best["spent_s"].values()) == pytest.approx(best["step_s"])
    way = "--tensor 8 --pipeline 8 --interleave 3 --micro-batch 1 --zero 0"
    fixed = call("ways", *asked, *way.split(), "--json")
    ways = json.loads(fixed.stdout)["best"]["ways"]
    assert (ways["tensor"], ways["pipeline"], ways["interleave"], ways["micro_batch"], ways["zero"]) == (8, 8, 3, 1, 0)


def test_a_cluster_file_is_searched_and_options_of_launchers_are_written(folder: Path) -> None:
    text = "halopipe: cluster\nversion: 1\nhosts:\n  - {name: n, count: 2, devices: [{device: A100-80GB, count: 4}]}\n"
    links = (
        "links: {within-host: {link: NVLink-3, latency: 10us}, across-hosts: {link: InfiniBand-HDR, latency: 5us}}\n"
    )
    Path("two.yaml").write_text(text + links, "utf-8")
    given = "--on two.yaml --gpus 8 --global-batch 32 --tensor 2 --pipeline 2 --interleave 2 --zero 1 -o ways.json"
    told = good("ways", "gpt2-345m", *given.split(), "--recompute", "selective")
    assert "datasheet" in told.output
    written = good("export", "ways.json", "--to", "megatron")
    assert "left to you: the vocabulary of 52256" in written.output
    options = Path("megatron.sh").read_text("utf-8").split()
    for name, value in {
        "--nnodes": "2",
        "--nproc-per-node": "4",
        "--tensor-model-parallel-size": "2",
        "--pipeline-model-parallel-size": "2",
        "--pipeline-model-parallel-layout": "'Et*6|t*6|t*6|t*6L'",
        "--recompute-granularity": "selective",
    }.items():
        assert options[options.index(name) + 1] == value
    assert "--use-distributed-optimizer" in options
    for target, said in (("torchtitan", "ZeRO-1 of 2 replicas: it has the levels 0, 2, 3"), ("deepspeed", "2 stages")):
        require_said(
            folder, ["export", "ways.json", "--to", target], 2, f"{target} cannot be told", said, "--to megatron"
        )
    Path("two.yaml").write_text(text.replace("A100-80GB, count: 4}", "A100-80GB}, {device: H100-SXM}") + links, "utf-8")
    require_said(folder, ["ways", "gpt2-345m", *given.split()], 2, "not alike")
    Path("ways.json").write_text('{"best": {}}', "utf-8")
    require_said(folder, ["export", "ways.json", "--to", "megatron"], 3, "no file of ways")


def unlike(of: Mapping[str, tuple[str, int]], per_host: int, more: str = "") -> str:
    """A cluster file of hosts of each name: (device, hosts)."""
    hosts = "".join(
        f"  - {{name: {name}, count: {count}, devices: [{{device: {device}, count: {per_host}}}]{more}}}\n"
        for name, (device, count) in of.items()
    )
    links = "within-host: {link: NVLink-2, latency: 10us}, across-hosts: {bandwidth: 8GB/s, latency: 50us}"
    return f"halopipe: cluster\nversion: 1\nhosts:\n{hosts}links: {{{links}}}\n"


def test_unlike_gpus_share_a_transformer_by_sailors_times_of_its_layers(folder: Path) -> None:
    Path("mixed.yaml").write_text(unlike({"a": ("A100-40GB", 2), "v": ("V100-16GB", 6)}, 4), "utf-8")
    Path("alone.yaml").write_text(unlike({"a": ("A100-40GB", 2)}, 4), "utf-8")
    asked = ("--global-batch", "256", "--zero", "0", "--layers", str(LAYERS), "-o", "ways.json")
    good("ways", "opt-350m", "--on", "alone.yaml", "--gpus", "8", *asked)
    alone_s = json.loads(Path("ways.json").read_text("utf-8"))["best"]["step_s"]
    told = good("ways", "opt-350m", "--on", "mixed.yaml", "--gpus", "32", *asked)
    assert "8 A100-40GB, 24 V100-16GB" in told.output
    assert "no way is better by this model" in told.output
    best = json.loads(Path("ways.json").read_text("utf-8"))["best"]
    ways = best["ways"]
    assert set(ways["pools"]) == {"A100-40GB", "V100-16GB"}
    assert ways["data"] * sum(ways["tensors"]) <= 32
    assert sum(ways["blocks"]) == 24
    assert best["step_s"] < 0.8 * alone_s
    for transformer, on, gpus, said in (
        ("opt-350m", "mixed.yaml", "8", "has 32 devices, and --gpus is 8"),
        ("gpt3-xl", "mixed.yaml", "32", "no times of a network like"),
        ("opt-350m", "a100-dgx", "8", "--layers is of devices of a cluster file"),
    ):
        require_said(folder, ["ways", transformer, "--on", on, "--gpus", gpus, *asked], 2, said)


def test_alike_hosts_in_zones_are_as_good_as_all_over_their_slowest_link(folder: Path) -> None:
    text = unlike({"n": ("A100-40GB", 4)}, 2, ", groups: {rack: 2}")
    tiers = "".join(f"  - {{name: {name}, within: {of}}}\n" for name, of in (("within-host", "host"), ("near", "rack")))
    links = "within-host: NVLink-2, near: {bandwidth: 8GB/s}, far: {bandwidth: 1GB/s}"
    Path("racks.yaml").write_text(
        f"{text.partition('links')[0]}tiers:\n{tiers}  - {{name: far}}\nlinks: {{{links}}}\n", "utf-8"
    )
    Path("far.yaml").write_text(unlike({"n": ("A100-40GB", 4)}, 2).replace("8GB/s, latency: 50us", "1GB/s"), "utf-8")
    steps = {}
    for file in ("racks.yaml", "far.yaml"):
        good("ways", SIZES, "--on", file, "--gpus", "8", "--global-batch", "16", "-o", "ways.json")
        steps[file] = json.loads(Path("ways.json").read_text("utf-8"))["best"]["step_s"]
    assert steps["racks.yaml"] <= steps["far.yaml"] * (1 + 1e-9)


def test_stages_of_unlike_gpus_and_degrees_are_a_plan_on_the_devices_of_their_kinds(folder: Path) -> None:
    Path("two.yaml").write_text(unlike({"a": ("A100-40GB", 1), "v": ("V100-16GB", 2)}, 2), "utf-8")
    sizes = ["vocabulary=48", "width=16", "hidden=24", "layers=2", "heads=4", "kv_heads=2"]
    network = ["profiler.models.llama:llama", "--input", "4,8", *(word for size in sizes for word in ("--arg", size))]
    good("profile", *network, "--on", "two.yaml", "--sizes", "1,2,4")
    spelled = "hidden=16,ffn=24,heads=4,kv_heads=2,layers=2,vocab=48,seq=8,gated=1,rotary=1,dropout=0"
    good("ways", spelled, "--on", "two.yaml", "--gpus", "6", "--global-batch", "8", "--zero", "0", "-o", "ways.json")
    asked = ["plan", "profile.json", "--ways", "ways.json"]
    good(*asked)
    file = json.loads(Path("ways.json").read_text("utf-8"))
    file["best"]["ways"] |= {
        "pipeline": 2, "data": 2, "tensor": 2, "tensors": [1, 2], "pools": ["A100-40GB", "V100-16GB"],
        "blocks": [1, 1], "micro_batch": 2, "interleave": 1, "sequence_parallel": False, "recompute": "none",
    }  # fmt: skip
    Path("ways.json").write_text(json.dumps(file), "utf-8")
    good(*asked)
    stages = load("plan.json", Plan).decision.stages
    assert [[name[0] for name in stage.devices] for stage in stages] == [["a"] * 2, ["v"] * 4]
    good("check", "plan.json", "--profile", "profile.json")
    file["hosts"] = [{"device": "A100-40GB", "hosts": 1, "gpus": 2}, {"device": "V100-16GB", "hosts": 2, "gpus": 2}]
    Path("ways.json").write_text(json.dumps(file), "utf-8")
    degrees = "tensor degrees 1, 2 of stages"
    for launcher, said in (("megatron", degrees), ("torchtitan", degrees), ("deepspeed", "2 stages: it has one")):
        require_said(folder, ["export", "ways.json", "--to", launcher], 2, f"{launcher} cannot be told", said)
    here = "A100-40GB"
    away = "T4"
    for pools, said in (((here, away), "have no T4"), ((here, here), "stage 0 takes 2 devices of A100-40GB")):
        wrong = json.loads(Path("ways.json").read_text("utf-8"))
        wrong["best"]["ways"]["pools"] = pools
        Path("wrong.json").write_text(json.dumps(wrong), "utf-8")
        require_said(folder, ["plan", "profile.json", "--ways", "wrong.json"], 2, said)


def on(cluster: str = "a100-dgx", gpus: int = 8, *more: str) -> tuple[str, ...]:
    return ("--on", cluster, "--gpus", str(gpus), "--global-batch", "8", *more)


@pytest.mark.parametrize(
    ("launcher", "asked", "told"),
    [
        ("megatron", "", "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params"),
        ("megatron", "--zero 1", "--use-distributed-optimizer"),
        ("megatron-bridge", "--tensor 2", "model.tensor_model_parallel_size=2"),
        ("torchtitan", "--pipeline 2", "--parallelism.module_fqns_per_model_part tok_embeddings,layers.0,"),
        ("torchtitan", "--version 0.2 --tensor 2", "--parallelism.fsdp_reshard_after_forward"),
        ("deepspeed", "--tensor 2", '"autotp_size": 2'),
        ("accelerate", "--tensor 2", "parallelism_config_tp_size: 2"),
    ],
)
def test_the_best_way_for_a_launcher_is_one_that_it_can_be_told(
    folder: Path, launcher: str, asked: str, told: str
) -> None:
    del folder
    version = asked.split()[:2] if "--version" in asked else []
    found = good("ways", "llama3-8b", *on("h100-dgx", 16, "--for", launcher, *asked.split(), "-o", "ways.json"))
    assert f"ways that {launcher} can be told" in found.output
    assert "no way is better" in found.output
    good("export", "ways.json", "--to", launcher, *version, "-o", "launch")
    assert told in Path("launch").read_text("utf-8")


def test_a_launcher_changes_the_answer_where_the_best_cannot_be_told(folder: Path) -> None:
    """Stages with ZeRO-1 are no answer for torchtitan, nor is any stage for DeepSpeed."""
    found = {}
    for launcher in ("", "torchtitan"):
        given = ["--for", launcher] if launcher else []
        good("ways", "llama2-7b", *on("a100-dgx", 16, "--pipeline", "2", *given, "-o", f"{launcher}.json"))
        best = json.loads(Path(f"{launcher}.json").read_text("utf-8"))["best"]
        found[launcher] = best["ways"]["zero"], best["step_s"]
    assert found[""][0] == 1
    assert found["torchtitan"][0] == 0
    assert found["torchtitan"][1] > found[""][1]
    require_said(folder, ["export", ".json", "--to", "torchtitan"], 2, "ZeRO-1 of", "--for torchtitan")
    good("export", "torchtitan.json", "--to", "torchtitan")


def test_pools_that_a_launcher_cannot_compute_on_are_left_idle_and_stages_have_one_degree(folder: Path) -> None:
    del folder
    Path("mixed.yaml").write_text(unlike({"a": ("A100-40GB", 1), "v": ("V100-16GB", 2)}, 2), "utf-8")
    asked = "--on mixed.yaml --gpus 6 --global-batch 128 --zero 0 -o ways.json --for"
    found = good("ways", SIZES, *asked.split(), "torchtitan")
    assert "on 2 A100-40GB" in found.output
    assert "2 of 6 devices used, 4 idle" in found.output
    good("export", "ways.json", "--to", "torchtitan")
    assert ", bfloat16, global batch 128:" in Path("torchtitan.sh").read_text("utf-8")
    good("ways", SIZES, *asked.split(), "megatron")
    ways = json.loads(Path("ways.json").read_text("utf-8"))["best"]["ways"]
    assert len(set(ways["tensors"])) <= 1
    good("export", "ways.json", "--to", "megatron")


def test_devices_that_no_way_uses_are_idle_and_unlike_numbers_of_blocks_are_told(tmp_path: Path) -> None:
    """Five devices and a batch of eight; a head that is longer than a block."""
    path = tmp_path / "ways.json"
    sizes = "hidden=512,ffn=2048,heads=8,layers=9,vocab=60000,seq=512"
    asked = "--on g4dn.12xlarge --gpus 5 --global-batch 8 --pipeline 2 -o"
    told = good("ways", sizes, *asked.split(), str(path))
    assert "4 of 5 devices used, 1 idle" in told.output
    blocks = json.loads(path.read_text("utf-8"))["best"]["ways"]["blocks"]
    assert sum(blocks) == 9
    assert blocks[0] > blocks[1]
    assert f"({blocks[0]}, {blocks[1]} blocks)" in told.output
    options = tmp_path / "megatron.sh"
    good("export", str(path), "--to", "megatron", "-o", str(options))
    assert f"--pipeline-model-parallel-layout 'Et*{blocks[0]}|t" in options.read_text("utf-8")


def test_selective_recomputation_of_fused_attention_is_priced_and_said_to_save_nothing() -> None:
    asked = "ways", f"{SIZES},fused_attention=1,dropout=0", *on("a100-dgx", 8, "--recompute", "selective")
    told = good(*asked, "--recompute-modules", "core_attn")
    assert "recompute selective" in told.output
    assert "fused attention keeps no scores" in told.output
    others = good(*asked)
    assert "recompute mlp" in others.output
    assert "fused attention keeps no scores" not in others.output


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("transformer", "arguments", "code", "said"),
    [
        ("gpt3-175", on(), 2, "gpt3-175b (did you mean that?)"),
        ("gpt3-175b", on("b100"), 2, "no cluster 'b100'"),
        ("gpt3-175b", on("A100-80GB"), 2, "try: a100-dgx"),
        ("meta-llama/Llama-3.1-8B", on(), 2, "hf download meta-llama/Llama-3.1-8B config.json"),
        ("llama3-8b", on("a100-dgx", 8, "--tensor", "3"), 2, "--tensor 3 does not divide 32 heads"),
        ("llama3-8b", on("a100-dgx", 8, "--pipeline", "40"), 2, "--pipeline 40 is more than the 32 blocks"),
        ("llama3-8b", on("a100-dgx", 8, "--expert", "2"), 2, "--expert 2 is of experts, and llama3-8b has none"),
        ("mixtral-8x7b", on("a100-dgx", 64, "--expert", "16"), 2, "does not divide the 8 experts"),
        ("llama3-8b", on("a100-dgx", 8, "--micro-batch", "3"), 2, "--micro-batch 3 does not divide a global batch"),
        ("llama3-8b", on("a100-dgx", 8, "--tensor", "8", "--pipeline", "4"), 2, "take 32 devices, and --gpus is 8"),
        ("llama3-8b", on("a100-dgx", 8, "--zero", "3", "--pipeline", "2"), 2, "ZeRO-2 and 3 are of one stage"),
        ("llama3-8b", on("a100-dgx", 1, "--zero", "1"), 2, "ZeRO-1 divides over replicas, and --gpus 1 leaves one"),
        ("gpt3-175b", on(), 4, "does not fit on 8 A100-80GB"),
        (SIZES, on("a100-dgx", 7, "--tensor", "3"), 2, "no way divides"),
        (SIZES, on("a100-dgx", 8, "--recompute", "all"), 2, "no recomputation 'all'"),
        (SIZES, on("a100-dgx", 8, "--recompute", "operators"), 2, "beside attention that is not fused"),
        (SIZES, on("a100-dgx", 8, "--recompute-modules", "norm"), 2, "no module of a block 'norm'"),
        (SIZES, on("a100-dgx", 8, "--recompute-modules", "moe"), 2, "has nothing of moe that is worth computing again"),
        ("mixtral-8x7b", on("a100-dgx", 64, "--recompute-modules", "moe,moe_act"), 2, "moe has moe_act in it"),
        (
            "llama3-8b",
            on("a100-dgx", 8, "--recompute-modules", "mlp", "--for", "torchtitan"),
            2,
            "torchtitan cannot be told --recompute-modules mlp",
        ),
        ("llama3-8b", on("a100-dgx", 8, "--shards", "3"), 4, "no copies come in groups of 3"),
        (
            "llama3-8b",
            on("a100-dgx", 8, "--offload", "parameters", "--for", "megatron"),
            2,
            "--offload parameters",
        ),
        (SIZES, on("a100-dgx", 8, "--context", "2"), 2, "attention is not fused"),
        (SIZES, on("a100-dgx", 8, "--precision", "fp8"), 2, "A100-80GB (a100-dgx) does not multiply in 8 bits"),
        (SIZES, on("a100-dgx", 8, "--precision", "int4"), 2, "no precision 'int4'"),
        (SIZES, on("p3.2xlarge", 8, "--offload", "optimizer"), 2, "how much the hosts of p3.2xlarge keep"),
        (SIZES, on("a100-dgx", 8, "--offload", "disk"), 2, "no offload 'disk'"),
        ("mixtral-8x7b", on("a100-dgx", 8, "--expert-exchange", "mail"), 2, "no expert exchange 'mail'"),
        ("mixtral-8x7b", on("a100-dgx", 64, "--tensor", "2", "--expert-tensor", "4"), 2, "no way divides"),
        (SIZES, on("a100-dgx", 8, "--software", "pytorch-2022"), 2, "pytorch-2023 (did you mean that?)"),
        (SIZES, on("a100-dgx", 8, "--offload", "activations", "--recompute", "full"), 2, "full recomputation beside"),
        (SIZES, on("h100-dgx", 8, "--precision", "fp8", "--for", "deepspeed"), 2, "told --precision fp8"),
        ("llama3-8b", on("a100-dgx", 8, "--context", "3"), 2, "8192 tokens do not divide by 2 x --context 3"),
        (SIZES, on("a100-dgx", 8, "--version", "0.2"), 2, "--version is of a launcher, and none is named"),
        (SIZES, on("a100-dgx", 8, "--for", "megatrn"), 2, "no launcher 'megatrn'"),
        (SIZES, on("a100-dgx", 8, "--for", "bridge"), 2, "megatron-bridge (did you mean that?)"),
        (SIZES, on("a100-dgx", 8, "--for", "torchtitan", "--zero", "1"), 2, "torchtitan cannot be told --zero 1"),
        (SIZES, on("a100-dgx", 8, "--for", "deepspeed", "--pipeline", "2"), 2, "deepspeed cannot be told --pipeline 2"),
        (SIZES, on("p3.16xlarge", 8, "--for", "torchtitan"), 2, "float16: it computes in bfloat16, float32"),
        (
            SIZES,
            on("a100-dgx", 2, "--for", "accelerate", "--tensor", "2"),
            2,
            "of the ways that accelerate can be told",
        ),
        (f"{SIZES},width=3", on(), 2, "'width'"),
        ("hidden=512,heads=8", on(), 2, "needs ffn"),
        (SIZES.replace("heads=8", "heads=7"), on(), 2, "not divided"),
        (SIZES.replace("seq=512", "seq=0"), on(), 2, "seq=0"),
        ("llama3-8b,seq=none", on(), 2, "seq=none"),
        ("llama3-8b,width=3", on(), 2, "'width'"),
        ("llama3-8b,settings=3", on(), 2, "'settings'"),
        ("llama3-8b,kv_heads=5", on(), 2, "heads=32, kv_heads=5"),
        ("missing.json", on(), 3, "missing.json"),
        ("llama3-8b", on()[:-2], 2, "no --global-batch was given"),
        ("llama3-8b", on("a100-dgx", 1), 4, "try: --gpus 2 ("),
        ("gpt3-175b", on("a100-dgx", 8, "--tensor", "5", "--fits"), 2, "no way divides"),
    ],
)
def test_what_is_wrong_is_said(
    folder: Path, transformer: str, arguments: tuple[str, ...], code: int, said: str
) -> None:
    require_said(folder, ["ways", transformer, *arguments], code, said)


def test_sizes_spell_a_transformer() -> None:
    network = network_of(f"{SIZES},kv_heads=2,gated=1,dropout=0,experts=4,top_k=2,expert_ffn=512")
    shape = network.shape
    assert (shape.kv_heads, shape.gated, shape.dropout, shape.head_size) == (2, True, False, 64)
    assert (shape.experts, shape.top_k, shape.expert_ffn) == (4, 2, 512)
    assert network.left_out["head_size"] == 64
    assert network.left_out["parameters_tied"] is True
    assert "kv_heads" not in network.left_out


LLAMA = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072,
}  # fmt: skip


def test_a_config_json_is_the_network_and_all_that_it_was_not_told_is_said(folder: Path) -> None:
    Path("config.json").write_text(json.dumps(LLAMA), "utf-8")
    told = good("ways", "config.json", *on("h100-dgx", 16), "-o", "ways.json").output
    for text in (
        "8.03 billion parameters; sequence 8,192; bfloat16",
        "not given, and taken as: ",
        "tie_word_embeddings=0",
        "sequence 8,192 of the 131,072 that it may have",
    ):
        assert text in told
    written = json.loads(Path("ways.json").read_text("utf-8"))
    assert written["network"]["parameters"]["total"] == 8_030_261_248
    assert written["transformer"]["kv_heads"] == 8
    named = json.loads(good("ways", "llama3-8b,seq=4096", *on("h100-dgx", 16), "--json").stdout)
    short = json.loads(good("ways", "config.json,seq=4096", *on("h100-dgx", 16), "--json").stdout)
    assert named["best"] == short["best"]
    assert named["network"]["notes"] == ["seq=4096 in place of 8192"]
    good("export", "ways.json", "--to", "megatron")


@pytest.mark.parametrize(
    ("transformer", "cluster", "gpus", "more", "said"),
    [
        ("llama3-70b", "gb200-nvl72", 72, (), "on 72 GB200 (gb200-nvl72, 4 a host, NVLink joins 72)"),
        ("llama3-70b", "gb200-nvl72", 72, ("--fits",), "  fits: "),
        ("gpt3-175b", "gb300-nvl72", 64, ("--tensor", "16", "--precision", "fp8"), "tensor 16"),
        ("llama3-70b", "b200-dgx", 16, ("--precision", "fp8"), "on 16 B200 (b200-dgx, 8 a host)"),
        ("llama3-70b", "b300-dgx", 16, (), "on 16 B300 (b300-dgx, 8 a host)"),
    ],
)
def test_blackwell_is_planned_for_and_its_nvlink_joins_hosts(
    transformer: str, cluster: str, gpus: int, more: tuple[str, ...], said: str
) -> None:
    asked = (transformer, "--on", cluster, "--gpus", str(gpus), "--global-batch", str(gpus), *more)
    assert said in good("ways", *asked).output


def test_experts_are_told_with_what_a_token_goes_through_of_them_and_shared_by_ranks() -> None:
    told = good("ways", "mixtral-8x7b", *on("h100-dgx", 64, "--expert", "8")).output
    assert "46.7 billion parameters, 12.88 billion of them for a token" in told
    assert "expert 8" in told
    fixed = ("--tensor", "2", "--pipeline", "8", "--expert", "32", "--gap", "0.05")
    cut, whole, dispatched = (
        json.loads(good("ways", "qwen3-235b-a22b", *on("h100-dgx", 512, *fixed, *more), "--json").stdout)["best"]
        for more in (
            ("--expert-tensor", "2"),
            ("--expert-tensor", "1"),
            ("--expert-tensor", "1", "--expert-exchange", "dispatch"),
        )
    )
    assert [best["ways"]["whole_experts"] for best in (cut, whole, dispatched)] == [False, True, True]
    exchanges = [best["ways"]["expert_exchange"] for best in (cut, whole, dispatched)]
    assert exchanges == ["all-to-all", "all-to-all", "dispatch"]
    best = json.loads(good("ways", "deepseek-v3", *on("h100-dgx", 256, "--context", "1"), "--json").stdout)
    assert best["network"]["parameters"] == {
        "total": 671_026_419_200, "active": 37_552_297_472, "mtp": 11_610_068_224,
    }  # fmt: skip


def test_long_samples_are_shared_by_ranks_and_the_launcher_is_told_how(folder: Path) -> None:
    long = "llama3-8b,seq=131072"
    told = good("ways", long, *on("h100-dgx", 64, "--for", "megatron", "--gap", "0.05", "-o", "ways.json")).output
    for text in ("context 8 by", "no way is better"):
        assert text in told
    ways = json.loads(Path("ways.json").read_text("utf-8"))["best"]["ways"]
    assert ways["context"] * ways["data"] * ways["tensor"] * ways["pipeline"] <= 64
    good("export", "ways.json", "--to", "megatron")
    kind = {"ring": "p2p", "all-to-all": "a2a"}[ways["context_exchange"]]
    script = Path("megatron.sh").read_text("utf-8")
    assert f"--context-parallel-size {ways['context']} --cp-comm-type {kind}" in script
    require_said(folder, ["export", "ways.json", "--to", "torchtitan"], 2, "share the tokens of a sample")
    fixed = ["--recompute", "none", "--pipeline", "1", "--global-batch", "16"]
    asked = ["ways", long, "--on", "h100-dgx", "--gpus", "64", "--fits", *fixed]
    answer = json.loads(good(*asked, "--context", "1", "--json").stdout)
    assert not answer["fits"]
    cheapest = answer["would_fit"][0]
    assert cheapest["ask"].startswith("--context ")
    assert json.loads(good(*asked, *cheapest["ask"].split(), "--json").stdout)["fits"]


def test_products_in_8_bits_are_asked_for_and_said(folder: Path) -> None:
    del folder
    steps = {}
    for precision in ("bf16", "fp8"):
        asked = on("h100-dgx", 8, "--precision", precision, "--for", "megatron", "-o", f"{precision}.json")
        told = good("ways", "llama3-8b", *asked).output
        assert ("products of blocks in 8 bits" in told) == ("fp8\n" in told) == (precision == "fp8")
        steps[precision] = json.loads(Path(f"{precision}.json").read_text("utf-8"))["best"]["step_s"]
    assert steps["fp8"] < 0.95 * steps["bf16"]
    good("export", "fp8.json", "--to", "megatron")
    assert "--fp8-format hybrid" in Path("megatron.sh").read_text("utf-8")


def test_what_runs_a_step_is_told_by_its_launcher_or_asked_for_by_name() -> None:
    asked = ("ways", "llama3-8b", *on("h100-dgx", 8, "--tensor", "1", "--pipeline", "1", "--zero", "3"))
    for more, name in (((), "megatron"), (("--for", "accelerate"), "pytorch")):
        assert f"\n  software {name}: " in good(*asked, *more).output
    steps = {}
    for name in ("pytorch-2023", "pytorch", "pytorch-compiled", "megatron"):
        answer = json.loads(good(*asked, "--recompute", "full", "--software", name, "--json").stdout)
        assert answer["software"] == name
        steps[name] = answer["best"]["step_s"]
    assert list(steps.values()) == sorted(steps.values(), reverse=True)
    others = good(*asked, "--software", "pytorch-2023").output
    assert "published runs, Megatron-LM by pytorch-2023, H100-SXM, dense, one host: none" in others


def test_a_small_step_is_bound_by_the_host_unless_its_layers_are_graphs() -> None:
    asked = ("ways", SIZES, *on("a100-dgx", 1, "--micro-batch", "1"))
    assert f"bound by {LAUNCHES}" in good(*asked).output
    assert f"bound by {LAUNCHES}" not in good(*asked, "--software", "megatron-graphs").output


def test_a_card_of_another_limit_of_power_is_a_device_of_a_cluster_file(folder: Path) -> None:
    links = "links: {within-host: NVLink-4, across-hosts: InfiniBand-NDR}\n"
    steps = {}
    for device in ("H100-SXM", "H100-96GB"):
        hosts = f"hosts: [{{name: n, count: 1, devices: [{{device: {device}, count: 8}}]}}]\n"
        (folder / f"{device}.yaml").write_text(f"halopipe: cluster\nversion: 1\n{hosts}{links}", "utf-8")
        asked = on(f"{device}.yaml", 8, "--recompute", "full", "--json")
        steps[device] = json.loads(good("ways", "llama3-8b", *asked).stdout)["best"]["step_s"]
    assert 1.1 < steps["H100-96GB"] / steps["H100-SXM"] < 1.3


def test_modules_operators_groups_and_weights_on_the_host_are_asked_for_and_told(folder: Path) -> None:
    """What is found for a launcher is in its file, and what no plan of halopipe says is refused by name."""
    del folder

    def told(to: str, *asked: str) -> str:
        machines = ("--on", "a100-dgx", "--gpus", "16", "--global-batch", "16")
        said = good("ways", "llama3-8b", *machines, "--for", to, *asked, "-o", "ways.json").output
        good("export", "ways.json", "--to", to)
        files = sorted(Path().glob(f"{to}.*"))
        return said + "".join(file.read_text("utf-8") for file in files)

    alone = ("--shards", "8", "--tensor", "1", "--pipeline", "1", "--context", "1")
    by_module = told("megatron", "--recompute", "selective", *alone, "--zero", "1")
    for text in ("recompute mlp", "within 8", "--recompute-modules mlp", "--num-distributed-optimizer-instances 2"):
        assert text in by_module
    by_operator = told("torchtitan", "--recompute", "operators", *alone, "--zero", "3", "--offload", "parameters")
    for text in (
        "recompute operators",
        "parameters on the host",
        "activation-checkpoint:selective",
        "--training.enable_cpu_offload",
        "--parallelism.data_parallel_replicate_degree 2",
    ):
        assert text in by_operator
    assert "mics_shard_size" in told("deepspeed", *alone, "--zero", "3")


def test_an_optimiser_on_the_host_is_advised_asked_for_and_said(folder: Path) -> None:
    asked = ["ways", "llama3-8b", "--on", "h100-dgx", "--gpus", "1", "--global-batch", "8"]
    answer = json.loads(good(*asked, "--fits", "--json").stdout)
    assert "--offload optimizer" in [change["ask"] for change in answer["would_fit"]]
    told = good(*asked, "--offload", "optimizer", "--recompute", "full", "-o", "ways.json").output
    for text in ("optimizer on the host", "GiB on its host", "optimiser on the host"):
        assert text in told
    assert json.loads(Path("ways.json").read_text("utf-8"))["best"]["memory_bytes"]["host"] > 90e9
    good("export", "ways.json", "--to", "megatron")
    assert "--optimizer-cpu-offload" in Path("megatron.sh").read_text("utf-8")
    good("export", "ways.json", "--to", "deepspeed")
    require_said(folder, ["export", "ways.json", "--to", "torchtitan"], 2, "optimizer in the host's memory")


def replaced(asked: list[str], words: list[str]) -> list[str]:
    """A question with other values of its options, and with those that it had not."""
    other = dict(zip(words[::2], words[1::2], strict=True))
    kept = [other.pop(before, word) for before, word in zip(["", *asked], asked, strict=False)]
    return [*kept, *(word for pair in other.items() for word in pair)]


def test_whether_it_fits_is_said_with_changes_that_do_what_they_say(folder: Path) -> None:
    """The cheapest first; each is asked for as it is written."""
    asked = ["ways", "llama3-8b", "--on", "a100-dgx", "--gpus", "1", "--fits"]
    told = good(*asked).output
    for text in ("does not fit", "weights 15.0, gradients 29.9, optimiser 89.7", "--gpus 2", "would fit"):
        assert text in told
    fixed = ["--tensor", "1", "--pipeline", "1", "--zero", "0", "--recompute", "none"]
    asked = ["ways", "llama3-8b", "--on", "a100-dgx", "--gpus", "8", "--global-batch", "16", "--fits", *fixed]
    answer = json.loads(good(*asked, "--json").stdout)
    assert not answer["fits"]
    assert answer["least"]["left_bytes"] < 0
    steps = []
    for change in answer["would_fit"]:
        words = change["ask"].split()
        if "seq=" in change["ask"] or "--gpus" in words:
            continue
        again = json.loads(good(*replaced(asked, words), "--json").stdout)
        assert again["fits"], change["ask"]
        assert again["best"]["left_bytes"] >= 0
        steps.append(change["step_s"])
    assert len(steps) >= 2
    assert steps == sorted(steps)
    fits = good("ways", "llama3-8b", "--on", "h100-dgx", "--gpus", "8", "--fits", "-o", "ways.json").output
    assert "are free in the way with the shortest step" in fits
    assert "global batch 8 (a sample a device)" in fits
    good("export", "ways.json", "--to", "deepspeed")


def test_a_way_is_a_plan_of_ones_own_network_that_check_finds_good(folder: Path) -> None:
    sizes = ["vocabulary=48", "width=16", "hidden=24", "layers=2", "heads=4", "kv_heads=2"]
    network = ["profiler.models.llama:llama", "--input", "4,8", *(word for size in sizes for word in ("--arg", size))]
    good("profile", *network, "--on", "a100-dgx", "--workers", "4", "--sizes", "1,2,4")
    asked = ["plan", "profile.json", "--global-batch", "8", "--ways"]
    way = "tensor=2,pipeline=2,sequence_parallel=1,micro_batch=2,recompute=full"
    good(*asked, way)
    plan = load("plan.json", Plan)
    assert (plan.search.solver, len(plan.decision.stages), plan.decision.micro_batches) == ("ways", 2, (2,) * 4)
    assert all(stage.recompute for stage in plan.decision.stages)
    good("check", "plan.json", "--profile", "profile.json")
    for zero in (2, 3):
        good(*asked, f"data=2,pipeline=2,zero={zero},micro_batch=2")
        divided = load("plan.json", Plan)
        assert [stage.level for stage in divided.decision.stages] == [zero, zero]
        good("check", "plan.json", "--profile", "profile.json")
    fused = good(*asked, way.replace("full", "selective"))
    assert "2 spans of layers computed again" in fused.output
    assert "one fused operator keeps no scores to drop" in fused.output
    stages = load("plan.json", Plan).decision.stages
    assert [[len(span) for span in stage.recomputed] for stage in stages] == [[1], [1]]
    good("check", "plan.json", "--profile", "profile.json")
    for given, why in (
        ("tensor=8", "takes 8 devices"),
        ("tensor=2,zero=2", "ZeRO-2 beside tensor 2"),
        ("context=2", "context 2: attention"),
        ("tensor=2,blocks=3", "part of a way"),
        ("tensor=none", "tensor=none"),
        (f"{way} --fix *=replicas:2", "--fix"),
        (f"{way} --micro-batch 3", "--micro-batch is 3"),
    ):
        require_said(folder, [*asked, *given.split()], 2, why)


WIDTH = 1024
DEPTH = 6
"""Of 4 MiB each: a bucket a layer."""
STEPS = RunOptions(steps=2, warmup=1, deadline_s=60.0, check_first_step=False, device="cpu")


def wide(*, input_shape: tuple[int, ...] = (32, WIDTH)) -> tuple[nn.Module, tuple[torch.Tensor, ...], nn.Module]:
    torch.manual_seed(0)
    layers = [layer for _ in range(DEPTH) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    inputs = torch.randn(input_shape)
    return nn.Sequential(*layers, nn.Linear(WIDTH, 10)), (inputs, torch.arange(len(inputs)) % 10), nn.CrossEntropyLoss()


@pytest.fixture(scope="module")
def profile() -> Profile:
    """Without a run: what layers hold follows from their operators."""
    source = ModelSource(f"{__name__}:wide", {}, (32, WIDTH))
    return modelled(source, ProfileOptions(on="a100-dgx", workers=2, optimizer="AdamW", sizes=(4, 8, 16, 32)))


@pytest.mark.skipif(bool(available()), reason="no compiler for the counting allocator")
@pytest.mark.parametrize(
    "zero", [*(pytest.param(zero, marks=pytest.mark.exhaustive("two processes, 5 s")) for zero in (1, 2)), 3]
)
def test_what_is_counted_is_what_was_predicted(profile: Profile, zero: int) -> None:
    plan = plan_by(profile, f"data=2,zero={zero},micro_batch=8", 32)
    found = run_plan(plan, STEPS)
    assert found is not None
    for rank, counted in zip(plan.prediction.ranks, found.peak_bytes, strict=True):
        assert rank.peak_bytes == pytest.approx(counted, rel=0.02)
