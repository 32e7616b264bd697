"""What README.md and docs/*.md show is run: `halopipe` commands and Python blocks in order, in one folder a document.

A Python block that begins with a name, `# model.py`, is that file. A block under the comment `<!-- not run: REASON -->`
is left out. `make` is never run from here, but its targets must be there.
"""

from __future__ import annotations

import functools
import itertools
import os
import re
import shlex
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

HOME = Path(__file__).resolve().parent.parent
DOCUMENTS = [HOME / "README.md", *sorted((HOME / "docs").rglob("*.md"))]
FENCE = re.compile(
    r"(?:^[ ]*<!-- not run:(?P<reason>[^\n]*?)-->[ ]*\n\s*)?"
    r"^(?P<indent>[ ]*)```(?P<language>\w+)[^\n]*\n(?P<text>.*?)^(?P=indent)```[ ]*$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block: its language, its text, the line of its fence, and why it is not run (None: it is)."""

    language: str
    text: str
    line: int
    reason: str | None


def blocks(document: str) -> list[Block]:
    """The console, bash and python blocks of a document, in order."""
    found = []
    for match in FENCE.finditer(document):
        line = document.count("\n", 0, match.start("indent")) + 1
        reason = match["reason"]
        if reason is not None and not reason.strip():
            raise ValueError(f"line {line}: 'not run' without a reason")
        if match["language"] in ("bash", "console", "python"):
            found.append(Block(match["language"], textwrap.dedent(match["text"]), line, reason))
    return found


def commands(block: Block) -> list[str]:
    """The command lines of a shell block; in a console block those after `$`, the rest being output."""
    lines = block.text.replace("\\\n", " ").splitlines()
    if block.language == "console":
        return [line[2:].strip() for line in lines if line.startswith("$ ")]
    return [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]


def make_targets(makefile: str) -> set[str]:
    """Names that stand before a colon at the start of a line."""
    return set(re.findall(r"^([a-z][\w-]*):(?!=)", makefile, re.MULTILINE))


def shell_faults(block: Block, targets: set[str]) -> list[str]:
    """Commands of a block that this test could not vouch for."""
    found = []
    for command in commands(block):
        words = shlex.split(command, comments=True)
        if words[0] == "make":
            goals = [word for word in words[1:] if "=" not in word and not word.startswith("-")]
            found += [f"line {block.line}: no target '{goal}' in the Makefile" for goal in goals if goal not in targets]
        elif block.reason is None and words[0] != "halopipe":
            found.append(f"line {block.line}: '{command}' is not halopipe's; put <!-- not run: REASON --> above it")
    return found


def spoken(document: str) -> list[str]:
    """All halopipe commands of a document: of its blocks, those that are not run too, and of its sentences."""
    of_blocks = [command for block in blocks(document) if block.language != "python" for command in commands(block)]
    of_sentences = re.findall(r"`(halopipe [a-z][^`\n]*)`", FENCE.sub("", document))
    return [command.partition("halopipe ")[2] for command in of_blocks + of_sentences if "halopipe " in command]


@functools.cache
def verbs() -> Any:
    """The command line, with its verbs by name."""
    import typer.main

    from halopipe.cli.app import app

    return typer.main.get_command(app)


def misspelt(command: str) -> str:
    """What the command line would not understand of the words behind `halopipe`; empty if it understands all."""
    import typer

    verb, *words = itertools.takewhile(
        lambda word: word not in ("|", "&&", ">", "2>&1"), shlex.split(command, comments=True)
    )
    known = verbs().commands
    if verb.startswith("-"):
        return ""
    if verb not in known:
        return f"halopipe {command}: there is no verb {verb}"
    try:
        known[verb].make_parser(typer.Context(known[verb])).parse_args(list(words))
    except Exception as error:  # noqa: BLE001  # of the library that parses
        return f"halopipe {command}: {error}"
    return ""


def file_of(block: Block) -> str:
    """The name of the file that a block is; empty if it is none."""
    first = block.text.partition("\n")[0]
    return first.removeprefix("# ") if block.language == "python" and re.fullmatch(r"# \w+\.py", first) else ""


def run(document: str, folder: Path) -> list[str]:
    """Run a document's blocks in `folder`; the first failure, with what it wrote, or nothing."""
    (folder / "bin").mkdir()
    script = folder / "bin" / "halopipe"
    script.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m halopipe "$@"\n')
    script.chmod(0o755)
    place = folder / "work"
    place.mkdir()
    environment = {**os.environ, "PATH": f"{script.parent}:{os.environ['PATH']}", "PYTHONPATH": str(HOME)}
    for block in blocks(document):
        if block.reason is not None:
            continue
        if name := file_of(block):
            (place / name).write_text(block.text, "utf-8")
            steps = []
        elif block.language == "python":
            steps = [[sys.executable, "-c", block.text]]
        else:
            shell = ["bash", "-o", "pipefail", "-c"]
            steps = [[*shell, line] for line in commands(block) if line.split()[0] == "halopipe"]
        for step in steps:
            result = subprocess.run(step, cwd=place, env=environment, capture_output=True, text=True, check=False)
            if result.returncode != 0:
                outcome = f"line {block.line}: exit {result.returncode} from:\n{step[-1]}\n"
                return [outcome + result.stdout + result.stderr]
    return []


@pytest.mark.exhaustive("every command of every document, as a newcomer types them: minutes")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_what_a_document_shows_works(path: Path, tmp_path: Path) -> None:
    document = path.read_text("utf-8")
    targets = make_targets((HOME / "Makefile").read_text("utf-8"))
    shell_blocks = [block for block in blocks(document) if block.language != "python"]
    assert [fault for block in shell_blocks for fault in shell_faults(block, targets)] == []
    assert run(document, tmp_path) == []


def test_every_command_of_every_document_is_one_that_the_command_line_understands() -> None:
    found = {path.name: spoken(path.read_text("utf-8")) for path in DOCUMENTS}
    assert [fault for each in found.values() for command in each if (fault := misspelt(command))] == []
    assert {"plan profile.json", "run plan.json"} <= {*found["README.md"], *found["runtime.md"]}


def test_a_misspelt_command_is_noticed() -> None:
    document = (
        "`halopipe plan x --no-such` and\n```console\n$ torchrun -m halopipe walk x\n```\n`halopipe run x --steps 3`"
    )
    walk, plan, run = spoken(document)
    assert misspelt(walk) == "halopipe walk x: there is no verb walk"
    assert "--no-such" in misspelt(plan)
    assert misspelt(run) == ""


SAMPLE = """
<!-- not run: it takes a minute -->

```console
$ make demo
$ pip install -e .
```

- A step:
  ```bash
  # a comment
  halopipe plan \\
      profile.json
  ```

```console
$ halopipe explain plan.json | head
stages 2
```

```json
{}
```

```python
print(1)
```
"""


def test_blocks_are_found_with_their_line_and_reason() -> None:
    found = blocks(SAMPLE)
    assert [block.language for block in found] == ["console", "bash", "console", "python"]
    assert [block.line for block in found] == [4, 10, 16, 25]
    assert [block.reason for block in found] == [" it takes a minute ", None, None, None]
    assert [commands(block) for block in found[:3]] == [
        ["make demo", "pip install -e ."],
        ["halopipe plan      profile.json"],
        ["halopipe explain plan.json | head"],
    ]


def test_a_block_left_out_needs_a_reason() -> None:
    with pytest.raises(ValueError, match="line 2: 'not run' without a reason"):
        blocks("<!-- not run: -->\n```bash\nhalopipe\n```\n")


def test_targets_and_foreign_commands_are_checked() -> None:
    targets = make_targets("VENV := .venv\ndemo: x\n\ttrue\n.PHONY: ghost\n")
    assert targets == {"demo"}
    (fault,) = shell_faults(Block("bash", "make demo ghost PYTHON=python3.12", 1, "slow"), targets)
    assert fault == "line 1: no target 'ghost' in the Makefile"
    (fault,) = shell_faults(Block("console", "$ rm -r x\nrm: no", 7, None), targets)
    assert fault.startswith("line 7: 'rm -r x' is not halopipe's")


def test_blocks_share_a_folder_and_a_failure_is_shown(tmp_path: Path) -> None:
    (tmp_path / "good").mkdir()
    writes = "```python\nopen('a.txt', 'w').close()\n```\n```python\n# b.py\nraise SystemExit(2)\n```\n"
    reads = "```python\nprint(open('a.txt').read(), open('b.py').read(), 'found')\nraise SystemExit(3)\n```\n"
    assert run(writes, tmp_path / "good") == []
    (tmp_path / "bad").mkdir()
    (fault,) = run(writes + reads, tmp_path / "bad")
    assert fault.startswith("line 8: exit 3 from:")
    assert "found" in fault


def test_a_command_goes_through_the_current_interpreter(tmp_path: Path) -> None:
    (fault,) = run("```console\n$ halopipe no-such-verb 2>&1 | cat\n```\n", tmp_path)
    assert fault.startswith("line 1: exit")
    assert "no-such-verb" in fault
