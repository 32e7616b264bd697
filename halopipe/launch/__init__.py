"""From a plan to its ranks: spawned here, on hosts of a file, or started by torchrun or Slurm."""

from __future__ import annotations

__all__: list[str] = []
