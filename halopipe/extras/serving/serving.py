"""A plan that answers, as a script sees it: requests in, answers in order, never more on the way than there is room.

    with hp.serve("plan.json") as serving:
        future = serving.submit(x)               waits while ``room`` requests are on their way: back-pressure
        print(future.result().output)            the module's output, in its own form
        for output in serving.map(loader): ...   one after another, in order

Ranks are processes of this host (:mod:`halopipe.launch.parallelize`).  Each has a connection of its own: it is sent
what its stages read of a request, and sends back what they make of the module's output
(:mod:`halopipe.extras.serving.rank_loop`). A request has up to the plan's global batch of samples, which fill its
micro-batches in order.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from cuda_ops._torch import BatchNormBase, DropoutBase
from halopipe.extras.serving import examples
from halopipe.extras.serving.options import SERVING_MODES
from halopipe.extras.serving.rank_loop import (
    END,
    HERE,
    READY,
    REQUEST,
    SHAPE,
    ZEROS,
    RankDescription,
    decoded,
    encoded,
    pieces_of,
    short_name,
    stream,
)
from halopipe.launch.job_environment import job_rank
from halopipe.launch.parallelize import Parallel
from halopipe.planning.measure import no_model
from halopipe.run_spec.options import ScriptOptions
from halopipe.terminal.units import require_known
from halopipe.training.evaluate import joined
from planner.ir.errors import BusyError, HalopipeError, MissingFileError, UsageError, WorkerError
from planner.ir.graph import SAMPLE
from planner.ir.plan import Plan
from planner.ir.profile import Profile
from profiler import load_model
from profiler.source.model import LoadedModel
from runtime.pipeline.microbatches import filled
from runtime.pipeline.routing import Piece

_log = logging.getLogger(__name__)

MODULE, EVALUATION = SERVING_MODES
_LOOK_S = 0.05
_MOST_LATENCIES = 100_000


@dataclass(frozen=True, slots=True)
class RequestAnswer:
    """What became of a request.

    Attributes:
        output: of the module, in its own form, for the samples of the request.
        loss: that the stages learnt by, a mean over samples; None where nothing is learnt.
        latency_s: since the request was taken; what waits for room is not taken yet.
    """

    output: Any
    loss: float | None
    latency_s: float


@dataclass(slots=True)
class RequestCounts:
    """What was asked so far.

    Attributes:
        requests, samples: that were answered.
        refused: for which there was no room.
        latencies_s: of the last answers.
        first_s, last_s: when the first request was taken and the last answered, by ``time.perf_counter``.
    """

    requests: int = 0
    samples: int = 0
    refused: int = 0
    latencies_s: deque[float] = field(default_factory=lambda: deque(maxlen=_MOST_LATENCIES))
    first_s: float = 0.0
    last_s: float = 0.0

    @property
    def samples_per_s(self) -> float:
        """Answered, from the first request to the last answer; 0 where there is none."""
        return self.samples / (self.last_s - self.first_s) if self.last_s > self.first_s else 0.0

    @property
    def summary(self) -> dict[str, float]:
        """For people and programs."""
        return {
            "requests": self.requests,
            "samples": self.samples,
            "refused": self.refused,
            "samples_per_s": self.samples_per_s,
            **{f"latency_p{share}_s": self.latency_s(share / 100) for share in (10, 50, 90)},
        }

    def latency_s(self, share: float) -> float:
        """The latency that so large a share of the last answers kept within; 0 where there is none."""
        kept = sorted(self.latencies_s)
        return kept[min(len(kept) - 1, int(share * len(kept)))] if kept else 0.0


@dataclass(slots=True)
class _PendingRequest:
    future: Future[RequestAnswer]
    rows: int
    began_s: float
    is_probe: bool
    missing: set[int]
    pieces: dict[tuple[int, str], list[Piece]] = field(default_factory=dict)
    losses: float = 0.0


class Serving:
    """A plan that answers requests; use as a context, or call ``close`` at the end.

    Args:
        run: the ranks, opened with ``answers``.
        model: that the plan was made for, in this process: gives the form of batches and outputs.
        mode: one of ``SERVING_MODES``.
        learn: whether each stage updates its weights after each request, by a loss of its own; requests have targets.
        room: requests that may be on their way; 0: twice the stages, and two.
        check: whether the first answer, of the model's example, is compared with one device before a request is taken.

    Attributes:
        counts: what was asked so far.
        checked: what the comparison found, in words; empty where it was not asked for.
        learns: whether stages update their weights.
        is_training: whether parts of the module are in training mode that behave otherwise in it: norms and dropouts.
        failure: what a rank has failed by.

    Raises:
        UsageError: the plan does not learn by local losses alone.
        UnsupportedModelError: the module's output cannot be had of the captured graph.
        NumericsError: the first answer is not one device's.
    """

    def __init__(
        self,
        run: Parallel,
        model: LoadedModel,
        *,
        mode: str = MODULE,
        learn: bool = False,
        room: int = 0,
        check: bool = True,
    ) -> None:
        require_known("mode", [mode], SERVING_MODES)
        if learn and mode != MODULE:
            raise UsageError(
                "stages learn in the mode of the module", [f"mode {mode!r} was asked for"], ["--mode module"]
            )
        self.run = run
        self.counts = RequestCounts()
        self.checked = ""
        self._structure = model.batch
        self.learns = learn
        parts = (part for part in model.module.modules() if isinstance(part, (BatchNormBase, DropoutBase)))
        self.is_training = mode == MODULE and any(part.training for part in parts)
        self.room = room or 2 * len(run.plan.decision.stages) + 2
        self._slots = threading.BoundedSemaphore(self.room)
        self._lock = threading.Lock()
        self._waiting = dict[int, _PendingRequest]()
        self._number = 0
        self._is_over = False
        self.failure: HalopipeError | None = None
        self._output: examples.OutputForm | None = None
        if check:
            model = examples.as_trained(run, model)
        path = run.ranks.folder / "stream"
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as door:
            try:
                with short_name(str(path)) as name:
                    door.bind(name)
            except OSError as error:
                what = f"{path}: {error.strerror or error}"
                raise MissingFileError("no socket can be made in the job's folder", [what], ["TMPDIR=/tmp"]) from None
            door.listen(run.plan.decision.num_ranks)
            run.ranks.begin(stream, str(path), learns=learn, training=mode == MODULE)
            self._links, self._ranks = self._opened(door)
        self._stream_spec = self._ranks[0]
        Path(path).unlink()
        self._thread = threading.Thread(target=self._listen, name="answers", daemon=True)
        self._thread.start()
        try:
            source = run.plan.inputs.model
            stream_spec = self._stream_spec
            dtype = source.autocast or source.dtype
            of_example = (model, stream_spec.inputs, stream_spec.planned, stream_spec.fixed, dtype)
            example = examples.ServedExample.of(*of_example, evaluated=mode != MODULE)
            self._output = example.form
            if check:
                self.checked = example.compare(self._probe)
        except BaseException:
            self._abandon()
            raise

    def __enter__(self) -> Serving:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self._abandon()
            self.run.ranks.end()

    def submit(
        self, inputs: Any, targets: Any = None, *, block: bool = True, timeout_s: float | None = None
    ) -> Future[RequestAnswer]:
        """Takes a request, of up to the plan's global batch of samples; its answer comes in the order of requests.

        What was taken is answered: its future cannot be cancelled.  Callbacks of futures run in the thread that gives
        all answers, and are not to wait for others.

        Args:
            inputs: as the module's example has them; floats are rounded to the model's dtype, nothing else is lost.
            targets: likewise; needed where stages learn, else only where the user wants them judged by nobody.
            block: whether to wait while there is no room.
            timeout_s: how long; None: for ever.

        Raises:
            BusyError: there is no room.
            UsageError: the request is not what the model takes.
            HalopipeError: what a rank has failed by.
        """
        tensors = self._tensors(inputs, targets)
        if threading.current_thread() is self._thread:  # a callback of an answer: whoever gives answers cannot wait
            block = False
        if not self._slots.acquire(blocking=block, timeout=timeout_s if block else None):
            self.counts.refused += 1
            raise BusyError(
                f"{self.room} requests are on their way, and there is room for no more",
                [f"answered so far: {self.counts.requests}, {self.counts.samples_per_s:.3g} samples a second"],
                ["ask again later", "more room: --room N, at the price of latency"],
            )
        try:
            return self._send(tensors, is_probe=False)
        except BaseException:
            self._slots.release()
            raise

    def map(self, batches: Iterable[Any]) -> Iterator[Any]:
        """The outputs for ``batches``, in order; the next batch is asked for when there is room for it.

        Where stages learn, each batch is ``(inputs, targets)``.
        """
        on_the_way: deque[Future[RequestAnswer]] = deque()
        for batch in batches:
            inputs, targets = batch if self.learns else (batch, None)
            while len(on_the_way) >= self.room:
                yield on_the_way.popleft().result().output
            on_the_way.append(self.submit(inputs, targets))
        while on_the_way:
            yield on_the_way.popleft().result().output

    def close(self) -> None:
        """Answers what was taken, and ends the ranks; what they learnt is put into the script's module, if it gave one.

        Raises:
            HalopipeError: what a rank has failed by.
        """
        try:
            self.finish()
        finally:
            self.run.close()

    def finish(self) -> None:
        """Answers what was taken, then ends the stream; the ranks stay, for :attr:`run` to be saved or looked at.

        Raises:
            HalopipeError: what a rank has failed by.
        """
        if self._is_over:
            return
        self._is_over = True
        if self.failure is None:
            with self._lock:
                self._tell_all([encoded({"what": END})] * len(self._links))
            self._thread_joined()
        if self.failure is not None:
            raise self.failure
        self.run.num_steps = self.run.ranks.end_of_call()["num_steps"]

    @property
    def num_waiting(self) -> int:
        """Requests on their way."""
        return len(self._waiting)

    def request(self, tensors: Mapping[str, Tensor]) -> tuple[Any, Any]:
        """Inputs and targets of tensors by name; see :func:`halopipe.extras.serving.examples.request`."""
        return examples.request(self._structure, tensors)

    @property
    def dtypes(self) -> Mapping[str, torch.dtype]:
        """What the model takes, by the names of the tensors of a request."""
        specs = self._stream_spec.inputs.specs.values()
        return {name: getattr(torch, spec.dtype) for name, spec in zip(self._structure.names, specs, strict=False)}

    @property
    def input_names(self) -> tuple[str, ...]:
        """Of the tensors of a request, targets after inputs."""
        return self._structure.names

    def _tensors(self, inputs: Any, targets: Any) -> list[Tensor | None]:
        """The tensors of a request, checked, in the order of the graph's inputs; None for targets not given."""
        structure = self._structure
        if targets is None and self.learns and structure.has_targets:
            raise UsageError("stages that learn need targets", ["the request has none"], ["submit(inputs, targets)"])
        if targets is None:
            values, aims = replace(structure, targets=None).apart(inputs, "the request")
        else:
            values, aims = structure.apart((inputs, targets), "the request")
        specs = self._stream_spec.inputs
        names = list(specs.specs)
        tensors = [
            examples.cast(tensor, name, getattr(torch, specs.specs[name].dtype))
            for name, tensor in zip(names, (*values, *aims), strict=False)
        ]
        samples = specs.samples(zip(names, tensors, strict=False))
        missing = [
            torch.empty(examples.shape_of(specs, name, samples), device="meta") for name in names[len(tensors) :]
        ]
        rows = specs.rows([*tensors, *missing])
        shares = filled(rows, self._stream_spec.planned)
        if self._stream_spec.fixed and any(count not in (0, self._stream_spec.fixed) for count in shares):
            raise UsageError(
                f"a request has {rows} samples, the model was captured for {self._stream_spec.fixed} "
                "a micro-batch only",
                [f"the plan's micro-batches: {', '.join(map(str, self._stream_spec.planned))}"],
                [f"requests of a multiple of {self._stream_spec.fixed} samples"],
            )
        return [*tensors, *[None] * len(missing)]

    def _send(self, tensors: Sequence[Tensor | None], *, is_probe: bool) -> Future[RequestAnswer]:
        specs = self._stream_spec.inputs
        names = list(specs.specs)
        rows = specs.samples((name, each) for name, each in zip(names, tensors, strict=True) if each is not None)
        shapes = [
            examples.shape_of(specs, name, rows) if tensor is None else tuple(tensor.shape)
            for name, tensor in zip(names, tensors, strict=True)
        ]
        frames: dict[frozenset[str], bytes] = {}  # ranks that read the same are sent the same: one frame in memory
        for reads in {each.reads for each in self._ranks}:
            ways = [
                SHAPE if name not in reads else ZEROS if tensor is None else HERE
                for name, tensor in zip(names, tensors, strict=True)
            ]
            dtypes = [spec.dtype for spec in specs.specs.values()]
            header = {"what": REQUEST, "probes": is_probe, "inputs": list(zip(ways, shapes, dtypes, strict=True))}
            frames[reads] = encoded(
                header,
                [tensor for how, tensor in zip(ways, tensors, strict=True) if how == HERE and tensor is not None],
            )
        future: Future[RequestAnswer] = Future()
        future.set_running_or_notify_cancel()
        with self._lock:
            if self.failure is not None:
                raise self.failure
            if self._is_over:
                raise UsageError("the stream is over", ["it was closed"], ["hp.serve(...) again"])
            began_s = time.perf_counter()
            if not is_probe:
                self.counts.first_s = self.counts.first_s or began_s
            self._waiting[self._number] = _PendingRequest(
                future, rows, began_s, is_probe, {each.rank for each in self._ranks if each.answers}
            )
            self._number += 1
            self._tell_all([frames[each.reads] for each in self._ranks])
        return future

    def _tell_all(self, frames: Sequence[bytes]) -> None:
        for link, frame in zip(self._links, frames, strict=True):
            try:
                link.send_bytes(frame)
            except (OSError, ValueError):  # the rank is gone; whoever listens says why
                return

    def _probe(self, batch: Sequence[Tensor]) -> list[Tensor]:
        """The tensors of the output for a batch that leaves no trace."""
        tensors = [*batch, *[None] * (len(self._stream_spec.inputs.specs) - len(batch))]
        output: list[Tensor] = self._send(tensors, is_probe=True).result().output
        return output

    def _opened(self, door: socket.socket) -> tuple[list[Connection], list[RankDescription]]:
        """A connection to each rank, in order, and what they say of themselves."""
        door.settimeout(_LOOK_S)
        ready: list[tuple[RankDescription, Connection]] = []
        while len(ready) < self.run.plan.decision.num_ranks:
            try:
                link = Connection(door.accept()[0].detach())
                header, _ = decoded(link.recv_bytes())
            except TimeoutError:
                if self.run.ranks.have_answered:  # they refuse, or are gone
                    self.run.ranks.end_of_call()
                continue
            except EOFError:
                raise self.run.ranks.wait_for_failure() from None
            if header["what"] == READY:
                ready.append((RankDescription.read(header["description"]), link))
        ready.sort(key=lambda pair: pair[0].rank)
        return [link for _, link in ready], [description for description, _ in ready]

    def _listen(self) -> None:
        """Gives answers until the ranks leave; whatever ends it, everyone who waits hears of it."""
        try:
            self._answer_all()
        except BaseException as error:  # noqa: BLE001  # nobody else answers
            self.failure = WorkerError(
                "the thread that gives answers has ended", [f"{type(error).__name__}: {error}"], HalopipeError.usual
            )
        else:
            if not self._waiting and self._is_over:
                return
            self.failure = self.run.ranks.wait_for_failure()
        with self._lock:
            left = list(self._waiting.values())
            self._waiting = {}
        for one in left:
            self._release(one)
            _settle(one.future, self.failure)

    def _answer_all(self) -> None:
        """Puts answers together, until the ranks leave."""
        ranks = {id(link): rank for rank, link in enumerate(self._links)}
        open_links = list(self._links)
        next_of = dict.fromkeys(ranks.values(), 0)
        while open_links:
            for link in cast("list[Connection]", wait(open_links)):
                rank = ranks[id(link)]
                try:
                    header, tensors = decoded(link.recv_bytes())
                except (EOFError, OSError):
                    open_links.remove(link)
                    continue
                number = next_of[rank]
                next_of[rank] = next_of[rank] + 1
                self._take(number, rank, header, tensors)

    def _take(self, number: int, rank: int, header: Mapping[str, Any], tensors: Sequence[Tensor]) -> None:
        one = self._waiting[number]
        for key, pieces in pieces_of(header, tensors).items():
            one.pieces.setdefault(key, []).extend(pieces)
        one.losses += header["losses"]
        one.missing.discard(rank)
        if one.missing:
            return
        del self._waiting[number]
        now_s = time.perf_counter()
        latency_s = now_s - one.began_s
        outcome: RequestAnswer | Exception
        try:
            flat = [self._whole(one, len(header["rows"]), *value) for value in self._stream_spec.values]
            output = flat if self._output is None or one.is_probe else self._output(flat)
            outcome = RequestAnswer(output, one.losses / one.rows if self.learns else None, latency_s)
        except Exception as error:  # noqa: BLE001  # whoever waits must hear of it
            outcome = error
        if isinstance(outcome, RequestAnswer) and not one.is_probe:
            self.counts.requests += 1
            self.counts.samples += one.rows
            self.counts.latencies_s.append(latency_s)
            self.counts.last_s = now_s
        self._release(one)
        _settle(one.future, outcome)

    def _release(self, one: _PendingRequest) -> None:
        if not one.is_probe:
            self._slots.release()

    def _whole(
        self, one: _PendingRequest, num_microbatches: int, value: str, dims: tuple[str, ...], dtype: str
    ) -> Tensor:
        """A tensor of the output, of the parts that ranks have of each micro-batch."""
        pieces = (one.pieces.get((m, value)) for m in range(num_microbatches))
        parts = [joined(each, getattr(torch, dtype)) for each in pieces if each]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dims.index(SAMPLE) if SAMPLE in dims else 0)

    def _thread_joined(self) -> None:
        """Waits for the answers that are on their way, however long ranks take: their own deadlines watch them."""
        if threading.current_thread() is self._thread:
            raise UsageError("a callback of an answer cannot end the stream", [], ["serving.close() elsewhere"])
        while self._thread.is_alive():
            self._thread.join(1.0)

    def _abandon(self) -> None:
        self._is_over = True
        for link in self._links:
            link.close()


def _settle(future: Future[RequestAnswer], outcome: RequestAnswer | Exception) -> None:
    """Gives a future what became of it; what its owner does with it, or by a callback, is the owner's own affair."""
    try:
        if isinstance(outcome, RequestAnswer):
            future.set_result(outcome)
        else:
            future.set_exception(outcome)
    except BaseException as error:  # noqa: BLE001  # set by its owner before, or a callback that would end this thread
        _log.warning("an answer could not be given: %s", error or type(error).__name__)


def open_serving(
    plan: Plan,
    module: nn.Module | None = None,
    *,
    profile: Profile | None = None,
    optimizer: Any = None,
    options: ScriptOptions | None = None,
    checkpoint: str | Path = "",
    step: int | None = None,
    **setting: Any,
) -> Serving:
    """The ranks of a plan, ready to answer.

    Args:
        module: whose weights they begin with; None: those that the plan's factory makes.
        checkpoint: a folder of checkpoints that they go on from instead; ``step``: which one, the newest if None.
        setting: of :class:`Serving`.

    Raises:
        UsageError: this process is a rank of a job; or the stream cannot be had.
    """
    if job_rank() is not None:
        raise UsageError(
            "a plan is served from one process, which starts the ranks on its host",
            ["this process was started as a rank of a job"],
            ["halopipe serve, without torchrun"],
        )
    if module is not None and not isinstance(module, nn.Module):
        raise no_model(module)
    script_options = cast("ScriptOptions", {**(options or {}), "check_first_step": False})
    run = Parallel(module, plan, profile, None, optimizer, script_options, has_state=module is not None, answers=True)
    try:
        if checkpoint:
            run.load(checkpoint, step=step)
        return Serving(run, load_model(plan.inputs.model, script_options.get("seed", 0)), **setting)
    except BaseException:
        run.ranks.end()
        raise
