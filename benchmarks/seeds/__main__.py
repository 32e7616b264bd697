"""Runs the benchmark."""

from __future__ import annotations

from benchmarks.report import run
from benchmarks.seeds import measure

raise SystemExit(run("Systems that split a network in one more way", measure))
