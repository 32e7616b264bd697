"""What the executor costs and reaches, beside torch.distributed.pipelining in the same run."""

from __future__ import annotations

__all__: list[str] = []
