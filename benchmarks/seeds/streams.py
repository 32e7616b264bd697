"""PARTIME (Meloni et al., 2022): a pipeline over time, each stage on a request of its own, without an end.

A network of equal layers in float64 on two cores of this host, a stage each: profiled, planned for the highest rate of
stream, then served to this process for some seconds.  Rates, latencies and memory are timed and measured here, loopback
alone: on a machine that does something else they say little, as the rows of the host's own speed do not either.

    sustained   requests as fast as there is room for them, the first ones left out
    latency     one request after another, none on the way
    memory      of all ranks and this process, resident, after the load less before it
"""

from __future__ import annotations

import http.client
import io
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

import halopipe as hp
from benchmarks.report import Row, at_least, at_most
from benchmarks.seeds.jobs import TOLERANCE, folder_of, halopipe
from planner.ir.plan import Plan

if TYPE_CHECKING:
    from torch import Tensor

    from halopipe.extras.serving.serving import Serving

_ROWS = 32
_WIDTH = 1024
_LAYERS = 8
_WARM = 10
_WITHIN = 0.05
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")

MODEL = f"""
import torch
from torch import nn


def model(input_shape=({_ROWS}, {_WIDTH})):
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear({_WIDTH}, {_WIDTH}), nn.Tanh()) for _ in range({_LAYERS})]
    example = torch.randn(*input_shape), torch.randn(*input_shape)
    return nn.Sequential(*layers).eval(), example, nn.functional.mse_loss
"""


def rows(quick: bool) -> Iterator[Row]:
    """Sustained rate and latency beside those predicted, answers against the module, and memory."""
    import torch  # late, as for all that is served

    with folder_of(MODEL) as folder:
        halopipe(folder, "profile", "model.py:model", "--dtype", "float64", *(["--quick"] if quick else []))
        stream = ("--objective", "throughput", "--schedule", "forward")
        halopipe(folder, "plan", "profile.json", *stream, "--ranks", "1", "-o", "one.json")
        halopipe(folder, "plan", "profile.json", *stream, "--fix", "*=replicas:1", "-o", "plan.json")
        here = Path.cwd()
        os.chdir(folder)
        try:
            plan, one = (hp.load(each) for each in ("plan.json", "one.json"))
            assert isinstance(plan, Plan)
            assert isinstance(one, Plan)
            best = plan.prediction.sustained_per_s
            alone = one.prediction.sustained_per_s
            yield Row("streams, two stages over one device: predicted", best / alone, "x")
            with hp.serve(plan) as serving, torch.no_grad():
                yield from _loaded(serving, plan, 100 if quick else 1000)
        finally:
            os.chdir(here)


def _loaded(serving: Serving, plan: Plan, count: int) -> Iterator[Row]:
    import torch

    from profiler.source.source import load_model

    said = plan.prediction
    module = load_model(plan.inputs.model).module
    requests = [torch.randn(_ROWS, _WIDTH, dtype=torch.float64) for _ in range(8)]
    alone_s = []
    for number in range(_WARM + count // 5):
        found = serving.submit(requests[number % 8]).result()
        alone_s += [found.latency_s] if number >= _WARM else []
    yield _beside("streams, latency of a request alone (timed): measured over predicted", median(alone_s) / said.step_s)
    before = _resident_bytes(serving)
    answers: list[Tensor] = []
    ended_s: list[float] = []
    for output in serving.map(requests[number % 8] for number in range(_WARM + count)):
        ended_s.append(time.perf_counter())
        answers += [output] if len(answers) < 8 else []
    rate = _ROWS * count / (ended_s[-1] - ended_s[_WARM - 1])
    worst = max(
        float((found - module(x)).norm() / module(x).norm()) for found, x in zip(answers, requests, strict=True)
    )
    yield _beside("streams, sustained rate (timed): measured over predicted", rate / said.sustained_per_s)
    full_s = serving.counts.latency_s(0.5)
    yield Row(
        "streams, latency of a full stream (timed): of room times the period", full_s / _full_s(serving, plan), "x"
    )
    yield at_most("streams, executed: largest error of an answer", worst, "relative", TOLERANCE)
    yield at_most("streams, memory after the load less before", (_resident_bytes(serving) - before) / 2**20, "MiB", 32)
    yield from _over_http(serving, said.sustained_per_s, count // 4)


def _full_s(serving: Serving, plan: Plan) -> float:
    return serving.room * plan.decision.global_batch / plan.prediction.sustained_per_s


def _beside(name: str, ratio: float) -> Row:
    return Row(name, ratio, "x", f"within {_WITHIN:.0%}", abs(ratio - 1) <= _WITHIN)


def _over_http(serving: Serving, predicted_per_s: float, count: int) -> Iterator[Row]:
    """Four clients on the loopback interface, each with one request after another."""
    from halopipe.extras.serving.http import listen, opened
    from halopipe.extras.serving.request_sources import Draining

    draining = Draining()
    statuses = list[int]()
    with opened("0") as door:
        port = door.getsockname()[1]
        server = threading.Thread(target=listen, args=(serving, door, 2**24, draining))
        server.start()
        body = io.BytesIO()
        np.save(body, np.zeros((_ROWS, _WIDTH)))

        def client() -> None:
            link = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
            for _ in range(count // 4):
                link.request("POST", "/infer", body.getvalue(), {"Content-Type": "application/x-npy"})
                answer = link.getresponse()
                answer.read()
                statuses.append(answer.status)

        _wait_for(port)
        start_s = time.perf_counter()
        clients = [threading.Thread(target=client) for _ in range(4)]
        for each in clients:
            each.start()
        for each in clients:
            each.join()
        rate = _ROWS * len(statuses) / (time.perf_counter() - start_s)
        draining.set()
        server.join()
    yield at_least("streams, over HTTP: answered of asked", statuses.count(200) / max(1, len(statuses)), "share", 1.0)
    yield Row("streams, rate over HTTP, four clients (timed): measured over predicted", rate / predicted_per_s, "x")


def _wait_for(port: int) -> None:
    for _ in range(200):
        try:
            http.client.HTTPConnection("127.0.0.1", port, timeout=5).connect()
        except OSError:
            time.sleep(0.05)
        else:
            return


def _resident_bytes(serving: Serving) -> int:
    numbers = [os.getpid(), *serving.run.ranks.processes.values()]
    return sum(int(Path(f"/proc/{number}/statm").read_text().split()[1]) * _PAGE_BYTES for number in numbers)
