from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest
import torch

from tests.cuda_ops.sparse.gpu_cases import cases

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


@pytest.fixture(scope="module")
def errors() -> dict[str, list[tuple[str, float]]]:
    """Operators and their errors by case, from one process: the interpreter is chosen before kernels are imported."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.cuda_ops.sparse.gpu_cases"],
        cwd=Path(__file__).parents[3],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = defaultdict(list)
    for line in done.stdout.splitlines():
        case, operator, error = line.split("\t")
        found[case].append((operator, float(error)))
    return found


def test_interpreted_kernels_agree_with_the_plain_operators(errors: dict[str, list[tuple[str, float]]]) -> None:
    """All cases in one test: the process has run them all, so none is left out."""
    for case in cases(torch.float16):
        assert errors[case.name], case.name
        wrong = [(operator, error) for operator, error in errors[case.name] if not error <= case.tolerance]
        assert wrong == [], case.name
