"""The map of the code is true: docs/architecture.md, CONTRIBUTING.md, the glossary, docstrings of packages."""

from __future__ import annotations

import ast
import gc
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.house import picture
from tests.test_architecture import parsed

HOME = Path(__file__).resolve().parent.parent
PRODUCT = ("cuda_ops", "halopipe", "planner", "profiler", "runtime")
PAGES = ("CONTRIBUTING.md", "docs/architecture.md", "docs/glossary.md")
FOR_USERS = ("halopipe/__init__", "halopipe/sparse/", "halopipe/graphs/", "profiler/models/")
"""Packages whose docstrings say how they are used."""


@pytest.fixture(scope="module")
def boxes() -> Iterator[dict[str, set[str]]]:
    """The packages of the picture, with what each imports."""
    gc.disable()  # the trees hold no garbage, and are gigabytes
    yield picture.of_product()
    gc.enable()
    parsed.cache_clear()


def packages() -> list[Path]:
    """The `__init__.py` of every package that describes itself to whoever works on it."""
    files = sorted(path for top in PRODUCT for path in (HOME / top).rglob("__init__.py"))
    return [path for path in files if not path.relative_to(HOME).as_posix().startswith(FOR_USERS)]


def modules_of(init: Path) -> set[str]:
    """Modules and packages beside an `__init__.py`."""
    of_files = {path.stem for path in init.parent.glob("*.py")} - {"__init__", "__main__"}
    return of_files | {path.parent.name for path in init.parent.glob("*/__init__.py")}


def unnamed(docstring: str, modules: set[str]) -> set[str]:
    """Modules that a docstring does not name."""
    return {name for name in modules if not re.search(rf"(?<![A-Za-z0-9_]){name}(?![A-Za-z0-9_])", docstring)}


def listed(docstring: str) -> set[str]:
    """The names of the lists under `Modules:` and `Besides:`."""
    lists = re.findall(r"(?:Modules|Besides):\n\n((?:    .*\n?)+)", docstring)
    return set(re.findall(r"^    (\w+)   ?", "\n".join(lists), re.MULTILINE))


def nobody(init: Path, docstring: str) -> Iterator[str]:
    """Names that a package's docstring says to be in one of its modules, and that are not there."""
    for module, name in re.findall(r"``(\w+)\.(\w+)(?:\.\w+)?``", docstring):
        source = init.parent / f"{module}.py"
        if source.exists() and not re.search(rf"^(?:class|def) {name}\b|^{name}\b", source.read_text("utf-8"), re.M):
            yield f"{module}.{name}"


def missing(page: str) -> Iterator[str]:
    """Files and names that a page points to, and that are not there."""
    for line in page.splitlines():
        folder = ""
        for code in re.findall(r"`([^`]+)`", line):
            is_path = re.fullmatch(r"[\w./]+/[\w./]*|[\w]+\.py", code)
            if not is_path:
                continue
            if (HOME / code).exists():
                folder = code if code.endswith("/") else code.rpartition("/")[0]
            elif not (HOME / folder / code).exists():
                yield code
    for name, path in re.findall(r"`(\w+)` in `([\w/]+\.py)`", page):
        if (HOME / path).exists() and not re.search(
            rf"^\s*(class|def) {name}\b|^{name}\b", (HOME / path).read_text(), re.M
        ):
            yield f"{name} in {path}"


def test_the_picture_is_the_one_that_the_imports_make(boxes: dict[str, set[str]]) -> None:
    remedy = "python -m benchmarks.house --picture draws it anew"
    assert (HOME / picture.PICTURE).read_text("utf-8") == picture.draw(boxes), remedy


def test_a_box_stands_above_what_it_imports_and_has_no_line_that_others_make_up() -> None:
    targets = {"a": {"b", "c"}, "b": {"c"}, "c": set[str]()}
    assert picture.levels_of(targets) == {"a": 2, "b": 1, "c": 0}
    assert picture.without_detours(targets) == [("a", "b"), ("b", "c")]


@pytest.mark.parametrize("init", packages(), ids=lambda path: path.parent.relative_to(HOME).as_posix())
@pytest.mark.every_case
def test_a_package_names_all_its_modules_and_no_other(init: Path) -> None:
    docstring = ast.get_docstring(ast.parse(init.read_text("utf-8"))) or ""
    assert unnamed(docstring, modules_of(init)) == set()
    assert listed(docstring) <= modules_of(init)
    assert list(nobody(init, docstring)) == []


def test_modules_that_are_missing_or_gone_are_seen() -> None:
    docstring = (
        "What a stage costs.\n\nModules:\n\n    sums    what computing\n            takes\n    gone    nothing\n"
    )
    assert unnamed(docstring, {"sums", "bound"}) == {"bound"}
    assert listed(docstring) == {"sums", "gone"}
    init = HOME / "planner" / "passes" / "__init__.py"
    assert list(nobody(init, "``lowering.lower``, ``lowering.raise_``")) == ["lowering.raise_"]


@pytest.mark.parametrize("page", PAGES)
def test_a_page_points_to_what_is_there(page: str) -> None:
    assert list(missing((HOME / page).read_text("utf-8"))) == []


def test_what_is_not_there_is_seen() -> None:
    assert list(missing("`planner/ir/box.py`, `plan.py`, `gone.py`; `planner/none/`")) == ["gone.py", "planner/none/"]
    assert list(missing("`Nothing` in `planner/ir/box.py`")) == ["Nothing in planner/ir/box.py"]


def test_the_map_has_at_most_25_rows() -> None:
    section = (HOME / "CONTRIBUTING.md").read_text("utf-8").split("## Where do I find")[1].split("\n## ")[0]
    assert 0 < len(re.findall(r"^\| ", section, re.MULTILINE)) - 1 <= 25


def test_the_page_of_the_architecture_has_a_sentence_for_every_box(boxes: dict[str, set[str]]) -> None:
    page = (HOME / "docs" / "architecture.md").read_text("utf-8")
    named = set(re.findall(r"^\| `([\w.]+)` \|", page, re.MULTILINE))
    assert {"planner.solvers" if box.startswith("planner.solvers") else box for box in boxes} == named


def skipped(files: list[str]) -> Iterator[str]:
    """Files of a reading list that none of those before them refers to, by an import or a text ``module:name``."""
    named = set[str]()
    for number, file in enumerate(files):
        if number and file.removesuffix(".py").removesuffix("/__init__").replace("/", ".") not in named:
            yield file
        for node in ast.walk(ast.parse((HOME / file).read_text("utf-8"))):
            if isinstance(node, ast.ImportFrom):
                named |= {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                named.add(node.value.partition(":")[0])


@pytest.mark.parametrize("verb", ["plan", "run"])
def test_who_reads_the_files_of_a_verb_in_their_order_meets_each_in_one_before(verb: str) -> None:
    page = (HOME / "docs" / "architecture.md").read_text("utf-8")
    section = page.split(f"## To follow `halopipe {verb}`, read")[1].split("\n## ")[0]
    files = re.findall(r"^\d+\. `([\w/]+\.py)`", section, re.MULTILINE)
    assert len(files) > 10
    assert list(skipped(files)) == []


def test_a_file_that_nobody_before_it_refers_to_is_seen() -> None:
    assert list(skipped(["halopipe/launch/run.py", "halopipe/launch/worker.py"])) == ["halopipe/launch/worker.py"]
