"""Whole training steps with compiled, divided stages, in processes: the numbers of one device."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from planner.ir.errors import UnsupportedModelError
from runtime.optim.ties import groups_of
from tests.runtime.divided import by_stage
from tests.runtime.engines import trained
from tests.runtime.plans import Trained, assert_equal, batch_of, engine_of
from tests.runtime.spatial.test_pipelines import HEIGHT, MICRO_BATCHES, network, serial
from tests.runtime.transport.conftest import run_in_processes


@pytest.mark.parametrize("cuts", [HEIGHT, {"channel": (0, 1, 2)}], ids=["height", "channel"])
def test_compiled_stages_train_as_one_device_does(cuts, tmp_path):
    """Takes 7 s: two processes compile their stages, forward and backward."""
    decision, expected = by_stage(network()[1].graph, [], [cuts], MICRO_BATCHES), serial()

    def program(transport):
        torch.set_num_threads(1)
        engine = engine_of(decision, *network(), transport, compiler="aot_eager")
        batches = [batch_of(network()[0], sum(MICRO_BATCHES), step) for step in range(2)]
        losses = [engine.step(*batch).loss for batch in batches]
        kept = [
            {name: each.detach() for name, each in some().items()} for some in (engine.gradients, engine.state_dict)
        ]
        return losses, *kept

    for found in run_in_processes(2, program, groups_of(decision, network()[1].graph), tmp_path / "store"):
        assert_equal(Trained(*found), expected)


def test_a_stage_that_computes_spans_again_is_refused() -> None:
    first, second, *_ = network()[1].graph.by_name()
    whole = by_stage(network()[1].graph, [], [HEIGHT], MICRO_BATCHES)
    decision = replace(whole, stages=(replace(whole.stages[0], recomputed=((first,), (second,))),))
    with pytest.raises(UnsupportedModelError, match="2 spans of layers again"):
        trained(network(), decision, 1, compiler="eager")
