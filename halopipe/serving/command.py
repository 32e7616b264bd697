"""What ``halopipe serve`` does: it opens the ranks, answers until it is told to drain, and says what was asked."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halopipe.planning import solve
from halopipe.serving import feeds
from halopipe.serving.feeds import Draining
from halopipe.serving.serving import Serving, open_serving
from halopipe.terminal import console, units
from halopipe.terminal.output_files import claimed
from planner.ir.errors import UsageError
from planner.ir.plan import Plan

_LEARNS = "each stage learns from each request by a loss of its own: this changes the optimisation"


@dataclass(frozen=True, slots=True)
class Source:
    """Where requests come from: one of ``folder``, ``stdin`` and ``http``.

    Attributes:
        output: for answers of files.
        reader: makes a request of a path.
        follow: whether the folder is looked at again and again.
        stdin: the format; empty: another source.
        http: ``[HOST:]PORT``.
        most_bytes: of a body, or of a line.
    """

    folder: Path | None
    output: Path | None
    reader: str
    follow: bool
    stdin: str
    http: str
    most_bytes: int

    def require_fitting(self) -> None:
        """Raises :class:`UsageError` unless one source is named, with what belongs to it alone."""
        named = {"--from": self.folder, "--stdin": self.stdin, "--http": self.http}
        feeds.require_one(named)
        of_folder = {"--to": self.output, "--reader": self.reader, "--follow": self.follow}
        for option, value in of_folder.items():
            if value and self.folder is None:
                raise UsageError(f"{option} goes with --from", [], ["--from FOLDER", f"leave {option} out"])
        if self.folder is not None and self.output is None:
            raise UsageError("--from needs a folder for the answers", [], [f"--from {self.folder} --to FOLDER"])
        if self.folder is not None and self.output is not None and self.folder.resolve() == self.output.resolve():
            raise UsageError("answers would replace requests", [f"both are in {self.folder}"], ["--to another folder"])
        if self.stdin and self.stdin not in feeds.FORMATS:
            known = ", ".join(feeds.FORMATS)
            raise UsageError(f"standard input brings no {self.stdin!r}", [f"known: {known}"], [f"--stdin {feeds.JSON}"])


def serve(path: Path, source: Source, setting: Mapping[str, Any], save: Path | None, *, json: bool) -> None:
    """Answers until the source ends, or SIGTERM drains it.

    Args:
        setting: of :func:`halopipe.serving.serving.open_serving`.
        save: where a checkpoint is written of what was learnt; None: nowhere.
        json: whether what was asked is told as JSON; on stderr, where answers go to stdout.

    Raises:
        HalopipeError: what a rank has failed by.
    """
    source.require_fitting()
    planned = solve.load_plan(path)
    if setting["learn"]:
        console.remark(_LEARNS)
    door = None
    if source.http:
        http = _http()
        door = http.opened(source.http)
    with claimed([], [path], [source.output, save]):
        serving = open_serving(planned, **setting)
        with serving, _drained_by_signal() as draining:
            _say_how(serving, planned, setting["mode"])
            if door is not None:
                host, port = door.getsockname()[:2]
                console.remark(f"listening at http://{host}:{port}/infer")
                if host not in ("127.0.0.1", "::1"):
                    console.remark(
                        "anybody who reaches this address may ask: there are no passwords, and no encryption"
                    )
                http.listen(serving, door, source.most_bytes, draining)
            else:
                requests = feeds.patiently(_requests(serving, source, draining), serving, draining)
                feeds.pump(serving, requests, draining)
            serving.finish()
            if save is not None:
                serving.run.save(save)
                console.wrote(save)
    _report(serving, planned, as_json=json, to_stderr=bool(source.stdin))


def _requests(serving: Serving, source: Source, draining: Draining) -> Iterator[tuple[Any, Any, feeds.Put]]:
    if source.folder is not None and source.output is not None:
        return feeds.of_folder(serving, source.folder, source.output, source.reader, draining, follow=source.follow)
    # A reader of its own: a thread that still waits on sys.stdin when the interpreter ends would end it with an abort.
    given = open(os.dup(sys.stdin.fileno()), "rb")  # noqa: SIM115  # read until the process ends
    if source.stdin == feeds.NPY:
        return feeds.of_arrays(serving, given, sys.stdout.buffer)
    return feeds.of_lines(serving, given, sys.stdout.buffer, source.most_bytes)


def _http() -> Any:
    try:
        from halopipe.serving import http
    except ModuleNotFoundError as error:
        raise UsageError(
            "a port needs a server, which is not installed", [str(error)], ["pip install 'halopipe[serve]'"]
        ) from None
    return http


@contextmanager
def _drained_by_signal() -> Iterator[Draining]:
    """Within it SIGTERM asks for no more requests; a second one is as ever."""
    draining = Draining()
    before = signal.getsignal(signal.SIGTERM)

    def drain(*_: object) -> None:
        draining.set()
        signal.signal(signal.SIGTERM, before)

    signal.signal(signal.SIGTERM, drain)
    try:
        yield draining
    finally:
        signal.signal(signal.SIGTERM, before)


def _say_how(serving: Serving, plan: Plan, mode: str) -> None:
    if serving.checked:
        console.remark(serving.checked)
    if mode == "module" and serving.is_training:
        console.remark("parts of the module are in training mode: batch norm runs, dropout drops; else: --mode eval")
    predicted = plan.prediction
    if predicted.sustained_per_s:
        rate, latency = units.rate(predicted.sustained_per_s), units.seconds(predicted.step_s)
        console.remark(f"predicted: {rate} samples/s sustained, {latency} a request")


def _report(serving: Serving, plan: Plan, *, as_json: bool, to_stderr: bool) -> None:
    counts = serving.counts
    told = {
        "requests": counts.requests,
        "samples": counts.samples,
        "refused": counts.refused,
        "samples_per_s": counts.samples_per_s,
        "latency_p10_s": counts.latency_s(0.1),
        "latency_p50_s": counts.latency_s(0.5),
        "latency_p90_s": counts.latency_s(0.9),
        "predicted_samples_per_s": plan.prediction.sustained_per_s,
        "predicted_latency_s": plan.prediction.step_s,
    }
    if as_json and not to_stderr:
        console.emit_json(told)
        return
    refused = f", {units.count(counts.refused, 'request')} refused for want of room" if counts.refused else ""
    latency = " to ".join(units.seconds(counts.latency_s(share)) for share in (0.1, 0.9))
    console.remark(
        f"answered {units.count(counts.requests, 'request')} of {units.count(counts.samples, 'sample')}{refused}: "
        f"{counts.samples_per_s:.4g} samples/s, latency {latency} (p10 to p90)"
    )
