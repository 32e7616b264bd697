"""The launcher, with workers of a few lines that need no torch."""

from __future__ import annotations

import errno
import gc
import json
import os
import resource
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch.distributed as dist

from halopipe.launch.processes import Processes, worker_environment
from planner.ir.errors import DeadlineError, StageFailedError, TransportError, WorkerDiedError
from planner.ir.schedule import Action
from runtime.monitor import watch
from runtime.monitor.activity import Beat
from runtime.monitor.waits import Waits
from runtime.monitor.watch import Supervisor, host_store, join_store, meet
from tests.forks import forked
from tests.processes import writing_into

LEAVE = "from runtime.monitor import failure, watch; store = watch.join_store(watch.LOOPBACK, PORT); failure.leave_"
"""The worker's own port and rank are put in."""
FINE = f"{LEAVE}result(store, RANK, 'yes')"
WAIT = "import time; time.sleep(600)"


def error(kind: str) -> str:
    record = json.dumps({"type": kind, "title": kind, "details": [], "remedies": []})
    return f"{LEAVE}error(store, RANK, {record!r})"


def run(folder: Path, *scripts: str, store: dist.TCPStore | None = None, **options: object) -> dict[int, str]:
    hosted = store or host_store()
    texts = [text.replace("RANK", str(rank)).replace("PORT", str(hosted.port)) for rank, text in enumerate(scripts)]
    variables = {rank: {"RANK": str(rank)} for rank in range(len(scripts))}
    titles = {rank: f"rank {rank} (n0/cpu{rank}, stage {rank})" for rank in range(len(scripts))}
    try:
        call = "tests.processes:execute"
        loads = ["runtime.monitor.watch"]
        workers = Processes(call, texts, variables, folder, os.environ, loads=loads)
        return Supervisor(titles, hosted, **options).run(workers)
    finally:
        assert writing_into(folder) == []


def test_a_host_that_cannot_reach_itself_is_no_meeting_place(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_route(*address: object) -> None:
        raise OSError(errno.ENETUNREACH, os.strerror(errno.ENETUNREACH))

    monkeypatch.setattr(watch, "_require_route", no_route)
    with pytest.raises(TransportError, match=r"(?s)cannot reach itself at 127.0.0.1.*unreachable.*ip link set lo up"):
        host_store()


def test_all_results_are_waited_for(tmp_path: Path) -> None:
    assert run(tmp_path, FINE, "import time; time.sleep(0.2); " + FINE) == {0: "yes", 1: "yes"}


def test_the_error_of_a_worker_is_raised_and_the_others_are_ended(tmp_path: Path) -> None:
    with pytest.raises(StageFailedError):
        run(tmp_path, WAIT, error("StageFailedError"), WAIT)


def test_a_worker_that_lost_its_peer_lets_the_peer_explain_itself(tmp_path: Path) -> None:
    with pytest.raises(StageFailedError):
        run(tmp_path, error("TransportError"), "import time; time.sleep(0.3); " + error("StageFailedError"))
    with pytest.raises(TransportError):
        run(tmp_path, error("TransportError"), WAIT)


@pytest.mark.parametrize(
    ("end", "how"),
    [
        ("import os; os.kill(os.getpid(), 9)", "by signal SIGKILL"),
        ("import os; os.abort()", "by signal SIGABRT"),
        ("import os; os._exit(0)", "with exit code 0"),
        ("import sys; sys.exit(7)", "with exit code 7"),
    ],
)
def test_a_worker_that_dies_is_named_with_how_and_its_last_lines(tmp_path: Path, end: str, how: str) -> None:
    with pytest.raises(WorkerDiedError) as caught:
        run(tmp_path, WAIT, f"import sys; print('last line', file=sys.stderr, flush=True); {end}")
    assert caught.value.title == f"rank 1 (n0/cpu1, stage 1) ended {how} without a word"
    assert "stderr: last line" in caught.value.details


def put(
    store: dist.Store, rank: int, number: int, for_s: float, deadline_s: float, what: str = "1F3", step: int = 2
) -> None:
    beat = {"rank": rank, "number": number, "what": what, "step": step, "for_s": for_s, "deadline_s": deadline_s}
    store.set(f"halopipe/beat/{rank}", json.dumps({**beat, "num_done": 2, "loss": None, "step_s": 0.1}))


def test_a_worker_that_does_one_thing_for_too_long_is_ended(tmp_path: Path) -> None:
    store = host_store()
    put(store, 1, 1, for_s=10.0, deadline_s=2.0)
    with pytest.raises(DeadlineError) as caught:
        run(tmp_path, WAIT, WAIT, store=store)
    assert "rank 1 (n0/cpu1, stage 1) hangs in 1F3, step 2: it has been there for 10." in caught.value.title
    assert "deadline 2 s" in caught.value.title


def test_a_worker_that_goes_silent_is_ended(tmp_path: Path) -> None:
    store = host_store()
    put(store, 0, 1, for_s=0.0, deadline_s=0.1)
    with pytest.raises(DeadlineError, match=r"rank 0 .* is silent in 1F3, step 2: nothing was heard of it for \d+\."):
        run(tmp_path, WAIT, store=store)


def test_a_worker_that_is_stopped_before_its_first_word_is_named_at_once(tmp_path: Path) -> None:
    with pytest.raises(DeadlineError, match=r"rank 1 .* is stopped before its first step: somebody") as caught:
        run(tmp_path, WAIT, "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)")
    assert caught.value.ranks == (1,)


def test_a_worker_that_is_stopped_in_a_longer_wait_than_a_step_s_is_named_after_the_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "_SLEEPS_S", 0.5)
    monkeypatch.setattr(watch, "_GRACE_S", 0.2)
    store = host_store()
    for rank in range(2):
        put(store, rank, 1, for_s=0.0, deadline_s=600.0, what="saving", step=11)
    with pytest.raises(DeadlineError, match=r"rank 1 .* is stopped in saving, step 11: somebody") as caught:
        run(tmp_path, WAIT, "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)", store=store, deadline_s=0.5)
    assert caught.value.ranks == (1,)


def test_a_worker_that_sleeps_at_the_start_is_named_where_others_wait_and_one_that_works_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "_SLEEPS_S", 0.5)
    store = host_store()
    works = "import time; end = time.time() + 2.0\nwhile time.time() < end: pass\n"
    put(store, 0, 1, for_s=9.0, deadline_s=600.0, what="meeting the others", step=-1)
    soon = "import time; time.sleep(2.5)\n"
    assert run(tmp_path, soon + FINE, works + FINE, store=store, deadline_s=0.5) == {0: "yes", 1: "yes"}
    with pytest.raises(DeadlineError, match=r"rank 1 .* hangs before its first step: it sleeps") as caught:
        run(tmp_path, WAIT, WAIT, store=store, deadline_s=0.5)
    assert caught.value.ranks == (1,)


def test_the_error_of_a_hang_says_who_waits_for_whom(tmp_path: Path) -> None:
    store = host_store()
    put(store, 0, 1, for_s=1.0, deadline_s=20.0, what="0F3")
    put(store, 1, 1, for_s=10.0, deadline_s=2.0, what="1RECV_F3<0")
    rows = [[Action.parse(text) for text in row.split()] for row in ("0F3 0SEND_F3>1", "1RECV_F3<0 1F3")]
    with pytest.raises(DeadlineError) as caught:
        run(tmp_path, WAIT, WAIT, store=store, waits=Waits(rows, [(0,), (1,)]))
    assert caught.value.title.startswith("rank 1 (n0/cpu1, stage 1) waits in vain in 1RECV_F3<0, step 2")
    assert (
        "rank 1 waits 10.0 s for rank 0 (activation of micro-batch 3, stage 0 -> stage 1), " in caught.value.details[0]
    )


def test_progress_is_what_the_workers_publish(tmp_path: Path) -> None:
    store = host_store()
    put(store, 0, 1, for_s=0.0, deadline_s=60.0)
    seen: list[Mapping[int, Beat]] = []
    noted = tmp_path / "noted"

    def watch(beats: Mapping[int, Beat]) -> None:
        seen.append(beats)
        noted.touch()

    # The worker stays until it was looked at: how long that takes depends on the machine.
    waits = f"import os, time\nwhile not os.path.exists({str(noted)!r}): time.sleep(0.01)\n"
    run(tmp_path, waits + FINE, store=store, watch=watch)
    assert seen[0][0].num_done == 2


def test_an_interrupt_ends_all_workers(tmp_path: Path) -> None:
    def interrupt(beats: Mapping[int, Beat]) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, WAIT, WAIT, watch=interrupt)


def test_the_store_listens_on_the_loopback_interface_only() -> None:
    store = host_store()
    port = store.port
    lines = Path("/proc/net/tcp").read_text().splitlines() + Path("/proc/net/tcp6").read_text().splitlines()
    listening = [line.split()[1] for line in lines if line.split()[1].endswith(f":{port:04X}") and " 0A " in line]
    assert listening == [f"0100007F:{port:04X}"]
    store.set("a", "b")


def meet_in_threads(store: dist.Store, num_ranks: int) -> list[str]:
    with ThreadPoolExecutor(num_ranks) as pool:
        return list(pool.map(lambda rank: meet(store, rank, num_ranks, timeout_s=20.0), range(num_ranks)))


def test_all_ranks_of_an_attempt_share_a_prefix_that_no_other_has() -> None:
    store = dist.HashStore()
    first = meet_in_threads(store, 4)
    second = meet_in_threads(store, 4)
    assert len(set(first)) == len(set(second)) == 1
    assert first[0] != second[0]
    assert meet(store, 0, 1) not in (first[0], second[0])


def test_what_dead_ranks_left_in_the_store_misleads_nobody() -> None:
    store = dist.HashStore()
    with pytest.raises(DeadlineError, match="rank 1 waited in vain for rank 0"):
        meet(store, 1, 2, timeout_s=0.05)  # it asked, and died before rank 0 came
    with pytest.raises(DeadlineError, match="rank 0 waited in vain for rank 1"):
        meet(store, 0, 2, timeout_s=0.05)  # this rank 0 answered the dead one
    assert len(set(meet_in_threads(store, 2))) == 1


def test_a_store_at_a_given_place_listens_there_alone_and_is_shared_with_who_had_it_first() -> None:
    store = host_store()
    port = store.port
    store.set("a", "b")
    again = host_store("127.0.0.1", port)
    assert again.get("a") == b"b"
    with pytest.raises(TransportError, match=r"cannot listen at 192\.0\.2\.1"):
        host_store("192.0.2.1", port)


def test_a_store_that_is_not_there_is_named() -> None:
    store = host_store()
    port = store.port
    del store
    with pytest.raises(TransportError, match=f"no store answers at 127.0.0.1, port {port}"):
        join_store("127.0.0.1", port, timeout_s=0.5)


def test_workers_do_not_inherit_somebody_elses_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("SLURM_PROCID", "3")
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    environment = worker_environment([str(tmp_path)], "eth7")
    assert not {"RANK", "SLURM_PROCID"} & set(environment)
    assert environment["PYTHONPATH"] == f"{tmp_path}{os.pathsep}/elsewhere"
    assert environment["HOME"] == os.environ["HOME"]
    assert environment["GLOO_SOCKET_IFNAME"] == "eth7"


def test_a_store_that_may_not_open_its_files_is_refused_at_once() -> None:
    """torch asks again for minutes."""

    def refused(_: int) -> int:
        free = [os.dup(0) for _ in range(6)]  # a limit is a number of a file, not of files: there may be gaps below it
        limit = max(free) + 1
        for file in free:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
        try:
            host_store()
        except OSError as error:
            return error.errno or 0
        return 0

    gc.collect()  # stores of other tests, whose files would be free in the middle of it
    assert forked(1, refused) == [errno.EMFILE]
