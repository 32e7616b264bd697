"""``halopipe fit`` on a table that is not one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.halopipe.commands import call


@pytest.mark.parametrize("value", ["inf", "nan", "-1", "1e300"])
def test_a_kernel_takes_a_finite_time(folder: Path, value: str) -> None:
    Path("t.csv").write_text(f"device,dtype,op,median_ms,m,n,k\nX,float16,gemm,{value},8,8,8\n", "utf-8")
    result = call("fit", "t.csv")
    assert (result.exit_code, f"line 2: ValueError: median_ms is {value}" in result.stderr) == (3, True), result.stderr
