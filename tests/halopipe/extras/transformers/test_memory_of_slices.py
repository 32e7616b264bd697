"""What ranks hold that divide optimiser state, gradients and parameters, counted while they run, and predicted."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from cuda_ops.memory import available
from halopipe.extras.kernels.modelled import modelled
from halopipe.extras.transformers.ways import plan_by
from halopipe.launch.run import run_plan
from halopipe.planning.options import ProfileOptions
from halopipe.run_spec.options import RunOptions
from planner.ir.profile import ModelSource, Profile

WIDTH, LAYERS = 1024, 6
"""Of 4 MiB each: a bucket a layer."""
STEPS = RunOptions(steps=2, warmup=1, deadline_s=60.0, check_first_step=False, device="cpu")


def wide(*, input_shape: tuple[int, ...] = (32, WIDTH)) -> tuple[nn.Module, tuple[torch.Tensor, ...], nn.Module]:
    torch.manual_seed(0)
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    inputs = torch.randn(input_shape)
    return nn.Sequential(*layers, nn.Linear(WIDTH, 10)), (inputs, torch.arange(len(inputs)) % 10), nn.CrossEntropyLoss()


@pytest.fixture(scope="module")
def profile() -> Profile:
    """Without a run: what layers hold follows from their operators."""
    source = ModelSource(f"{__name__}:wide", {}, (32, WIDTH))
    return modelled(source, ProfileOptions(on="a100-dgx", workers=2, optimizer="AdamW", sizes=(4, 8, 16, 32)))


@pytest.mark.skipif(bool(available()), reason="no compiler for the counting allocator")
@pytest.mark.parametrize(
    "zero", [*(pytest.param(zero, marks=pytest.mark.exhaustive("two processes, 5 s")) for zero in (1, 2)), 3]
)
def test_what_is_counted_is_what_was_predicted(profile: Profile, zero: int) -> None:
    plan = plan_by(profile, f"data=2,zero={zero},micro_batch=8", 32)
    found = run_plan(plan, STEPS)
    assert found is not None
    for rank, counted in zip(plan.prediction.ranks, found.peak_bytes, strict=True):
        assert rank.peak_bytes == pytest.approx(counted, rel=0.02)
