"""What a run on GPUs does beside one on cores, done on the processor: stages that are placed, messages over channels.

The processor stands for the GPU, gloo for NCCL; what is left out is CUDA itself.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from halopipe.data.batch_sources import MESSAGE_KINDS
from halopipe.run_spec.job import REFERENCE, Job, RankResult
from halopipe.run_spec.options import RunOptions
from halopipe.training.single_device import make_reference
from halopipe.training.work import work
from planner.ir.plan import Plan
from planner.ir.profile import ModelSource
from planner.ir.program import Program
from runtime.monitor.failure import set_text
from runtime.transport import ChannelTransport, channels_of
from runtime.transport.base import join
from tests.forks import forked
from tests.halopipe.plans import plan_of
from tests.halopipe.ranks import run_job

HERE = torch.device("cpu")
MODEL = ModelSource("tests.halopipe.learners:classifier", {}, (4, 5), "float64")


def over_channels(
    rank: int, num_ranks: int, path: Path, groups: tuple[tuple[int, ...], ...], program: Callable[[], Program]
) -> ChannelTransport:
    make = partial(
        ChannelTransport,
        *(channels_of(program()), groups),
        backend="gloo",
        device="cpu",
        host_kinds=MESSAGE_KINDS,
        timeout_s=60.0,
        owns_group=True,
    )
    return join("gloo", rank, num_ranks, dist.FileStore(str(path), num_ranks), 60.0, make)


def run_over_channels(plan: Plan, folder: Path, **options: object) -> list[RankResult]:
    (folder / "job").mkdir()
    job = Job(plan, RunOptions(**{"steps": 5, "warmup": 1, "deadline_s": 60.0, **options}), folder / "job")
    set_text(dist.FileStore(str(folder / "talk"), -1), REFERENCE, make_reference(job, HERE).to_text())
    num_ranks = plan.decision.num_ranks

    def rank_of(rank: int) -> str:
        torch.set_num_threads(1)
        stores = [dist.FileStore(str(folder / name), num_ranks) for name in ("talk", "board")]
        opened = partial(over_channels, rank, num_ranks, folder / "group")
        return work(job, rank, *stores, opened, device=HERE).to_json()

    return [RankResult.from_json(text) for text in forked(num_ranks, rank_of)]


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize(
    ("cuts", "options", "data_from"),
    [([0.5], {}, "first"), ([], {"ranks": [(0, 1)], "shares": [(1, 1)]}, "each")],
    ids=["pipeline", "replicas"],
)
def test_a_run_over_channels_computes_what_one_device_does(
    cuts: list[float], options: dict[str, object], data_from: str, tmp_path: Path
) -> None:
    plan = plan_of(MODEL, cuts, **options)
    results = run_over_channels(plan, tmp_path, data_from=data_from, check_numerics=True)
    compared = [each for result in results for each in result.compared]
    assert {each.kind for each in compared} >= {"gradient", "parameter", "loss"}
    assert all(each.error <= each.accepted for each in compared)


def test_stages_that_are_placed_train_as_those_that_stay(tmp_path: Path) -> None:
    plan = plan_of(MODEL, [0.5])
    losses = []
    for name, device in (("there", HERE), ("here", None)):
        (tmp_path / name).mkdir()
        losses.append(run_job(plan, tmp_path / name, device=device).losses)
    assert losses[0] == losses[1]


def test_the_memory_of_placed_stages_is_that_of_the_device_s_meter(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Meter:
        current_bytes = 7
        taken = 0

        def take_peak(self) -> int:
            self.taken += 1
            return 1000 + self.taken

        def limit(self, num_bytes: int | None) -> None:
            if num_bytes is not None:
                pytest.fail("nobody asked for a limit")

    meters = [Meter(), Meter()]
    monkeypatch.setattr("halopipe.training.rank.meter_of", lambda device: meters.pop())
    result = run_job(plan_of(MODEL, [0.5]), tmp_path, device=HERE, warmup=2, steps=3)
    assert all(peak > 1000 for peak in result.peak_bytes)
