"""Sailor's times of layers as profiles of unlike GPUs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from halopipe.cli.app import app
from planner.extras.baselines.sailor import NETWORKS, layer_times, parse, profile_of, read
from planner.ir.cluster import Cluster, DeviceSpec
from planner.ir.codec import load
from planner.ir.errors import FormatError, UnknownNameError
from planner.ir.plan import Plan

FILE = Path(__file__).parents[3] / "data" / "profiles" / "sailor" / "layers.csv"


def cluster(*kinds: str) -> Cluster:
    return Cluster(tuple(DeviceSpec(f"n0/gpu{i}", kind, "n0", 24 << 30) for i, kind in enumerate(kinds)), {})


def test_each_kind_has_its_own_seconds_of_each_layer_and_micro_batch() -> None:
    rows = read(FILE)
    found = profile_of(rows, "OPT-350", cluster("RTX-3090", "Titan-RTX"))
    assert [layer.name for layer in found.graph.layers][:3] == ["embedding", "block1", "block2"]
    assert len(found.graph.layers) == 27  # 24 blocks, embedding, head, loss
    for kind in ("RTX-3090", "Titan-RTX"):
        for size in (1, 2, 4):
            (row,) = (
                r
                for r in rows
                if (r.gpu, r.model, r.micro_batch, r.tensor_parallel) == (kind, "OPT-350", size, 1)
                and r.first_layer <= 7 <= r.last_layer
            )
            (m,) = (m for m in found.measurements[kind] if (m.layer, m.samples) == ("block7", size))
            saved = NETWORKS["OPT-350"].saved_bytes(size)
            assert (m.forward_s, m.backward_s, m.saved_bytes) == (row.forward_s, row.backward_s, saved)
    total = sum(spec.num_bytes for spec in found.graph.parameters.values()) / 4
    assert total == pytest.approx(24 * 12 * 1024**2 + 2 * 50272 * 1024, rel=0.01)


def test_times_that_are_those_of_a_smaller_network_are_refused_and_what_is_not_there_is_named() -> None:
    rows = read(FILE)
    assert profile_of(rows, "OPT-350", cluster("GH200-96GB")).measurements["GH200-96GB"]
    with pytest.raises(FormatError, match=r"the times of GPT-Neo-2\.7 on GH200-96GB are those of OPT-350"):
        profile_of(rows, "GPT-Neo-2.7", cluster("GH200-96GB"))
    with pytest.raises(UnknownNameError, match="no times of OPT-350 on T4"):
        profile_of(rows, "OPT-350", cluster("T4"))
    with pytest.raises(UnknownNameError, match="no times of 'OPT'"):
        profile_of(rows, "OPT", cluster("RTX-3090"))


def test_times_are_by_kind_tensor_degree_and_micro_batch_layer_by_layer() -> None:
    rows = read(FILE)
    network = NETWORKS["OPT-350"]
    found = layer_times(rows, network, ["V100-16GB", "RTX-3090"])
    assert set(found["V100-16GB"]) == {(degree, size) for degree in (1, 2, 4) for size in (1, 2)}
    assert {degree for degree, _ in found["RTX-3090"]} == {1}
    layers = found["V100-16GB"][2, 1]
    assert len(layers) == 26
    (block,) = (
        row
        for row in rows
        if (row.gpu, row.micro_batch, row.tensor_parallel) == ("V100-16", 1, 2)
        and row.first_layer <= 9 <= row.last_layer
    )
    assert layers[9] == (block.forward_s, block.backward_s, block.update_s)
    with pytest.raises(UnknownNameError, match="no times of a network like"):
        layer_times(rows, replace(network, heads=32), ["V100-16GB"])
    with pytest.raises(UnknownNameError, match="no times of OPT-350 on T4"):
        layer_times(rows, network, ["T4"])


def test_a_wrong_line_is_named() -> None:
    with pytest.raises(FormatError) as caught:
        parse(FILE.read_text().splitlines()[0] + "\nOPT-350,RTX-3090,1,1,0,0,fast,1,1\n", "layers.csv")
    assert "line 2: could not convert" in str(caught.value)


def test_a_cluster_of_unlike_gpus_is_planned_from_their_own_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    hosts = "".join(f"  - {{name: {n}, devices: [{k}]}}\n" for n, k in (("a", "RTX-3090"), ("b", "RTX-2080")))
    Path("c.yaml").write_text(f"halopipe: cluster\nversion: 1\nhosts:\n{hosts}links: {{across-hosts: Ethernet-25G}}\n")
    made = CliRunner().invoke(
        app, ["import", str(FILE), "--from", "sailor", "--model", "OPT-350", "--cluster", "c.yaml"]
    )
    assert made.exit_code == 0, made.stderr
    planned = CliRunner().invoke(app, ["plan", "profile.json", "--global-batch", "16", "-o", "plan.json"])
    assert planned.exit_code == 0, planned.stderr
    decision = load("plan.json", Plan).decision
    layers = {stage.ranks: len(decision.layers_of(index)) for index, stage in enumerate(decision.stages)}
    assert layers[(0,)] > 1.5 * layers[(1,)]  # the RTX 3090 is nearly twice as fast
    assert CliRunner().invoke(app, ["check", "plan.json", "--profile", "profile.json"]).exit_code == 0
