"""What ``halopipe serve`` does: it opens the ranks, answers until it is told to drain, and says what was asked."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from halopipe.extras.serving import request_sources
from halopipe.extras.serving.options import ServeOptions
from halopipe.extras.serving.request_sources import Draining
from halopipe.extras.serving.serving import Serving, open_serving
from halopipe.planning import plan_files
from halopipe.terminal import console, units
from halopipe.terminal.output_files import claimed
from planner.ir.errors import UsageError
from planner.ir.plan import Plan

_LEARNS = "each stage learns from each request by a loss of its own: this changes the optimisation"


def serve(path: Path, options: ServeOptions, *, json: bool) -> None:
    """Answers until the source ends, or SIGTERM drains it.

    Args:
        json: whether what was asked is told as JSON; on stderr, where answers go to stdout.

    Raises:
        HalopipeError: what a rank has failed by.
    """
    require_fitting(options)
    most_bytes = units.parse_size(options.max_request)
    planned = plan_files.load_plan(path)
    if options.learn:
        console.remark(_LEARNS)
    if options.source is not None and options.to is not None and options.source.is_dir():
        any_file = bool(options.reader)
        request_sources.require_free(
            options.to, request_sources.questions(options.source, any_file=any_file), any_file=any_file
        )
    door = None
    if options.http:
        http = _http()
        door = http.opened(options.http)
    with claimed([], [path], [options.to, options.save]):
        serving = open_serving(
            planned,
            checkpoint="" if options.checkpoint is None else options.checkpoint.absolute(),
            step=options.step,
            mode=options.mode,
            room=options.room,
            learn=options.learn,
            optimizer=options.optimizer or None,
            check=not options.no_check_first_answer,
            options={"device": options.device, "deadline_s": options.deadline},
        )
        with serving, _drained_by_signal() as draining:
            _say_how(serving, planned, options.mode)
            if door is not None:
                host, port = door.getsockname()[:2]
                console.remark(f"listening at http://{host}:{port}/infer")
                if host not in ("127.0.0.1", "::1"):
                    console.remark(
                        "anybody who reaches this address may ask: there are no passwords, and no encryption"
                    )
                http.listen(serving, door, most_bytes, draining, http.names_of(options.http, options.names))
            else:
                requests = request_sources.patiently(
                    _requests(serving, options, most_bytes, draining), serving, draining
                )
                request_sources.pump(serving, requests, draining)
            serving.finish()
            if options.save is not None:
                serving.run.save(options.save)
                console.wrote(options.save)
    _report(serving, planned, as_json=json, to_stderr=bool(options.stdin))


def require_fitting(options: ServeOptions) -> None:
    """Raises :class:`UsageError` unless one source is named, and what is asked goes together."""
    for option, value in {"--optimizer": options.optimizer, "--save": options.save}.items():
        if value and not options.learn:
            raise UsageError(f"{option} goes with --learn", ["nothing is learnt without it"], [f"leave {option} out"])
    if options.names and not options.http:
        raise UsageError("--names goes with --http", [], ["leave --names out"])
    folder = options.source
    answers = options.to
    with_folder: dict[str, object] = {"--to": answers, "--reader": options.reader, "--follow": options.follow}
    request_sources.require_one({"--from": folder, "--stdin": options.stdin, "--http": options.http}, with_folder)
    for option, asked in with_folder.items():
        if asked and folder is None:
            named = "--stdin" if options.stdin else "--http"
            raise UsageError(
                f"{option} goes with --from", [], [f"--from FOLDER in place of {named}", f"leave {option} out"]
            )
    if folder is not None and answers is None:
        raise UsageError("--from needs a folder for the answers", [], [f"--from {folder} --to FOLDER"])
    if folder is not None and answers is not None and folder.resolve() == answers.resolve():
        raise UsageError("answers would replace requests", [f"both are in {folder}"], ["--to another folder"])
    if options.stdin and options.stdin not in request_sources.FORMATS:
        formats = ", ".join(request_sources.FORMATS)
        raise UsageError(
            f"standard input brings no {options.stdin!r}", [f"known: {formats}"], [f"--stdin {request_sources.JSON}"]
        )


def _requests(
    serving: Serving, options: ServeOptions, most_bytes: int, draining: Draining
) -> Iterator[tuple[Any, Any, request_sources.PutAnswer]]:
    if options.source is not None and options.to is not None:
        return request_sources.of_folder(
            serving, options.source, options.to, options.reader, draining, most_bytes, follow=options.follow
        )
    # Files of its own: a thread that still waits on sys.stdin when the interpreter ends would end it with an abort, and
    # what sys.stdout could not write would be tried again there.
    requests = open(os.dup(sys.stdin.fileno()), "rb")  # noqa: SIM115  # read until the process ends
    answers = open(os.dup(sys.stdout.fileno()), "wb")  # noqa: SIM115  # likewise written
    if options.stdin == request_sources.NPY:
        return request_sources.of_arrays(serving, requests, answers, most_bytes)
    return request_sources.of_lines(serving, requests, answers, most_bytes)


def _http() -> Any:
    try:
        from halopipe.extras.serving import http
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
        rate = units.rate(predicted.sustained_per_s)
        latency = units.seconds(predicted.step_s)
        console.remark(f"predicted: {rate} samples/s sustained, {latency} a request")


def _report(serving: Serving, plan: Plan, *, as_json: bool, to_stderr: bool) -> None:
    counts = serving.counts
    summary = {
        **counts.summary,
        "predicted_samples_per_s": plan.prediction.sustained_per_s,
        "predicted_latency_s": plan.prediction.step_s,
    }
    if as_json and not to_stderr:
        console.emit_json(summary)
        return
    refused = f", {units.count(counts.refused, 'request')} refused for want of room" if counts.refused else ""
    latency = " to ".join(units.seconds(counts.latency_s(share)) for share in (0.1, 0.9))
    console.remark(
        f"answered {units.count(counts.requests, 'request')} of {units.count(counts.samples, 'sample')}{refused}: "
        f"{counts.samples_per_s:.4g} samples/s, latency {latency} (p10 to p90)"
    )
