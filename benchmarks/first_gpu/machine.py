"""What the machine is, and the tests that need its GPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch

from benchmarks.first_gpu.frame import Bench, Parts
from benchmarks.report import Row
from cuda_ops import die_with_parent
from cuda_ops.device.gpus import gpu_clocks
from halopipe.reports.doctor import OK, examine
from profiler.session import versions

HOME = Path(__file__).parents[2]
_MARK = "mark.cuda"
_OUTCOME = re.compile(r"^tests/\S+?::.* (PASSED|FAILED|ERROR|SKIPPED)\b")
_FAULT = re.compile(r"^(?:FAILED|ERROR) (?P<test>tests/.*)$")


def machine(bench: Bench) -> Parts:
    """Versions and the card, then doctor."""
    return {"versions": partial(of_versions, bench), "doctor": of_doctor}


def of_versions(bench: Bench) -> Iterator[Row]:
    """What results depend on; the number says nothing but of the card."""
    by_name = dict(versions())
    try:
        import triton

        by_name["triton"] = triton.__version__
    except ImportError:
        by_name["triton"] = "none"
    if bench.device == "cuda":
        card = torch.cuda.get_device_properties(0)
        by_name |= {"CUDA": str(torch.version.cuda), "cuDNN": str(torch.backends.cudnn.version())}
        by_name |= {"NCCL": ".".join(map(str, torch.cuda.nccl.version())), "card": card.name}
        yield Row("memory of the card", card.total_memory / 2**30, "GiB")
        yield Row("multiprocessors", card.multi_processor_count, "")
        yield from (Row(f"clock: {name}", clock / 1e6, "MHz") for name, clock in gpu_clocks(0).items())
    yield from (Row(f"{name} {version}", 1.0, "there") for name, version in by_name.items())


def of_doctor() -> Iterator[Row]:
    """A row a line of ``halopipe doctor``, the user's folder as ``~``; what is needed must be there."""
    for each in examine():
        goal = "ok" if each.needed else ""
        text = each.text.replace(str(Path.home()), "~")
        yield Row(f"doctor, {each.what}: {text}", float(each.status == OK), "ok", goal, not each.fails)


def tests(bench: Bench) -> Parts:
    """Every file of tests that has some for a GPU; in a rehearsal one, of which they are skipped."""
    files = [path for path in sorted((HOME / "tests").rglob("test_*.py")) if _MARK in path.read_text("utf-8")]
    names = [str(path.relative_to(HOME)) for path in files]
    return {name: partial(of_tests, name) for name in (names[:1] if bench.rehearses else names)}


def of_tests(file: str) -> Iterator[Row]:
    """How many passed, were skipped or failed, and what those that failed have to say."""
    command = [sys.executable, "-m", "pytest", "-m", "cuda", "--all-cases", "-v", "-rfE", "--tb=short", file]
    counts: Counter[str] = Counter()
    faults = []
    parent = os.getpid()
    with subprocess.Popen(
        command,
        cwd=HOME,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=lambda: die_with_parent(parent),
    ) as process:
        for line in process.stdout or ():
            sys.stdout.write(line)
            sys.stdout.flush()
            if match := _OUTCOME.match(line):
                counts[match[1]] += 1
            if match := _FAULT.match(line):
                faults.append(match["test"][:400].strip())
    if not counts.total():
        raise RuntimeError(f"pytest ran no tests: exit code {process.returncode}; {'; '.join(faults)}")
    yield from (Row(fault, 0.0, "passed", "passed", holds=False) for fault in faults)
    bad = counts["FAILED"] + counts["ERROR"]
    yield Row(f"{file}: passed", counts["PASSED"], "tests")
    yield Row(f"{file}: skipped", counts["SKIPPED"], "tests")
    yield Row(f"{file}: failed", bad, "tests", "none", bad == 0)
