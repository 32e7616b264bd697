"""Hostile requests of the benchmark are refused, and its large bodies are of the size that is asked for."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from benchmarks import serving
from tests.halopipe.extras.serving.stand_in import StandIn
from tests.halopipe.extras.serving.test_http import port_of

BYTES = 2**14


def test_every_hostile_request_is_refused_and_right_ones_are_answered() -> None:
    takes = StandIn(nn.Identity())
    takes.dtype = torch.float32
    with port_of(takes, BYTES) as port:
        statuses = [serving._asked(port, text) for text in serving._hostile(18)]
        assert all(400 <= status < 500 for status in statuses), statuses
        assert serving._asked(port, b"GET /health HTTP/1.1\r\nHost: here\r\n\r\n") == 200
        assert serving._output(port, '{"inputs": [[1, 2.5]]}') == [[1.0, 2.5]]


@pytest.mark.parametrize("number", range(8))
def test_large_bodies_are_of_the_size_asked_for_and_refused(number: int) -> None:
    kind, body = list(serving.large(BYTES))[number]
    assert 0.9 * BYTES < len(body) <= BYTES
    with port_of(StandIn(nn.Identity()), BYTES) as port:
        assert 400 <= serving._asked(port, serving._raw(kind, body)) < 500
