"""YAML as strictly as JSON: no key twice, no alias inside of what it names."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Hashable, Iterable
from typing import Any

from planner.ir.errors import CorruptFileError

MOST_YAML_BYTES = 2**18
MOST_YAML_NODES = 50_000
"""Values of a document, each alias counted as what it stands for."""


def parse_yaml(text: str, source: str) -> Any:
    """What ``text`` says, in plain types.

    Raises:
        CorruptFileError: it is no YAML, or has a key twice; ``source`` names it.
    """
    import yaml  # late: only who reads the catalogue or a cluster file needs it

    class StrictLoader(yaml.SafeLoader):
        """As ``yaml.safe_load``, but a key that comes twice is refused."""

        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
            keys = Counter(key.value for key, _ in node.value if isinstance(key.value, str))
            twice = sorted(key for key, count in keys.items() if count > 1)
            if twice:
                raise yaml.constructor.ConstructorError(
                    "while reading a mapping", node.start_mark, f"{twice[0]} is given twice", node.start_mark
                )
            return super().construct_mapping(node, deep)

    if len(text) > MOST_YAML_BYTES:
        raise CorruptFileError(f"{source} is too large", [f"{len(text)} characters; {MOST_YAML_BYTES} are the most"])
    try:
        loader = StrictLoader(text)
        root = loader.get_single_node()
        _require_small(root, source)
        return loader.construct_document(root) if root is not None else None
    except yaml.YAMLError as error:
        raise CorruptFileError(f"{source} is not YAML", str(error).splitlines()) from None
    except RecursionError:
        raise CorruptFileError(f"{source} is not YAML of ours", ["nested too deeply"]) from None
    except (ArithmeticError, ValueError) as error:
        raise CorruptFileError(f"{source} is not YAML", [str(error)]) from None


def yaml_words(text: str) -> dict[str, tuple[int, str]]:
    """Of a mapping that :func:`parse_yaml` has read: by key its line, from 1, and its value as written, if one word."""
    import yaml

    root = yaml.compose(text, Loader=yaml.SafeLoader)
    pairs = root.value if isinstance(root, yaml.MappingNode) else ()
    return {
        str(key.value): (key.start_mark.line + 1, value.value if isinstance(value, yaml.ScalarNode) else "")
        for key, value in pairs
    }


def _require_small(root: Any, source: str) -> None:
    """Of a composed document, aliases spelled out: few enough nodes, and none inside itself."""
    sizes: dict[int, int] = {}

    def size(node: Any) -> int:
        key = id(node)
        if key not in sizes:
            sizes[key] = -1
            pairs = node.value if not isinstance(node.value, str) else ()
            sizes[key] = 1 + sum(
                size(each) for item in pairs for each in (item if isinstance(item, tuple) else (item,))
            )
        if sizes[key] < 0:
            raise CorruptFileError(f"{source} is not YAML of ours", ["an alias stands inside of what it names"])
        return sizes[key]

    if root is not None and size(root) > MOST_YAML_NODES:
        text = f"with its aliases spelled out it has {size(root):.3g} values; {MOST_YAML_NODES} are the most"
        raise CorruptFileError(f"{source} is too large", [text], ["write it without aliases, with 'count'"])


def suggestion(name: str, candidates: Iterable[str]) -> str:
    """``; did you mean V100-16GB?``, or nothing; case does not matter."""
    names = {candidate.lower(): candidate for candidate in candidates}
    near = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.5)
    return f"; did you mean {names[near[0]]}?" if near else ""
