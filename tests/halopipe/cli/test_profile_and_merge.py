"""``halopipe profile`` and ``halopipe merge``: what is handed to the profiler, and profiles of several hosts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import halopipe
from benchmarks.chains import chain_profile
from halopipe.planning import measure
from planner.ir.cluster import ACROSS_HOSTS, WITHIN_HOST, PairLink
from planner.ir.codec import dump, load, loads
from planner.ir.errors import UsageError
from planner.ir.plan import Plan
from planner.ir.profile import ModelSource, Profile, Slowdown
from tests.halopipe.commands import call, good
from tests.planner.networks import plain, priced
from tests.planner.parts import with_parts

PROFILE = with_parts(priced(*plain()), (4,), 2)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """What the profiler is asked, by name; it measures nothing."""
    found: dict[str, Any] = {}

    def profile(source: ModelSource, **options: Any) -> Profile:
        found.update(source=source, **options)
        return PROFILE

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("profiler.session.profile", profile)
    return found


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        ("--elementwise lib::a --elementwise lib::b", "elementwise", ("lib::a", "lib::b")),
        ("--local-loss 3 --workers 4", "local_losses", 3),
        ("--local-loss stage --workers 4", "local_losses", 4),
        ("--local-loss 0 --workers 4", "local_losses", 0),
        ("", "shapes", None),
        ("", "num_processes", 0),
        ("", "resume", False),
        ("", "unfinished", Path(".profile.json.unfinished")),
        ("--processes 5 --resume -o x.json", "num_processes", 5),
        ("--processes 5 --resume -o x.json", "resume", True),
        ("--processes 5 --resume -o x.json", "unfinished", Path(".x.json.unfinished")),
        ("--transport gloo", "transport", "gloo"),
        ("--measure-machine", "measure_machine", True),
        ("", "measure_machine", False),
    ],
)
def test_what_is_said_reaches_the_profiler_or_is_kept_with_the_model(
    asked: dict[str, Any], words: str, name: str, value: object
) -> None:
    good("profile", "a:b", *words.split())
    assert (asked[name] if name in asked else getattr(asked["source"], name)) == value


def test_parts_are_asked_for_by_families_of_dims_and_ranks(asked: dict[str, Any]) -> None:
    result = good("profile", "a:b", "--allow", "sample,spatial", "--ranks", "8")
    assert asked["shapes"].keywords == {"allow": ("sample", "spatial"), "num_ranks": 8}
    assert "parts of 4 layers" in result.output
    assert load("profile.json", Profile) == PROFILE


def test_slow_downs_of_a_profile_are_in_the_plans_made_of_it(
    asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers twice as long beside those of the other device: two at once gain nothing any more."""
    alone = chain_profile(4, forward_s=1e-2)
    slowed = tuple(Slowdown(layer.name, 4, 2, 2.0, 2.0) for layer in alone.graph.layers)
    plans = {}
    for name, slowdowns in (("alone", {}), ("together", {alone.cluster.devices[0].kind: slowed})):
        monkeypatch.setattr(
            "profiler.session.profile", lambda source, found=slowdowns, **_: replace(alone, slowdowns=found)
        )
        good("profile", "a:b", "-o", f"{name}.json")
        for solver in ("data-parallel", "best-first"):
            words = ("--global-batch", "8", "--solver", solver, "-o", f"{name}-{solver}.json")
            good("plan", f"{name}.json", *words)
            assert good("check", words[-1], "--profile", f"{name}.json").stdout == f"{words[-1]} is good\n"
            plans[name, solver] = load(words[-1], Plan)
    steps_s = {which: plan.prediction.step_s for which, plan in plans.items()}
    assert steps_s["together", "data-parallel"] == pytest.approx(2 * steps_s["alone", "data-parallel"], rel=1e-3)
    assert steps_s["together", "best-first"] == pytest.approx(8 * 4 * 3e-2, rel=1e-3)
    assert all(plan.search.bound_s <= plan.prediction.step_s for plan in plans.values())


@pytest.mark.parametrize("words", ["--allow space", "--transport mpi", "--transport pigeons"])
def test_what_the_profiler_does_not_know_is_refused_before_it_is_asked(asked: dict[str, Any], words: str) -> None:
    assert call("profile", "a:b", *words.split()).exit_code == 2
    assert not asked


def test_blocks_that_are_no_number_are_refused() -> None:
    with pytest.raises(UsageError, match="'-1' says no number of blocks"):
        measure.local_blocks("-1", "cpu", 2)
    with pytest.raises(UsageError, match="module as it is"):
        measure.source_of(nn.Linear(1, 1), local_losses=2)


def test_the_call_asks_for_the_same(asked: dict[str, Any]) -> None:
    halopipe.profile("a:b", allow=("channel",), num_ranks=4, elementwise=["lib::a"], transport="shared")
    assert asked["transport"] == "shared"
    assert asked["shapes"].keywords == {"allow": ("channel",), "num_ranks": 4}
    assert asked["source"] == ModelSource("a:b", elementwise=("lib::a",))


@pytest.mark.parametrize("error", [KeyboardInterrupt, UsageError])
def test_a_profile_that_does_not_end_says_how_to_go_on_and_one_that_does_leaves_its_file_alone(
    asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    kept = Path(".profile.json.unfinished")

    def interrupted(source: ModelSource, unfinished: Path, **options: Any) -> Profile:
        unfinished.write_text("pieces")
        raise error("ended")

    with monkeypatch.context() as patched:
        patched.setattr("profiler.session.profile", interrupted)
        result = call("profile", "a:b")
    assert result.exit_code == (130 if error is KeyboardInterrupt else 2)
    assert f"what was measured is kept in {kept}; the same command with --resume goes on with it" in result.stderr
    assert kept.read_text() == "pieces"
    assert call("profile", "a:b", "--resume").exit_code == 0
    assert not kept.exists()
    assert Path("profile.json").exists()


def test_the_call_goes_on_with_a_file_that_it_is_given(asked: dict[str, Any], tmp_path: Path) -> None:
    kept = tmp_path / "pieces"
    kept.write_text("pieces")
    halopipe.profile("a:b", num_processes=2, unfinished=kept)
    assert (asked["num_processes"], asked["resume"], asked["unfinished"]) == (2, True, kept)
    assert not kept.exists()
    halopipe.profile("a:b")
    assert (asked["resume"], asked["unfinished"]) == (False, None)


@pytest.fixture
def hosts(folder: Path) -> Path:
    """Profiles of one model on two hosts, and of another."""
    for name, profile in {
        "fast": chain_profile(3, speeds=2.0),
        "slow": chain_profile(3, speeds=1.0),
        "longer": chain_profile(4),
    }.items():
        cluster = profile.cluster
        links = {WITHIN_HOST: cluster.links[WITHIN_HOST]}
        dump(replace(profile, cluster=replace(cluster, links=links)), f"{name}.json")
    return folder


def test_profiles_of_two_hosts_become_one_file_and_what_is_missing_is_said(hosts: Path) -> None:
    result = call("merge", "fast.json", "slow.json", "-o", "both.json")
    assert result.exit_code == 0, result.stderr
    found = load("both.json", Profile)
    assert len({device.host for device in found.cluster.devices}) == 2
    assert set(found.measurements) == {"kind-1", "kind-2"}
    assert "kind-1" in result.stdout
    assert "kind-2" in result.stdout
    assert "no profile says what messages between hosts cost" in result.stderr
    assert "wrote both.json; next: halopipe plan both.json" in result.stderr
    assert loads(call("merge", "fast.json", "slow.json", "--json").stdout, Profile) == found


def test_profiles_of_different_models_are_refused_by_their_files(hosts: Path) -> None:
    result = call("merge", "fast.json", "longer.json")
    assert result.exit_code == 3
    assert "error[H304] fast.json and longer.json are no profiles of one model" in result.stderr
    assert not (hosts / "merged.json").exists()
    assert call("merge", "nowhere.json").exit_code == 3
    assert call("merge").exit_code == 2


def test_hosts_are_linked_by_a_class_or_each_by_its_own_link(hosts: Path) -> None:
    call("merge", "fast.json", "slow.json", "-o", "both.json")
    found = load("both.json", Profile)
    link = found.cluster.links[WITHIN_HOST]
    a, b = dict.fromkeys(device.host for device in found.cluster.devices)
    there = PairLink(a, b, link)
    back = PairLink(b, a, link)

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


def test_hosts_without_a_link_are_not_planned_for_but_on_one_device(hosts: Path) -> None:
    call("merge", "fast.json", "slow.json", "-o", "both.json")
    result = call("plan", "both.json")
    assert result.exit_code == 3
    assert "error[H306] the profile does not say what messages between" in result.stderr
    assert "--cluster FILE" in result.stderr
    assert call("plan", "both.json", "--ranks", "1").exit_code == 0
