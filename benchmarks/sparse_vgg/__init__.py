"""A sparse VGG-16 on two unequal workers: our plan and SparsePipe's, predicted beside measured."""

from __future__ import annotations

__all__: list[str] = []
