from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

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
from planner.ir.errors import RankCountError, UsageError
from planner.ir.plan import Decision, Stage
from tests.forks import forked, places_in_mpi, require_mpich

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
    stages, rank = [], 0
    for group in devices:
        stages.append(Stage(tuple(range(rank, rank + len(group))), tuple(group)))
        rank += len(group)
    return Decision("1f1b", (1,), tuple(stages), {}, ((),) * rank)


def test_a_process_is_the_rank_that_torchrun_says() -> None:
    assert job_rank(TORCHRUN) == JobRank(2, 3, 0, 1, 1, 2)
    assert job_rank({"RANK": "1", "WORLD_SIZE": "2"}) == JobRank(1, 2, 1)
    assert job_rank({}) is None


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
    assert job_rank({**SLURM, **TORCHRUN}) == JobRank(2, 3, 0, 1, 1, 2)


def test_what_a_rank_starts_does_not_take_the_store_of_its_job_for_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    from halopipe.launch.job_stores import job_stores
    from runtime.monitor.watch import host_store

    hosted = host_store()
    for name, value in {**JobRank(0, 1).variables(LOOPBACK, hosted.port), ATTEMPT: "one", GLOO: "lo"}.items():
        monkeypatch.setenv(name, value)
    store, _ = job_stores(0, 1)
    store.set("word", "of this rank")
    assert hosted.get("one/word") == b"of this rank"
    assert ATTEMPT not in os.environ


def test_processes_of_mpiexec_give_themselves_what_torchrun_would_say() -> None:
    from halopipe.launch.job_stores import job_stores

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


def test_torchrun_inside_of_an_mpi_job_is_the_launcher() -> None:
    assert job_rank({**TORCHRUN, "PMI_RANK": "0", "PMI_SIZE": "2"}) == JobRank(2, 3, 0, 1, 1, 2)


def test_one_task_of_slurm_a_batch_script_or_a_shell_run_the_plan_themselves() -> None:
    for environment in (
        {**SLURM, "SLURM_STEP_NUM_TASKS": "1"},
        {**SLURM, "ENVIRONMENT": "BATCH"},
        {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "8"},
    ):
        assert job_rank(environment) is None


def test_the_ranks_of_the_plans_hosts_run_on_the_jobs_hosts_in_order() -> None:
    made = decision(["n1/gpu0", "n0/gpu1"], ["n1/gpu1"])
    assert ranks_by_host(made) == {"n1": (0, 2), "n0": (1,)}
    on_hosts = [JobRank(0, 3, 0, 2, 0, 2), JobRank(1, 3, 1, 2, 0, 2), JobRank(2, 3, 0, 1, 1, 2)]
    assert [each.rank_of(made) for each in on_hosts] == [0, 2, 1]
    assert [JobRank(rank, 3, rank, 3).rank_of(made) for rank in range(3)] == [0, 1, 2]  # tried on one host


def test_a_job_of_another_size_is_refused_with_both_numbers_and_the_commands() -> None:
    made = decision(["n0/cpu0", "n0/cpu1"], ["n1/cpu0"])
    with pytest.raises(RankCountError, match="the plan is for 3 ranks, the job has 2") as caught:
        JobRank(0, 2).require_size(made)
    assert "on n1: torchrun --nnodes 2 --node-rank 1 --nproc-per-node 1 --master-addr n0" in caught.value.remedies[1]
    with pytest.raises(RankCountError) as caught:
        JobRank(0, 2, over_mpi=True).require_size(made)
    assert caught.value.remedies[0] == "mpiexec -n 3 halopipe run PLAN"
    with pytest.raises(RankCountError, match="2 ranks on n0, host 0 of the job has 1") as caught:
        JobRank(0, 3, 0, 1, 0, 2).rank_of(made)
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


def test_the_loopback_interface_leads_to_this_host() -> None:
    assert interfaces()["lo"] == LOOPBACK
    assert (address_of("lo"), address_of(LOOPBACK)) == (LOOPBACK,) * 2
    assert interface_towards(LOOPBACK) == interface_towards("127.0.1.1") == "lo"


def test_with_other_hosts_the_loopback_interface_is_never_meant() -> None:
    assert interface_towards(LOOPBACK, several_hosts=True) != "lo"


def test_an_interface_that_is_not_there_is_named_beside_those_that_are() -> None:
    with pytest.raises(UsageError, match="this host has no interface nowhere0") as caught:
        address_of("nowhere0")
    assert "lo (127.0.0.1)" in caught.value.details[0]


@pytest.mark.parametrize("host", ["no-such-host.invalid", "a..b"])
def test_where_there_is_no_way_to_a_host_the_way_to_any_other_is_taken(host: str) -> None:
    assert interface_towards(host) == interface_towards("192.0.2.1")


def test_gloo_is_told_the_way_to_the_master_unless_somebody_said_so() -> None:
    environment = {"MASTER_ADDR": LOOPBACK, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    choose_gloo_interface(environment)
    assert environment[GLOO] == "lo"
    for known in ({"MASTER_ADDR": LOOPBACK, GLOO: "eth7"}, {"WORLD_SIZE": "2"}):
        before = dict(known)
        choose_gloo_interface(known)
        assert known == before


def test_the_address_is_one_that_can_be_bound_to() -> None:
    with socket.create_server((address_of("lo"), 0)) as listener:
        assert listener.getsockname()[0] == LOOPBACK
