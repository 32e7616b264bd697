from __future__ import annotations

import json
import re
import sys
import tomllib
from pathlib import Path

import pytest
import torch

from halopipe.reports import doctor
from halopipe.reports.doctor import MISSING, ODD, OK, Finding
from tests.halopipe.commands import HOME, call


def test_this_machine_is_examined_and_can_run() -> None:
    result = call("doctor", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["can_run"]
    names = [finding["what"] for finding in found["findings"]]
    assert {"python", "torch", "gloo", "memory", "loopback", "cores", "C++ compiler", "cache", "GPU"} <= set(names)
    assert {finding["status"] for finding in found["findings"]} <= {OK, ODD, MISSING}
    assert all(finding["remedy"] for finding in found["findings"] if finding["status"] == MISSING)
    assert not [finding for finding in found["findings"] if "cannot be looked at" in finding["text"]]


@pytest.mark.parametrize("lacking", ["all of it", "_disable_dynamo"])
def test_without_torch_or_what_is_leant_on_it_ends_with_six_and_says_what_to_install(
    lacking: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "_LOOKS", (("torch", doctor._torch),))
    if lacking == "all of it":
        monkeypatch.setitem(sys.modules, "torch", None)
    else:
        monkeypatch.delattr(torch._compile, lacking)
        monkeypatch.delitem(sys.modules, "cuda_ops._torch")
    result = call("doctor")
    assert result.exit_code == 6
    said = "" if lacking == "all of it" else f"lacks .*{lacking}.*; tested: .*"
    assert re.search(rf"missing +torch .*{said}\n +try: pip install 'torch>=2", result.stdout)
    assert "halopipe cannot run here: torch" in result.stdout


@pytest.mark.parametrize(
    ("version", "status"),
    [("2.10.1", MISSING), ("2.11.0", OK), ("2.12.1+cu130", OK), ("2.13.0+cpu", OK), ("2.14.0", ODD), ("3.0", ODD)],
)
def test_a_torch_outside_of_what_is_tested_is_named(version: str, status: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    finding = next(doctor._torch())
    assert (finding.what, finding.status) == ("torch", status)
    assert finding.text.startswith(version)
    assert finding.text.endswith("tested: 2.11 to 2.13")
    assert finding.remedy == ("" if status == OK else "pip install 'torch>=2.11,<2.14'")


@pytest.mark.parametrize(("version", "status"), [((3, 10), MISSING), ((3, 11), OK), ((3, 13), OK), ((3, 14), ODD)])
def test_a_python_outside_of_what_is_tested_is_named(
    version: tuple[int, int], status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "version_info", (*version, 0))
    (finding,) = doctor._python()
    assert finding.status == status
    assert finding.remedy == ("" if status == OK else "install Python 3.11 to 3.13")


def test_a_look_that_fails_is_a_finding_and_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def look() -> None:
        raise ZeroDivisionError("odd")

    monkeypatch.setattr(doctor, "_LOOKS", (("links", look),))
    (finding,) = doctor.examine()
    assert (finding.what, finding.status) == ("links", ODD)
    assert doctor.can_run((finding,))


@pytest.mark.parametrize(
    ("code", "status", "said"),
    [
        ("", OK, "9.1"),
        ("raise RuntimeError('operator torchvision::nms does not exist')", ODD, "torchvision::nms does not exist"),
        ("import os; os._exit(3)", ODD, "the process ended with 3"),
        ("import time; time.sleep(60)", ODD, "importing it takes above 0.5 s"),
    ],
)
def test_a_torchvision_for_another_torch_is_told(
    code: str, status: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torchvision.py").write_text(code)
    (tmp_path / "torchvision-9.1.dist-info").mkdir()
    (tmp_path / "torchvision-9.1.dist-info" / "METADATA").write_text("Name: torchvision\nVersion: 9.1\n")
    monkeypatch.setattr(doctor, "BUILT_FOR_TORCH", ("torchvision",))
    monkeypatch.syspath_prepend(tmp_path)
    honest = doctor._import_error
    monkeypatch.setattr(doctor, "_import_error", lambda name: honest(name, 0.5 if "sleep" in code else 60.0))
    (finding,) = doctor._built_for_torch()
    assert (finding.what, finding.status) == ("torchvision", status)
    assert said in finding.text
    if status == ODD:
        assert "beside torch" in finding.text
        assert finding.remedy.startswith("pip install --force-reinstall --no-deps torchvision==9.1")


def test_only_what_is_needed_fails() -> None:
    assert doctor.can_run((Finding("extra report", MISSING, ""), Finding("torch", ODD, "", needed=True)))
    assert not doctor.can_run((Finding("torch", MISSING, "", needed=True),))


@pytest.mark.parametrize(("text", "cores"), [("max 100000", None), ("150000 100000", 1.5), ("", None)])
def test_a_control_group_s_quota_is_read_in_cores(text: str, cores: float | None) -> None:
    assert doctor.cpu_quota(text) == cores


@pytest.mark.parametrize(("siblings", "threads"), [("0", 1), ("0,4", 2), ("0-1", 2), ("0-3,8-11", 8)])
def test_threads_of_a_core_are_counted(siblings: str, threads: int, tmp_path: Path) -> None:
    assert doctor.hyperthreads(tmp_path) == 1
    (tmp_path / "cpu0" / "topology").mkdir(parents=True)
    (tmp_path / "cpu0" / "topology" / "thread_siblings_list").write_text(siblings)
    assert doctor.hyperthreads(tmp_path) == threads


def test_extras_are_those_of_the_project() -> None:
    extras = tomllib.loads((HOME / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    stated = {name: {re.split(r"[><=\[; ]", one)[0] for one in extras[name]} for name in extras if name != "test"}
    assert {name: set(packages) for name, packages in doctor.EXTRAS.items()} == stated
