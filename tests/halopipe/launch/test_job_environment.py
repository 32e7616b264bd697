"""What a process is told of its job by torchrun, mpiexec or Slurm, how it reaches the others, and profiles of hosts."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from benchmarks.chains import chain_profile
from halopipe.launch import profile_hosts
from halopipe.launch.job_environment import (
    ATTEMPT,
    GLOO,
    LOOPBACK,
    JobRank,
    address_of,
    choose_gloo_interface,
    hosts_refused,
    interface_towards,
    interfaces,
    job_rank,
    num_started_by_mpi,
    ranks_by_host,
)
from halopipe.launch.job_stores import job_stores
from halopipe.launch.profile_hosts import together
from halopipe.planning.measure import measure_in_job
from halopipe.planning.options import ProfileOptions
from planner.ir.cluster import ACROSS_HOSTS, Cluster, Link, PairLink
from planner.ir.codec import dumps, loads
from planner.ir.errors import DeadlineError, RankCountError, StageFailedError, UsageError
from planner.ir.plan import Decision, Stage
from planner.ir.profile import ModelSource, Profile
from profiler.links import cpu
from profiler.links.processes import LinkCosts
from runtime.monitor.activity import Activity, Heartbeat, StatusStore
from runtime.monitor.failure import write_error
from runtime.monitor.watch import host_store
from tests.forks import forked, places_in_mpi, require_mpich
from tests.planner.sparse_networks import classifier, sparse_profile

TORCHRUN = {
    "RANK": "2",
    "WORLD_SIZE": "3",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "1",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_PORT": "29500",
}
SLURM = {"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1", "SLURM_JOB_ID": "4711"}


def decision(*devices: Sequence[str]) -> Decision:
    """One stage for each group of devices; ranks in order."""
    stages = []
    rank = 0
    for group in devices:
        stages.append(Stage(tuple(range(rank, rank + len(group))), tuple(group)))
        rank += len(group)
    return Decision("1f1b", (1,), tuple(stages), {}, ((),) * rank)


def test_a_process_is_the_rank_that_torchrun_says() -> None:
    assert job_rank(TORCHRUN) == JobRank(2, 3, 0, 1, 1, 2)
    assert job_rank({**TORCHRUN, "PMI_RANK": "0", "PMI_SIZE": "2"}) == JobRank(2, 3, 0, 1, 1, 2), "within an MPI job"
    assert job_rank({**TORCHRUN, **SLURM}) == JobRank(2, 3, 0, 1, 1, 2)
    assert job_rank({"RANK": "1", "WORLD_SIZE": "2"}) == JobRank(1, 2, 1)


@pytest.mark.every_case
@pytest.mark.parametrize(
    "environment",
    [
        {},
        {**SLURM, "SLURM_STEP_NUM_TASKS": "1"},
        {**SLURM, "ENVIRONMENT": "BATCH"},
        {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "8"},
    ],
)
def test_one_task_of_slurm_a_batch_script_or_a_shell_run_the_plan_themselves(environment: dict[str, str]) -> None:
    assert job_rank(environment) is None


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("name", "value"),
    [("RANK", "x"), ("RANK", "-1"), ("RANK", "3"), ("WORLD_SIZE", "0"), ("LOCAL_RANK", "3"), ("MASTER_PORT", "99999")],
)
def test_numbers_that_do_not_fit_together_are_named(name: str, value: str) -> None:
    with pytest.raises(UsageError, match=f"{name} is '{value}'"):
        job_rank({**TORCHRUN, name: value})


def test_tasks_of_slurm_without_torchrun_are_told_the_command() -> None:
    for environment in (SLURM, {**SLURM, "ENVIRONMENT": "BATCH", "SLURM_STEP_ID": "0"}):
        with pytest.raises(UsageError, match="as one of 8 tasks") as caught:
            job_rank(environment)
        assert "srun --ntasks-per-node 1 torchrun --nnodes $SLURM_NNODES" in caught.value.remedies[0]
        assert caught.value.exit_code == 2


def test_what_a_rank_starts_does_not_take_the_store_of_its_job_for_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    hosted = host_store()
    for name, value in {**JobRank(0, 1).variables(LOOPBACK, hosted.port), ATTEMPT: "one", GLOO: "lo"}.items():
        monkeypatch.setenv(name, value)
    store, _ = job_stores(0, 1)
    store.set("word", "of this rank")
    assert hosted.get("one/word") == b"of this rank"
    assert ATTEMPT not in os.environ


def test_processes_of_mpiexec_give_themselves_what_torchrun_would_say() -> None:
    def work(rank: int) -> tuple[JobRank | None, str, str]:
        mine = job_rank()
        store, _ = job_stores(rank, 2)
        store.set(f"from {rank}", str(rank))
        other = store.get(f"from {1 - rank}").decode()
        store.add("heard", 1)
        while rank == 0 and store.add("heard", 0) < 2:  # it hosts the store
            time.sleep(0.01)
        return mine, os.environ["MASTER_ADDR"], other

    with places_in_mpi(2) as places:
        assert forked(2, work, places) == [
            (JobRank(rank, 2, rank, 2, 0, 1, over_mpi=True), LOOPBACK, str(1 - rank)) for rank in range(2)
        ]


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("environment", "count"),
    [
        ({"PMI_RANK": "0", "PMI_SIZE": "4"}, 4),
        ({"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "3", "PMIX_RANK": "2"}, 3),
        ({**SLURM, "PMIX_RANK": "5", "SLURM_STEP_NUM_TASKS": "8"}, 8),
        ({"PMI_RANK": "0", "PMI_SIZE": "1"}, 1),  # as in an interactive step of Slurm
        (SLURM, 1),
    ],
)
def test_the_launcher_of_mpi_says_how_many_it_started(environment: dict[str, str], count: int) -> None:
    assert num_started_by_mpi(environment) == count


def test_another_mpi_than_the_launchers_and_none_at_all_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def alone(rank: int) -> str:
        with pytest.raises(UsageError, match="the launcher started 3 processes, MPI knows 1") as caught:
            job_rank({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "3"})
        load_mpi(60.0).Finalize()
        return caught.value.remedies[0]

    from runtime.transport.mpi_requests import load_mpi

    require_mpich()
    assert "mpiexec of that MPI" in forked(1, alone)[0]
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(UsageError, match="one of 3 of an MPI job, and MPI cannot be loaded") as caught:
        job_rank({"PMI_RANK": "0", "PMI_SIZE": "3"})
    assert "pip install 'halopipe[mpi]'" in caught.value.remedies[0]
    with pytest.raises(UsageError, match="PMI_SIZE is 'many'"):
        job_rank({"PMI_RANK": "0", "PMI_SIZE": "many"})


def test_the_ranks_of_the_plans_hosts_run_on_the_jobs_hosts_in_order() -> None:
    made = decision(["n1/gpu0", "n0/gpu1"], ["n1/gpu1"])
    assert ranks_by_host(made) == {"n1": (0, 2), "n0": (1,)}
    on_hosts = [JobRank(0, 3, 0, 2, 0, 2), JobRank(1, 3, 1, 2, 0, 2), JobRank(2, 3, 0, 1, 1, 2)]
    assert [each.planned_rank(made) for each in on_hosts] == [0, 2, 1]
    assert [JobRank(rank, 3, rank, 3).planned_rank(made) for rank in range(3)] == [0, 1, 2]  # tried on one host


def test_a_job_of_another_size_is_refused_with_both_numbers_and_the_commands() -> None:
    made = decision(["n0/cpu0", "n0/cpu1"], ["n1/cpu0"])
    with pytest.raises(RankCountError, match="the plan is for 3 ranks, the job has 2") as caught:
        JobRank(0, 2).require_size(made)
    assert "on n1: torchrun --nnodes 2 --node-rank 1 --nproc-per-node 1 --master-addr n0" in caught.value.remedies[1]
    with pytest.raises(RankCountError) as caught:
        JobRank(0, 2, over_mpi=True).require_size(made)
    assert caught.value.remedies[0] == "mpiexec -n 3 halopipe run PLAN"
    with pytest.raises(RankCountError, match="2 ranks on n0, host 0 of the job has 1") as caught:
        JobRank(0, 3, 0, 1, 0, 2).planned_rank(made)
    assert "--nproc-per-node 2" in caught.value.remedies[0]


def test_the_hosts_of_a_file_are_answered_with_the_commands_of_torchrun(tmp_path: Path) -> None:
    path = tmp_path / "hosts.txt"
    path.write_text("# the rack\nnode07 slots=2\nalice@node09\n$(reboot)\n")
    meeting = "--master-addr node07 --master-port 29500 -m halopipe"
    start = "torchrun --nnodes 3 --node-rank"
    assert hosts_refused(path, "profile x:y").remedies == (
        f"on node07: {start} 0 --nproc-per-node 2 {meeting} profile x:y",
        f"on alice@node09: {start} 1 --nproc-per-node 1 {meeting} profile x:y",
        f"on '$(reboot)': {start} 2 --nproc-per-node 1 {meeting} profile x:y",
    )
    made = decision(["n0/cpu0"], ["n1/cpu0", "n1/cpu1"])
    shown = hosts_refused(path, "run plan.json", made)
    assert " 2 --node-rank 0 --nproc-per-node 1 " in shown.remedies[0]
    assert " 2 --node-rank 1 --nproc-per-node 2 " in shown.remedies[1]
    assert (len(shown.remedies), shown.exit_code) == (2, 2)
    assert "on HOST1: torchrun" in hosts_refused(tmp_path / "nowhere", "run plan.json", made).remedies[1]


def test_the_loopback_interface_leads_to_this_host_and_to_no_other() -> None:
    assert interfaces()["lo"] == LOOPBACK
    assert (address_of("lo"), address_of(LOOPBACK)) == (LOOPBACK,) * 2
    assert interface_towards(LOOPBACK) == interface_towards("127.0.1.1") == "lo"
    assert interface_towards(LOOPBACK, several_hosts=True) != "lo"
    for host in ("no-such-host.invalid", "a..b"):  # where there is no way to a host the way to any other is taken
        assert interface_towards(host) == interface_towards("192.0.2.1")
    with pytest.raises(UsageError, match="this host has no interface nowhere0") as caught:
        address_of("nowhere0")
    assert "lo (127.0.0.1)" in caught.value.details[0]


def test_gloo_is_told_the_way_to_the_master_unless_somebody_said_so() -> None:
    environment = {"MASTER_ADDR": LOOPBACK, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    choose_gloo_interface(environment)
    assert environment[GLOO] == "lo"
    for known in ({"MASTER_ADDR": LOOPBACK, GLOO: "eth7"}, {"WORLD_SIZE": "2"}):
        before = dict(known)
        choose_gloo_interface(known)
        assert known == before


SOURCE = ModelSource("small.py:net", {"width": "2"}, (2, 8), "float32", "", ("scale",))


def test_hosts_become_one_profile_with_the_links_that_the_first_one_wrote() -> None:
    profile = chain_profile(3, num_devices=1)
    link = Link(1e-4, 1e8)
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


@pytest.mark.parametrize("is_sparse", [False, True])
def test_hosts_measure_what_a_sparse_network_computes_around_its_exchanges(
    monkeypatch: pytest.MonkeyPatch, is_sparse: bool
) -> None:
    """One host does; a plan of several would otherwise take exchanges of sites for messages alone."""
    found = chain_profile(2) if not is_sparse else sparse_profile(classifier(), (1.0, 1.0), sizes=(1, 2))
    asked: list[bool] = []

    def measured(*_: object, sites: bool) -> LinkCosts:
        asked.append(sites)
        return LinkCosts({})

    monkeypatch.setattr(cpu, "opened", lambda *_: SimpleNamespace(barrier=bool, close=bool))
    monkeypatch.setattr(cpu, "measure_together", measured)
    job = SimpleNamespace(rank=0)
    activity = SimpleNamespace(begin=bool)
    for profile in (found, None):  # of the first rank of a host, and of another one
        profile_hosts._linked(job, ("n0", "n1"), True, None, found.cluster, activity, "", profile)  # type: ignore[arg-type]
    assert asked == [is_sparse, False]


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
