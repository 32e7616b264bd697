from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.published import sailor_clusters
from benchmarks.published.__main__ import A100, main, measure
from benchmarks.published.runs import published, read, t4
from benchmarks.published.sailor import Profiles

DATA = Path("benchmarks/published/data")


def test_published_runs_are_predicted_and_only_those_of_licensed_sources_ship() -> None:
    rows = {row.name: row for row in measure(quick=True)}
    assert rows[f"{A100}: mean error"].holds
    assert rows[f"{A100}: largest error"].holds
    assert rows["memory, Megatron on A100: mean error of memory"].holds
    assert rows["Sailor, unlike GPUs: mean error"].holds
    assert rows["Sailor, GH200: mean error of memory"].holds
    assert rows["Alpa, 8 V100: mean error"].value < 5
    one = "Megatron on A100, gpt3-175B-selective"
    predicted, measured = rows[f"{one}: predicted"].value, rows[f"{one}: measured"].value
    assert rows[f"{one}: error"].value == pytest.approx(100 * (predicted / measured - 1))
    shipped = "".join(path.read_text("utf-8") for path in DATA.glob("*.csv"))
    assert "DS3Lab" not in shipped
    assert not list(DATA.glob("amp*"))


def test_messages_of_one_communicator_hide_where_windows_hold_them() -> None:
    """A round trip of 0.4 ms at 10 Gbit/s is 0.5 MB, less than windows are at first; one of 2 ms is 2.5 MB."""
    header = (DATA / "published_runs.csv").read_text("utf-8").splitlines()[0].split(",")
    line = dict.fromkeys(header, "") | {
        "id": "xl-32", "model": "xl", "hidden": "2048", "ffn": "8192", "heads": "16", "layers": "24", "seq_len": "2048",
        "global_batch": "32", "micro_batch": "1", "tensor_parallel": "1", "pipeline": "8", "data_parallel": "1",
        "schedule": "gpipe", "recompute": "full", "measured_s": "3",
    }  # fmt: skip
    networks = ("0.2 ms, 10 Gbit/s", "1 ms, 10 Gbit/s")
    waited, hidden = published([line | {"network": network} for network in networks])
    message_s = 2 * 2048 * 2048 / (0.85 * 10e9 / 8)
    # An inner stage waits for two messages of each micro-batch; the first one's way through the pipeline is the same.
    more_s = waited.prediction.step.seconds - hidden.prediction.step.seconds
    assert more_s == pytest.approx(32 * 2 * (message_s + 0.2e-3) - 14 * (1e-3 - 0.2e-3), rel=0.05)


def test_rates_between_hosts_grow_with_messages_up_to_the_largest() -> None:
    profiles = Profiles()
    for gpu, number in profiles.networks:
        rates = [profiles.host_bytes_per_s(gpu, number, 2.0**power) for power in range(20, 36)]
        assert rates == sorted(rates)
        assert rates[-1] == pytest.approx(profiles.networks[gpu, number][1], rel=0.03)


def test_sailors_clusters_are_planned_below_its_own_plans_by_both_models() -> None:
    found = list(sailor_clusters.rows())
    judged = [row for row in found if row.goal and "processor time" not in row.name]
    assert len(judged) == 9
    assert all(row.holds for row in judged)
    assert all(row.value <= 1e-6 for row in found if "proven gap" in row.name)


def test_rows_of_a_folder_are_added_and_public_ones_show_errors_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "published_runs.csv").write_text((DATA / "published_runs.csv").read_text("utf-8"), "utf-8")
    header = "micro_batch,tensor_parallel,data_parallel,pipeline,stage_boundaries,rank_map,amp_predicted_s,measured_s\n"
    plans = (
        "1,1,16,1,0 30,,9,1.0",
        "32,1,1,16,0 4 6 8 10 12 14 16 18 19 20 21 22 23 24 25 30,,9,inf",
        "4,2,8,1,0 30,,9,2.0",
    )
    (tmp_path / "amp_homogeneous.csv").write_text(header + "\n".join(plans) + "\n", "utf-8")
    costs = "model,instance,tensor_parallel,layer,forward_backward_or_forward_s\n"
    costs += "".join(f"gpt2,G4,{tensor},{layer},0.004\n" for tensor in (1, 2) for layer in range(30))
    (tmp_path / "amp_layer_costs.csv").write_text(costs, "utf-8")
    first, second, third = t4(read(tmp_path / "amp_homogeneous.csv"), read(tmp_path / "amp_layer_costs.csv"))
    assert first.ran
    assert first.fits
    assert not second.ran
    assert not second.fits
    assert third.error != first.error
    assert main(["--json", "--quick", "--data", str(tmp_path), "--public"]) == 0
    names = [row["name"] for row in json.loads(capsys.readouterr().out)]
    ours = [name for name in names if name.startswith("16 T4, ")]
    assert ours
    assert all(name.endswith(": error") for name in ours)
