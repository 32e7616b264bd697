"""The packages as a picture, drawn from the imports: ``python -m benchmarks.house --picture`` writes the one in docs.

A box is a package that has a floor of its own (``FLOORS`` in ``tests/test_architecture.py``).  It stands above all that
it imports.  A line leads from a box to what it imports, unless a way over other boxes leads there as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from benchmarks.house.measures import HOME, PACKAGES
from tests.test_architecture import floor_of, imports_of, read_sources, resolve

PICTURE = Path("docs/images/architecture.svg")
WHOLE = ("halopipe", "profiler", "runtime", "cuda_ops", "planner.ir", "planner.extras")
"""One box each, whatever floors lie inside."""
LEFT_OUT = ("planner", "planner.solvers.budget", "planner.solvers.progress")
"""The planner's face, and two modules that import nothing of ours."""
FACE = "halopipe"
"""Drawn over all others, without lines."""
LEFT = ("profiler", "planner.extras")
RIGHT = ("runtime", "cuda_ops", "planner.sites", "planner.proof", "planner.check")
"""Which boxes stand left and right in their rows, so that few lines cross."""
FILES = ("profile.json", "plan.json", "timeline.json")
VERBS = ("profile", "plan", "run")
HEAD = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="13"'
    ' text-anchor="middle">'
)
TIP = (
    '<marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    '<path d="M0 0L8 4L0 8z" fill="#9ab"/></marker>'
)
WIDTH = 960
ROW = 62
BOX_WIDTH = 148
BOX_HEIGHT = 30
TOP = 96
OF_PLANNER = "#e3eefb"
OTHER = "#e6f4e3"
FILE = "#fdf3d8"


def arrows(sources: Mapping[str, str]) -> dict[str, set[str]]:
    """The boxes that each box imports from, by the imports of all modules."""
    modules = {name.removesuffix(".__init__") for name in sources}
    imported = {name: imports_of(name, text) for name, text in sources.items()}
    faces = {
        name.removesuffix(".__init__"): {alias: (module, taken) for module, taken, alias, _ in rows if alias}
        for name, rows in imported.items()
        if name.endswith(".__init__")
    }
    targets: dict[str, set[str]] = {}
    for name, rows in imported.items():
        box = box_of(name.removesuffix(".__init__"))
        boxes = {box_of(resolve(module, taken, faces, modules)) for module, taken, _, _ in rows}
        # Extras stand above the core: what the core asks of them it asks by name.
        above = {"planner.extras"} if box.startswith("planner.") else set[str]()
        targets.setdefault(box, set()).update(boxes - {box, "", *above})
    targets.pop("", None)
    return targets


def of_product() -> dict[str, set[str]]:
    """The arrows of what users install."""
    return arrows({name: text for name, text in read_sources(HOME).items() if name.startswith(PACKAGES)})


def write() -> None:
    """Put the picture where docs/architecture.md shows it."""
    (HOME / PICTURE).write_text(draw(of_product()), encoding="utf-8")


def box_of(module: str) -> str:
    """The box that a module is in, or nothing."""
    whole = next((name for name in WHOLE if module == name or module.startswith(f"{name}.")), None)
    box = whole or floor_of(module) or ""
    return "" if box in LEFT_OUT else box


def levels_of(targets: Mapping[str, set[str]]) -> dict[str, int]:
    """How high each box stands: one above the highest of what it imports."""
    levels: dict[str, int] = {}

    def level(box: str) -> int:
        if box not in levels:
            levels[box] = 1 + max(map(level, targets[box]), default=-1)
        return levels[box]

    for box in targets:
        level(box)
    return levels


def without_detours(targets: Mapping[str, set[str]]) -> list[tuple[str, str]]:
    """The arrows that no way over other boxes replaces."""

    def reached(box: str) -> set[str]:
        return targets[box].union(*(reached(below) for below in targets[box]))

    return sorted(
        (box, below)
        for box, belows in targets.items()
        for below in belows
        if not any(below in reached(other) for other in belows - {below})
    )


def draw(targets: Mapping[str, set[str]]) -> str:
    """The picture as SVG text: the way of the files above, the packages below."""
    levels = levels_of(targets)
    highest = max(levels.values())
    places = {}
    for level in range(highest + 1):
        row = sorted(
            (box for box in levels if levels[box] == level), key=lambda box: (box in RIGHT, box not in LEFT, box)
        )
        for index, box in enumerate(row):
            x = WIDTH * (2 * index + 1) / (2 * len(row))
            places[box] = (x, TOP + ROW * (highest - level))
    lines = [
        f'<line x1="{places[box][0]:.0f}" y1="{places[box][1] + BOX_HEIGHT}" '
        f'x2="{places[below][0]:.0f}" y2="{places[below][1]}" stroke="#9ab" marker-end="url(#tip)"/>'
        for box, below in without_detours(targets)
        if box != FACE
    ]
    boxes = [
        part
        for box, (x, y) in places.items()
        for part in _box(box, x, y, _colour(box), WIDTH - 20 if box == FACE else BOX_WIDTH)
    ]
    height = TOP + ROW * highest + BOX_HEIGHT + 10
    background = f'<rect width="{WIDTH}" height="{height}" fill="white"/>'
    return "\n".join([HEAD.format(width=WIDTH, height=height), TIP, background, *_files(), *boxes, *lines, "</svg>\n"])


def _files() -> list[str]:
    """A model on its way through three verbs and three files."""
    step = WIDTH / len(FILES)
    parts = ['<text x="38" y="40">MODEL</text>']
    for index, (verb, file) in enumerate(zip(VERBS, FILES, strict=True)):
        x = step * (index + 1) - BOX_WIDTH / 2 - 4
        start = 66 if index == 0 else step * index
        end = x - BOX_WIDTH / 2
        parts += [
            f'<line x1="{start:.0f}" y1="35" x2="{end:.0f}" y2="35" stroke="#567" marker-end="url(#tip)"/>',
            f'<text x="{(start + end) / 2:.0f}" y="27">{verb}</text>',
            *_box(file, x, 20, FILE),
        ]
    return parts


def _colour(box: str) -> str:
    return OF_PLANNER if box.startswith("planner.") else OTHER


def _box(label: str, x: float, y: float, colour: str, width: int = BOX_WIDTH) -> list[str]:
    place = f'x="{x - width / 2:.0f}" y="{y:.0f}" width="{width}" height="{BOX_HEIGHT}"'
    text = f'<text x="{x:.0f}" y="{y + 20:.0f}">{label.removeprefix("planner.")}</text>'
    return [f'<rect {place} rx="5" fill="{colour}" stroke="#567"/>', text]
