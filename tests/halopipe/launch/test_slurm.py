from __future__ import annotations

import pytest

from halopipe.launch.slurm import expand, job_variables
from planner.ir.errors import UsageError

STEP = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_JOB_NODELIST": "node[07,09-11]",
    "SLURM_JOB_ID": "4711",
}


def test_a_task_of_srun_gets_the_variables_that_torchrun_sets() -> None:
    assert job_variables(STEP) == {
        "RANK": "5",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "1",
        "GROUP_RANK": "2",
        "MASTER_ADDR": "node07",
        "MASTER_PORT": "14711",
    }


def test_the_steps_own_tasks_and_hosts_count_before_the_jobs() -> None:
    step = {"SLURM_STEP_NUM_TASKS": "3", "SLURM_STEP_NODELIST": "node11", "SLURM_STEP_ID": "2"}
    found = job_variables({**STEP, **step, "SLURM_STEP_TASKS_PER_NODE": "4(x2),3"})
    assert (found["WORLD_SIZE"], found["MASTER_ADDR"], found["MASTER_PORT"]) == ("3", "node11", "14713")
    assert found["LOCAL_WORLD_SIZE"] == "3"


def test_what_is_set_already_is_kept() -> None:
    found = job_variables({**STEP, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1234"})
    assert (found["MASTER_ADDR"], found["MASTER_PORT"]) == ("10.0.0.1", "1234")
    assert job_variables({**STEP, "RANK": "0"}) == {}


def test_neither_a_batch_script_nor_a_shell_is_a_task() -> None:
    assert job_variables({**STEP, "ENVIRONMENT": "BATCH"}) == {}
    assert job_variables({**STEP, "ENVIRONMENT": "BATCH", "SLURM_STEP_ID": "0"})["RANK"] == "5"
    assert job_variables({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "8"}) == {}


def test_ports_stay_where_stores_may_listen() -> None:
    ports = [
        int(job_variables({**STEP, "SLURM_JOB_ID": str(job)})["MASTER_PORT"]) for job in (0, 19_999, 20_000, 10**8)
    ]
    assert ports == [10_000, 29_999, 10_000, 10_000]


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("node1", "node1"),
        ("a,b", "a b"),
        ("node[1-3]", "node1 node2 node3"),
        ("node[098-101,7]", "node098 node099 node100 node101 node7"),
        ("gpu[01-02,07],login,cpu[3]", "gpu01 gpu02 gpu07 login cpu3"),
        ("rack[0-1]n[1-2].x", "rack0n1.x rack0n2.x rack1n1.x rack1n2.x"),
        ("rack[0-1]-gpu", "rack0-gpu rack1-gpu"),
        ("", ""),
    ],
)
def test_lists_of_hosts_are_expanded(text: str, hosts: str) -> None:
    assert list(expand(text)) == hosts.split()


@pytest.mark.parametrize("text", ["node[1-", "node1]", "node[]", "node[a-b]", "node[3-1]", "a,,b", "n[1]]", "n[[1]"])
def test_a_list_that_cannot_be_read_is_named(text: str) -> None:
    with pytest.raises(UsageError, match="cannot read Slurm's list of hosts"):
        list(expand(text))


def test_a_job_without_hosts_or_with_a_strange_number_is_refused() -> None:
    with pytest.raises(UsageError, match="on which hosts"):
        job_variables({**STEP, "SLURM_JOB_NODELIST": ""})
    with pytest.raises(UsageError, match="SLURM_JOB_ID is 'x'"):
        job_variables({**STEP, "SLURM_JOB_ID": "x"})
