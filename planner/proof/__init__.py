"""Proofs of plans: what a search claims, in a form that little code verifies.

``space`` and ``prices``: the plans that a claim is about, and what their stages and messages take at least, derived
from the profile anew.  ``verify`` and ``step``: whether a proof holds.  These four are all that has to be trusted; they
ask nothing of the search, the costs or the checker.  ``prove`` makes a proof; ``scope``: for which requests.
"""

from __future__ import annotations

__all__: list[str] = []
