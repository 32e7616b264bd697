from __future__ import annotations

import re
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.chains import chain_profile
from planner.extras.catalogue.clusters import Machines, machines_of, read_machines
from planner.ir.cluster import ACROSS_HOSTS, DATASHEET, WITHIN_HOST, Cluster, Link, PairLink
from planner.ir.errors import CorruptFileError, MissingFileError

PROFILE = chain_profile(3, num_devices=2)
ROOT = Path(__file__).resolve().parents[4]

GOOD = """
halopipe: cluster
version: 1
hosts:
  - name: n
    count: 2
    devices:
      - {device: V100-16GB, count: 2, memory: 15GiB}
      - EPYC-7763-core
  - name: big
    devices:
      - {name: my-gpu, memory: 24GiB, memory-bandwidth: 936GB/s, peak: {float32: 35.6TFLOP/s}}
links:
  within-host: NVLink-2
  across-hosts: {link: Ethernet-10G, latency: 30us}
"""


def machines(text: str) -> Machines:
    return machines_of(textwrap.dedent(text), PROFILE.cluster)


def faults(text: str) -> tuple[str, ...]:
    with pytest.raises(CorruptFileError) as caught:
        machines(text)
    return caught.value.details


def test_devices_are_named_by_host_family_and_number_and_links_have_the_catalogues_figures_and_ones_own() -> None:
    found = machines(GOOD.replace("- EPYC-7763-core", "- {device: EPYC-7763-core, memory: 4GiB}")).cluster
    names = ["gpu0", "gpu1", "cpu0"]
    assert [d.name for d in found.devices] == [f"{host}/{n}" for host in ("n0", "n1") for n in names] + ["big/gpu0"]
    assert [d.kind for d in found.devices[:3]] == ["V100-16GB", "V100-16GB", "EPYC-7763-core"]
    assert found.devices[0].memory_bytes == 15 * 2**30
    assert found.devices[0].peak_flop_per_s["float32"] == 15.7e12
    assert (found.devices[-1].kind, found.devices[-1].memory_bytes_per_s) == ("my-gpu", 936e9)
    assert found.links[WITHIN_HOST].bandwidth_bytes_per_s == 150e9
    across = found.links[ACROSS_HOSTS]
    assert (across.bandwidth_bytes_per_s, across.latency_s) == (1.25e9, 30e-6)
    assert {link.evidence for link in found.links.values()} == {DATASHEET}


def file_of(hosts: str, links: str = "{}", more: str = "") -> str:
    return f"halopipe: cluster\nversion: 1\nhosts: {hosts}\nlinks: {links}\n{more}"


ONE = file_of("[{name: n, devices: [T4]}]")


def test_other_figures_make_another_kind() -> None:
    devices = "[V100-16GB, {device: V100-16GB, peak: {float32: 20TFLOP/s}}]"
    found = machines(file_of(f"[{{name: n, devices: {devices}}}]", "{within-host: NVLink-2}")).cluster
    assert [device.kind for device in found.devices] == ["V100-16GB", "V100-16GB (float32 20TFLOP/s)"]
    assert found.devices[1].peak_flop_per_s["float32"] == 20e12


def test_kinds_and_links_of_the_profile_can_be_named() -> None:
    links = "{within-host: measured, across-hosts: {bandwidth: 1GB/s}}"
    found = machines(file_of("[{name: m, count: 2, devices: [{device: kind-1, count: 2}]}]", links)).cluster
    assert [device.name for device in found.devices] == ["m0/cpu0", "m0/cpu1", "m1/cpu0", "m1/cpu1"]
    assert found.links[WITHIN_HOST] == PROFILE.cluster.links[WITHIN_HOST]
    assert found.collectives == PROFILE.cluster.collectives
    assert found.devices[0].memory_bytes == PROFILE.cluster.devices[0].memory_bytes


def test_what_the_profile_was_measured_on_may_be_a_name_or_figures() -> None:
    base = GOOD.replace("- EPYC-7763-core", "")
    named = machines(f"{base}measured-on: Titan-V\n").measured_on
    assert named["kind-1"].peak_flop_per_s["float32"] == 13.8e12
    figures = machines(f"{base}measured-on: {{device: EPYC-7763-core, memory-bandwidth: 20GB/s}}\n").measured_on
    assert (figures["kind-1"].memory_bytes_per_s, figures["kind-1"].peak_flop_per_s["float32"]) == (20e9, 112e9)
    by_kind = machines(f"{base}measured-on: {{kind-1: T4}}\n").measured_on
    assert by_kind["kind-1"].kind == "T4"
    assert machines(base).measured_on == {}


def test_a_kind_called_like_a_device_of_the_catalogue_is_that_device() -> None:
    found = machines_of(ONE, Cluster((replace(PROFILE.cluster.devices[0], kind="V100-16GB"),), {}))
    assert found.measured_on["V100-16GB"].peak_flop_per_s["float32"] == 15.7e12
    assert found.cluster.links == {}  # none is needed


def test_all_faults_are_named_at_once_each_unknown_name_with_the_nearest() -> None:
    found = faults(
        """
        halopipe: cluster
        version: 1
        measured_on: T4
        hosts:
          - name: n
            count: 0
            devices: [{device: V100-16, count: 2}]
          - name: n
            devices: [{device: T4, memori: 8GiB}]
          - {name: n, devices: [T4]}
        links: {within-host: NVLink-22, across-hosts: {latency: 5}}
        """
    )
    assert found == (
        "measured_on: unknown key; did you mean measured-on?",
        "hosts[0].count: should be a positive integer, got 0",
        "hosts[0].devices[0].device: no device 'V100-16'; did you mean V100-16GB?",
        "hosts[1].devices[0].memori: unknown key; did you mean memory?",
        "hosts: two hosts are called 'n'",
        "links.within-host: no link 'NVLink-22'; did you mean NVLink-2?",
        "links.across-hosts.latency: '5' is no number of seconds; write 5us",
        "links.across-hosts.bandwidth: missing: name a link of the catalogue, or give its bandwidth",
    )


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (GOOD, "hosts[0].devices[1].memory: missing: no source says how much memory EPYC-7763-core has"),
        (ONE.replace("[T4]", "[T4, T4]"), "links.within-host: missing: devices of one host use it"),
        (ONE.replace("name: n,", "name: n, count: 2,"), "links.across-hosts: missing: devices of several hosts use it"),
        ("", ""),
        ("[]", ""),
        ("hosts: 3", ""),
        ("halopipe: plan\nversion: 1\nhosts: [1]\nlinks: {}", ""),
        (
            '{"halopipe": "profile", "version": 1, "graph": {}}',
            "it is a halopipe profile file; a cluster file has 'halopipe",
        ),
    ],
)
def test_what_is_missing_or_no_cluster_file_is_refused(text: str, fault: str) -> None:
    assert faults(text)[0].startswith(fault)


def test_a_file_is_read_from_disk(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    with pytest.raises(MissingFileError, match=r"cannot read .*cluster.yaml"):
        read_machines(path)
    path.write_text("hosts: [")
    with pytest.raises(CorruptFileError, match=r"cluster.yaml is not YAML"):
        read_machines(path)
    path.write_text(ONE)
    assert read_machines(path).cluster.devices[0].kind == "T4"


@pytest.mark.parametrize("where", ["docs/catalogue.md", "planner/extras/catalogue/clusters.py"])
def test_the_documented_example_is_a_cluster_file(where: str) -> None:
    text = (ROOT / where).read_text("utf-8")
    first = text.rindex("\n", 0, text.index("halopipe: cluster")) + 1
    lines = textwrap.dedent(re.split(r"\n\s*(?:```)?\n", text[first:])[0] + "\n")
    found = machines(lines)
    assert len(found.cluster.devices) == 9
    assert found.measured_on["kind-1"].peak_flop_per_s["float32"] == 112e9


COMPLETE = GOOD.replace("- EPYC-7763-core", "")
PAIRS = """
  pairs:
    - {from: n0, to: n1, bandwidth: 125MB/s, latency: 50us, burst: 64KiB}
    - {from: n1, to: n0, link: Ethernet-10G}
"""


def test_a_file_may_state_links_of_pairs_of_hosts_and_bursts() -> None:
    found = machines(COMPLETE.rstrip() + PAIRS).cluster
    there, back = found.pairs
    assert (there.src_host, there.dst_host, back.src_host, back.dst_host) == ("n0", "n1", "n1", "n0")
    assert (there.link.bandwidth_bytes_per_s, there.link.latency_s, there.link.burst_bytes) == (125e6, 50e-6, 65536)
    assert found.link(0, 2) == there.link
    assert found.link(0, 4) == found.links[ACROSS_HOSTS]
    wrong = COMPLETE.rstrip() + PAIRS.replace("to: n1", "to: n7").replace("link: Ethernet-10G", "latency: 1us")
    assert "no host 'n7'" in "".join(faults(wrong))
    assert "links.pairs[1].bandwidth" in "".join(faults(wrong))


def test_measured_links_of_pairs_stay_where_their_hosts_are_there() -> None:
    links = {ACROSS_HOSTS: Link(1e-3, 1e6)}
    pairs = (PairLink("n0", "n1", Link(1e-3, 5e5)), PairLink("n0", "n9", Link(1e-3, 5e5)))
    own = replace(PROFILE.cluster, links=links, pairs=pairs)
    text = textwrap.dedent(COMPLETE).replace(
        "across-hosts: {link: Ethernet-10G, latency: 30us}", "across-hosts: measured"
    )
    assert machines_of(text, own).cluster.pairs == pairs[:1]
    assert machines_of(textwrap.dedent(COMPLETE), own).cluster.pairs == ()


def tiered() -> str:
    """The example with islands and racks of docs/catalogue.md."""
    text = (ROOT / "docs" / "catalogue.md").read_text("utf-8")
    start = text.rindex("halopipe: cluster\n", 0, text.index("tiers:\n"))
    return text[start : text.index("```", start)]


def test_devices_are_in_islands_and_hosts_in_racks() -> None:
    found = machines(tiered()).cluster
    assert len(found.devices) == 16
    assert found.devices[6].groups == {"island": "n1/island1", "rack": "rack0"}
    assert [found.link_class(0, rank) for rank in (1, 2, 4, 8)] == [tier.name for tier in found.tiers]
    assert found.link(0, 1).bandwidth_bytes_per_s == 150e9
    assert found.group_link_class((0, 1, 4)) == "within-rack"
    by_name = machines(tiered().replace("island: 2", "island: pair").replace("rack: 2", "rack: a")).cluster
    assert by_name.devices[-1].groups == {"island": "n3/pair", "rack": "a"}
    assert by_name.tiers_used() == ("nvlink", "within-rack")


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("rack: 2", "rak: 2", "hosts[0].groups.rak: unknown key; did you mean rack?"),
        ("island: 2", "rack: 2", "hosts[0].devices[0].groups.rack: unknown key"),
        ("island: 2", "island: 0", "hosts[0].devices[0].groups.island: should be a positive integer, got 0"),
        ("  nvlink:", "  nvlnk:", "links.nvlnk: unknown key; did you mean nvlink?"),
        ("  nvlink: NVLink-2\n", "", "links.nvlink: missing: devices of one island use it"),
        ("  across-racks: {b", "  # {b", "links.across-racks: missing: devices of several racks use it"),
        ("  - {name: across-racks}\n", "", "tiers: one should be within: host, and the last one"),
        ("within: rack", "within: host", "tiers: two tiers have the within 'host'"),
        ("name: within-rack", "name: nvlink", "tiers: two tiers have the name 'nvlink'"),
    ],
)
def test_faults_of_tiers(old: str, new: str, fault: str) -> None:
    assert old in tiered()
    found = faults(tiered().replace(old, new))
    assert any(each.startswith(fault) for each in found), found


def test_groups_that_do_not_nest_are_refused() -> None:
    island = "{name: nvlink, within: island}"
    text = tiered().replace(island, f"{island}\n  - {{name: bus, within: bus}}")
    found = faults(text.replace("groups: {island: 2}", "groups: {island: 2, bus: 3}"))
    fault = "island 'n0/island1' is in bus 'n0/bus1' (n0/gpu3) and in 'n0/bus0' (n0/gpu2)"
    assert any(fault in each for each in found)
