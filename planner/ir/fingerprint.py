"""Fingerprints: short names for contents, so that a file made for another model, profile or cluster is noticed."""

from __future__ import annotations

import hashlib

from planner.ir.codec import canonical
from planner.ir.errors import StaleFileError


def fingerprint(value: object) -> str:
    """``sha256:`` and 16 hex digits of ``value``'s canonical JSON; equal contents give equal fingerprints."""
    return "sha256:" + hashlib.sha256(canonical(value).encode()).hexdigest()[:16]


def require_match(what: str, expected: str, found: str, remedy: str) -> None:
    """Raises :class:`StaleFileError` unless the two fingerprints of ``what`` are equal."""
    if expected != found:
        raise StaleFileError(f"the plan was made for another {what}", [f"plan: {expected}", f"here: {found}"], [remedy])
