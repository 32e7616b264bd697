"""What only processes do: be started by torchrun's environment, and share what they are started with."""

from __future__ import annotations

import os
import socket

import pytest
import torch
import torch.distributed as dist

from planner.ir.errors import TransportError
from runtime.transport import GlooTransport, open_gloo

pytestmark = pytest.mark.parametrize("run", ["gloo", "shared", "mixed"], indirect=True)


def test_the_default_group_stays_where_somebody_else_made_it(run):
    def program(transport):
        GlooTransport().close()
        assert dist.is_initialized()
        transport.barrier()
        transport.close()
        with pytest.raises(TransportError, match="there is no default process group"):
            GlooTransport()

    run(2, program)


def test_the_environment_of_a_launcher_names_rank_size_and_meeting_place(run, monkeypatch):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    monkeypatch.setenv("WORLD_SIZE", "2")

    def program(transport):
        transport.close()
        os.environ["RANK"] = str(1 - transport.rank)
        joined = open_gloo(timeout_s=20.0)
        total = torch.tensor([joined.rank])
        joined.all_reduce(total, (0, 1))
        place = joined.rank, joined.world_size, total.item()
        joined.close()
        return place

    assert run(2, program) == [(1, 2, 1), (0, 2, 1)]


def test_a_second_attempt_is_not_misled_by_what_the_first_left_in_the_launchers_store(run, monkeypatch):
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # torchrun's agent has one
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(server.port))
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")

    def program(transport):
        transport.close()
        os.environ["RANK"] = str(transport.rank)
        joined = open_gloo(timeout_s=5.0)
        total = torch.tensor([1])
        joined.all_reduce(total, (0, 1))
        joined.close()
        return total.item()

    for attempt in range(2):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(attempt))
        assert run(2, program) == [2, 2]


def test_ranks_that_do_not_find_each_other_are_told_so(run, tmp_path, monkeypatch):
    monkeypatch.delenv("MASTER_ADDR", raising=False)

    def program(transport):
        transport.close()
        with pytest.raises(TransportError, match="rank from the environment could not join the others"):
            open_gloo(timeout_s=5.0)
        with pytest.raises(TransportError, match="rank 0 of 2 could not join the others"):
            open_gloo(0, 2, dist.FileStore(str(tmp_path / f"lonely-{transport.rank}"), 2), timeout_s=0.3)

    run(2, program)
