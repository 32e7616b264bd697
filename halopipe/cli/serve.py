"""``halopipe serve``: a plan answers requests without an end, from files, standard input or a port."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from halopipe.cli import completion
from halopipe.cli.options import Json, a_number

_FROM, _WEIGHTS, _STREAM = "Where requests come from (one of them)", "Weights", "The stream"
"""Headings in the help, below the common options."""


def serve(
    plan: Annotated[
        Path,
        typer.Argument(metavar="PLAN", help="A plan, as written by 'halopipe plan'.", autocompletion=completion.plans),
    ],
    source: Annotated[
        Path | None,
        typer.Option(
            "--from",
            metavar="FOLDER",
            help="Files .npy, .npz, .pt, answered in the order of names.",
            rich_help_panel=_FROM,
        ),
    ] = None,
    to: Annotated[
        Path | None,
        typer.Option("--to", metavar="FOLDER", help="With --from: answers, by the same names.", rich_help_panel=_FROM),
    ] = None,
    reader: Annotated[
        str,
        typer.Option(
            metavar="FUNCTION",
            help="With --from: pkg.mod:function, which makes a request of a path, as of an image.",
            rich_help_panel=_FROM,
        ),
    ] = "",
    follow: Annotated[
        bool, typer.Option("--follow", help="With --from: look for further files until SIGTERM.", rich_help_panel=_FROM)
    ] = False,
    stdin: Annotated[
        str,
        typer.Option(
            metavar="FORMAT",
            help="Requests from standard input, answers to standard output: json (lines) or npy (arrays).",
            autocompletion=completion.stdin_formats,
            rich_help_panel=_FROM,
        ),
    ] = "",
    http: Annotated[
        str,
        typer.Option(
            metavar="[HOST:]PORT",
            help="POST /infer, JSON or npy; 127.0.0.1 unless a host is named. pip install 'halopipe[serve]'.",
            rich_help_panel=_FROM,
        ),
    ] = "",
    max_request: Annotated[
        str, typer.Option(metavar="SIZE", help="Largest body, or line of JSON.", rich_help_panel=_FROM)
    ] = "16MiB",
    checkpoint: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Weights of 'run --checkpoint'; the factory's if not given.",
            rich_help_panel=_WEIGHTS,
        ),
    ] = None,
    step: Annotated[
        int | None,
        typer.Option(metavar="N", help="The checkpoint of step N; the newest if not given.", rich_help_panel=_WEIGHTS),
    ] = None,
    mode: Annotated[
        str,
        typer.Option(
            metavar="MODE",
            help="module: batch norm and dropout as the module was planned; eval: running statistics, nothing dropped.",
            autocompletion=completion.serving_modes,
            rich_help_panel=_STREAM,
        ),
    ] = "module",
    room: Annotated[
        int,
        typer.Option(
            min=0,
            metavar="N",
            help="Requests on their way before the next waits; 0: 2 a stage, and 2.",
            rich_help_panel=_STREAM,
        ),
    ] = 0,
    learn: Annotated[
        bool,
        typer.Option(
            "--learn",
            help="Each stage updates its weights after each request, by its own loss: this changes the optimisation.",
            rich_help_panel=_STREAM,
        ),
    ] = False,
    optimizer: Annotated[
        str,
        typer.Option(
            metavar="NAME[:K=V,..]",
            help="With --learn: the plan's if not given.",
            autocompletion=completion.optimizers,
            rich_help_panel=_STREAM,
        ),
    ] = "",
    save: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", help="With --learn: write a checkpoint there at the end.", rich_help_panel=_STREAM
        ),
    ] = None,
    device: Annotated[str, typer.Option(metavar="NAME", help="cpu: all ranks on cores; else as planned.")] = "",
    deadline: Annotated[
        float, typer.Option(min=1.0, callback=a_number, metavar="SECONDS", help="Longest wait for another rank.")
    ] = 120.0,
    no_check_first_answer: Annotated[
        bool, typer.Option("--no-check-first-answer", help="Do not compare the example's answer with one device.")
    ] = False,
    json: Json = False,
) -> None:
    """Answer requests by the plan, each stage on its own at the same time, until SIGTERM: then what was taken, and 0.

    Each request has up to the plan's global batch of samples. Answers come in order. Who asks faster than the slowest
    stage can answer is slowed down (files, standard input) or told to come again (HTTP 503 with Retry-After).
    """
    from halopipe.serving import command
    from halopipe.terminal import units
    from planner.ir.errors import UsageError

    for option, value in {"--optimizer": optimizer, "--save": save}.items():
        if value and not learn:
            raise UsageError(f"{option} goes with --learn", ["nothing is learnt without it"], [f"leave {option} out"])
    command.serve(
        plan,
        command.Source(source, to, reader, follow, stdin, http, units.parse_size(max_request)),
        {
            "checkpoint": "" if checkpoint is None else checkpoint.absolute(),
            "step": step,
            "mode": mode,
            "room": room,
            "learn": learn,
            "optimizer": optimizer or None,
            "check": not no_check_first_answer,
            "options": {"device": device, "deadline_s": deadline},
        },
        save,
        json=json,
    )
