"""Mutation check: the share of faults that the short suite notices, of those that the whole suite notices.

Read ``__main__`` (the rows), ``mutants`` (what is changed), ``verdicts`` (how a mutant is judged), ``selection`` (by
which tests), ``recording`` (which file of tests enters which function).
"""

from __future__ import annotations

__all__: list[str] = []
