"""Token slices (:mod:`planner.extras.token_slices`) on a rank.

Modules:

    peers    Token slices of one stage on one rank: what a slice reads of those before it is kept here until their
             backward
"""

from __future__ import annotations

HOOKS = {
    "part peers": {"time": "runtime.extras.token_slices.peers:SlicePeers"},
    "joined parts": {"time": "runtime.extras.token_slices.peers:of_micro_batches"},
}
