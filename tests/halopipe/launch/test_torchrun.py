"""Ranks that torchrun or mpiexec started: where they meet, also after a restart."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch.distributed as dist

from halopipe.launch import torchrun
from halopipe.launch.job_stores import job_stores
from halopipe.launch.run import run_plan
from halopipe.run_spec.options import RunOptions
from planner.ir.codec import dump
from planner.ir.errors import HalopipeError, StageFailedError, TransportError, UsageError
from runtime.monitor.activity import StatusStore
from runtime.monitor.failure import leave_result, read_error, write_error
from runtime.transport import mpi, open_mpi
from tests.forks import forked, places_in_mpi
from tests.halopipe.launch.jobs import free_port
from tests.halopipe.plans import mined
from tests.halopipe.ranks import run_job
from tests.processes import Program

ROOT = Path(__file__).parents[3]


@pytest.mark.exhaustive("torchrun waits before it starts again")
@pytest.mark.parametrize("deed", ["raise", "kill"])
def test_a_restart_by_torchrun_works_although_its_store_remembers_the_dead(tmp_path: Path, deed: str) -> None:
    """The loss is in the fourth step, and the curve goes on after the second as if nothing had happened."""
    dump(mined(2, f"once:{deed}:7:{tmp_path / 'mark'}", dropout=0.2), tmp_path / "plan.json")
    elastic = "-m torch.distributed.run --nproc-per-node 2 --max-restarts 1 --monitor-interval 0.1"
    rendezvous = f"--master-addr 127.0.0.1 --master-port {free_port()}"
    data = "tests.halopipe.bombs:noise"
    run = f"-m halopipe run plan.json --steps 6 --data {data} --no-check-first-step --json"
    saved = "--checkpoint saved --checkpoint-every 2 --resume auto"
    known = {name: value for name, value in os.environ.items() if not name.startswith("TORCH")}
    (tmp_path / "jobs").mkdir()
    done = subprocess.run(
        [sys.executable, *f"{elastic} {rendezvous} {run} {saved}".split()],
        cwd=tmp_path,
        env={**known, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path / "jobs")},
        capture_output=True,
        text=True,
        check=False,
        timeout=150,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "mark").exists()
    found = json.loads(done.stdout)
    whole = run_plan(mined(-1, dropout=0.2), RunOptions(6, data=data, check_first_step=False))
    assert whole is not None
    assert (found["first_step"], tuple(found["losses"])) == (0, whole.losses)
    (restart,) = found["restarts"]
    assert (restart["step"], restart["resumed_step"] in (0, 2), restart["recovery_s"] > 0) == (3, True, True)
    assert (restart["code"], restart["ranks"]) == (("H502", [1]) if deed == "raise" else (restart["code"], []))
    assert sorted(path.name for path in (tmp_path / "saved").iterdir()) == ["step-2", "step-4", "step-6"]
    assert list((tmp_path / "jobs").glob("halopipe-*")) == [], "that of the killed rank was removed by the next attempt"


def test_ranks_of_mpiexec_join_as_those_of_torchrun_and_train_alike(tmp_path: Path) -> None:
    plan = mined()
    options = {"steps": 3, "warmup": 0, "check_first_step": False}

    def work(rank: int) -> tuple[tuple[float, ...], bool]:
        result = run_plan(plan, RunOptions(**options))
        return () if result is None else tuple(result.losses), "open_mpi" in opened

    opened: list[str] = []
    with pytest.MonkeyPatch.context() as patch, places_in_mpi(2) as places:
        patch.setattr(mpi, "open_mpi", lambda *given: opened.append("open_mpi") or open_mpi(*given))
        (losses, *over_mpi), others = forked(2, work, places)
    assert (others, over_mpi) == (((), True), [True])
    assert losses == pytest.approx(run_job(plan, tmp_path, **options).losses, rel=1e-6)


def told(monkeypatch: pytest.MonkeyPatch, **variables: str) -> None:
    """What this process finds in its environment of a job, and nothing else."""
    monkeypatch.setattr(os, "environ", {"PATH": os.environ["PATH"], **variables})


def test_rank_0_hosts_the_store_where_the_job_says_and_nowhere_else(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    told(monkeypatch, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    with ThreadPoolExecutor(2) as pool:
        (mine, _), (_, theirs) = pool.map(lambda rank: job_stores(rank, 2), range(2))
    lines = [line.split() for path in ("tcp", "tcp6") for line in Path(f"/proc/net/{path}").read_text().splitlines()]
    assert [line[1] for line in lines if line[1].endswith(f":{port:04X}") and line[3] == "0A"] == [
        f"0100007F:{port:04X}"
    ]
    mine.set("a", "b")
    assert theirs.get("a") == b"b"
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"


def test_two_launchers_on_one_host_meet_at_its_loopback_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each believes the other on another host: rank 0 listens at an address that other hosts could reach."""
    sizes = {"LOCAL_WORLD_SIZE": "1", "WORLD_SIZE": "2"}
    told(monkeypatch, **sizes, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    monkeypatch.setattr("halopipe.launch.job_stores.SETUP_S", 5.0)
    with ThreadPoolExecutor(2) as pool:
        (mine, _), (_, theirs) = pool.map(lambda rank: job_stores(rank, 2), range(2))
    mine.set("a", "b")
    assert theirs.get("a") == b"b"


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("address", "port", "kind", "text"),
    [
        ("", "29500", UsageError, "does not say where its ranks meet"),
        ("127.0.0.1", "", UsageError, "does not say where its ranks meet"),
        ("127.0.0.1", "http", UsageError, "does not say where its ranks meet"),
        ("a..b", "29500", TransportError, "is no host"),
        ("x" * 64, "29500", TransportError, "is no host"),
    ],
)
def test_a_job_that_does_not_say_where_to_meet_is_refused(
    monkeypatch: pytest.MonkeyPatch, address: str, port: str, kind: type[HalopipeError], text: str
) -> None:
    told(monkeypatch, MASTER_ADDR=address, MASTER_PORT=port)
    with pytest.raises(kind, match=text):
        job_stores(0, 2)


def test_the_error_of_the_rank_that_failed_first_is_raised_by_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchrun, "_FAREWELL_S", 0.0)
    store = StatusStore(dist.HashStore())
    first = StageFailedError("the bomb")
    late = TransportError("rank 0 lost rank 1")
    assert torchrun._explained(store, 1, 2, first) is first
    told = torchrun._explained(store, 0, 2, late)
    assert (type(told), told.title) == (StageFailedError, "the bomb")
    assert read_error(store.get("error/0").decode()).title == late.title


def test_a_rank_whose_result_will_not_come_is_an_error_at_once() -> None:
    store = dist.HashStore()
    store.set("error/1", write_error(StageFailedError("the bomb")))
    with pytest.raises(StageFailedError, match="the bomb"):
        torchrun.gathered(store, 0, 2, "{}", 10.0)
    leave_result(store, 1, "{}")
    assert torchrun.gathered(store, 0, 2, "{}", 10.0) == ["{}", "{}"]
    with pytest.raises(TransportError, match="rank 2 left no result"):
        torchrun.gathered(store, 0, 3, "{}", 0.0)


HANGING = """
import sys, time, torch.distributed as dist
from halopipe.launch import torchrun
from halopipe.launch.job_stores import job_stores
from halopipe.launch.run import run_plan
from runtime.monitor.activity import StatusStore
torchrun._WATCH_S = torchrun._HANGING_S = 0.2
store = StatusStore(dist.HashStore())
with torchrun._ended_if_it_hangs(store):
    if "fail" in sys.argv:
        store.set("failed", "")
        time.sleep(600)
time.sleep(1.0)
print("done")
"""


@pytest.mark.parametrize(("word", "code", "output"), [("fail", 1, ""), ("", 0, "done\n")])
def test_a_rank_that_hangs_after_another_failed_is_ended(tmp_path: Path, word: str, code: int, output: str) -> None:
    (tmp_path / "hanging.py").write_text(HANGING)
    ended, stdout, stderr = Program.start(tmp_path / "hanging.py", [word]).end()
    assert (ended, stdout) == (code, output)
    assert ("this one hangs: it is ended" in stderr) == bool(word)
