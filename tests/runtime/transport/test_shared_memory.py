"""What only ranks that share memory do: hand blocks over, wait without a thread, vanish without a trace."""

from __future__ import annotations

import gc
import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from cuda_ops.memory import available, install
from planner.ir.errors import DeadlineError, OutOfMemoryError, TransportError
from runtime.transport import MessageKey, open_named
from runtime.transport.segments import SharedSegments
from runtime.transport.shared_memory import IN_PARTS_BYTES
from tests.runtime.transport.conftest import run_in_processes

DEADLINE_S = 20.0
SPEC = [((1000,), torch.float32)]

pytestmark = pytest.mark.parametrize("run", ["shared"], indirect=True)


def key(number: int, step: int = 0) -> MessageKey:
    return MessageKey(step, "F", 0, 1, number)


def test_a_block_comes_back_when_the_last_tensor_of_its_message_is_gone(run):
    """However many messages there were, the segment is as large as those that were held at once."""

    def program(transport):
        used = []
        views = []
        for number in range(40):
            if transport.rank == 0:
                transport.send(key(number), 1, [torch.full((1000,), float(number))])
                transport.flush()
                transport.barrier()
                used.append(transport.segments.used_bytes)
            else:
                transport.post_receive(key(number), 0, SPEC)
                (came,) = transport.receive(key(number), 0)
                views = [came[:3], came[5:]] if number % 2 else [came[7]]
                transport.barrier()
        return used, [view.flatten()[0].item() for view in views]

    (used, _), (_, views) = run(2, program)
    assert used[-1] == used[2] < used[0] + 3 * 4096 * 2
    assert views == [39.0, 39.0]


def test_what_ranks_do_together_gives_its_blocks_back(run):
    """However often they meet, the segment is about as large as after the first few times."""

    def program(transport):
        ranks = (0, 1, 2)
        used = []
        others = [rank for rank in ranks if rank != transport.rank]
        for _ in range(40):
            transport.all_reduce(torch.ones(1000), ranks)
            transport.start_sum(torch.ones(IN_PARTS_BYTES // 4), ranks).wait()
            flat = torch.ones(3000)
            transport.reduce_scatter(flat, (1000,) * 3, ranks)
            transport.all_gather(flat, (1000,) * 3, ranks)
            sent, received = ({rank: torch.ones(1000) for rank in others} for _ in range(2))
            transport.start_exchange(sent, received).wait()
            received = {rank: torch.ones(50, 40)[:, :20] for rank in others}  # which is not in one piece
            transport.start_exchange(sent, received).wait()
            transport.barrier()
            used.append(transport.segments.used_bytes)
        return used

    for used in run(3, program, [(0, 1, 2)]):
        assert used[-1] < 2 * used[4]


def test_received_tensors_can_be_written_and_outlive_transport_and_sender(run):
    def program(transport):
        if transport.rank == 0:
            transport.send(key(0), 1, [torch.ones(1000)])
            transport.flush()
            return os._exit(0)
        transport.post_receive(key(0), 0, SPEC)
        (came,) = transport.receive(key(0), 0)
        transport.close()
        time.sleep(0.1)
        came += 1
        return came.sum().item()

    assert run(2, program)[1] == 2000.0


@pytest.mark.skipif(bool(available()), reason=f"no counting allocator: {available()}")
def test_a_message_counts_as_memory_of_the_rank_that_holds_it(run):
    def program(transport):
        if transport.rank == 0:
            transport.barrier()
            transport.send(key(0), 1, [torch.ones(1000)])
            return transport.flush()
        counter = install()
        transport.segments.count_memory()
        transport.barrier()
        transport.post_receive(key(0), 0, SPEC)
        counter.reset_peak()
        before = counter.current_bytes
        came = transport.receive(key(0), 0)
        held = counter.current_bytes - before
        del came
        return held, counter.current_bytes - before, counter.peak_bytes - before >= held

    assert run(2, program)[1] == (4064, 0, True)


def test_more_announcements_than_a_ring_holds_wait_with_their_sender(run):
    def program(transport):
        if transport.rank == 0:
            for number in range(700):
                transport.send(key(number), 1, [torch.full((1,), float(number))])
            transport.flush()
            return transport.num_buffers()
        time.sleep(0.05)
        found = []
        for number in reversed(range(700)):
            transport.post_receive(key(number), 0, [((1,), torch.float32)])
            found.append(transport.receive(key(number), 0)[0].item())
        return found

    sent, found = run(2, program)
    assert sent == (0, 0)
    assert found == [float(number) for number in reversed(range(700))]


@pytest.mark.parametrize("other", [torch.ones(1000, dtype=torch.int32), torch.ones(999)], ids=["dtype", "size"])
@pytest.mark.parametrize("way", ["sum", "exchange"])
def test_what_is_of_another_dtype_or_size_is_not_taken_for_what_was_expected(run, way, other):
    def program(transport):
        peer = 1 - transport.rank
        mine = torch.ones(1000) if transport.rank == 0 else other.clone()
        ways = {
            "sum": lambda: transport.all_reduce(mine, (0, 1)),
            "exchange": lambda: transport.start_exchange({peer: mine}, {peer: mine}).wait(),
        }
        with pytest.raises(TransportError, match="or they are of another dtype") as caught:
            ways[way]()
        transport.barrier()
        return f"expects ({len(mine)},) {mine.dtype} from rank {peer}" in str(caught.value)

    assert run(2, program, [(0, 1)]) == [True, True]


def test_segments_have_no_name_and_leave_none(run):
    def names() -> set[str]:  # but those of MPI, of a test beside this one
        folder = Path("/dev/shm")
        return {path.name for path in folder.glob("*") if not path.name.startswith("mpich")}

    before = names()

    def program(transport):
        maps = Path("/proc/self/maps").read_text(encoding="ascii")
        return maps.count("/memfd:halopipe (deleted)"), names() - before

    assert run(2, program) == [(2, set()), (2, set())]
    gc.collect()
    assert names() <= before


def test_a_message_beyond_the_segment_is_out_of_memory_with_a_remedy(run):
    def program(transport):
        if transport.rank == 1:
            return None
        with pytest.raises(OutOfMemoryError, match="no room for a message of") as caught:
            transport.segments.block(1 << 60)
        return "--transport gloo" in str(caught.value)

    assert run(2, program)[0]


def test_a_segment_of_another_process_is_not_taken_for_the_one_meant(run):
    def program(transport):
        mine = SharedSegments(transport.rank, 2)
        address = mine.address("host")
        wrong = type(address)(address.host, address.boot, address.process, address.file, "00" * 16, address.cores)
        gone = type(address)(address.host, address.boot, 2**22 - 1, address.file, address.token, address.cores)
        faults = [mine.attach(1 - transport.rank, each) for each in (wrong, gone)]
        mine.close()
        return faults

    for wrong, gone in run(2, program):
        assert "another process" in wrong
        assert "No such process" in gone


def test_a_rank_whose_core_something_else_uses_sleeps_at_once_and_the_others_as_they_are(run, tmp_path):
    def opened(rank, world_size, groups, store):
        meeting = dist.FileStore(str(store), world_size)
        return open_named("shared", rank, meeting, 20.0, groups, ("n0",) * world_size, sleeps=rank == 1)

    def program(transport):
        transport.barrier()
        return transport.spin_s > 0

    expected = [len(os.sched_getaffinity(0)) > 1, False]
    assert run_in_processes(2, program, (), tmp_path / "store", opened) == expected


def test_what_is_sent_to_a_rank_that_has_left_is_refused_at_once(run):
    def program(transport):
        if transport.rank == 1:
            return None
        while not transport.segments.has_left(1):
            time.sleep(0.001)
        with pytest.raises(TransportError, match="rank 0 lost rank 1"):
            transport.send(key(0), 1, [torch.ones(1000)])
        return transport.num_buffers()

    assert run(2, program)[0] == (0, 0)


def test_after_its_deadline_a_rank_is_lost_for_its_peers_and_for_itself(run, over):
    def program(transport):
        if transport.rank == 0:
            transport.deadline_s = 0.05
            transport.post_receive(key(0), 1, SPEC)
            with pytest.raises(DeadlineError, match="waited"):
                transport.receive(key(0), 1)
            with pytest.raises(TransportError, match="rank 0 lost rank 1"):
                transport.send(key(1), 1, [torch.ones(1)])
            return over.wait(DEADLINE_S)  # its peer learns of it while it is still there
        transport.post_receive(key(2), 0, SPEC)
        with pytest.raises(TransportError, match="rank 1 lost rank 0"):
            transport.receive(key(2), 0)
        over.set()
        return True

    assert run(2, program) == [True, True]


def test_without_the_files_of_proc_ranks_talk_over_gloo(run, monkeypatch, tmp_path):
    def missing():
        raise FileNotFoundError("there is no /proc")

    monkeypatch.setattr("runtime.transport.segments.boot_id", missing)

    def opened(rank, world_size, groups, store):
        meeting = dist.FileStore(str(store), world_size)
        return open_named("", rank, meeting, 20.0, groups, ("n0",) * world_size)

    def program(transport):
        total = torch.full((2,), float(transport.rank + 1))
        transport.all_reduce(total, (0, 1))
        return transport.name, total.tolist()

    assert run_in_processes(2, program, ((0, 1),), tmp_path / "store", opened) == [("gloo", [3.0, 3.0])] * 2
