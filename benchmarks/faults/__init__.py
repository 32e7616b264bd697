"""Jobs whose ranks are killed, stopped and made to fail; see ``python -m benchmarks.faults``."""
