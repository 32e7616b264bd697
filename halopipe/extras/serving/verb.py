"""``halopipe serve``: a plan answers requests without an end, from files, standard input or a port."""

from __future__ import annotations

from halopipe.cli.options import JsonOption, PlanPath, with_options
from halopipe.extras.serving.options import ServeOptions
from halopipe.terminal import console


@with_options
def serve(plan: PlanPath, options: ServeOptions, json: JsonOption = False) -> None:
    """Answer requests by the plan, each stage on its own at the same time, until SIGTERM: then what was taken, and 0.

    Each request has up to the plan's global batch of samples. Answers come in order. Who asks faster than the slowest
    stage can answer is slowed down (files, standard input) or told to come again (HTTP 503 with Retry-After).
    """
    if options.stdin:
        console.require_streams()  # before torch is loaded
    from halopipe.extras.serving import command

    command.serve(plan, options, json=json)
