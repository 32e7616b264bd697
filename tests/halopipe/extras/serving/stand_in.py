"""A serving without ranks: the module answers in this process, when it is let."""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from halopipe.extras.serving import examples
from halopipe.extras.serving.serving import RequestAnswer, RequestCounts
from planner.ir.errors import BusyError, HalopipeError, UsageError
from profiler.source.structure import BatchStructure


class StandIn:
    """As :class:`halopipe.extras.serving.serving.Serving`, for what feeds and the port ask of it.

    Args:
        held: whether answers wait until :attr:`go` is set.
    """

    def __init__(self, module: nn.Module, room: int = 3, *, held: bool = False) -> None:
        self.module = module
        self.room = room
        self.learns = False
        self.failure = None
        self.counts = RequestCounts()
        self.go = threading.Event()
        self.most_waiting = 0
        self.dtype = torch.float64
        self._structure = BatchStructure.plain(1, 0)
        self._waiting: list[tuple[Future[RequestAnswer], Tensor]] = []
        self._lock = threading.Lock()
        if not held:
            self.go.set()

    @property
    def input_names(self) -> tuple[str, ...]:
        return self._structure.names

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def dtypes(self) -> Mapping[str, torch.dtype]:
        return dict.fromkeys(self.input_names, self.dtype)

    def request(self, tensors: Mapping[str, Tensor]) -> tuple[Any, Any]:
        return examples.request(self._structure, tensors)

    def fail(self, error: HalopipeError) -> None:
        self.failure = error  # type: ignore[assignment]
        for future, _ in self._waiting:
            future.set_exception(error)

    def submit(self, inputs: Any, targets: Any = None, *, block: bool = True) -> Future[RequestAnswer]:
        (x,) = inputs if isinstance(inputs, tuple) else (inputs,)
        if x.ndim != 2:
            raise UsageError(f"inputs has shape {tuple(x.shape)}, the model takes (4, 3)")
        future: Future[RequestAnswer] = Future()
        while block and len(self._waiting) >= self.room:
            time.sleep(1e-3)
        with self._lock:
            if len(self._waiting) >= self.room and not block:
                self.counts.refused += 1
                raise BusyError(f"{self.room} requests are on their way, and there is room for no more")
            self._waiting.append((future, x))
            self.most_waiting = max(self.most_waiting, len(self._waiting))
        threading.Thread(target=self._answer, daemon=True).start()
        return future

    def _answer(self) -> None:
        self.go.wait(20)
        with self._lock:
            if not self._waiting:
                return
            future, x = self._waiting.pop(0)
            if future.done():
                return
            with torch.no_grad():
                output = self.module(x.to(torch.float64))
            self.counts.requests += 1
            self.counts.samples += len(x)
            future.set_result(RequestAnswer(output, None, 0.0))


def network() -> nn.Module:
    """What is served."""
    torch.manual_seed(0)
    return nn.Linear(3, 2, dtype=torch.float64)


def npy(array: np.ndarray, *, allow_pickle: bool = False) -> bytes:
    """An array as a file of numpy's."""
    found = io.BytesIO()
    np.save(found, array, allow_pickle=allow_pickle)
    return found.getvalue()
