"""Every import of every module against the floors: imports point down, and no module depends on itself.

The walk sees imports at the top, inside functions, under `TYPE_CHECKING`, and `import_module("...")` of a literal. A
name taken from a package counts as an import of the module that the package's `__init__` takes it from, and importing
`a.b.c` is not held to import `a` and `a.b`: else every face that re-exports its modules would make a cycle.
"""

from __future__ import annotations

import ast
import functools
import gc
import itertools
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from benchmarks.house import measures

HOME = Path(__file__).resolve().parent.parent
CODE = ("benchmarks", "cuda_ops", "halopipe", "planner", "profiler", "runtime")
TOP_LEVEL = {*CODE, "docs", "notebooks", "tests"}


@dataclass(frozen=True, slots=True)
class Floor:
    """What the modules of one floor may import besides the standard library and their own package."""

    ours: frozenset[str]
    third_party: frozenset[str]


def floor(ours: str = "", third_party: str = "") -> Floor:
    return Floor(frozenset(ours.split()), frozenset(third_party.split()))


PLANNER = "planner.ir planner.layers planner.schedules planner.passes"
# What a search needs beside costs.
SEARCH = "planner.solvers.budget planner.solvers.candidates planner.solvers.everyday planner.solvers.progress"
WITH_TORCH = "planner.ir planner.layers planner.sites cuda_ops"
DEPENDENCIES = (
    "bokeh cloudpickle jinja2 laspy lazrs matplotlib nbformat numpy pandas pydantic rich sklearn starlette torch typer"
    " uvicorn"
)
# The architecture's table. The longest name here that a module's own begins with is its floor.
FLOORS = {
    "planner.ir": floor(),
    "planner.ir.codec": floor("planner.ir", "pydantic"),
    "planner.ir.strict_yaml": floor("planner.ir", "yaml"),
    "cuda_ops": floor("planner.ir.extras planner.ir.scratch", "numpy spconv torch torchsparse triton"),
    "planner.layers": floor("planner.ir", "numpy"),
    "planner.sites": floor("planner.ir", "numpy"),
    "planner.schedules": floor("planner.ir planner.passes"),
    "planner.passes": floor("planner.ir planner.layers"),
    "planner.costs": floor(PLANNER, "numpy scipy"),
    "planner.solvers.progress": floor(),
    "planner.solvers.budget": floor("planner.ir"),
    "planner.solvers.integer_program": floor("", "highspy numpy scipy"),
    "planner.solvers.candidates": floor(f"{PLANNER} planner.costs planner.solvers.budget", "numpy"),
    "planner.solvers.everyday": floor(f"{PLANNER} planner.costs planner.solvers.candidates planner.solvers.progress"),
    "planner.solvers.layouts": floor(
        f"{PLANNER} planner.costs planner.solvers.integer_program {SEARCH}", "numpy scipy"
    ),
    "planner.extras": floor(),
    "planner.extras.baselines": floor(
        f"{PLANNER} planner.costs planner.solvers.layouts planner.solvers.integer_program {SEARCH}",
        "networkx numpy scipy",
    ),
    "planner.solvers": floor(f"{PLANNER} planner.costs", "highspy numpy scipy"),
    "planner.extras.tiles": floor(
        f"{PLANNER} planner.check.structure planner.costs planner.solvers.layouts planner.solvers.best_first {SEARCH}",
        "numpy",
    ),
    "planner.extras.token_slices": floor(
        f"{PLANNER} planner.costs planner.solvers.best_first.continued planner.solvers.requests {SEARCH}", "numpy"
    ),
    "planner.extras.catalogue": floor("planner.ir", "pydantic"),
    "planner.extras.kernels": floor("planner.ir planner.extras.catalogue", "numpy scipy"),
    "planner.extras.on_chip_memory": floor("planner.ir planner.costs"),
    "planner.extras.sites": floor("planner.ir planner.layers planner.costs", "numpy"),
    "planner.extras.transformers": floor(
        f"{PLANNER} planner.extras.catalogue planner.extras.kernels planner.costs.memory.table planner.costs.simulator"
        " planner.costs.timeline planner.solvers.best_first.recurrence planner.solvers.best_first.message_bound",
        "numpy",
    ),
    # The checker asks the cost model what a decision costs; tests hold the cost model to the oracles of tests/oracles.
    "planner.check": floor(f"{PLANNER} planner.costs"),
    # Proofs: what a plan costs is derived anew, and nothing of the search, its costs or the checker is asked.
    "planner.proof": floor("planner.ir planner.layers planner.schedules", "numpy"),
    "planner.extras.export": floor(
        f"{PLANNER} planner.costs planner.solvers planner.extras.baselines planner.extras.transformers", "pandas"
    ),
    "planner": floor("planner"),
    # What it captures is a model as the runtime takes it.
    "profiler": floor(f"{WITH_TORCH} runtime.captured", "cloudpickle pandas sympy torch"),
    "profiler.extras.modelled": floor(f"{WITH_TORCH} profiler planner.extras.kernels runtime.captured", "torch"),
    "profiler.models": floor("cuda_ops planner.ir.extras", "torch"),
    # Links are measured by what a run exchanges by: a copy of it would measure something else before long.
    "profiler.links": floor(f"{WITH_TORCH} profiler runtime.transport", "torch"),
    # The same of what ranks make of the sites that they share.
    "profiler.measure.preparing": floor(
        f"{WITH_TORCH} profiler runtime.captured runtime.pipeline.microbatches runtime.pipeline.routing"
        " runtime.sparse.batch runtime.sparse.share",
        "numpy torch",
    ),
    "profiler.links.calls": floor(
        "cuda_ops planner.ir profiler runtime.optim.gradient_buckets runtime.sparse.halo runtime.spatial"
        " runtime.stage.batch_norm runtime.transport",
        "torch",
    ),
    "runtime": floor(f"{WITH_TORCH} planner.passes", "mpi4py torch"),
    "runtime.extras": floor(),
    "runtime.extras.distcp": floor(f"{WITH_TORCH} runtime", "torch"),
    "runtime.extras.compiling": floor(f"{WITH_TORCH} runtime", "torch"),
    "runtime.extras.sampled_graphs": floor(f"{WITH_TORCH} runtime", "torch"),
    "runtime.extras.streams": floor(f"{WITH_TORCH} runtime", "torch"),
    "runtime.extras.tiles": floor("planner.ir planner.layers planner.extras.tiles.division runtime", "torch"),
    "runtime.extras.token_slices": floor(
        "planner.ir planner.extras.token_slices.axes planner.layers.boundary runtime", "torch"
    ),
    "runtime.checkpoint": floor(f"{WITH_TORCH} runtime", "pydantic safetensors torch"),
    "halopipe": floor(" ".join(CODE[1:]), DEPENDENCIES),
    "halopipe.guard": floor(),
    "benchmarks": floor(
        " ".join(CODE), f"{DEPENDENCIES} cosmic_ray highspy networkx scipy spconv timm torchvision transformers triton"
    ),
    "benchmarks.house": floor("benchmarks", "tests"),  # reads this table
    "benchmarks.without": floor("benchmarks", "tests"),  # and imports as it does
    # Their networks are those of tests/zoo.
    "benchmarks.accuracy": floor(" ".join(CODE), f"{DEPENDENCIES} tests timm"),
    "benchmarks.devices": floor(" ".join(CODE), f"{DEPENDENCIES} tests"),  # ranks are forked by tests/forks
    "benchmarks.journey": floor(" ".join(CODE), f"{DEPENDENCIES} tests"),
    "benchmarks.networks": floor(" ".join(CODE), f"{DEPENDENCIES} tests transformers"),
    "benchmarks.robustness": floor(" ".join(CODE), f"{DEPENDENCIES} tests"),
}
FACES = ("planner",)  # of these floors, only the package's own __init__: a new sub-package needs a line in the table


def read_sources(home: Path, folders: Iterable[str] = CODE) -> dict[str, str]:
    """Source text by module name; a package stands under its own name with `.__init__` behind."""
    files = (path for top in folders for path in sorted((home / top).rglob("*.py")))
    return {".".join(path.relative_to(home).with_suffix("").parts): path.read_text("utf-8") for path in files}


NAMING = (
    *(ast.Import, ast.ImportFrom, ast.Call, ast.Attribute, ast.Name),
    *(ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef),
)


@functools.cache
def parsed(text: str) -> list[ast.AST]:
    """The nodes of a source that import, call, define or use a name."""
    nodes: list[ast.AST] = [ast.parse(text)]
    for node in nodes:  # which grows meanwhile; ast.walk takes three times as long
        for value in vars(node).values():
            if isinstance(value, ast.AST):
                nodes.append(value)
            elif isinstance(value, list):
                nodes += [part for part in value if isinstance(part, ast.AST)]
    return [node for node in nodes if isinstance(node, NAMING)]


@pytest.fixture(scope="module", autouse=True)
def trees() -> Iterator[None]:
    """Of the whole project they are gigabytes, which nobody else needs, and hold no garbage."""
    gc.disable()
    yield
    gc.enable()
    parsed.cache_clear()


def imports(name: str, nodes: Sequence[ast.AST]) -> Iterator[tuple[str, str, str, int]]:
    """Each import of a module: (module, name taken from it or "", name given to it here, line)."""
    package = name.split(".")[:-1]
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from ((alias.name, "", alias.asname or "", node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) + 1 - node.level] if node.level else []
            module = ".".join([*above, *([node.module] if node.module else [])])
            yield from ((module, alias.name, alias.asname or alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                yield node.args[0].value, "", "", node.lineno


def resolve(module: str, name: str, faces: Mapping[str, Mapping[str, tuple[str, str]]], modules: set[str]) -> str:
    """The module that `from module import name` reads, followed through the `__init__` of each package on the way."""
    seen = set()
    while name and (module, name) not in seen:
        seen.add((module, name))
        if f"{module}.{name}" in modules:
            return f"{module}.{name}"
        module, name = faces.get(module, {}).get(name, (module, ""))
    return module


def floor_of(module: str) -> str | None:
    """The name of a module's floor; `planner.ir.codec_x` belongs to the codec."""
    if module.startswith("planner.ir.codec"):
        return "planner.ir.codec"
    parts = module.split(".")
    prefixes = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    found = next((prefix for prefix in prefixes if prefix in FLOORS), None)
    return None if found in FACES and found != module else found


def inside(module: str, names: frozenset[str]) -> bool:
    return any(module == name or module.startswith(f"{name}.") for name in names)


def complaints(sources: Mapping[str, str]) -> list[str]:
    """Everything that breaks the table, and the first cycle; empty when all is well."""
    modules = {name.removesuffix(".__init__") for name in sources}
    found = {name: imports_of(name, text) for name, text in sources.items()}
    faces = {
        name.removesuffix(".__init__"): {given: (module, taken) for module, taken, given, _ in rows if given}
        for name, rows in found.items()
        if name.endswith(".__init__")
    }
    problems = []
    edges = {}
    for source, rows in found.items():
        module = source.removesuffix(".__init__")
        at = floor_of(module)
        if at is None:
            problems.append(f"{module}: no floor in the table")
            continue
        edges[module] = set()
        for target_module, name, _, line in rows:
            target = resolve(target_module, name, faces, modules)
            top = target.split(".")[0]
            if top in CODE:
                edges[module].add(target)
                # Its own floor is open to a module, but not a narrower floor that lies inside, nor a wider one around.
                allowed = inside(target, FLOORS[at].ours) or (floor_of(target) == at) or target.startswith(f"{at}.")
            else:
                allowed = top in sys.stdlib_module_names or top in FLOORS[at].third_party
            if not allowed:
                problems.append(f"{module}:{line}: {at} may not import {target}")
    try:
        TopologicalSorter(edges).prepare()
    except CycleError as cycle:
        problems.append("cycle: " + " <- ".join(cycle.args[1]))
    return problems


def imports_of(module: str, text: str) -> list[tuple[str, str, str, int]]:
    """:func:`imports`; where it is said what extras may add, types of all floors are there for type checkers alone."""
    if module.endswith("extra"):
        tree = ast.parse(text)
        tree.body = [node for node in tree.body if not ast.unparse(node).startswith("if TYPE_CHECKING:")]
        text = ast.unparse(tree)
    return list(imports(module, parsed(text)))


PRIVATES = "cuda_ops._torch"  # the only module that may use private names of torch
OF_PYTHON = {"_exit", "_fields", "_getframe", "_replace"}  # of os, named tuples and sys, documented


def torch_privates(sources: Mapping[str, str]) -> list[str]:
    """Uses of private names that are torch's: imported from it, or attributes of names that nobody here defines."""
    parts_of = {name: parsed(text) for name, text in sources.items()}
    own = {name for nodes in parts_of.values() for name in _defined(nodes)} | OF_PYTHON
    problems = []
    for module, nodes in parts_of.items():
        if module == PRIVATES:
            continue
        for target, name, _, line in imports(module, nodes):
            parts = [*target.split("."), name]
            if parts[0] == "torch" and ("distributed_c10d" in parts or any(_is_private(part) for part in parts)):
                problems.append(f"{module}:{line}: {'.'.join(parts)}")
        for node in nodes:
            name = node.attr if isinstance(node, ast.Attribute) else _asked(node)
            if _is_private(name) and (name not in own or _root(node) in ("torch", "dist")):
                problems.append(f"{module}:{getattr(node, 'lineno', 0)}: {ast.unparse(node)}")
    return problems


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def _root(node: ast.AST) -> str:
    """The ``a`` of ``a.b.c``."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def _asked(node: ast.AST) -> str:
    """The name of a ``getattr(x, "name")``."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr"):
        name = node.args[1]
        return name.value if isinstance(name, ast.Constant) and isinstance(name.value, str) else ""
    return ""


def _defined(nodes: Sequence[ast.AST]) -> Iterator[str]:
    """Names of functions, classes, variables and attributes of ``self`` that a module makes."""
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Name):
            yield from [node.attr] if node.value.id in ("self", "cls") else []


CLEAN = ("planner.", "profiler.", "runtime.", "cuda_ops.", "halopipe.")
"""Packages in which names were gone through: no private word comes back there."""

SLACK = 0.98
"""A figure that has fallen below this part of its entry is to be recorded, so that nothing creeps back."""


def exceeded(now: Mapping[str, int], history: Sequence[Mapping[str, str]]) -> list[str]:
    """Figures of the house above their entry in the last row, or far below it, and entries raised without a page."""
    problems = []
    for name, figure in now.items():
        entry = int(history[-1][name])
        if figure > entry:
            problems.append(f"{name}: {figure}, and the house has room for {entry}; delete something")
        elif figure < SLACK * entry:
            problems.append(f"{name}: {figure} of {entry}; python -m benchmarks.house --record WHY keeps what was won")
    for before, after in itertools.pairwise(history):
        page = re.search(r"docs/decisions/\S+\.md", after["why"])
        has_page = page is not None and (HOME / page[0]).is_file()
        raised = [name for name in now if before.get(name) and int(after[name]) > int(before[name])]
        problems += [
            f"{after['date']}: {name} was raised without a page of docs/decisions" for name in raised if not has_page
        ]
    return problems


EXTRAS = re.compile(rf"(?:{'|'.join(CODE[1:])})\.extras\b")


STILL_KNOWING: frozenset[str] = frozenset()
"""Modules of the core that still name an extra; none is added."""


def extras_in_core(sources: Mapping[str, str]) -> list[str]:
    """Imports of an extra in modules that are none."""
    return [
        f"{source.removesuffix('.__init__')}:{line}: {module}"
        for source, text in sources.items()
        if source.split(".")[0] in CODE[1:] and not EXTRAS.match(source)
        for module, name, _, line in imports(source, parsed(text))
        if EXTRAS.match(f"{module}.{name}")
    ]


PROBE = """
import sys
code = sys.argv.pop()
try:
    exec(code)
except SystemExit as stop:
    assert not stop.code, stop.code
print()
print(*sorted({"scipy", "torch", "torchvision", "triton"} & set(sys.modules)))
"""


def heavy_after(code: str, folder: Path) -> list[str]:
    """The heavy packages that are loaded once `code` has run in a fresh interpreter, started in `folder`."""
    environment = {**os.environ, "PYTHONPATH": str(HOME)}
    command = [sys.executable, "-c", PROBE, code]
    result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()[-1].split()


def test_every_import_points_down_and_there_is_no_cycle() -> None:
    assert complaints(read_sources(HOME)) == []


def test_the_core_imports_no_extra() -> None:
    """Extras add to the core at its hooks (`planner.ir.extras`): without their folders it does what it did before."""
    imported = extras_in_core(read_sources(HOME))
    assert [each for each in imported if each.split(":")[0] not in STILL_KNOWING] == []
    assert {each.split(":")[0] for each in imported} >= STILL_KNOWING, "these know no extra any more: take them out"


def test_an_extra_in_the_core_is_named() -> None:
    sources = {
        "planner.ir.plan": "from planner.extras.sites import x",
        "planner.extras.sites.__init__": "",
        "planner.extras.tiles.__init__": "from planner.extras import sites",
        "halopipe.cli.plan": "import planner.extras.sites as sites",
    }
    assert extras_in_core(sources) == [
        "planner.ir.plan:1: planner.extras.sites",
        "halopipe.cli.plan:1: planner.extras.sites",
    ]


def test_private_names_of_torch_are_used_in_one_module_alone() -> None:
    assert torch_privates(read_sources(HOME)) == []


def test_packages_that_were_cleaned_have_no_private_words() -> None:
    sources = read_sources(HOME)
    assert measures.private_words({name: sources[name] for name in sources if name.startswith(CLEAN)}) == []


@pytest.mark.parametrize(
    ("source", "place"),
    [
        ("class Told: pass", "1: Told is private; the term is what it is"),
        ("def f():\n    def g(*again): pass", "2: g binds again: say what it holds"),
        ("def f():\n    for _, found in (): pass", "1: f binds found: say what it holds"),
        ("class Retold:\n    def found(self):\n        self.told = f(seen=1)", None),
    ],
)
def test_a_private_word_is_named(source: str, place: str | None) -> None:
    assert measures.private_words({"planner.a": source}) == ([] if place is None else [f"planner.a:{place}"])


def test_the_house_does_not_grow() -> None:
    assert exceeded(measures.figures(read_sources(HOME, TOP_LEVEL)), measures.rows()) == []


@pytest.mark.parametrize(
    ("now", "raised", "why", "complaints_of"),
    [
        (100, 100, "", 0),
        (101, 100, "", 1),
        (90, 100, "", 1),
        (110, 110, "needed", 1),
        (110, 110, "docs/decisions/README.md says so", 0),
    ],
)
def test_an_entry_of_the_house_is_kept_to(now: int, raised: int, why: str, complaints_of: int) -> None:
    history = [{"date": "before", "homonyms": "100", "why": ""}, {"date": "now", "homonyms": f"{raised}", "why": why}]
    assert len(exceeded({"homonyms": now}, history)) == complaints_of


@pytest.mark.parametrize(
    ("source", "figure", "count"),
    [
        ("class A: pass\nclass B:\n    class A: pass", "homonyms", 1),
        ("def f(found): pass", "vague names", 1),
        ("def f():\n    for told, _ in (): pass", "vague names", 1),
        ("def f():\n    found_s = g(found=1)", "vague names", 0),
        ("def f():\n    def g():\n        seen = 1", "vague names", 1),
        ("def f(a, b, c, *d, e, f): pass", "wide functions", 0),
        ("def f(a, b, c, *d, e, f, **g): pass", "wide functions", 1),
        ("def f():\n    'text'\n    if 1: return 2  # why", "planner tokens", 10),
        ("x = [\n    1,\n    f'{y}',\n]", "planner tokens", 7),
        ("'text'", "runtime tokens", 0),
        ("Ab = int\nclass Bc: pass\nBc = str", "aliases of two meanings", 1),
        ("a, b = 1, 2\na, b = b, a\na, b = f()\n(a, b), c = x, 1\na, *b = 1, 2", "packed assignments", 3),
        (
            "def f(a0, b0, c0, d0, e0):\n    " + " = ".join(f"x{n}" for n in range(20)) + " = 0",
            "functions of many names",
            0,
        ),
        (
            "def f(a0, b0, c0, d0, e0):\n    " + " = ".join(f"x{n}" for n in range(21)) + " = 0",
            "functions of many names",
            1,
        ),
    ],
)
def test_figures_of_the_house(source: str, figure: str, count: int) -> None:
    assert measures.figures({"planner.a": source})[figure] == count


def test_packed_assignments_are_counted_in_all_folders_and_all_else_in_the_packages() -> None:
    packed = {"benchmarks.a": "a, b = 1, 2", "tests.a": "a, b = 1, 2\nclass A: pass", "tests.b": "class A: pass"}
    assert measures.figures(packed)["packed assignments"] == 2
    assert measures.figures(packed)["homonyms"] == 0


@pytest.mark.parametrize(
    ("source", "use"),
    [
        ("import torch._dynamo", "torch._dynamo."),
        ("def f():\n    from torch._C._distributed_c10d import Store", "torch._C._distributed_c10d.Store"),
        ("from torch.utils import _pytree", "torch.utils._pytree"),
        ("from torch.distributed.distributed_c10d import Store", "torch.distributed.distributed_c10d.Store"),
        ("import torch\ntorch._C.anything", "torch._C"),
        ("def f(x):\n    return x._version", "x._version"),
        ("def f(x):\n    return getattr(x, '_schema', None)", "getattr(x, '_schema', None)"),
    ],
)
def test_a_private_name_of_torch_is_named(source: str, use: str) -> None:
    (problem,) = torch_privates({"runtime.engine": source})
    assert problem.endswith(f": {use}")
    assert torch_privates({PRIVATES: source}) == []


def test_private_names_of_ours_are_not_torchs() -> None:
    source = "class A:\n    def __init__(self):\n        self._mine = 1\n\ndef f(a):\n    return a._mine"
    assert torch_privates({"runtime.engine": source}) == []


def test_python_code_lies_in_the_known_top_level_folders_alone() -> None:
    folders = [path for path in HOME.iterdir() if path.is_dir() and not path.name.startswith(".")]
    holding = {path.name for path in folders if any(path.rglob("*.py")) and not (path / "pyvenv.cfg").exists()}
    assert holding - {"build"} <= TOP_LEVEL
    assert {path.name for path in HOME.glob("*.py")} == set()


@pytest.mark.parametrize("package", ["planner", "halopipe", "planner.solvers.best_first.solver"])
def test_importing_the_package_loads_nothing_heavy(package: str, tmp_path: Path) -> None:
    assert heavy_after(f"import {package}", tmp_path) == []


@pytest.mark.parametrize("verb", ["", "explain", "compare", "check"])
def test_the_help_of_a_verb_loads_no_torch(verb: str, tmp_path: Path) -> None:
    arguments = ["halopipe", *verb.split(), "--help"]
    code = f"sys.argv[:] = {arguments}; from halopipe.cli.app import main; sys.exit(main())"
    assert heavy_after(code, tmp_path) == []


def test_the_probe_sees_torch(tmp_path: Path) -> None:
    (tmp_path / "torch.py").touch()
    assert heavy_after("def lazily():\n    import torch\nlazily(); raise SystemExit(0)", tmp_path) == ["torch"]


@pytest.mark.parametrize(
    ("module", "source", "complaint"),
    [
        ("planner.ir.graph", "import numpy", "planner.ir.graph:1: planner.ir may not import numpy"),
        ("planner.ir.graph", "import pydantic", "planner.ir may not import pydantic"),
        ("planner.ir.codec_v1", "import rich", "planner.ir.codec may not import rich"),
        ("planner.ir.box", "from ..layers import conv", "planner.ir may not import planner.layers"),
        ("planner.layers.conv", "from planner.schedules.gpipe import gpipe", "may not import planner.schedules.gpipe"),
        (
            "planner.costs.layers.interpolation",
            "def f():\n    import torch.nn as nn",
            "planner.costs.layers.interpolation:2: planner.costs may not",
        ),
        (
            "planner.costs.layers.interpolation",
            "if TYPE_CHECKING:\n    from torch import Tensor",
            "may not import torch",
        ),
        (
            "planner.solvers.dp",
            "from planner.extras.export import trace",
            "planner.solvers may not import planner.extras.export",
        ),
        ("planner.solvers.dp", "import planner", "planner.solvers may not import planner"),
        ("planner.__init__", "import scipy", "planner may not import scipy"),
        ("planner.common.units", "", "planner.common.units: no floor in the table"),
        ("cuda_ops.conv", "import planner.ir.box", "cuda_ops may not import planner.ir.box"),
        ("profiler.capture.trace", "import runtime.worker", "profiler may not import runtime.worker"),
        ("profiler.models.vgg", "from profiler import trace", "profiler.models may not import profiler"),
        ("profiler.models.vgg", "from planner.ir import box", "profiler.models may not import planner.ir"),
        ("runtime.worker", "import_module('profiler.capture.trace')", "runtime may not import profiler.capture.trace"),
        ("runtime.worker", "importlib.import_module('pandas')", "runtime may not import pandas"),
        (
            "planner.check.verdict",
            "from planner.solvers import solver",
            "planner.check may not import planner.solvers",
        ),
        ("runtime.worker", "from planner.costs import layer", "runtime may not import planner.costs"),
        ("halopipe.guard", "from halopipe import cli", "halopipe.guard may not import halopipe"),
        ("halopipe.cli.app", "import requests", "halopipe may not import requests"),
        ("benchmarks.speed", "from tests import oracle", "benchmarks may not import tests"),
    ],
)
def test_an_import_upward_sideways_or_foreign_is_named(module: str, source: str, complaint: str) -> None:
    assert [text for text in complaints({module: source}) if complaint in text] != []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("planner.ir.codec", "import json, pydantic\nfrom planner.ir import plan"),
        ("planner.passes", "from planner.layers import conv\nfrom planner.ir.box import Box"),
        ("planner.solvers.dp", "import highspy, numpy as np\nfrom ..costs.layer import seconds"),
        ("profiler.capture.trace", "import torch\nfrom profiler.models import vgg\nfrom cuda_ops import conv"),
        ("runtime.worker", "from planner.layers import conv\nfrom .transport.gloo import Gloo"),
        ("halopipe.cli.app", "import typer, runtime.worker, planner, profiler.capture.trace"),
        ("planner.ir.planner_extra", "if TYPE_CHECKING:\n    from planner.solvers import dp\nimport planner.ir.extras"),
    ],
)
def test_an_import_downward_is_in_order(module: str, source: str) -> None:
    assert complaints({module: source}) == []


def test_a_name_from_a_package_counts_as_its_module() -> None:
    face = {"planner.ir.__init__": "from .graph import Graph\nfrom planner.ir.plan import Plan", "planner.ir.graph": ""}
    assert complaints({**face, "planner.ir.plan": "from planner.ir import Graph"}) == []
    through = {
        "planner.__init__": "from planner.extras.export import trace as chrome",
        "planner.extras.export.trace": "",
    }
    upward = complaints({**through, "runtime.worker": "from planner import chrome"})
    assert upward == ["runtime.worker:1: runtime may not import planner.extras.export.trace"]


@pytest.mark.parametrize("late", ["import planner.ir.a", "def f():\n    from planner.ir.a import A", "from . import a"])
def test_a_cycle_is_shown_module_by_module(late: str) -> None:
    (problem,) = complaints({"planner.ir.a": "from planner.ir.b import B", "planner.ir.b": late})
    assert problem.startswith("cycle: planner.ir.")
    assert {"planner.ir.a", "planner.ir.b"} <= set(problem.split())
