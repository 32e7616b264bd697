"""What processes have in common: what one does before them, and where a step of all went, read off a picture.

rank 0   0F0 |--| 0SEND |-|            0RECV |------------|  0B0 |---|  0UPDATE |-|
rank 1            1RECV |---------|  1F0 |--| 1B0 |--| 1SEND |-|        1UPDATE |-----|
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from benchmarks.chains import chain_profile
from cuda_ops.device.fork_server import Process, Server, start
from halopipe.launch import ahead
from halopipe.launch.combine import ranks_measured, stage_medians, stage_once_s
from planner.ir.plan import Decision
from planner.ir.schedule import Op
from planner.ir.timeline import Span, Timeline
from tests.planner.factories import chain_decision

ROOT = Path(__file__).resolve().parents[3]


def begin(name: str, output: int, server: Server, files: Sequence[int] = ()) -> Process:
    """A process that calls a function of this file."""
    call, arguments = ahead.continued(f"{__name__}:{name}", [])
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "GREETING": "again"}
    return start(call, arguments, environment=environment, output=output, files=files, loads=[], server=server)


def sleep() -> None:
    time.sleep(60)


def leave() -> None:
    raise SystemExit(3)


def learn(done: str, deed: str) -> Callable[[], None]:
    """What is done ahead: processes are to begin with it, unless it cannot be parted by a fork."""
    global _learned
    _learned = f"{deed} in {os.getpid()}"
    sys.path.append("/learned")
    os.environ["LEARNED"] = "yes"
    os.environ.pop("GREETING")
    if deed == "thread":
        threading.Thread(target=time.sleep, args=[60], daemon=True).start()
    elif deed == "file":
        _kept.append(open(done, "ab"))  # noqa: SIM115 - it is to stay open
    elif deed == "folder":
        os.chdir("/")
    elif deed == "error":
        raise ValueError("no such thing")
    elif deed == "late":
        time.sleep(60)
    return Path(done).touch


_learned = ""
_kept: list[object] = []


def recite(file: int) -> None:
    os.write(file, f"{_learned}, {sys.path[-1]}, {os.environ['LEARNED']}, {os.environ.get('GREETING')}\n".encode())


def learned(done: Path, deed: str, output: int, deadline_s: float = 60.0) -> Server | None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "GREETING": "again"}
    given = {"environment": environment, "output": output, "loads": [], "num_processes": 2}
    return ahead.begun(f"{__name__}:learn", [str(done), deed], **given, deadline_s=deadline_s)


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs Linux 5.3")
def test_processes_begin_with_what_one_has_done_before_them_which_it_then_forgets(tmp_path: Path) -> None:
    done = tmp_path / "done"
    with tempfile.TemporaryFile("w+") as output:
        server = learned(done, "nothing more", output.fileno())
        assert server is not None
        reads, writes = os.pipe()
        assert begin("recite", output.fileno(), files=[writes], server=server).wait(60) == 0
        assert not done.exists()
        assert begin("recite", output.fileno(), files=[writes], server=server).wait(60) == 0
        process = begin("sleep", output.fileno(), server=server)
        os.close(writes)
        with open(reads) as file:
            first, second = file.readlines()
        assert first == second
        assert first.startswith("nothing more in ")
        assert first.endswith(", /learned, yes, None\n")
        assert done.exists()
        server.end()
        assert process.wait(60) == -signal.SIGKILL
        assert begin("leave", output.fileno(), server=server).wait(60) == 3  # as if there had been none


@pytest.mark.parametrize("deed", ["thread", "file", "folder", "error", "late"])
def test_what_cannot_be_parted_by_a_fork_is_left_to_each_process(deed: str, tmp_path: Path) -> None:
    with tempfile.TemporaryFile("w+") as output:
        assert learned(tmp_path / "done", deed, output.fileno(), 0.5 if deed == "late" else 60.0) is None
        output.seek(0)
        assert ("ValueError: no such thing" in output.read()) is (deed == "error")


def step(*spans: tuple[int, str, float, float], step_s: float) -> Timeline:
    return Timeline("measured", step_s, tuple(Span(*span) for span in spans))


def pipeline() -> Decision:
    return chain_decision(chain_profile(2), (1,), (2,))


PIPELINE = step(
    (0, "0F0", 0.0, 2.0),
    (0, "0SEND_F0>1", 2.0, 2.5),
    (0, "0RECV_B0<1", 2.5, 9.0),
    (0, "0B0", 9.0, 12.0),
    (0, "0UPDATE", 12.0, 13.0),
    (1, "1RECV_F0<0", 0.0, 3.0),
    (1, "1F0", 3.0, 5.0),
    (1, "1B0", 5.0, 8.0),
    (1, "1SEND_B0>0", 8.0, 8.5),
    (1, "1UPDATE", 8.5, 11.0),
    step_s=14.0,
)


def test_a_receive_waits_for_another_rank_until_it_sends_then_for_the_message() -> None:
    first, second = ranks_measured([PIPELINE], pipeline())
    assert (first.compute_s, first.communication_s, first.bubble_s, first.idle_s) == pytest.approx((6.0, 1.5, 5.5, 1.0))
    assert (second.compute_s, second.communication_s, second.bubble_s) == pytest.approx((7.5, 1.5, 2.0))
    assert second.idle_s == pytest.approx(3.0)
    assert ranks_measured([PIPELINE, PIPELINE], pipeline()) == (first, second)
    assert ranks_measured([], pipeline()) == ()
    assert stage_once_s([PIPELINE], pipeline(), Op.UPDATE) == pytest.approx((1.0, 2.5)), "that of the slowest rank"
    assert stage_once_s([PIPELINE], pipeline(), Op.REDUCE_GRAD) == (0.0, 0.0)


def test_a_sum_counts_from_when_its_last_rank_is_there() -> None:
    replicas = chain_decision(chain_profile(2), (), (2,), ranks=[(0, 1)], shares=[(1, 1)])
    found = step((0, "0REDUCE_GRAD", 1.0, 4.0), (1, "0REDUCE_GRAD", 2.5, 4.5), step_s=5.0)
    assert stage_once_s([found], replicas, Op.REDUCE_GRAD) == pytest.approx((2.0,))
    first, second = ranks_measured([found], replicas)
    assert (first.communication_s, second.communication_s) == pytest.approx((1.5, 2.0))
    assert (first.bubble_s, first.idle_s) == pytest.approx((2.5, 1.0))


def test_stage_medians_are_per_micro_batch_and_halves_add_up() -> None:
    spans = [("0F0", 0, 1), ("0F1", 1, 4), ("0F2", 4, 6), ("1I0", 0, 2), ("1W0", 2, 3), ("0SEND_F0>1", 0, 9)]
    timelines = [step(*((0, *span) for span in spans), step_s=1.0)]
    assert stage_medians(timelines, 2, (Op.FORWARD,)) == (2, 0)
    assert stage_medians(timelines, 2, (Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)) == (0, 3)
