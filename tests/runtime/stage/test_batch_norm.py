from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import pytest
import torch
import torch.nn.functional as F

from planner.ir.errors import StageFailedError
from runtime.stage import batch_norm
from runtime.stage.batch_norm import synchronised_batch_norm
from runtime.transport import Exchanging, InProcessTransport
from runtime.transport.small_allgather import PendingRows, RowGather
from tests.runtime.ranks import on_ranks

MOMENTUM = 0.3
EPS = 1e-3
SHARES = [(5, 3), (1, 7), (4, 0), (0, 6), (2, 2, 2), (1, 4, 3), (3, 0, 1), (0, 2, 0)]
EXTENTS = [(), (9,), (5, 4), (3, 2, 4)]


def alone(parts: Sequence[torch.Tensor], dtype: torch.dtype) -> PendingRows:
    """What a rank without others is told."""
    return PendingRows(torch.cat(tuple(parts)).to(dtype).unsqueeze(0))


def tensors(rows: int, extent: tuple[int, ...], dtype: torch.dtype = torch.float64, channels: int = 6) -> dict:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, channels, *extent, generator=generator, dtype=dtype)
    scale, shift, mean, var = torch.rand(4, channels, generator=generator, dtype=dtype)
    dy = torch.randn(x.shape, generator=generator, dtype=dtype)
    return {"x": 3 * x + 40, "dy": dy, "weight": scale, "bias": shift, "running_mean": mean, "running_var": var}


def serial(data: dict, affine: bool = True) -> dict[str, torch.Tensor]:
    x, weight, bias = (data[name].clone().requires_grad_() for name in ("x", "weight", "bias"))
    mean = data["running_mean"].clone()
    var = data["running_var"].clone()
    parameters = (weight, bias) if affine else (None, None)
    y = F.batch_norm(x, mean, var, *parameters, training=True, momentum=MOMENTUM, eps=EPS)
    y.backward(data["dy"])
    gradients = {"dweight": weight.grad, "dbias": bias.grad} if affine else {}
    return {"y": y.detach(), "dx": x.grad, "running_mean": mean, "running_var": var, **gradients}


def distributed(data: dict, shares: tuple[int, ...], affine: bool = True) -> list[dict[str, torch.Tensor]]:
    """What each rank has; nothing that it was given is overwritten."""

    def program(end: InProcessTransport) -> dict[str, torch.Tensor]:
        part = {name: data[name].split(shares)[end.rank] for name in ("x", "dy")}
        x = part["x"].clone().requires_grad_()
        weight, bias = (data[name].clone().requires_grad_() if affine else None for name in ("weight", "bias"))
        mean = data["running_mean"].clone()
        var = data["running_var"].clone()
        tell = RowGather(cast(Exchanging, end), tuple(range(len(shares))))
        y = synchronised_batch_norm(x, weight, bias, mean, var, MOMENTUM, EPS, tell)
        y.backward(part["dy"])
        assert torch.equal(x, part["x"])
        gradients = {"dweight": weight.grad, "dbias": bias.grad} if affine else {}
        return {"y": y.detach(), "dx": x.grad, "running_mean": mean, "running_var": var, **gradients}

    before = data["dy"].clone()
    found = on_ranks(len(shares), program)
    assert torch.equal(data["dy"], before)
    return found


def assert_agree(expected: dict, parts: list[dict], tolerance: float) -> None:
    for name, value in expected.items():
        values = [part[name] for part in parts]
        if name in ("y", "dx"):
            found = torch.cat(values)
        elif name in ("dweight", "dbias"):
            found = sum(values)
        else:
            assert all(torch.equal(other, values[0]) for other in values)
            found = values[0]
        torch.testing.assert_close(found, value, rtol=tolerance, atol=tolerance * max(1.0, value.abs().max().item()))


@pytest.mark.cases(12)
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("extent", EXTENTS)
@pytest.mark.parametrize("shares", SHARES)
def test_outputs_gradients_and_running_statistics_are_those_of_all_rows_together(shares, extent, affine):
    data = tensors(sum(shares), extent)
    assert_agree(serial(data, affine), distributed(data, shares, affine), 1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_in_the_precisions_of_training(dtype):
    data = tensors(9, (6, 5))
    exact = serial(data)
    parameters = ("weight", "bias", "running_mean", "running_var")
    low = {name: value.to(torch.float32 if name in parameters else dtype) for name, value in data.items()}
    if dtype == torch.bfloat16:  # the reference sees the same rounded input
        exact = serial({name: value.double() for name, value in low.items()})
    found = distributed(low, (4, 0, 5))
    assert found[0]["y"].dtype == found[0]["dx"].dtype == dtype
    assert found[0]["running_var"].dtype == torch.float32
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    assert_agree(exact, [{name: value.double() for name, value in part.items()} for part in found], tolerance)


def test_half_precision_without_parameters_keeps_its_statistics_in_single():
    x = torch.randn(64, 3, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    y = synchronised_batch_norm(x, None, None, None, None, 0.1, EPS, alone)
    expected = F.batch_norm(x.double(), None, None, training=True, eps=EPS)
    torch.testing.assert_close(y.double(), expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("needs_input_gradient", [True, False])
def test_one_table_forward_and_one_backward_only_where_the_input_needs_a_gradient(needs_input_gradient):
    data = tensors(6, (4,))
    x = data["x"].clone().requires_grad_(needs_input_gradient)
    weight = data["weight"].clone().requires_grad_()
    told: list[int] = []

    def tell(parts: Sequence[torch.Tensor], dtype: torch.dtype) -> PendingRows:
        table = alone(parts, dtype)
        told.append(table.wait().numel())
        return table

    y = synchronised_batch_norm(x, weight, data["bias"], None, None, MOMENTUM, EPS, tell)
    assert told == [1 + 2 * 6]
    y.backward(data["dy"])
    assert told[1:] == ([2 * 6] if needs_input_gradient else [])
    torch.testing.assert_close(weight.grad, serial(data)["dweight"], rtol=1e-12, atol=1e-12)


def test_statistics_of_far_away_values_do_not_cancel():
    data = tensors(8, (50,))
    data["x"] += 1e6
    parts = distributed(data, (5, 3))
    torch.testing.assert_close(parts[0]["running_var"], serial(data)["running_var"], rtol=1e-9, atol=0)


@pytest.mark.parametrize("shares", [(1, 0), (0, 1, 0)])
def test_one_value_a_channel_has_no_variance(shares):
    data = tensors(1, ())
    with pytest.raises(StageFailedError, match="batch norm of 1 values a channel, expected at least 2"):
        distributed(data, shares)


def test_no_values_at_all_are_normalised_and_leave_the_statistics_alone():
    """Clouds without a site."""
    data = tensors(0, ())
    for part in distributed(data, (0, 0)):
        for name in ("running_mean", "running_var"):
            assert torch.equal(part[name], data[name])
        assert not part["dweight"].any()
        assert not part["dbias"].any()


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("chunk_bytes", [1, 500, 1 << 30])
def test_local_moments_are_those_of_torch_however_many_channels_are_taken_at_a_time(
    monkeypatch, chunk_bytes, memory_format
):
    monkeypatch.setattr(batch_norm, "_CHUNK_BYTES", chunk_bytes)
    values = (tensors(3, (5, 4))["x"] + 1e5).contiguous(memory_format=memory_format)
    mean, variance = batch_norm._moments(values)
    expected_mean, expected = torch.batch_norm_update_stats(values, None, None, 0.0)
    torch.testing.assert_close(mean, expected_mean, rtol=1e-14, atol=0)
    torch.testing.assert_close(variance, expected, rtol=1e-12, atol=0)


def test_single_precision_moments_of_values_far_from_zero_are_as_good_as_the_input():
    values = (torch.randn(4, 3, 50, 50, generator=torch.Generator().manual_seed(0)) + 1000.0).float()
    _, variance = batch_norm._moments(values)
    expected = values.double().var((0, 2, 3), correction=0)
    torch.testing.assert_close(variance.double(), expected, rtol=1e-5, atol=0)
