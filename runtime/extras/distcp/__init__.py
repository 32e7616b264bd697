"""Checkpoints of earlier releases, which kept the tensors of a rank as torch.distributed.checkpoint does.

Modules:

    folder   The tensors of a rank's folder, each read when it is asked for
"""

from __future__ import annotations

HOOKS = {"rank folders": {"torch": "runtime.extras.distcp.folder:TorchFolder"}}
