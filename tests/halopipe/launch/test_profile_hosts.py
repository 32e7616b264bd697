from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch.distributed as dist

from benchmarks.chains import chain_profile
from halopipe.launch import profile_hosts
from halopipe.launch.job_environment import JobRank
from halopipe.launch.profile_hosts import together
from halopipe.planning.measure import measure_in_job
from halopipe.planning.options import ProfileOptions
from planner.ir.cluster import ACROSS_HOSTS, Cluster, Link, PairLink
from planner.ir.codec import dumps, loads
from planner.ir.errors import DeadlineError, StageFailedError, UsageError
from planner.ir.profile import ModelSource, Profile
from runtime.monitor.activity import Activity, Heartbeat, StatusStore
from runtime.monitor.failure import write_error

SOURCE = ModelSource("small.py:net", {"width": "2"}, (2, 8), "float32", "", ("scale",))


def test_hosts_become_one_profile_with_the_links_that_the_first_one_wrote() -> None:
    profile, link = chain_profile(3, num_devices=1), Link(1e-4, 1e8)
    devices = [replace(profile.cluster.devices[0], name=f"n{host}/cpu0", host=f"n{host}") for host in range(2)]
    pairs = (PairLink("n1", "n0", replace(link, bandwidth_bytes_per_s=5e7)),)
    clusters = (Cluster((devices[0],), {ACROSS_HOSTS: link}), Cluster((devices[1],), {}))
    texts = [dumps(replace(profile, cluster=cluster)) for cluster in clusters]
    found = together({f"n{host}": loads(text, Profile, "") for host, text in enumerate(texts)}, pairs).cluster
    assert [device.name for device in found.devices] == ["n0/cpu0", "n1/cpu0"]
    assert (dict(found.links), found.pairs) == ({ACROSS_HOSTS: link}, pairs)
    assert found.link(1, 0) == pairs[0].link


@pytest.mark.parametrize(
    ("device", "resume", "why"),
    [("cpu", True, "--resume is for a profile of one host"), ("cuda", False, "measures cores, not GPUs")],
)
def test_a_job_measures_cores_from_the_beginning(device: str, resume: bool, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        measure_in_job(JobRank(0, 2), SOURCE, ProfileOptions(device=device, resume=resume))


def waiting(store: dist.Store, monkeypatch: pytest.MonkeyPatch) -> profile_hosts._HostsWait:
    """Of rank 0, for two hosts of which only its own speaks."""
    monkeypatch.setattr(profile_hosts, "SILENCE_S", 0.5)
    monkeypatch.setattr(profile_hosts, "_POLL_S", 0.01)
    return profile_hosts._HostsWait(StatusStore(store), ("n0", "n1"), True)


def test_a_rank_that_is_gone_is_named_with_its_host(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    gone = pytest.raises(DeadlineError, match=r"nothing was heard of rank 1 on n1 for 0\.5 s")
    with Heartbeat(store, 0, Activity(), 0.01), gone:
        waiting(store, monkeypatch).until(store, ["measured/1"])


def test_what_another_rank_failed_by_ends_the_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    store.set("error/1", write_error(StageFailedError("the bomb")))
    store.set("failed", "")
    with pytest.raises(StageFailedError, match="the bomb"):
        waiting(store, monkeypatch).until(store, ["measured/1"])


def test_what_is_there_is_waited_for_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    writing = threading.Timer(0.1, lambda: store.set("measured/1", ""))
    writing.start()
    waiting(store, monkeypatch).until(store, ["measured/1"])
    assert store.check(["measured/1"])
    writing.join()
