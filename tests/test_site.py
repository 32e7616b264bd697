"""Links of all documents lead somewhere, and the site is built from them without a warning."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import halopipe

HOME = Path(__file__).resolve().parent.parent
DOCUMENTS = sorted(
    {*HOME.glob("*.md"), *(HOME / "docs").rglob("*.md"), HOME / "benchmarks/README.md"}
    | set(HOME.glob("notebooks/*.ipynb"))
)
MADE = {HOME / "docs/reference/commands.md"}
"""Pages that are written when the site is."""

CODE = re.compile(r"^ *```.*?^ *```|`[^`\n]+`", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?P<target>[^()\s]*)\)")
EXTERNAL = re.compile(r"<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)=[\"']?(?:https?:)?//[^>]*>")


def text_of(path: Path) -> str:
    """A document without its code; of a notebook the cells of text."""
    if path.suffix == ".md":
        return CODE.sub("", path.read_text("utf-8"))
    cells = json.loads(path.read_text("utf-8"))["cells"]
    return CODE.sub("", "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown"))


def anchors(path: Path) -> set[str]:
    """Those of the headings of a document, as GitHub and mkdocs make them."""
    heads = re.findall(
        r"^#+ (.+)$", re.sub(r"^```.*?^```", "", path.read_text("utf-8"), flags=re.M | re.S), re.MULTILINE
    )
    return {re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", head).strip().lower()) for head in heads}


def faults(path: Path, text: str) -> list[str]:
    """Links of a document's text that lead nowhere."""
    found = []
    for match in LINK.finditer(text):
        target, _, anchor = match["target"].partition("#")
        if re.match(r"[a-z]+:", target):
            continue
        there = (path.parent / target).resolve() if target else path
        if there in MADE:
            continue
        if not there.is_file():
            found.append(f"{path.relative_to(HOME)}: {match['target']}: no such file")
        elif anchor and anchor not in anchors(there):
            found.append(f"{path.relative_to(HOME)}: {match['target']}: no such heading")
    return found


def test_every_link_leads_to_a_file_and_a_heading_that_are_there() -> None:
    assert [fault for path in DOCUMENTS for fault in faults(path, text_of(path))] == []


def test_a_link_that_leads_nowhere_is_noticed() -> None:
    text = "[a](docs/planner.md#the-bound) [b](docs/planner.md#nothing) [c](gone.md) [d](https://example.org) [e](#x)"
    assert faults(HOME / "README.md", text) == [
        "README.md: docs/planner.md#nothing: no such heading",
        "README.md: gone.md: no such file",
        "README.md: #x: no such heading",
    ]


def test_the_page_of_the_command_line_has_every_verb_and_the_site_knows_where_files_are() -> None:
    pytest.importorskip("mkdocs", reason="the extra 'docs' is not installed")
    spec = importlib.util.spec_from_file_location("halopipe_site", HOME / "docs" / "site.py")
    assert spec is not None
    assert spec.loader is not None
    site = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(site)
    import typer.main

    from halopipe.cli.app import app

    verbs = list(typer.main.get_command(app).commands)  # type: ignore[attr-defined]  # of a group
    page = site.commands()
    assert [verb for verb in verbs if f"## `halopipe {verb}`" not in page] == []
    assert "--check-numerics" in page
    assert site.site_uri("index.md", "docs/planner.md") == "planner.md"
    assert site.site_uri("planner.md", "../SECURITY.md") == "SECURITY.md"
    assert site.site_uri("SECURITY.md", "README.md") == "index.md"
    assert site.site_uri("decisions/README.md", "../gone.md") is None


@pytest.mark.exhaustive("it builds all pages: five seconds")
def test_the_site_is_built_without_a_warning_and_asks_no_other_machine(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="the extra 'docs' is not installed")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(HOME), "NO_MKDOCS_2_WARNING": "1"}
    result = subprocess.run(command, cwd=HOME, env=environment, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout + result.stderr) == (0, "")
    pages = {path.relative_to(tmp_path).as_posix(): path.read_text("utf-8") for path in tmp_path.rglob("*.html")}
    assert {"index.html", "your_model.html", "benchmarks.html", "reference/python.html"} <= pages.keys()
    assert 'id="halopipe-profile"' in pages["reference/commands.html"]
    headings = set(re.findall(r'id="[\w.]+\.(\w+)"', pages["reference/python.html"]))
    assert set(halopipe.__all__) - headings == set()
    assert {name: EXTERNAL.findall(page) for name, page in pages.items() if EXTERNAL.search(page)} == {}
