"""The verbs, one a file: parse, call one function, write one file.

Nothing of halopipe's other packages is imported at the top of these files, so that ``--help`` is quick and a user's
file that hides one of them is reported before it is imported.
"""

from __future__ import annotations

__all__: list[str] = []
