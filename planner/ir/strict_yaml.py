"""YAML as strictly as JSON: no key twice, no tag, no alias inside of what it names; numbers as JSON writes them."""

from __future__ import annotations

import difflib
import functools
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from planner.ir.errors import CorruptFileError

MOST_YAML_BYTES = 2**18
MOST_YAML_NODES = 50_000
"""Values of a document, each alias counted as what it stands for."""

MOST_DIGITS = 40
"""Of a whole number; far more than any quantity has, and few enough to be shown."""

YamlWords = dict[str, tuple[int, str]]
"""Of a mapping, by key: its line, from 1, and its value as written, if one word."""

_TAG = "tag:yaml.org,2002:"
_HALF = re.compile("[\ud800-\udfff]")
_SHOWN = 60


def parse_yaml(text: str, source: str) -> Any:
    """What ``text`` says, in plain types.

    Raises:
        CorruptFileError: it is no YAML, or not as strict as JSON; ``source`` names it.
    """
    return parse_yaml_words(text, source)[0]


def parse_yaml_words(text: str, source: str) -> tuple[Any, YamlWords]:
    """As :func:`parse_yaml`, and where its keys are, if it is a mapping; what is merged into it (``<<``) is in it."""
    import yaml  # late: only who reads the catalogue or a cluster file needs it

    if len(text) > MOST_YAML_BYTES:
        raise CorruptFileError(f"{source} is too large", [f"{len(text)} characters; {MOST_YAML_BYTES} are the most"])
    loader = _loader_class()(text)
    try:
        root = loader.get_single_node()
        if root is None:
            return None, {}
        _require_plain(loader, root, source)
        return loader.construct_document(root), _words(root)
    except yaml.YAMLError as error:
        raise CorruptFileError(f"{source} is not YAML", str(error).splitlines()) from None
    except RecursionError:
        raise CorruptFileError(f"{source} is not YAML of ours", ["nested too deeply"]) from None


@functools.cache
def _loader_class() -> Any:
    """A loader that takes for a number, truth or nothing what JSON would, and YAML's ``on`` and ``off``.

    Dates, and numbers in other bases, are text: YAML 1.1 reads 010 as 8, 3:5 as 185, and 1e-3 as text.
    """
    import yaml

    class Loader(yaml.SafeLoader):
        """Each plain word has one meaning."""

        yaml_implicit_resolvers = {}  # noqa: RUF012 - as its base has it

    patterns = {
        "bool": r"(?i:yes|no|true|false|on|off)",
        "int": r"[-+]?(?:0|[1-9][0-9]*)",
        "float": r"[-+]?[0-9]+(?:\.[0-9]*)?(?:[eE][-+]?[0-9]+)?",
        "null": r"~|null|Null|NULL|",
        "merge": r"<<",
    }
    for name, pattern in patterns.items():
        Loader.add_implicit_resolver(f"{_TAG}{name}", re.compile(rf"(?:{pattern})\Z"), None)
    return Loader


def _require_plain(loader: Any, root: Any, source: str) -> None:
    """Of a composed document: few enough values, aliases spelled out, none inside itself, and each as in JSON.

    Raises:
        CorruptFileError: it is not so.  It is looked at before any value is made.
    """
    sizes: dict[int, int] = {}

    def size(node: Any) -> int:
        key = id(node)
        if key not in sizes:
            sizes[key] = -1
            if fault := _fault(loader, node):
                where = f"line {node.start_mark.line + 1}, column {node.start_mark.column + 1}"
                raise CorruptFileError(f"{source} is not YAML of ours", [f"{where}: {fault}"])
            sizes[key] = 1 + sum(map(size, _parts(node)))
        if sizes[key] < 0:
            raise CorruptFileError(f"{source} is not YAML of ours", ["an alias stands inside of what it names"])
        return sizes[key]

    if size(root) > MOST_YAML_NODES:
        text = f"with its aliases spelled out it has {size(root):.3g} values; {MOST_YAML_NODES} are the most"
        raise CorruptFileError(f"{source} is too large", [text], ["write it without aliases, with 'count'"])


def _parts(node: Any) -> Iterator[Any]:
    """What a node holds: the entries of a list, the keys and values of a mapping."""
    if isinstance(node.value, list):
        for item in node.value:
            yield from item if isinstance(item, tuple) else (item,)


def _fault(loader: Any, node: Any) -> str:
    """What of the node alone JSON does not have; empty: nothing."""
    is_word = node.id == "scalar"
    if node.tag != loader.resolve(type(node), node.value, (is_word and node.style is None, False)):
        return f"{cut(node.tag.replace(_TAG, '!!', 1))} is a tag; values are read as they are written, without tags"
    if node.tag == f"{_TAG}int" and len(node.value) > MOST_DIGITS:
        return f"an integer of {len(node.value)} digits, {MOST_DIGITS} are the most"
    if is_word and _HALF.search(node.value):
        return "half a character, of which a name cannot be made"
    if node.id == "mapping":
        keys = [key.value for key, _ in node.value if key.tag in (f"{_TAG}str", f"{_TAG}merge")]
        if len(keys) < len(node.value):
            return "a key is no text; write it in quotes"
        twice = sorted(key for key, count in Counter(keys).items() if count > 1)
        if twice:
            return f"{cut(twice[0])} is given twice"
    return ""


def _words(root: Any) -> YamlWords:
    """Of a document that was made of: what was merged into it comes first, and is replaced by what it says itself."""
    pairs = root.value if root.id == "mapping" else ()
    return {key.value: (key.start_mark.line + 1, value.value if value.id == "scalar" else "") for key, value in pairs}


def cut(text: str) -> str:
    """``text`` as far as an error shows it."""
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


def shown(value: Any) -> str:
    """A value of a file as an error shows it."""
    return cut("nothing" if value is None else repr(value))


def suggestion(name: str, candidates: Iterable[str]) -> str:
    """``; did you mean V100-16GB?``, or nothing; case does not matter."""
    names = {candidate.lower(): candidate for candidate in candidates}
    near = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.5)
    return f"; did you mean {names[near[0]]}?" if near else ""
