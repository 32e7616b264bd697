"""What the site has beside the pages of this folder: a hook of mkdocs (see mkdocs.yml).

README.md is its first page.  Other files of the repository that pages link to go along under their own paths, and links
are mended.  The page of the command line is written from the command line.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

HOME = Path(__file__).resolve().parent.parent
COMMANDS = "reference/commands.md"
LINK = re.compile(r"(?<=\]\()(?P<target>[^()\s#:]+)(?=(#[^()\s]*)?\))")
ROLE = re.compile(r":(?:class|func|mod|meth|data|attr):(?=<code>)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the page of the command line, README.md as the first page, and what pages link to outside of docs/."""
    files.append(File.generated(config, COMMANDS, content=commands()))
    files.append(File.generated(config, "index.md", abs_src_path=str(HOME / "README.md")))
    pages = [file for file in files if file.is_documentation_page()]
    for page in pages:  # grows
        for match in LINK.finditer(page.content_string):
            uri = site_uri(page.src_uri, match["target"])
            if uri is not None and files.get_file_from_path(uri) is None:
                files.append(linked := File.generated(config, uri, abs_src_path=str(HOME / uri)))
                pages += [linked] if linked.is_documentation_page() else []
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """The page with its links to files of the repository as they are in the site."""
    folder = posixpath.dirname(page.file.src_uri) or "."

    def mended(match: re.Match[str]) -> str:
        uri = site_uri(page.file.src_uri, match["target"])
        return match[0] if uri is None else posixpath.relpath(uri, folder)

    return LINK.sub(mended, markdown)


def on_page_content(html: str, **_: Any) -> str:
    """The page without the roles of docstrings (:class:`Plan`), which Markdown does not know."""
    return ROLE.sub("", html)


def site_uri(page: str, target: str) -> str | None:
    """Where the site has the file that a page of it links to; None if the repository has no such file."""
    own = "README.md" if page == "index.md" else page if (HOME / page).is_file() else f"docs/{page}"
    found = posixpath.normpath(posixpath.join(posixpath.dirname(own), target))
    if found == f"docs/{COMMANDS}":
        return COMMANDS
    if found.startswith("..") or not (HOME / found).is_file():
        return None
    return "index.md" if found == "README.md" else found.removeprefix("docs/")


def commands() -> str:
    """The page of the command line: what ``--help`` says of every verb."""
    import typer.main
    from typer.cli import get_docs_for_click

    from halopipe.cli.app import app

    group = typer.main.get_command(app)
    with typer.Context(group, info_name="halopipe") as context:
        return get_docs_for_click(obj=group, ctx=context, name="halopipe", title="The command line")
