"""What the launcher of a run on this host tells people of its ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

from halopipe.launch import spawn
from halopipe.launch.job_environment import JobRank, job_rank
from halopipe.launch.job_stores import job_stores
from halopipe.launch.processes import workers_of
from halopipe.run_spec.job import Job, RankResult
from halopipe.run_spec.options import RunOptions
from runtime.monitor.activity import Activity, Beat
from runtime.monitor.watch import Supervisor
from tests.halopipe import learners


@pytest.mark.parametrize("heard", [(), ("first",), ("first", "second")])
def test_what_people_should_hear_is_told_once_also_of_a_run_that_is_over_before_its_next_beat(
    heard: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    activity = Activity()
    for remark in ("first", "second", "first"):
        activity.tell(remark)
    assert (activity.remarks, activity.remark) == (("first", "second"), "second")
    text = RankResult(0, (), (0.1,), {}, 0, (), remarks=activity.remarks).to_json()

    def run(self: Supervisor, workers: object) -> dict[int, str]:
        for number, remark in enumerate(heard):
            beat = Beat(0, number, "", 0, 0.0, 1.0, 0, None, 0.0, remark=remark)
            self.watch({0: beat})
            self.watch({0: beat})
        return {0: text}

    monkeypatch.setattr(Supervisor, "run", run)
    job, told = Job(learners.plan([]), RunOptions(1), tmp_path), list[str]()
    (result,) = spawn._watched(job, None, dist.HashStore(), lambda at: told.append(at.word))
    assert told == ["first", "second"]
    assert result.remarks == ("first", "second")


def test_a_rank_of_this_host_is_told_what_torchrun_would_tell_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But that the store is its attempt's alone: it need not wait until the others are there."""
    workers, store = workers_of(tmp_path, 2)
    for name, text in workers._variables[1].items():
        monkeypatch.setenv(name, text)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert job_rank() == JobRank(1, 2, 1, 2, 0, 1)
    to_wait, to_talk = job_stores(1, 2)
    to_wait.set("from", "rank 1")
    assert (store.get("from"), to_talk.get("from")) == (b"rank 1", b"rank 1")
