"""``halopipe merge``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from benchmarks.chains import chain_profile
from halopipe.cli.app import app
from planner.ir.cluster import ACROSS_HOSTS, WITHIN_HOST, PairLink
from planner.ir.codec import dump, load, loads
from planner.ir.profile import Profile


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Profiles of one model on two hosts, and of another."""
    monkeypatch.chdir(tmp_path)
    for name, profile in {
        "fast": chain_profile(3, speeds=2.0),
        "slow": chain_profile(3, speeds=1.0),
        "longer": chain_profile(4),
    }.items():
        cluster = profile.cluster
        links = {WITHIN_HOST: cluster.links[WITHIN_HOST]}
        dump(replace(profile, cluster=replace(cluster, links=links)), f"{name}.json")
    return tmp_path


def merge(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["merge", *arguments])


def test_profiles_of_two_hosts_become_one_file_and_what_is_missing_is_said(folder: Path) -> None:
    result = merge("fast.json", "slow.json", "-o", "both.json")
    assert result.exit_code == 0, result.stderr
    found = load("both.json", Profile)
    assert len({device.host for device in found.cluster.devices}) == 2
    assert set(found.measurements) == {"kind-1", "kind-2"}
    assert "kind-1" in result.stdout
    assert "kind-2" in result.stdout
    assert "no profile says what messages between hosts cost" in result.stderr
    assert "wrote both.json; next: halopipe plan both.json" in result.stderr
    assert loads(merge("fast.json", "slow.json", "--json").stdout, Profile) == found


def test_profiles_of_different_models_are_refused_by_their_files(folder: Path) -> None:
    result = merge("fast.json", "longer.json")
    assert result.exit_code == 3
    assert "error[H304] fast.json and longer.json are no profiles of one model" in result.stderr
    assert not (folder / "merged.json").exists()
    assert merge("nowhere.json").exit_code == 3
    assert merge().exit_code == 2


def test_hosts_are_linked_by_a_class_or_each_by_its_own_link(folder: Path) -> None:
    merge("fast.json", "slow.json", "-o", "both.json")
    found = load("both.json", Profile)
    link = found.cluster.links[WITHIN_HOST]
    a, b = dict.fromkeys(device.host for device in found.cluster.devices)
    there, back = PairLink(a, b, link), PairLink(b, a, link)

    def unlinked(**parts: object) -> tuple[str, ...]:
        cluster = replace(found.cluster, **parts)
        missing = cluster.unlinked()
        return () if missing is None else tuple(cluster.devices[rank].host for rank in missing[1:])

    assert unlinked() == (a, b)
    assert unlinked(links={WITHIN_HOST: link, ACROSS_HOSTS: link}) == ()
    assert unlinked(pairs=(there,)) == (b, a)
    assert unlinked(pairs=(there, back)) == ()
    assert unlinked(links={}, pairs=(there, back)) == (a, a)
    assert unlinked(links={}, devices=found.cluster.devices[:1]) == ()


def test_hosts_without_a_link_are_not_planned_for_but_on_one_device(folder: Path) -> None:
    merge("fast.json", "slow.json", "-o", "both.json")
    result = CliRunner().invoke(app, ["plan", "both.json"])
    assert result.exit_code == 3
    assert "error[H306] the profile does not say what messages between" in result.stderr
    assert "--cluster FILE" in result.stderr
    assert CliRunner().invoke(app, ["plan", "both.json", "--ranks", "1"]).exit_code == 0
