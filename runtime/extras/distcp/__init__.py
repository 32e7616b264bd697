"""Checkpoints of earlier releases, which kept the tensors of a rank as torch.distributed.checkpoint does.

Modules:

    folder   The tensors of a rank's folder, each read when it is asked for
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from runtime.extra import RuntimeExtra

if TYPE_CHECKING:
    from runtime.checkpoint.reader import TensorFolder


class DistributedCheckpoints(RuntimeExtra):
    """Checkpoints of earlier releases."""

    def rank_folder(self, kept_as: str) -> type[TensorFolder] | None:
        if kept_as != "torch":
            return None
        from runtime.extras.distcp.folder import TorchFolder

        return TorchFolder


EXTRA = DistributedCheckpoints()
