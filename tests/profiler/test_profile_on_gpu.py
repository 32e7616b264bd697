"""A profile on a GPU: it is of one, and its bytes are the allocator's.  No times are compared."""

from __future__ import annotations

import pytest
import torch

from cuda_ops.device.placing import tensors_of
from planner.ir.profile import ModelSource, Optimizer, Profile
from profiler.capture.graph import capture_for
from profiler.measure.memory import footprints
from profiler.measure.noise import clock_for
from profiler.measure.timing import SegmentedPass, segments
from profiler.session import profile
from profiler.source.model import example_of
from profiler.source.source import load_model

pytestmark = pytest.mark.cuda

MODEL = ModelSource("profiler.models.resnet:resnet18", {"width": "32", "num_classes": "10"}, (8, 3, 64, 64))
GPT = ModelSource("profiler.models.gpt:gpt", {"vocabulary": "64", "width": "128", "layers": "2", "heads": "4"}, (4, 64))


@pytest.fixture(scope="module")
def found() -> Profile:
    return profile(MODEL, device="cuda", num_workers=1, optimizer=Optimizer("SGD", {"lr": 0.01}), quick=True)


def test_a_profile_is_of_the_gpu(found: Profile) -> None:
    (device,) = found.cluster.devices
    assert device.name == "n0/gpu0"
    assert device.kind == torch.cuda.get_device_name(0)
    assert device.core_share == 0.0
    assert set(found.measurements) == {device.kind}
    assert any("cudnn" in one.key.lower() for one in found.measurements[device.kind])
    assert found.provenance.canary_before_s > 0


def test_every_time_is_one(found: Profile) -> None:
    (kind,) = found.measurements
    measured = found.measurements[kind]
    for one in measured:
        assert min(one.forward_s, one.backward_s, one.backward_input_s, one.backward_weight_s) >= 0
    assert all(seconds > 0 for seconds in found.provenance.iteration_s.values())


@pytest.mark.parametrize("source", [MODEL, GPT], ids=["resnet", "gpt"])
def test_bytes_are_those_of_the_caching_allocator(source: ModelSource) -> None:
    device = torch.device("cuda:0")
    model, captured = capture_for(load_model(source), device)
    tensors = example_of(captured.graph.inputs, model, model.samples)
    found = footprints(captured, tensors, model.samples)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated(device)
    loss = model.loss_of_prepared(model.inputs, model.targets)
    held = torch.cuda.memory_allocated(device) - before
    assert loss.device == device
    saved = sum(each.saved_bytes for each in found.values())
    assert saved == pytest.approx(held, rel=0.05)
    assert all(each.workspace_bytes >= 0 for each in found.values())


@pytest.mark.parametrize("split", [False, True], ids=["both", "split"])
def test_a_pass_gives_the_gradients_of_the_module(split: bool) -> None:
    device = torch.device("cuda:0")
    source = ModelSource(GPT.factory, GPT.arguments, GPT.input_shape, "float64")
    model, captured = capture_for(load_model(source), device)
    assert {tensor.device for tensor in tensors_of(captured.graph_module)} == {device}
    model.loss_of_prepared(model.inputs, model.targets).backward()
    expected = {name: p.grad.clone() for name, p in model.module.named_parameters()}
    model.module.zero_grad(set_to_none=True)
    tensors = example_of(captured.graph.inputs, model, model.samples)
    run = SegmentedPass(captured, tensors, model.samples, clock_for(device), split)
    parts = segments(captured)
    for part in parts:
        run.forward(part)
    run.start_backward()
    for part in reversed(parts):
        run.backward(part)
    times = run.times()
    assert all(forward_s >= 0 and backward.both_s >= 0 for forward_s, backward in times.values())
    for name, parameter in model.module.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name])
