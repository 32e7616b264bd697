"""The catalogue's figures, names that find its entries, and faults of its files."""

from __future__ import annotations

import re

import pytest

from planner.extras.catalogue import listing as catalogue
from planner.extras.catalogue.known_devices import _with_figures, entry_of
from planner.extras.catalogue.listing import FAMILIES, devices, read_device, read_links
from planner.ir.cluster import DeviceSpec
from planner.ir.errors import CorruptFileError, UnknownNameError
from planner.ir.graph import BYTES_PER_ELEMENT

ENTRIES = [*catalogue.devices().values(), *catalogue.links().values()]

DTYPES = {*BYTES_PER_ELEMENT, "tfloat32", "float8"}


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_every_figure_has_a_source_and_a_date(entry: catalogue.DeviceEntry | catalogue.LinkEntry) -> None:
    figures = dict(entry.figures())
    assert figures or entry.unknown
    for name, figure in figures.items():
        assert figure.value > 0, name
        assert len(figure.source) > 20, name
        assert re.fullmatch(r"20\d\d-(0[1-9]|1[0-2])", figure.date), name


@pytest.mark.parametrize("entry", catalogue.devices().values(), ids=lambda entry: entry.name)
def test_figures_are_of_a_plausible_size(entry: catalogue.DeviceEntry) -> None:
    assert entry.family in FAMILIES
    assert set(entry.peak_flop_per_s) <= DTYPES
    assert all(1e10 < figure.value < 1e16 for figure in entry.peak_flop_per_s.values())
    assert entry.memory_bytes is None or 2**28 < entry.memory_bytes.value < 2**39
    assert entry.memory_bytes_per_s is None or 1e10 < entry.memory_bytes_per_s.value < 1e14
    wide, narrow = (entry.peak_flop_per_s.get(dtype) for dtype in ("float32", "float16"))
    assert wide is None or narrow is None or narrow.value > wide.value


def test_the_machines_people_ask_for_are_there() -> None:
    wanted = {"V100-16GB", "V100-32GB", "A100-40GB", "A100-80GB", "H100-SXM", "H100-PCIe", "H200", "L4", "L40S", "T4"}
    wanted |= {"RTX-4090", "RTX-3090", "Titan-V", "Titan-Xp", "MI250X", "MI300X", "EPYC-7763", "Alveo-U280"}
    wanted |= {"B200", "B300", "GB200", "GB300", "IPU-GC200"}
    assert wanted <= set(catalogue.devices())
    cables = {"PCIe-4-x16", "NVLink-4", "NVLink-5", "InfiniBand-NDR", "InfiniBand-XDR", "Ethernet-25G"}
    assert cables <= set(catalogue.links())
    assert catalogue.link("Ethernet-10G").bandwidth_bytes_per_s.value == 1.25e9


def test_other_names_and_case_do_not_matter_and_an_unknown_name_is_answered_with_the_nearest() -> None:
    assert catalogue.device("v100").name == "V100-16GB"
    assert catalogue.link("HDR").name == "InfiniBand-HDR"
    with pytest.raises(UnknownNameError, match=r"no device 'A100-80' in the catalogue; did you mean A100-80GB\?"):
        catalogue.device("A100-80")
    with pytest.raises(UnknownNameError, match=r"no link 'nvlnk-2' in the catalogue; did you mean NVLink-2\?"):
        catalogue.link("nvlnk-2")


GOOD = """
device: X
family: gpu
vendor: Y
figures:
  memory: {value: 16GiB, source: a data sheet, date: "2020-01"}
"""


def test_all_faults_of_a_file_are_named_at_once() -> None:
    text = GOOD.replace("family: gpu", "family: gnu").replace(', date: "2020-01"', "").replace("16GiB", "16 giga")
    with pytest.raises(CorruptFileError) as caught:
        read_device(text + "colour: red\n", "x.yaml")
    assert caught.value.title == "x.yaml is not a valid catalogue file: 4 faults"
    assert caught.value.details == (
        "colour: unknown key",
        "family: 'gnu' is none of cpu, fpga, gpu, ipu, snn, tpu",
        "figures.memory.date: missing",
        "figures.memory.value: '16 giga' is no number of bytes; write 16GiB or 512MB",
    )


def test_keys_that_come_twice_or_are_missing_are_named() -> None:
    with pytest.raises(CorruptFileError, match=r"x.yaml is not YAML") as caught:
        read_device(f"{GOOD}device: Z\n", "x.yaml")
    assert "device is given twice" in " ".join(caught.value.details)
    with pytest.raises(CorruptFileError) as caught:
        read_links("links: [{link: X}]", "links.yaml")
    assert "links[0].bandwidth: missing" in caught.value.details


@pytest.mark.parametrize(
    ("kind", "gibibytes", "entry"),
    [
        ("NVIDIA H200", 139.8, "H200"),
        ("NVIDIA H100 80GB HBM3", 79.1, "H100-SXM"),
        ("NVIDIA B200", 178.35, "B200"),
        ("NVIDIA GB200", 184.0, "GB200"),
        ("NVIDIA H100 PCIe", 79.6, "H100-PCIe"),
        ("NVIDIA A100-SXM4-40GB", 39.4, "A100-40GB"),
        ("NVIDIA A100 80GB PCIe", 79.2, "A100-80GB"),
        ("Tesla V100-SXM2-16GB", 15.8, "V100-16GB"),
        ("Tesla V100-SXM2-32GB", 31.7, "V100-32GB"),
        ("Tesla T4", 14.6, "T4"),
        ("NVIDIA L4", 22.0, "L4"),
        ("NVIDIA GeForce RTX 3090", 23.7, "RTX-3090"),
        ("NVIDIA TITAN V", 11.8, "Titan-V"),
        ("NVIDIA GeForce RTX 3090 Ti", 23.7, None),
        ("NVIDIA A10G", 22.0, None),
        ("Tesla V100-SXM2-16GB", 1.0, None),  # another program has it: which of two it is cannot be told
    ],
)
def test_a_driver_s_name_and_memory_find_the_catalogue_s_entry(kind: str, gibibytes: float, entry: str | None) -> None:
    found = entry_of(kind, int(gibibytes * 2**30), devices().values())
    assert (found and found.name) == entry


def test_a_gpu_gets_the_peaks_of_its_entry_and_a_core_none() -> None:
    gpu = _with_figures(DeviceSpec("n0/gpu0", "NVIDIA H200", "n0", 139 << 30))
    assert gpu.peak_flop_per_s["bfloat16"] == 989.5e12
    assert gpu.memory_bytes_per_s == 4.8e12
    core = DeviceSpec("n0/cpu0", "NVIDIA H200", "n0", 1 << 30)
    assert _with_figures(core) is core
