"""What ``halopipe serve`` may be asked: one list of options, as of a run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from halopipe.run_spec.options import OPTIMIZERS
from planner.ir.options import NAMES, option
from runtime.timeouts import WAIT_S

SERVING_MODES = ("module", "eval")
"""The mode that a served plan's stages run in: the module's, part by part, or evaluation mode throughout."""

STDIN_FORMATS = ("json", "npy")
"""What ``halopipe serve --stdin`` reads."""

FROM = "Where requests come from (one of them)"
WEIGHTS = "Weights"
STREAM = "The stream"
"""Headings in the help, below the common options."""


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """Where requests come from, which weights answer, and how.  The help of each field says what it is."""

    source: Path | None = option(
        None, "Files .npy, .npz, .pt, answered in the order of names.", "FOLDER", FROM, flag="--from"
    )
    to: Path | None = option(None, "With --from: answers, by the same names.", "FOLDER", FROM)
    reader: str = option(
        "", "With --from: pkg.mod:function, which makes a request of a path, as of an image.", "FUNCTION", FROM
    )
    follow: bool = option(False, "With --from: look for further files until SIGTERM.", panel=FROM)
    stdin: str = option(
        "",
        "Requests from standard input, answers to standard output: json (lines) or npy (arrays).",
        "FORMAT",
        FROM,
        offers=STDIN_FORMATS,
    )
    http: str = option(
        "",
        "POST /infer, JSON or npy; 127.0.0.1 unless a host is named. Needs halopipe's extra 'serve'.",
        "[HOST:]PORT",
        FROM,
    )
    names: tuple[str, ...] = option(
        (), "With --http: other names that clients know it by, as behind a proxy.", "NAME,...", FROM, kind=NAMES
    )
    max_request: str = option("16MiB", "Largest body, line of JSON, array or file.", "SIZE", FROM)
    checkpoint: Path | None = option(
        None, "Weights of 'run --checkpoint'; the factory's if not given.", "FOLDER", WEIGHTS
    )
    step: int | None = option(None, "The checkpoint of step N; the newest if not given.", "N", WEIGHTS)
    mode: str = option(
        "module",
        "module: batch norm and dropout as the module was planned; eval: running statistics, nothing dropped.",
        "MODE",
        STREAM,
        offers=SERVING_MODES,
    )
    room: int = option(0, "Requests on their way before the next waits; 0: 2 a stage, and 2.", "N", STREAM, least=0)
    learn: bool = option(
        False,
        "Each stage updates its weights after each request, by its own loss: this changes the optimisation.",
        panel=STREAM,
    )
    optimizer: str = option("", "With --learn: the plan's if not given.", "NAME[:K=V,..]", STREAM, offers=OPTIMIZERS)
    save: Path | None = option(None, "With --learn: write a checkpoint there at the end.", "FOLDER", STREAM)
    device: str = option("", "cpu: all ranks on cores; else as planned.", "NAME")
    deadline: float = option(WAIT_S, "Longest wait for another rank.", "SECONDS", least=1.0)
    no_check_first_answer: bool = option(False, "Do not compare the example's answer with one device.")
