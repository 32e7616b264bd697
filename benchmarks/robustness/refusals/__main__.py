"""Follows the remedies of all rows, or of those that are named."""

from __future__ import annotations

import sys

from benchmarks.robustness.refusals import rows, verdict
from benchmarks.robustness.tables import main

if __name__ == "__main__":
    sys.exit(
        main("Refusals whose remedies are followed to the letter", rows(), verdict, "refusals have remedies that work")
    )
